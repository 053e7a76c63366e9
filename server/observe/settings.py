"""Trace and log settings, which clients may change while the server runs."""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from server.errors import InvalidRequest, Unsupported

TraceLevel = Literal["OFF", "TIMESTAMPS"]
LogTimes = Literal["default", "ISO8601"]

_log = logging.getLogger("cohabit.trace")

_MOST = 2**31 - 1
_UNLIMITED = -1


class TraceSettings(msgspec.Struct, frozen=True):
    level: TraceLevel = "OFF"
    rate: int = 1000
    """One of this many requests is traced."""
    count: int = _UNLIMITED
    """Maximum number of requests to trace; -1 for no limit, as in Triton."""
    log_frequency: int = 0
    """Number of traces after which the file is flushed; 0 for the server's default."""

    def to_wire(self, file: str = "") -> dict[str, str | list[str]]:
        """Return Triton's form, in which all values are strings."""
        return {
            "trace_file": file,
            "trace_level": [self.level],
            "trace_rate": str(self.rate),
            "trace_count": str(self.count),
            "log_frequency": str(self.log_frequency),
            "trace_mode": "triton",
        }


class LogSettings(msgspec.Struct, frozen=True):
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    """Above 0, debug messages are logged."""
    times: LogTimes = "default"

    def to_wire(self) -> dict[str, bool | int | str]:
        return {
            "log_file": "",
            "log_info": self.info,
            "log_warning": self.warning,
            "log_error": self.error,
            "log_verbose_level": self.verbose_level,
            "log_format": self.times,
        }


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
        levels = [settings.get("level", self._server.level) for settings in self._models.values()]
        return any(level != "OFF" for level in (self._server.level, *levels))

    def settings(self, model: str | None = None) -> TraceSettings:
        """Return a model's settings; the server's apply to those that it has not set."""
        return msgspec.structs.replace(self._server, **self._models.get(model or "", {}))

    def to_wire(self, model: str | None = None) -> dict[str, str | list[str]]:
        """Return the settings of a model, or of the server, in Triton's form."""
        return self.settings(model).to_wire(self.file)

    def update(self, changes: Mapping[str, Any], model: str | None = None) -> None:
        """Change settings as the client names them; a value of None clears one. Raises InvalidRequest, Unsupported."""
        read = _trace_changes(changes)
        if model is None:
            start = msgspec.structs.asdict(self._defaults)
            new = {field: start[field] if value is None else value for field, value in read.items()}
            self._server = msgspec.structs.replace(self._server, **new)
        else:
            kept = self._models.get(model, {}) | read
            self._models[model] = {field: value for field, value in kept.items() if value is not None}
        if "count" in read:
            self._remaining.clear()
        if self.on and not self.file:
            _log.warning("tracing is on without a file to write to; start the server with --trace-file")

    def wanted(self, model: str) -> bool:
        """Count a request; returns whether it is traced."""
        settings = self.settings(model)
        if settings.level == "OFF":
            return False
        self._seen[model] = self._seen.get(model, 0) + 1
        if self._seen[model] % settings.rate:
            return False
        if settings.count == _UNLIMITED:
            return True
        remaining = self._remaining.get(model, settings.count)
        self._remaining[model] = max(0, remaining - 1)
        return remaining > 0


def log_changes(current: LogSettings, changes: Mapping[str, Any]) -> LogSettings:
    """Change settings as the client names them. Raises InvalidRequest or Unsupported."""
    if "log_file" in changes:
        raise Unsupported("'log_file' cannot be changed: the log goes to stderr")
    read = _converted(changes, _LogChanges, "log", strict=True)
    return msgspec.structs.replace(current, **{_field("log_", key): value for key, value in read.items()})


class _TraceChanges(msgspec.Struct, forbid_unknown_fields=True):
    """Trace settings on the wire; None clears one."""

    trace_level: TraceLevel | UnsetType | None = UNSET
    trace_rate: Annotated[int, Meta(ge=1, le=_MOST)] | UnsetType | None = UNSET
    trace_count: Annotated[int, Meta(ge=_UNLIMITED, le=_MOST)] | UnsetType | None = UNSET
    log_frequency: Annotated[int, Meta(ge=0, le=_MOST)] | UnsetType | None = UNSET


class _LogChanges(msgspec.Struct, forbid_unknown_fields=True):
    """Log settings on the wire."""

    log_info: bool | UnsetType = UNSET
    log_warning: bool | UnsetType = UNSET
    log_error: bool | UnsetType = UNSET
    log_verbose_level: Annotated[int, Meta(ge=0, le=_MOST)] | UnsetType = UNSET
    log_format: LogTimes | UnsetType = UNSET


def _trace_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Read changes by field of TraceSettings; None clears one. Values may be strings, also in lists of one."""
    for key in ("trace_file", "trace_mode"):
        if key in changes:
            raise Unsupported(f"'{key}' cannot be changed while the server runs")
    single = {k: (v[0] if len(v) == 1 else v or None) if _is_list(v) else v for k, v in changes.items()}
    return {_field("trace_", k): v for k, v in _converted(single, _TraceChanges, "trace", strict=False).items()}


def _converted(changes: Mapping[str, Any], kind: type[msgspec.Struct], what: str, strict: bool) -> dict[str, Any]:
    try:
        read = msgspec.convert(dict(changes), kind, strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{what} settings: {str(error)[:200]}") from error
    return {key: value for key, value in msgspec.structs.asdict(read).items() if value is not UNSET}


def _field(prefix: str, key: str) -> str:
    """Return the field of a setting on the wire."""
    return {"log_frequency": "log_frequency", "log_format": "times"}.get(key, key.removeprefix(prefix))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
