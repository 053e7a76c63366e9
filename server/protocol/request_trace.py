"""One request's way through the server: who called, and when what began. W3C's traceparent names it."""

import os
import re
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.protocol.model import Execution

if TYPE_CHECKING:
    from runtime.recording import Follow

HEADER = "traceparent"

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FORBIDDEN_VERSION, _OUR_VERSION = "ff", "00"
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A request's place in a trace: its own span, and the caller's."""

    trace_id: str
    span_id: str
    parent_id: str | None = None
    flags: int = 0

    @property
    def header(self) -> str:
        """What is passed on: whoever gets it is a child of this span."""
        return f"{_OUR_VERSION}-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def new_context(traceparent: str | None = None) -> TraceContext:
    """A new span under the caller's, or of a new trace if there is no caller, or its header is malformed."""
    span_id = os.urandom(8).hex()
    match = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent is not None else None
    if match is None:
        return TraceContext(os.urandom(16).hex(), span_id)
    version, trace_id, parent_id, flags, more = match.groups()
    malformed = version == _FORBIDDEN_VERSION or trace_id == _NO_TRACE or parent_id == _NO_SPAN
    if malformed or (more is not None and version == _OUR_VERSION):
        return TraceContext(os.urandom(16).hex(), span_id)
    return TraceContext(trace_id, span_id, parent_id, int(flags, 16) & _SAMPLED)


@dataclass(slots=True)
class RequestTrace:
    """Filled in on the way, by the event loop and then by the engine. Times are the monotonic clock's."""

    context: TraceContext
    began_s: float
    wanted: bool = False
    """Whether it is written to the trace file."""
    follow: "Follow | None" = None
    """Takes what the lanes did for its execution, if it is written."""
    model: str = ""
    request_id: str | None = None
    arrived_s: float | None = None
    """When it came to the queue."""
    started_s: float | None = None
    """When its execution began; None for a request that was refused."""
    busy_s: float = 0.0
    compute_s: float = 0.0
    stall_s: float = 0.0
    output_s: float = 0.0
    swapped_bytes: int = 0
    rows: int = 0
    """Of the execution, other requests' included."""
    lane: int = 0
    """Where it was executed."""
    error: str | None = None
    fields: dict[str, str] = field(init=False)
    """What log lines say of the request."""

    def __post_init__(self) -> None:
        self.fields = {"trace_id": self.context.trace_id, "span_id": self.context.span_id}

    def executed(self, arrived_s: float, started_s: float, busy_s: float, execution: Execution, rows: int) -> None:
        """Note an execution. Engine's thread."""
        self.arrived_s, self.started_s, self.busy_s, self.rows = arrived_s, started_s, busy_s, rows
        self.compute_s, self.stall_s, self.output_s = execution.compute_s, execution.stall_s, execution.output_s
        self.swapped_bytes = execution.swapped_bytes


CURRENT: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)
"""The request that is being handled, where somebody wants to know."""
