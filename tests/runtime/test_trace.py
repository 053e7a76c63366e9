"""Timelines become traces that Perfetto opens: one process per timeline, one thread per lane."""

import json

from planner.plan import Address, Compute, Drop, Plan, SwapIn
from planner.timeline import Span, Timeline
from runtime.profiling.trace import chrome_trace
from tests.planner.graphs import PAGE, chain


def test_a_trace_has_every_span_with_its_name_lane_and_bytes() -> None:
    graph = chain([PAGE])
    window = Address("workspace", 2 * PAGE)
    steps = (SwapIn(0, window), Compute(0, (Address("workspace", PAGE),), after=(0,)), Drop(0))
    plan = Plan(graph.fingerprint, "", 0, 3 * PAGE, (), (), steps)
    spans = (Span(0, "swap_in", 0.0, 0.25), Span(1, "compute", 0.25, 1.25))
    timeline = Timeline(spans, 1.25, None, PAGE)
    events = json.loads(chrome_trace({"predicted": timeline, "measured": timeline}, graph, plan))["traceEvents"]
    drawn = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["name"]) for e in drawn] == [(1, "W0"), (1, "op0"), (2, "W0"), (2, "op0")]
    copy, op = drawn[:2]
    assert (copy["ts"], copy["dur"], copy["args"]["bytes"]) == (0.0, 0.25e6, PAGE)
    assert (op["ts"], op["dur"], op["args"]["target"]) == (0.25e6, 1e6, "conv")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[(1, copy["tid"])] == "swap_in"
    assert names[(1, op["tid"])] == "compute"
