"""A traced request as events of Chrome's trace format, which Perfetto opens."""

from collections.abc import Iterable, Iterator
from typing import Any

from cohabit.server.ipc.request import NO_LANE
from cohabit.server.ipc.spans import DeviceSpan
from cohabit.server.observe.request_trace import RequestTrace

REQUESTS, DEVICE = 1, 2
"""The trace's processes: one has a track per request, the other the device's lanes."""
COMPUTE, SWAP_IN, SWAP_OUT = 0, 1, 2
"""Tracks of the first compute lane; those of other lanes follow, three each."""
_TRACKS = {"compute": COMPUTE, "swap_in": SWAP_IN, "swap_out": SWAP_OUT}
_NAMES = {COMPUTE: "compute lane", SWAP_IN: "swap-in lane", SWAP_OUT: "swap-out lane"}

Event = dict[str, Any]


def header_events(lanes: int = 1) -> list[Event]:
    """Return the names of the tracks."""
    return [
        _meta("process_name", REQUESTS, "requests"),
        _meta("process_name", DEVICE, "device"),
        *(
            _meta("thread_name", DEVICE, name if lanes == 1 else f"{name} {lane}", track_of(track, lane))
            for lane in range(lanes)
            for track, name in _NAMES.items()
        ),
    ]


def track_of(track: int, lane: int) -> int:
    """Return the number of a compute lane's track."""
    return len(_TRACKS) * lane + track


def events_of(trace: RequestTrace, ended_s: float) -> list[Event]:
    """Return a request's spans. Its stalls are drawn as one span at the beginning of the execution."""
    label = label_of(trace)
    if trace.context.parent_id is not None:
        label["parent_id"] = trace.context.parent_id
    begin, end = _pair(trace, trace.model, trace.began_s, ended_s, label)
    events = [begin]
    for name, start_s, end_s in stages_of(trace, ended_s):
        events += _pair(trace, name, start_s, end_s)
    events.append(end)
    for model, timing in trace.steps if trace.timing is None else [(trace.model, trace.timing)]:
        if timing.lane == NO_LANE:
            continue
        numbers = {"rows": timing.rows, "stall_ms": timing.stall_s * 1e3, "swapped_bytes": timing.swapped_bytes}
        track, executed = track_of(COMPUTE, timing.lane), {**numbers, "trace_id": trace.context.trace_id}
        events.append(_complete(track, model, timing.started_s, timing.busy_s, executed))
    return events


def lane_events(spans: Iterable[DeviceSpan], trace_id: str) -> Iterator[Event]:
    """Return the spans of a compute lane and its copy lanes for an execution: ops, stalls, and copies."""
    for span in spans:
        name = "swap stall" if span.stalled else span.name
        label: dict[str, Any] = {"model": span.model}
        if span.stalled:
            label["op"] = span.name
        elif span.lane != "compute":
            label["bytes"] = span.nbytes
        label["trace_id"] = trace_id
        track = track_of(_TRACKS[span.lane], span.compute_lane)
        yield _complete(track, name, span.start_s, span.end_s - span.start_s, label)


def label_of(trace: RequestTrace) -> dict[str, str | None]:
    """Return a request's attributes besides its times."""
    error = {} if trace.error is None else {"error": trace.error}
    return {"model": trace.model, "request": trace.request_id, **trace.fields, **error}


def stages_of(trace: RequestTrace, ended_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield the name, start and end of each stage, in order; for an ensemble, of each step."""
    for model, executed in trace.steps:
        yield model, executed.queued_s, executed.started_s + executed.busy_s
    if (timing := trace.timing) is None:
        return
    computed_s = timing.started_s + max(timing.busy_s - timing.output_s, 0.0)
    compute_s = max(computed_s - timing.compute_s, timing.started_s)
    stalled_s = compute_s + min(timing.stall_s, computed_s - compute_s)
    yield "decode", trace.began_s, timing.queued_s
    yield "queue", timing.queued_s, timing.started_s
    yield "prepare", timing.started_s, compute_s
    if stalled_s > compute_s:
        yield "swap stall", compute_s, stalled_s
    yield "compute", stalled_s, computed_s
    yield "encode", computed_s, ended_s


def _pair(
    trace: RequestTrace, name: str, start_s: float, end_s: float, label: dict[str, Any] | None = None
) -> tuple[Event, Event]:
    """Return begin and end of a span that may overlap others: Chrome's nestable asynchronous events."""
    common = {"cat": "request", "id": trace.context.span_id, "pid": REQUESTS, "tid": 0, "name": name}
    begin = {**common, "ph": "b", "ts": start_s * 1e6, "args": label or {}}
    return begin, {**common, "ph": "e", "ts": max(end_s, start_s) * 1e6}


def _complete(track: int, name: str, start_s: float, seconds: float, label: dict[str, Any]) -> Event:
    """Return a span of one of the device's tracks."""
    times = {"ts": start_s * 1e6, "dur": seconds * 1e6}
    return {"ph": "X", "pid": DEVICE, "tid": track, "name": name, **times, "args": label}


def _meta(kind: str, process: int, name: str, thread: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
