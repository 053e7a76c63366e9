"""Follows requests that somebody wants to follow, and writes the spans of those that the trace settings pick."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from server.observe.settings import TraceControl
from server.observe.spans import events_of, lane_events
from server.observe.trace_file import TraceFile
from server.protocol.request import InferRequest
from server.protocol.request_trace import CURRENT, RequestTrace, new_context

if TYPE_CHECKING:
    from runtime.recording import Recording

_log = logging.getLogger("cohabit.trace")


class Tracer:
    """Belongs to the event loop's thread. Without a file, requests are followed for their callers' sake only."""

    def __init__(self, control: TraceControl, file: TraceFile | None = None) -> None:
        self.control = control
        self._file = file

    @property
    def follows_all(self) -> bool:
        """Whether a request is followed even if its caller does not trace it."""
        return self._file is not None and self.control.on

    @contextmanager
    def request(self, traceparent: str | None) -> Iterator[RequestTrace]:
        """Follow one request, from its headers to its answer."""
        trace = RequestTrace(new_context(traceparent), time.monotonic())
        token = CURRENT.set(trace)
        try:
            yield trace
        finally:
            CURRENT.reset(token)
            self._end(trace)

    def attach(self, request: InferRequest) -> InferRequest:
        """Let the engine note when the request ran, if it is followed."""
        trace = CURRENT.get()
        if trace is None:
            return request
        trace.model, trace.request_id = request.model, request.id
        if self._file is not None and self.control.wanted(request.model):
            frequency = self.control.settings(request.model).log_frequency
            trace.wanted, trace.follow = True, partial(_write_lanes, self._file, trace, frequency)
        return msgspec.structs.replace(request, trace=trace)

    def _end(self, trace: RequestTrace) -> None:
        ended_s = time.monotonic()
        if trace.model and _log.isEnabledFor(logging.DEBUG):
            fields = {
                "model": trace.model,
                "request": trace.request_id,
                **trace.fields,
                "ms": round((ended_s - trace.began_s) * 1e3, 3),
                **({"error": trace.error} if trace.error else {}),
            }
            _log.debug("request", extra={"fields": fields})
        if trace.wanted and self._file is not None:
            frequency = self.control.settings(trace.model).log_frequency
            self._file.write(events_of(trace, ended_s), flush_every=frequency)


def _write_lanes(file: TraceFile, trace: RequestTrace, flush_every: int, recording: "Recording") -> None:
    """Write what the lanes did. Any thread."""
    events = lane_events(recording, trace.context.trace_id, _clock_shift_s(), trace.lane)
    file.write(events, flush_every, late=True)


def _clock_shift_s() -> float:
    """What leads from the recordings' clock to the monotonic one, which on Linux are the same."""
    recorded, ours = (time.get_clock_info(name).implementation for name in ("perf_counter", "monotonic"))
    return 0.0 if recorded == ours else time.monotonic() - time.perf_counter()
