"""The trace of one request: its position in the caller's trace (W3C traceparent), and the start of each stage."""

import os
import re
from contextvars import ContextVar
from dataclasses import dataclass, field

from cohabit.server.ipc.request import Timing

HEADER = "traceparent"

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FORBIDDEN_VERSION, _OUR_VERSION = "ff", "00"
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A request's position in a trace: its own span, and the caller's."""

    trace_id: str
    span_id: str
    parent_id: str | None = None
    flags: int = 0

    @property
    def header(self) -> str:
        """The traceparent to pass on: its receiver becomes a child of this span."""
        return f"{_OUR_VERSION}-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def new_context(traceparent: str | None = None) -> TraceContext:
    """Return a new span under the caller's; in a new trace if the header is missing or malformed."""
    span_id = os.urandom(8).hex()
    match = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent is not None else None
    if match is not None:
        version, trace_id, parent_id, flags, more = match.groups()
        malformed = version == _FORBIDDEN_VERSION or trace_id == _NO_TRACE or parent_id == _NO_SPAN
        if not malformed and (more is None or version != _OUR_VERSION):
            return TraceContext(trace_id, span_id, parent_id, int(flags, 16) & _SAMPLED)
    return TraceContext(os.urandom(16).hex(), span_id)


@dataclass(slots=True)
class RequestTrace:
    """Filled in while the request is handled. Times are by `time.monotonic`."""

    context: TraceContext
    began_s: float
    is_sampled: bool = False
    """Whether it is written to the trace file, and exported."""
    model: str = ""
    request_id: str | None = None
    timing: Timing | None = None
    """Times of its execution; None for a refused request, and for an ensemble's."""
    steps: list[tuple[str, Timing]] = field(default_factory=list)
    """Models that an ensemble's request has executed, with the times of each."""
    error: str | None = None
    fields: dict[str, str] = field(init=False)
    """The request's fields in log lines."""

    def __post_init__(self) -> None:
        self.fields = {"trace_id": self.context.trace_id, "span_id": self.context.span_id}


CURRENT: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)
"""The request that this task handles, if it is traced."""
