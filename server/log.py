"""Logging: events with fields, as text or as JSON."""

import logging
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from cohabit.server.config.config import LogFormat
from cohabit.server.observe.request_trace import CURRENT
from cohabit.server.observe.settings import LogSettings

_ROOT = "cohabit"
_MOST_PER_SECOND = 10
_KIND_CHARACTERS = 80
"""Records of one logger that begin alike, before arguments are put in, are of one kind."""


def configure_logging(log_format: LogFormat) -> None:
    """Send the log to stderr. Called once, by the command line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    handler.addFilter(FloodLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    apply(LogSettings())


def apply(settings: LogSettings) -> None:
    """Apply the settings to every handler."""
    logging.getLogger(_ROOT).setLevel(logging.DEBUG if settings.log_verbose_level else logging.INFO)
    for handler in logging.getLogger().handlers:
        for old in [f for f in handler.filters if isinstance(f, _LevelFilter)]:
            handler.removeFilter(old)
        handler.addFilter(_LevelFilter(settings))
        if isinstance(handler.formatter, _JsonFormatter | _TextFormatter):
            handler.formatter.iso_times = settings.log_format == "ISO8601"


def log_internal_error(logger: logging.Logger, **where: str) -> str:
    """Log the error that is being handled under an id, and return the message for the client, which has the id too."""
    incident = uuid.uuid4().hex[:12]
    logger.exception("internal error", extra={"fields": {"incident": incident, **where}})
    return f"internal error {incident}; the server's log has the details"


class FloodLimit(logging.Filter):
    """Passes a number of records of one kind per second: what clients do wrong must not fill the disk."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._second = 0
        self._counts: dict[tuple[str, str], int] = {}
        self._dropped: dict[tuple[str, str], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = (record.name, str(record.msg)[:_KIND_CHARACTERS])
        if (second := int(self._clock())) != self._second:
            self._second, self._dropped, self._counts = second, self._counts, {}
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count > _MOST_PER_SECOND:
            return False
        if count == 1 and (dropped := self._dropped.get(kind, 0) - _MOST_PER_SECOND) > 0:
            record.msg = f"{record.msg} (and {dropped} more of this kind, which were not logged)"
        return True


class _LevelFilter(logging.Filter):
    """Passes the server's records of the levels in the settings, and all records of other libraries."""

    def __init__(self, settings: LogSettings) -> None:
        super().__init__(_ROOT)
        self._settings = settings

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):
            return True
        if record.levelno >= logging.ERROR:
            return self._settings.log_error
        if record.levelno >= logging.WARNING:
            return self._settings.log_warning
        return self._settings.log_info if record.levelno >= logging.INFO else self._settings.log_verbose_level > 0


def _iso(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


class _TextFormatter(logging.Formatter):
    iso_times = False

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _iso(record) if self.iso_times else super().formatTime(record, datefmt)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        return f"{super().formatMessage(record)} {fields}".rstrip()


class _JsonFormatter(logging.Formatter):
    iso_times = False

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            **({"time": _iso(record)} if self.iso_times else {"time_s": record.created}),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(event, enc_hook=str).decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    trace = CURRENT.get()
    return fields if trace is None else {**fields, **trace.fields}
