"""Traces requests: with a traceparent for their callers, and by the settings for the trace file and collector."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cohabit.server.errors import RequestError
from cohabit.server.ipc.request import Request, Timing
from cohabit.server.ipc.spans import DeviceSpan, OnSpans
from cohabit.server.observe.otlp import OtlpExporter
from cohabit.server.observe.request_trace import CURRENT, RequestTrace, new_context
from cohabit.server.observe.settings import TraceSettings
from cohabit.server.observe.spans import events_of, lane_events
from cohabit.server.observe.trace_file import TraceFile

_log = logging.getLogger("cohabit.trace")


class Tracer:
    """Belongs to the event loop's thread. Without a file and an exporter, traces only requests with a traceparent."""

    def __init__(
        self,
        settings: TraceSettings | None = None,
        file: TraceFile | None = None,
        exporter: OtlpExporter | None = None,
    ) -> None:
        self.settings = settings or TraceSettings()
        self._file = file
        self._exporter = exporter
        self._seen: dict[str, int] = {}
        """Requests by model."""
        self._watcher: OnSpans | None = None

    def watch(self, watcher: OnSpans | None) -> None:
        """Also pass the spans of requests in the trace file to a watcher, if there is a file; None stops this."""
        self._watcher = watcher

    @property
    def samples(self) -> bool:
        """Whether requests without a traceparent may be traced."""
        return self._file is not None or self._exporter is not None

    @contextmanager
    def request(self, traceparent: str | None) -> Iterator[RequestTrace]:
        """Trace one request, from its headers to its answer."""
        trace = RequestTrace(new_context(traceparent), time.monotonic())
        token = CURRENT.set(trace)
        try:
            yield trace
        finally:
            CURRENT.reset(token)
            self._end(trace)

    def attach(self, request: Request) -> OnSpans | None:
        """Attach a request to its trace. Returns a callback for its spans if it is sampled for the trace file."""
        trace = CURRENT.get()
        if trace is None:
            return None
        trace.model, trace.request_id = request.model.name, request.id
        trace.fields["version"] = str(request.model.version)
        if not self.samples or not self._is_due(trace.model):
            return None
        trace.is_sampled = True
        if (file := self._file) is None:
            return None

        def write(spans: Sequence[DeviceSpan]) -> None:
            file.write(lane_events(spans, trace.context.trace_id))
            if (watcher := self._watcher) is not None:
                watcher(spans)

        return write

    def _is_due(self, model: str) -> bool:
        """Count a request; returns whether it is traced."""
        self._seen[model] = self._seen.get(model, 0) + 1
        return self._seen[model] % self.settings.rate == 0

    def executed(self, timing: Timing) -> None:
        """Record the timing of the current request."""
        if (trace := CURRENT.get()) is not None:
            trace.timing = timing

    def failed(self, error: RequestError) -> None:
        """Record the error of the current request."""
        if (trace := CURRENT.get()) is not None:
            trace.error = error.kind

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
        if trace.is_sampled and self._file is not None:
            self._file.write(events_of(trace, ended_s))
        if trace.is_sampled and self._exporter is not None:
            self._exporter.write(trace, ended_s)
