"""Export of traced requests to an OpenTelemetry collector, with the SDK's own exporter over OTLP/HTTP."""

import os
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from cohabit.server.errors import ConfigError
from cohabit.server.observe.request_trace import RequestTrace
from cohabit.server.observe.spans import label_of, stages_of
from cohabit.server.protocol.descriptions import product_version

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

_PATH = "/v1/traces"
_TIMEOUT_S = 2.0


class OtlpExporter:
    """Any thread may write. A thread of the SDK sends spans in batches, and drops those that it cannot send."""

    def __init__(self, url: str) -> None:
        """`url` is the collector's, such as http://collector:4318. Raises ConfigError without the extra's packages."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--trace-config otlp=: it needs the package {error.name}; pip install 'cohabit[otlp]'"
            ) from error
        parts = urlsplit(url)
        endpoint = urlunsplit(parts._replace(path=_PATH)) if parts.path in ("", "/") else url
        self._resource = Resource.create({"service.name": "cohabit", "service.version": product_version()})
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=_TIMEOUT_S))
        self._epoch_s = time.time() - time.monotonic()
        """Offset from `time.monotonic` to seconds since the epoch."""

    def write(self, trace: RequestTrace, ended_s: float) -> None:
        """Export a request's span, a child of the caller's span if any, and its stages as child spans."""
        from opentelemetry.trace import SpanKind, StatusCode

        own = trace.context
        context = _context(own.trace_id, own.span_id)
        parent = None if own.parent_id is None else _context(own.trace_id, own.parent_id, is_remote=True)
        label = label_of(trace)
        attributes: dict[str, Any] = {f"cohabit.{key}": label[key] for key in label if label[key] is not None}
        if (timing := trace.timing) is not None:
            attributes |= {
                "cohabit.rows": timing.rows,
                "cohabit.stall_ms": timing.stall_s * 1e3,
                "cohabit.swapped_bytes": timing.swapped_bytes,
            }
        times = (trace.began_s, ended_s)
        status = StatusCode.UNSET if trace.error is None else StatusCode.ERROR
        self._end(trace.model, context, parent, times, SpanKind.SERVER, attributes, status)
        for name, start_s, end_s in stages_of(trace, ended_s):
            stage = _context(own.trace_id, os.urandom(8).hex())
            self._end(name, stage, context, (start_s, end_s), SpanKind.INTERNAL, {}, StatusCode.UNSET)

    def close(self) -> None:
        """Send the remaining spans. Takes a few seconds at most if the collector does not answer."""
        self._processor.shutdown()

    def _end(
        self,
        name: str,
        context: "SpanContext",
        parent: "SpanContext | None",
        times_s: tuple[float, float],
        kind: Any,
        attributes: dict[str, Any],
        status: Any,
    ) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Status

        start_ns, end_ns = (int((at_s + self._epoch_s) * 1e9) for at_s in times_s)
        span: ReadableSpan = ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=Status(status),
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
        )
        self._processor.on_end(span)


def _context(trace_id: str, span_id: str, is_remote: bool = False) -> "SpanContext":
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))
