"""The device's lanes in the trace file: what they did for a traced request."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cohabit.planner.plan import Compute, SwapIn
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Program
from cohabit.runtime.lowering.lower import Lowered
from cohabit.server.engine.servable import ProgramServable, describe
from cohabit.server.observe.spans import COMPUTE, SWAP_IN
from tests.runtime.test_executor import evicting_plan, partition_plan
from tests.support.runtime.backends import Bench, cpu, opened
from tests.support.runtime.stores import WAIT_S, GatedStore
from tests.support.server.server_fakes import Running, running, serving
from tests.support.server.server_http import infer

pytestmark = pytest.mark.process

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 384], "data": [0.5] * 768}]}

Event = dict[str, Any]


@pytest.fixture
def bench(wide: Lowered) -> Iterator[Bench]:
    with opened(cpu, wide) as bench:
        yield bench


def servable(bench: Bench, program: Program) -> ProgramServable:
    info = describe(bench.lowered, 1, 2)
    info = type(info)(program.name, 1, info.inputs, info.outputs, info.max_batch_size)
    lowered = bench.lowered
    return ProgramServable(
        info, {Bucket(2): program}, lowered.inputs, lowered.outputs, lowered.dynamic, bench.executor
    )


def written(handle: Running, bench: Bench, path: Path) -> list[Event]:
    """All events, when the lanes have done everything."""
    bench.executor.settle()
    assert handle.stop()
    events: list[Event] = json.loads(path.read_text())
    return events


def track(events: Sequence[Event], lane: int, model: str) -> list[Event]:
    """What a lane did for a model, without waits and the frames around executions."""
    found = [e for e in events if e["ph"] == "X" and e["tid"] == lane and e["args"].get("model") == model]
    return sorted((e for e in found if e["name"] != "swap stall"), key=lambda e: float(e["ts"]))


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def test_a_traced_request_shows_every_op_and_every_copy_of_its_run(bench: Bench, tmp_path: Path) -> None:
    plan = evicting_plan(bench.graph)
    model = servable(bench, bench.program(plan))
    with running(serving(model), trace={"file": str(tmp_path / "t.json"), "rate": "1"}) as handle:  # type: ignore[arg-type]
        assert infer(handle, "wide", BODY).status == 200
        events = written(handle, bench, tmp_path / "t.json")
    ops, copies = track(events, COMPUTE, "wide"), track(events, SWAP_IN, "wide")
    graph = bench.graph
    assert [e["name"] for e in ops] == [graph.ops[s.op].name for s in plan.steps if isinstance(s, Compute)]
    swapped = [graph.tensors[s.tensor] for s in plan.steps if isinstance(s, SwapIn)]
    assert [(e["name"], e["args"]["bytes"]) for e in copies] == [(t.name, t.nbytes) for t in swapped]
    (execution,) = [e for e in events if e["ph"] == "X" and "rows" in e["args"]]
    assert sum(e["args"]["bytes"] for e in copies) == execution["args"]["swapped_bytes"]
    assert {e["args"]["trace_id"] for e in (*ops, *copies)} == {execution["args"]["trace_id"]}
    assert all(execution["ts"] <= e["ts"] and end(e) <= end(execution) for e in ops)
    assert all(e["ts"] >= execution["ts"] for e in copies)
    for lane in (ops, copies):
        assert all(end(before) <= after["ts"] for before, after in pairwise(lane))
    stalls = [e for e in events if e["name"] == "swap stall" and e["ph"] == "X"]
    for stall in stalls:
        (waiting,) = [op for op in ops if op["name"] == stall["args"]["op"]]
        assert end(stall) <= waiting["ts"]
        assert any(end(copy) <= end(stall) for copy in copies)
    lost_ms = sum(e["dur"] for e in stalls) / 1e3
    assert lost_ms == pytest.approx(execution["args"]["stall_ms"])


def test_a_copy_during_an_op_overlaps_with_it(bench: Bench, tmp_path: Path) -> None:
    """The second copy ends when the first op is done at the earliest, which begins when that copy has begun."""
    store = GatedStore(bench.lowered.weights_path, bench.lowered.manifest)
    store.open.set()
    program = bench.program(partition_plan(bench.graph), store)
    store.begun.clear()
    store.open.clear()
    op, *others = program.computes
    first_copy, second_copy, *later = program.swap_ins
    ungated = replace(first_copy, copy=bench.program(partition_plan(bench.graph)).swap_ins[0].copy)

    def wait(_: object) -> None:
        assert store.begun.wait(WAIT_S)

    slow = replace(op, calls=(wait, *op.calls, lambda _: store.open.set()))
    program = replace(program, computes=(slow, *others), swap_ins=(ungated, second_copy, *later))
    model = servable(bench, program)
    with running(serving(model), trace={"file": str(tmp_path / "t.json"), "rate": "1"}) as handle:  # type: ignore[arg-type]
        assert infer(handle, "wide", BODY).status == 200
        events = written(handle, bench, tmp_path / "t.json")
    computing, copying = track(events, COMPUTE, "wide")[0], track(events, SWAP_IN, "wide")[1]
    assert copying["ts"] < end(computing)
    assert computing["ts"] < end(copying)


def test_requests_that_are_not_sampled_leave_nothing_of_the_lanes(bench: Bench, tmp_path: Path) -> None:
    model = servable(bench, bench.program(evicting_plan(bench.graph)))
    with running(serving(model), trace={"file": str(tmp_path / "t.json"), "rate": "3"}) as handle:  # type: ignore[arg-type]
        for _ in range(7):
            assert infer(handle, "wide", BODY, {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}).status == 200
        events = written(handle, bench, tmp_path / "t.json")
    assert len(track(events, COMPUTE, "wide")) == 2 * len(bench.graph.ops)


def test_answers_are_the_same_whether_traced_or_not(bench: Bench, tmp_path: Path) -> None:
    model = servable(bench, bench.program(evicting_plan(bench.graph)))
    inputs = {"x": np.full((2, 384), 0.5, np.float32)}
    expected = model.execute([inputs], 2).outputs
    recordings: list[Any] = []
    for name, array in model.execute([inputs], 2, recordings.append).outputs.items():
        assert np.array_equal(array, expected[name])
    bench.backend.close()
    assert len(recordings) == 1
