"""Trace and log settings, which clients may change while the server runs."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from server.errors import InvalidRequest, Unsupported

TraceLevel = Literal["OFF", "TIMESTAMPS"]
LogTimes = Literal["default", "ISO8601"]

_log = logging.getLogger("cohabit.trace")

_MOST = 2**31 - 1
_UNLIMITED = -1
"""`trace_count` on the wire for no limit."""


class TraceSettings(msgspec.Struct, frozen=True):
    level: TraceLevel = "OFF"
    rate: int = 1000
    """One of so many requests is traced."""
    count: int | None = None
    """Most requests to trace; None for no limit."""
    log_frequency: int = 0
    """Traces after which the file is written; 0 leaves that to the server."""

    def to_wire(self, file: str = "") -> dict[str, str | list[str]]:
        """Return Triton's form, in which all values are strings."""
        return {
            "trace_file": file,
            "trace_level": [self.level],
            "trace_rate": str(self.rate),
            "trace_count": str(_UNLIMITED if self.count is None else self.count),
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
        self._left: dict[str, int] = {}

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
        read = dict(_trace_change(key, value) for key, value in changes.items())
        if model is None:
            start = self._defaults
            new = {field: getattr(start, field) if value is _CLEARED else value for field, value in read.items()}
            self._server = msgspec.structs.replace(self._server, **new)
        else:
            kept = self._models.get(model, {}) | read
            self._models[model] = {field: value for field, value in kept.items() if value is not _CLEARED}
        if "count" in read:
            self._left.clear()
        if self.on and not self.file:
            _log.warning("tracing is on without a file to write to; start the server with --trace-file")

    def wanted(self, model: str) -> bool:
        """Count a request, and say whether it is traced."""
        settings = self.settings(model)
        if settings.level == "OFF":
            return False
        self._seen[model] = self._seen.get(model, 0) + 1
        if self._seen[model] % settings.rate:
            return False
        if settings.count is None:
            return True
        left = self._left.get(model, settings.count)
        self._left[model] = max(0, left - 1)
        return left > 0


_CLEARED = object()


def log_changes(current: LogSettings, changes: Mapping[str, Any]) -> LogSettings:
    """Change settings as the client names them. Raises InvalidRequest or Unsupported."""
    return msgspec.structs.replace(current, **dict(_log_change(key, value) for key, value in changes.items()))


def _trace_change(key: str, value: Any) -> tuple[str, Any]:
    if key in ("trace_file", "trace_mode"):
        raise Unsupported(f"'{key}' cannot be changed while the server runs")
    field = {"trace_level": "level", "trace_rate": "rate", "trace_count": "count"}.get(key, key)
    if field not in TraceSettings.__struct_fields__:
        raise InvalidRequest(f"Unknown trace setting: '{key[:80]}'")
    if value is None or value == []:
        return field, _CLEARED
    if field == "level":
        return field, _level(value)
    number = _number(key, value[0] if _is_list(value) and len(value) == 1 else value)
    if field == "count":
        return field, None if number == _UNLIMITED else _at_least(0, key, number)
    return field, _at_least(1 if field == "rate" else 0, key, number)


def _level(value: Any) -> TraceLevel:
    levels = value if _is_list(value) else [value]
    known: dict[str, TraceLevel] = {"OFF": "OFF", "TIMESTAMPS": "TIMESTAMPS"}
    if len(levels) != 1 or levels[0] not in known:
        raise InvalidRequest(f"trace_level must be OFF or TIMESTAMPS, got {str(levels)[:80]}")
    return known[levels[0]]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _number(key: str, value: Any) -> int:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or len(text) > 10 or not text.removeprefix("-").isdecimal():
        raise InvalidRequest(f"{key} must be a whole number, got {str(value)[:40]!r}")
    return int(text)


def _at_least(least: int, key: str, number: int) -> int:
    if not least <= number <= _MOST:
        raise InvalidRequest(f"{key} must be from {least} to {_MOST}, got {number}")
    return number


def _log_change(key: str, value: Any) -> tuple[str, Any]:
    if key == "log_file":
        raise Unsupported(
            "'log_file' cannot be changed: the log goes to stderr, whose reader decides where it is kept"
        )
    if key in ("log_info", "log_warning", "log_error"):
        if not isinstance(value, bool):
            raise InvalidRequest(f"{key} must be true or false, got {str(value)[:40]!r}")
        return key.removeprefix("log_"), value
    if key == "log_verbose_level":
        return "verbose_level", _at_least(0, key, _number(key, value))
    if key == "log_format":
        if value not in ("default", "ISO8601"):
            raise InvalidRequest(f"log_format must be default or ISO8601, got {str(value)[:40]!r}")
        return "times", value
    raise InvalidRequest(f"Unknown log setting: '{key[:80]}'")
