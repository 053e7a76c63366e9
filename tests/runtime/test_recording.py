"""What the lanes did for a followed run: every step with its name and bytes, without waiting for any of it."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from cohabit.planner.plan import Compute, SwapIn
from cohabit.planner.shapes import Bucket
from cohabit.runtime.cpu.executor import CpuExecutor
from cohabit.runtime.cpu.swap_lane import Counter
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.recording import LaneSpan, Recording
from cohabit.runtime.shared_region.sharing import SHARINGS, SharedRegion
from tests.runtime.test_executor import evicting_plan
from tests.support.runtime.backends import ARENA_BYTES, Bench, cpu, fake_cuda, fake_streams, opened
from tests.support.runtime.observing import observed
from tests.support.runtime.plans import streaming_plan
from tests.support.runtime.stores import WAIT_S, GatedStore


@pytest.fixture
def bench(wide: Lowered) -> Iterator[Bench]:
    with opened(cpu, wide) as bench:
        yield bench


class Mailbox:
    """Takes recordings, from whatever thread."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []
        self._came = threading.Semaphore(0)

    def __call__(self, recording: Recording) -> None:
        self.recordings.append(recording)
        self._came.release()

    def next(self) -> list[LaneSpan]:
        assert self._came.acquire(timeout=WAIT_S)
        return list(self.recordings.pop(0).spans())


def on(lane: str, spans: list[LaneSpan]) -> list[LaneSpan]:
    return [span for span in spans if span.lane == lane and not span.stalled]


def test_a_followed_run_says_what_each_lane_did_in_order(bench: Bench) -> None:
    plan, mail = evicting_plan(bench.graph), Mailbox()
    program = bench.program(plan)
    for _ in range(3):
        bench.executor.run(program, bench.lowered.examples(Bucket(2)), on_recording=mail)
    for _ in range(3):
        spans = mail.next()
        graph, steps = bench.graph, plan.steps
        assert [s.name for s in on("compute", spans)] == [
            graph.ops[s.op].name for s in steps if isinstance(s, Compute)
        ]
        copied = [graph.tensors[s.tensor] for s in steps if isinstance(s, SwapIn)]
        assert [(s.name, s.nbytes) for s in on("swap_in", spans)] == [(t.name, t.nbytes) for t in copied]
        assert {s.model for s in spans} == {"wide"}
        for lane in ("compute", "swap_in"):
            assert all(a.end_s <= b.start_s for a, b in pairwise(on(lane, spans)))


def test_a_run_does_not_wait_for_the_epilogue_that_it_will_tell_about(bench: Bench) -> None:
    mail = Mailbox()
    store = GatedStore(bench.lowered.weights_path, bench.lowered.manifest)
    store.open.set()
    program = bench.program(evicting_plan(bench.graph), store)
    assert isinstance(bench.executor, CpuExecutor)
    last = program.computes[-1].step

    def close_the_gate(step: int, frame: list[object]) -> None:
        if step == last:  # its own copies have ended: what comes now is the epilogue
            store.open.clear()

    bench.executor.run(observed(program, close_the_gate), bench.lowered.examples(Bucket(2)), on_recording=mail)
    assert not mail.recordings, "the epilogue is still to come"
    store.open.set()
    spans = mail.next()
    assert len(on("swap_in", spans)) == len(program.swap_ins)
    assert on("swap_in", spans)[-1].end_s > on("compute", spans)[-1].end_s


def test_a_stall_is_told_with_the_op_that_waited(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    mail = Mailbox()
    store = GatedStore(bench.lowered.weights_path, bench.lowered.manifest)
    wait = Counter.wait

    def opening(counter: Counter, value: int) -> None:
        if threading.current_thread() is threading.main_thread():  # the compute lane waits
            store.open.set()
        wait(counter, value)

    program = bench.program(streaming_plan(bench.graph), store)
    monkeypatch.setattr(Counter, "wait", opening)
    result = bench.executor.run(program, bench.lowered.examples(Bucket(2)), on_recording=mail)
    spans = mail.next()
    stalls = [s for s in spans if s.stalled]
    assert stalls[0].name == on("compute", spans)[0].name
    assert sum(s.end_s - s.start_s for s in stalls) == pytest.approx(result.stall_s)
    assert stalls[0].end_s >= on("swap_in", spans)[0].end_s


def test_a_run_that_failed_is_told_as_far_as_it_came(bench: Bench) -> None:
    mail = Mailbox()
    program = bench.program(resident_plan(bench.graph))
    with pytest.raises(DeviceError):
        bench.executor.run(program, [torch.zeros(2, 7)], on_recording=mail)
    assert on("compute", mail.next()) == []


def test_whoever_fails_to_take_a_recording_harms_nobody(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail(recording: Recording) -> None:
        raise RuntimeError("the disk is full")

    program = bench.program(streaming_plan(bench.graph))
    expected = bench.run(program).outputs[0]
    bench.executor.run(program, bench.lowered.examples(Bucket(2)), on_recording=fail)
    assert torch.equal(bench.run(program).outputs[0], expected)
    assert "could not be handed over" in caplog.text


@pytest.mark.parametrize("layout", sorted(SHARINGS))
def test_copies_of_a_model_that_comes_to_a_shared_region_are_told(wide: Lowered, layout: str) -> None:
    backend, mail = cpu(), Mailbox()
    arena = backend.arena(ARENA_BYTES)
    store = backend.open_store("ram", wide.weights_path, wide.manifest)
    plan = resident_plan(wide.graphs[Bucket(2)])
    shared = SharedRegion(backend, SHARINGS[layout], arena, 1 << 20, ARENA_BYTES - (1 << 20))
    program = shared.add(wide, plan, None, store)
    result = shared.run(program, wide.examples(Bucket(2)), on_recording=mail)
    spans = mail.next()
    if SHARINGS[layout].blocking:
        spans += mail.next()
    assert sum(s.nbytes for s in spans) == result.link_bytes > 0
    ops = [wide.graphs[Bucket(2)].ops[s.op].name for s in plan.steps if isinstance(s, Compute)]
    assert [s.name for s in on("compute", spans)] == ops
    backend.close()
    store.close()
    arena.close()


@pytest.mark.parametrize("make", [fake_cuda, fake_streams])
def test_a_device_that_knows_no_times_of_steps_tells_when_the_inference_ran(wide: Lowered, make: Any) -> None:
    mail = Mailbox()
    with opened(make, wide) as bench:
        program = bench.program(streaming_plan(bench.graph))
        result = bench.executor.run(program, bench.lowered.examples(Bucket(2)), on_recording=mail)
    (span,) = mail.next()
    assert (span.model, span.lane, span.name) == ("wide", "compute", "inference")
    assert span.end_s - span.start_s == pytest.approx(result.latency_s)
