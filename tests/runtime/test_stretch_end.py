"""What the end of a stretch costs is found where plans have ends, whatever the machine's speed does meanwhile."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import runtime.cpu.scripted
from planner.graph import Graph, Op, Tensor
from runtime.binding.program import Program
from runtime.cpu.executor import Executor
from runtime.lowering.lower import Lowered
from runtime.profiling.measuring import Cold
from runtime.profiling.profile import resident_plan
from runtime.profiling.stretch_end import Part, end_seconds, first_readers, measure_stretch, parts_of, stretches
from runtime.recording import Recording
from tests.runtime.backends import Bench, opened, scripted_cpu

END_S = 1.5e-4
ROUNDS = range(7)


class Device:
    """Ops of about the same length, each with its own noise, at a speed that changes from run to run."""

    def __init__(self, ops: int, op_s: float, *, end_s: float, noise: float, drift: float, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.op_seconds = [op_s * self.rng.uniform(0.5, 1.5) for _ in range(ops)]
        self.end_s, self.noise, self.drift = end_s, noise, drift

    def ran(self, cuts: Sequence[range]) -> Iterator[float]:
        """Seconds of each stretch of a run, with what its end costs."""
        speed = 1 + self.rng.uniform(0, self.drift)
        for cut in cuts:
            ops_s = sum(self.op_seconds[n] * max(0.5, self.rng.gauss(1, self.noise)) for n in cut)
            yield (ops_s + self.end_s) * speed

    def parts(self, parts: Sequence[Part]) -> Callable[[int], list[float]]:
        """What `end_seconds` takes as `run`."""

        def run(turn: int) -> list[float]:
            cuts = list(stretches(parts, turn))
            seconds = list(self.ran(cuts))
            return [sum(s for s, cut in zip(seconds, cuts, strict=True) if cut.start in part.ops) for part in parts]

        return run


def graph(*reads: tuple[int, ...], activations: Sequence[int] = ()) -> Graph:
    """Ops that read these of four tensors, all of them parameters but `activations`."""
    tensors = [Tensor(str(i), 8, "activation" if i in activations else "parameter", 64) for i in range(4)]
    tensors += [Tensor(f"out{n}", 8, "activation", 64) for n in range(len(reads))]
    ops = tuple(Op(str(n), "op", r, (4 + n,), 0, ()) for n, r in enumerate(reads))
    return Graph("g", 1, "w", tuple(tensors), ops, (3 + len(reads),))


def test_ends_are_where_a_parameter_is_read_first() -> None:
    assert first_readers(graph((0, 3), (0, 1), (1,), (3,), (2,), (2, 0), activations=[3])) == [0, 1, 4]


@pytest.mark.parametrize("places", [0, 1, 2, 7, 8, 9, 40, 97, 149])
def test_parts_share_out_the_places_and_cut_every_other_one_in_turn(places: int) -> None:
    ops = 3 * places + 2
    parts = parts_of([3 * n for n in range(places + 1)], ops)
    if places == 0:
        assert parts == []
        return
    assert [n for part in parts for n in part.ops] == list(range(ops))
    assert len(parts) == 1 or len(parts) % 2 == 0
    assert all(part.ends and set(part.ends) <= set(part.ops[1:]) for part in parts)
    cut = [[n.start for n in stretches(parts, turn)] for turn in (0, 1)]
    starts = {part.ops.start for part in parts}
    assert set(cut[0]) & set(cut[1]) == starts
    assert set(cut[0]) | set(cut[1]) == starts | {n for part in parts for n in part.ends}
    for turn in (0, 1):
        inside = [len(set(cut[turn]) & set(part.ends)) for part in parts]
        assert inside == [len(part.ends) if place % 2 == turn else 0 for place, part in enumerate(parts)]


@pytest.mark.parametrize("places", [1, 2, 7, 8, 40])
@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_an_end_costs_what_it_costs_whatever_the_speed_of_the_run(places: int, drift: float) -> None:
    """With but one part, nothing tells the speed of a run from what its ends cost: there it is steady."""
    parts = parts_of(range(0, 4 * places + 4, 4), 4 * places + 4)
    device = Device(4 * places + 4, 1e-3, end_s=END_S, noise=0.0, drift=drift if len(parts) > 1 else 0.0)
    found = end_seconds(parts, device.parts(parts), ROUNDS)
    assert found == pytest.approx(END_S * (1 + drift / 2), rel=0.02 if drift == 0 else 0.25)


def test_an_end_is_found_in_a_run_a_thousand_times_as_long() -> None:
    """Of 300 ms with noise of 4 % on each op, between runs of which one is up to a quarter slower than another."""
    parts = parts_of(range(0, 400, 3), 400)
    short, long = (
        [
            end_seconds(parts, Device(400, op_s, end_s=END_S, noise=0.04, drift=0.25, seed=n).parts(parts), ROUNDS)
            for n in range(20)
        ]
        for op_s in (0.75e-6, 0.75e-3)
    )
    usual_s = END_S * 1.125
    assert min(short) > 0.9 * usual_s
    assert max(short) < 1.1 * usual_s
    assert min(long) > 0.8 * usual_s
    assert max(long) < 1.2 * usual_s


def test_noise_is_not_charged_for_an_end() -> None:
    """Ends that cost nothing, and ends that seem to make runs faster."""
    parts = parts_of(range(0, 100, 5), 100)
    free = [
        end_seconds(parts, Device(100, 3e-3, end_s=0.0, noise=0.04, drift=0.25, seed=n).parts(parts), ROUNDS)
        for n in range(20)
    ]
    assert sum(seconds == 0 for seconds in free) > 10
    assert min(free) == 0
    assert max(free) < END_S
    faster = Device(100, 1e-3, end_s=-1e-4, noise=0.0, drift=0.0)
    assert end_seconds(parts, faster.parts(parts), ROUNDS) == 0


@pytest.fixture
def bench(wide: Lowered, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(runtime.cpu.scripted, "FEWEST_CALLS", 1)
    with opened(scripted_cpu, wide) as bench:
        yield bench


class SteadyExecutor(Executor):
    """Says of every op that it took a millisecond, and of every end that it took `END_S`."""

    def run(self, program: Program, inputs: Sequence[torch.Tensor], **options: Any) -> Any:
        recording, now = Recording(program), 0.0
        for step in program.stretched:
            start, now = now, now + 1e-3 * step.length + END_S
            recording.note(program, step, start, now)
        options["follow"](recording)


def test_a_model_s_own_programs_are_cut_before_each_layer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six layers of two ops: five ends, of which one is left out so that both programs end alike."""
    ran: list[list[int]] = []
    run = SteadyExecutor.run

    def note(self: SteadyExecutor, program: Program, *args: Any, **options: Any) -> Any:
        ran.append([step.length for step in program.stretched])
        return run(self, program, *args, **options)

    monkeypatch.setattr(SteadyExecutor, "run", note)
    program = bench.program(resident_plan(bench.graph))
    store: Any = bench.store
    found = measure_stretch(bench.lowered, program, store, SteadyExecutor(), Cold(0))
    assert found == pytest.approx(END_S)
    assert ran[:4] == [[2, 2, 2, 2, 4], [12], [12], [2, 2, 2, 2, 4]], "in turns, the order changing"


def test_what_has_no_place_for_an_end_costs_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.profiling.stretch_end.first_readers", lambda graph: [0])
    program = bench.program(resident_plan(bench.graph))
    store: Any = bench.store
    assert measure_stretch(bench.lowered, program, store, SteadyExecutor(), Cold(0)) == 0.0
