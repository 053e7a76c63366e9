"""Log lines are events with fields, for people or as JSON."""

import logging
import sys
from typing import Any

import msgspec

from server.config import LogFormat


def configure_logging(log_format: LogFormat) -> None:
    """Send the log to stderr. Called once, by the command line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("cohabit").setLevel(logging.INFO)
    # aiohttp logs what is not HTTP, with the bytes and a traceback; handlers' own errors are ours to log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        return f"{super().formatMessage(record)} {fields}".rstrip()


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time_s": record.created,
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
    return fields
