"""Trace and log settings, which clients may change while the server runs."""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, replace

from cohabit.server.errors import InvalidRequest, Unsupported

TraceLevel = Literal["OFF", "TIMESTAMPS"]
LogTimes = Literal["default", "ISO8601"]
_Settings = TypeVar("_Settings", "TraceSettings", "LogSettings")

_log = logging.getLogger("cohabit.trace")

_MOST = 2**31 - 1
_UNLIMITED = -1


class TraceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By the names that clients use."""

    trace_level: TraceLevel = "OFF"
    trace_rate: Annotated[int, Meta(ge=1, le=_MOST)] = 1000
    """One of this many requests is traced."""
    trace_count: Annotated[int, Meta(ge=_UNLIMITED, le=_MOST)] = _UNLIMITED
    """Maximum number of requests to trace; -1 for no limit, as in Triton."""
    log_frequency: Annotated[int, Meta(ge=0, le=_MOST)] = 0
    """Number of traces after which the file is flushed; 0 for the server's default."""


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By the names that clients use."""

    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: Annotated[int, Meta(ge=0, le=_MOST)] = 0
    """Above 0, debug messages are logged."""
    log_format: LogTimes = "default"

    def to_wire(self) -> dict[str, bool | int | str]:
        return {"log_file": "", **asdict(self)}


class TraceControl:
    """The trace settings of the server and its models, and which requests they select. Event loop's thread only."""

    def __init__(self, file: str = "", defaults: TraceSettings | None = None) -> None:
        self.file = file
        self._defaults = defaults or TraceSettings()
        self._server = self._defaults
        self._models: dict[str, dict[str, Any]] = {}
        self._seen: dict[str, int] = {}
        self._remaining: dict[str, int] = {}

    @property
    def on(self) -> bool:
        """Whether requests of any model may be traced."""
        levels = [self.settings(model).trace_level for model in self._models]
        return any(level != "OFF" for level in (self._server.trace_level, *levels))

    def settings(self, model: str | None = None) -> TraceSettings:
        """Return a model's settings; the server's apply to those that it has not set."""
        return replace(self._server, **self._models.get(model or "", {}))

    def to_wire(self, model: str | None = None) -> dict[str, str | list[str]]:
        """Return the settings of a model, or of the server, in Triton's form, in which all values are strings."""
        values = {key: str(value) for key, value in asdict(self.settings(model)).items()}
        return {**values, "trace_file": self.file, "trace_level": [values["trace_level"]], "trace_mode": "triton"}

    def update(self, changes: Mapping[str, Any], model: str | None = None) -> None:
        """Change settings as the client names them. Raises InvalidRequest or Unsupported.

        Values may be strings, also in lists of one; None or an empty list clears a setting.
        """
        for key in ("trace_file", "trace_mode"):
            if key in changes:
                raise Unsupported(f"'{key}' cannot be changed while the server runs")
        given = {k: (v[0] if len(v) == 1 else v or None) if _is_list(v) else v for k, v in changes.items()}
        if "trace_level" in changes:
            given["trace_level"] = _level_of(changes["trace_level"])
        cleared = asdict(self._defaults if model is None else self._server)
        read = {key: cleared.get(key) if value is None else value for key, value in given.items()}
        settings = _converted(asdict(self.settings(model)) | read, TraceSettings, "trace", strict=False)
        if model is None:
            self._server = settings
        else:
            kept = self._models.get(model, {}) | {key: getattr(settings, key) for key in given}
            self._models[model] = {key: value for key, value in kept.items() if given.get(key, value) is not None}
        if "trace_count" in given:
            self._remaining.clear()
        if self.on and not self.file:
            _log.warning("tracing is on without a file to write to; start the server with --trace-config")

    def wanted(self, model: str) -> bool:
        """Count a request; returns whether it is traced."""
        settings = self.settings(model)
        if settings.trace_level == "OFF":
            return False
        self._seen[model] = self._seen.get(model, 0) + 1
        if self._seen[model] % settings.trace_rate:
            return False
        if settings.trace_count == _UNLIMITED:
            return True
        remaining = self._remaining.get(model, settings.trace_count)
        self._remaining[model] = max(0, remaining - 1)
        return remaining > 0


def _level_of(given: Any) -> Any:
    """Return what trace levels select together: one that is unknown, if there is one, or None if there are none."""
    levels = list(given) if _is_list(given) else [given]
    if "TENSORS" in levels:
        raise Unsupported("trace_level TENSORS is not supported: traces have times and no tensors; use TIMESTAMPS")
    if len(levels) > 1 and "OFF" in levels:
        raise InvalidRequest("trace settings: Expect only one trace level 'OFF' is specified")
    return next((level for level in levels if level != "TIMESTAMPS"), "TIMESTAMPS" if levels else None)


def log_changes(current: LogSettings, changes: Mapping[str, Any]) -> LogSettings:
    """Change settings as the client names them. Raises InvalidRequest or Unsupported."""
    if "log_file" in changes:
        raise Unsupported("'log_file' cannot be changed: the log goes to stderr")
    return _converted(asdict(current) | dict(changes), LogSettings, "log", strict=True)


def _converted(settings: dict[str, Any], kind: type[_Settings], what: str, strict: bool) -> _Settings:
    try:
        return msgspec.convert(settings, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{what} settings: {str(error)[:200]}") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
