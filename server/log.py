"""Logging: events with fields, one line each, as text or as JSON."""

import atexit
import json
import logging
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from cohabit.server.config.config import LogFormat
from cohabit.server.observe.request_trace import CURRENT
from cohabit.server.observe.settings import LogSettings

_ROOT = "cohabit"
_MOST_PER_SECOND = 10
_KIND_CHARACTERS = 80
"""Two records are of one kind if logger, level and this many first characters of the message template are equal."""

_UNSAFE = (
    *(*range(0x20), *range(0x7F, 0xA0)),  # control characters
    *(0x2028, 0x2029),  # line and paragraph separators
    *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # change the writing direction
    *range(0xD800, 0xE000),  # surrogates, which cannot be encoded
)
_ESCAPES = {code: f"\\u{code:04x}" for code in _UNSAFE} | {ord(c): repr(c)[1:-1] for c in "\n\r\t"}
"""Clients choose request ids, names and paths: they must not end a line, or move a terminal's cursor."""


def configure_logging(log_format: LogFormat) -> None:
    """Send the log to stderr. Called once per process, by its main function."""
    flood = FloodFilter()
    atexit.register(flood.report)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(flood)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    apply(LogSettings())
    if log_format == "json":
        logging.captureWarnings(capture=True)
        sys.excepthook = lambda kind, error, trace: _log_uncaught(error)
        threading.excepthook = lambda thread: _log_uncaught(thread.exc_value)


def _log_uncaught(error: BaseException | None) -> None:
    logging.getLogger(_ROOT).critical("unexpected error", exc_info=error)


def escaped(text: str) -> str:
    """Escape control characters, and others that change how a line is shown."""
    return text.translate(_ESCAPES)


def report_suppressed() -> None:
    """Log the number of suppressed records of each kind now."""
    for handler in logging.getLogger().handlers:
        for flood in [f for f in handler.filters if isinstance(f, FloodFilter)]:
            flood.report()


def apply(settings: LogSettings) -> None:
    """Apply the settings to every handler."""
    logging.getLogger(_ROOT).setLevel(logging.DEBUG if settings.log_verbose_level else logging.INFO)
    for handler in logging.getLogger().handlers:
        for old in [f for f in handler.filters if isinstance(f, _LevelFilter)]:
            handler.removeFilter(old)
        handler.addFilter(_LevelFilter(settings))
        if isinstance(handler.formatter, _TextFormatter):
            handler.formatter.iso_times = settings.log_format == "ISO8601"


def log_internal_error(logger: logging.Logger, **where: str) -> str:
    """Log the error being handled under an id. Returns a message for the client, which contains the id."""
    incident = uuid.uuid4().hex[:12]
    logger.exception("internal error", extra={"fields": {"incident": incident, **where}})
    return f"internal error {incident}; the server's log has the details"


class FloodFilter(logging.Filter):
    """Passes ten records of a kind per second: errors of clients must not fill the disk.

    The first record of a later second, of any kind, logs how many were suppressed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._second = 0
        self._counts: Counter[tuple[str, int, str]] = Counter()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "is_report"):
            return True
        if (second := int(self._clock())) != self._second:
            self._second = second
            self.report()
        kind = (record.name, record.levelno, str(record.msg)[:_KIND_CHARACTERS])
        with self._lock:
            self._counts[kind] += 1
            return self._counts[kind] <= _MOST_PER_SECOND

    def report(self) -> None:
        """Log the number of suppressed records of each kind, and count from zero."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        for (name, level, kind), count in counts.items():
            if count > _MOST_PER_SECOND:
                message = f"and {count - _MOST_PER_SECOND} more of this kind, which were not logged"
                logging.getLogger(name).log(level, message, extra={"fields": {"kind": kind}, "is_report": True})


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
    """A line per record. Only a traceback has further lines."""

    iso_times = False

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return _iso(record) if self.iso_times else super().formatTime(record, datefmt)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        return escaped(f"{super().formatMessage(record)} {fields}".rstrip())

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return "\n".join(_traceback_lines(*ei))


def _traceback_lines(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Iterator[str]:
    """Yield the lines of a traceback. An exception's text stays on one line, because clients may have chosen it."""
    for part in traceback.TracebackException(kind, error, trace, compact=True).format():
        lines = part.rstrip("\n").split("\n") if part.startswith(_OWN_LINES) else [part.removesuffix("\n")]
        yield from map(escaped, lines)


_OWN_LINES = ("  File ", "Traceback ", "\nDuring ", "\nThe above ")
"""Prefixes of the parts of a traceback that have several lines."""


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": _iso(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return escaped(json.dumps(event, default=str, ensure_ascii=False))


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    trace = CURRENT.get()
    return fields if trace is None else {**fields, **trace.fields}
