"""Draws timelines: Chrome's trace format, which Perfetto and chrome://tracing open."""

from typing import Any

import msgspec

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Compute, Plan, SwapIn, SwapOut, Timeline

_LANES = {"compute": 1, "swap_in": 2, "swap_out": 3}


def chrome_trace(timelines: dict[str, Timeline], graph: Graph, plan: Plan) -> bytes:
    """One process for each named timeline (`{"predicted": ..., "measured": ...}`), one thread for each lane."""
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines.items(), start=1):
        events.append(_meta("process_name", process, 0, f"{graph.name} batch {graph.batch}: {name}"))
        events += [_meta("thread_name", process, thread, lane) for lane, thread in _LANES.items()]
        for span in timeline.spans:
            events.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": _LANES[span.lane],
                    "ts": span.start_s * 1e6,
                    "dur": (span.end_s - span.start_s) * 1e6,
                    **_label(graph, plan, span.step),
                }
            )
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"})


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _label(graph: Graph, plan: Plan, index: int) -> dict[str, Any]:
    step = plan.steps[index]
    match step:
        case Compute():
            op = graph.ops[step.op]
            return {"name": op.name, "args": {"step": index, "target": op.target}}
        case SwapIn() | SwapOut():
            tensor = graph.tensors[step.tensor]
            return {"name": tensor.name, "args": {"step": index, "bytes": tensor.nbytes}}
        case _:
            return {"name": "drop", "args": {"step": index}}
