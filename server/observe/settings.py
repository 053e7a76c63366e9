"""Trace settings, which clients read, and log settings, which clients may change while the server runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import asdict

from cohabit.server.errors import InvalidRequest, Refused

LogTimes = Literal["default", "ISO8601"]

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Selection and destination of traces. Set at the start; clients only read them."""

    file: str = ""
    """Empty for no file."""
    collector: str = ""
    """URL of an OpenTelemetry collector; empty for none."""
    rate: int = 1000
    """One of this many requests of a model is traced."""

    def to_wire(self) -> dict[str, str | list[str]]:
        """Return the settings in Triton's format, in which all values are strings."""
        return {
            "trace_file": self.file,
            "trace_level": ["TIMESTAMPS" if self.file or self.collector else "OFF"],
            "trace_rate": str(self.rate),
            "trace_count": "-1",
            "log_frequency": "0",
            "trace_mode": "opentelemetry" if self.collector and not self.file else "triton",
        }


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields have the names that clients use."""

    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: Annotated[int, Meta(ge=0, le=_MOST)] = 0
    """Above 0, debug messages are logged."""
    log_format: LogTimes = "default"

    def to_wire(self) -> dict[str, bool | int | str]:
        return {"log_file": "", **asdict(self)}


def log_changes(current: LogSettings, changes: Mapping[str, Any]) -> LogSettings:
    """Change settings given by the client's names. Raises InvalidRequest or Refused."""
    if "log_file" in changes:
        raise Refused("Unsupported", "'log_file' cannot be changed: the log goes to stderr")
    try:
        return msgspec.convert(asdict(current) | dict(changes), LogSettings)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"log settings: {str(error)[:200]}") from error
