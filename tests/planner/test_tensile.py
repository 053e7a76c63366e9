"""TENSILE's schedules: the peak is found and lowered, transfers never meet, plans hold what the schedule says."""

import random
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from cohabit.planner.arrays import GraphArrays
from cohabit.planner.check import check
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import single_budget
from cohabit.planner.papers.tensile.axis import NS_PER_S, Axis, Channel, TransferSpan
from cohabit.planner.papers.tensile.schedule import MemoryUsage, TensileSchedule, actions_of, choices_of
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.schedule.no_wait import no_wait
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.schedule.table import COMPUTE, columns, peak_bytes
from tests.support.planner.actions import plan_of, swap_in, swap_out
from tests.support.planner.graphs import (
    PAGE,
    any_graph,
    chain,
    profile_of,
    random_profile,
)
from tests.support.planner.reference import sequence_peak_bytes

seeds = st.integers(0, 10**6)
S = NS_PER_S


def valley(pages: int = 4, between: int = 6) -> Graph:
    """A big tensor made by the first op and used by the last; the peak lies in between, where `wide` is written.

    start: X -> big, A0 | between: A0 -> A1 -> ... -> A6, one in the middle wide | end: big, A6 -> out
    """
    tensors = [Tensor("X", PAGE, "input"), Tensor("big", pages * PAGE, "activation")]
    tensors += [Tensor(f"A{i}", PAGE * (3 if i == between // 2 else 1), "activation") for i in range(between + 1)]
    tensors.append(Tensor("out", PAGE, "activation"))
    ops = [Op("start", "any", (0,), (1, 2))]
    ops += [Op(f"op{i}", "any", (i + 2,), (i + 3,)) for i in range(between)]
    ops.append(Op("end", "any", (1, between + 2), (between + 3,)))
    graph = Graph("valley", 1, "weights", tuple(tensors), tuple(ops), (between + 3,))
    graph.validate()
    return graph


BIG = 1


def training(layers: int = 4, weight_pages: int = 4) -> Graph:
    """Layers forward and backward, then each weight is changed in place, the first layer's last."""
    tensors = [Tensor(f"W{i}", weight_pages * PAGE, "state", PAGE) for i in range(layers)]
    tensors += [Tensor("X", PAGE, "input")]
    tensors += [Tensor(f"A{i + 1}", PAGE, "activation") for i in range(layers)]
    tensors += [Tensor(f"G{i}", PAGE, "activation") for i in range(layers + 1)]
    a, g = layers, 2 * layers + 1
    ops = [Op(f"forward{i}", "any", (i, a + i), (a + i + 1,)) for i in range(layers)]
    ops.append(Op("loss", "any", (a + layers,), (g + layers,)))
    for i in reversed(range(layers)):
        ops.append(Op(f"backward{i}", "any", (i, a + i, g + i + 1), (g + i,)))
        ops.append(Op(f"update{i}", "any", (i, g + i), (), 0, (i,)))
    graph = Graph("training", 1, "weights", tuple(tensors), tuple(ops), (a + layers,))
    graph.validate()
    return graph


@dataclass(frozen=True)
class Case:
    graph: Graph
    profile: Profile
    most_swapped: float
    memory: int

    def scheduled(self) -> TensileSchedule:
        schedule = TensileSchedule(self.graph, self.profile, self.most_swapped)
        schedule.lower(self.memory)
        return schedule


def some_case(seed: int) -> Case:
    rng = random.Random(seed)
    graph = any_graph(rng)
    room = sum(t.nbytes for t in graph.tensors)
    memory = least_bytes(graph) + rng.choice((0, PAGE, 3 * PAGE, room // 4, room // 2))
    return Case(graph, random_profile(rng, graph), rng.choice((1.0, 1.0, 0.5, 0.2)), memory)


def scheduled(graph: Graph, profile: Profile, memory: int = 0, most_swapped: float = 1.0) -> TensileSchedule:
    return Case(graph, profile, most_swapped, memory).scheduled()


def checked_plan(schedule: TensileSchedule) -> Plan:
    """The plan of a schedule, in as much memory as its actions take."""
    axis = schedule.axis
    actions, residents = actions_of(axis)
    memory = peak_bytes(GraphArrays.of(axis.graph, axis.profile), *columns(actions), residents)
    plan = plan_of(Problem(axis.graph, axis.profile, single_budget(memory)), actions, residents)
    assert plan is not None
    check(axis.graph, None, plan)
    return plan


def swapped(axis: Axis) -> int:
    return sum(any(g.back is not None for g in t.gaps) for t in axis.tracks.values())


def test_link_gives_the_earliest_and_the_latest_room() -> None:
    """0  1  2  3  4  5  6  7  8  9 10
    taken      ####        ####           avoided: [1, 2)"""
    channel = Channel([TransferSpan(6, 8), TransferSpan(2, 4)])
    assert channel.earliest(2, 0, 10) == (0, 2)
    assert channel.earliest(2, 0, 10, [TransferSpan(1, 2)]) == (4, 6)
    assert channel.earliest(3, 0, 10) is None
    assert channel.earliest(3, 0, 11) == (8, 11)
    assert channel.earliest(2, 3, 6) == (4, 6)
    assert channel.latest(2, 0, 10) == (8, 10)
    assert channel.latest(2, 0, 9) == (4, 6)
    assert channel.latest(2, 5, 9) is None
    assert channel.latest(2, 0, 5) == (0, 2)
    channel.release(TransferSpan(6, 8))
    assert channel.latest(2, 5, 9) == (7, 9)


def test_peak_is_where_most_is_alive() -> None:
    """While op 3 reads A2 and writes A3 of three pages: with big, eight pages. Op 4's footprint is as large, but later.

    seconds: 0 start | 1 op0 | 2 op1 | 3 op2: writes A3 | 4 op3: reads A3 | ...
    """
    peak = MemoryUsage(Axis(valley(), profile_of(valley()))).peak()
    assert peak.nbytes == 8 * PAGE
    assert peak.time_ns == 3 * S
    assert peak.tensors == (BIG, 5, 4)


def test_large_tensor_at_the_peak_goes_out_as_early_and_comes_back_as_late_as_possible() -> None:
    """big: out in seconds 1 to 3, right after its op and gone at the peak; in from 5 to 7, right before `end`."""
    graph = valley(2)
    system = scheduled(graph, profile_of(graph), 5 * PAGE)
    track = system.axis.tracks[BIG]
    assert track.outs == {1: TransferSpan(1 * S, 3 * S)}
    assert [gap.back for gap in track.gaps] == [TransferSpan(5 * S, 7 * S)]
    assert system.usage.peak().nbytes == 4 * PAGE
    actions, _ = actions_of(system.axis)
    computes = [i for i, a in enumerate(actions) if a[0] == COMPUTE]
    assert computes[0] < actions.index(swap_out(BIG)) < computes[1]
    assert computes[4] < actions.index(swap_in(BIG)) < computes[5]


def test_swap_that_would_delay_an_op_is_not_scheduled() -> None:
    """Four pages take four seconds: out by second 5, after the peak at second 3."""
    graph = valley(4)
    system = scheduled(graph, profile_of(graph))
    assert not system.axis.tracks[BIG].released
    fast = scheduled(graph, profile_of(graph, bandwidth=2.0 * PAGE))
    assert fast.axis.tracks[BIG].released


def test_scheduling_stops_in_the_memory_that_is_enough() -> None:
    graph = training()
    profile = profile_of(graph, bandwidth=8.0 * PAGE)
    before = scheduled(graph, profile, 10**9).usage.peak().nbytes
    peaks = [scheduled(graph, profile, memory).usage.peak().nbytes for memory in range(0, before + PAGE, PAGE)]
    assert max(peaks) == before
    assert min(peaks) < before // 2
    assert all(
        peak <= max(memory, min(peaks)) for memory, peak in zip(range(0, before + PAGE, PAGE), peaks, strict=True)
    )


def test_updated_weights_are_swapped_across_the_iteration() -> None:
    """W3 is changed first and used last of all in the next iteration: it leaves after its update, and returns before
    its layer."""
    graph = training()
    system = scheduled(graph, profile_of(graph, bandwidth=8.0 * PAGE))
    axis, track = system.axis, system.axis.tracks[3]
    update = next(run for run in axis.runs if graph.ops[run.op].name == "update3")
    assert not track.resident
    assert track.outs[1].start_ns >= update.end_ns
    back = track.gaps[-1].back
    assert back is not None
    assert back.end_ns <= axis.runs[3].start_ns
    checked_plan(system)


def test_constant_weights_leave_without_a_transfer() -> None:
    graph = chain([4 * PAGE] * 8)
    system = scheduled(graph, profile_of(graph, bandwidth=8.0 * PAGE))
    assert all(not track.outs for track in system.axis.tracks.values() if track.kind == "parameter")
    assert sum(track.resident for track in system.axis.tracks.values()) == 1  # W0 is needed at once
    assert system.usage.peak().nbytes == 10 * PAGE


def recomputable(op_s: float = 1.0) -> tuple[Graph, Profile]:
    """A1 = f(X) and B = g(A1), both used at the end; X stays till then. A link that is far too slow to swap.

    f: X -> A | g: A -> B | h: B -> C | i: C -> D (wide) | j: D -> E | k: E, X, A, B -> F
    """
    names = ("X", "A", "B", "C", "D", "E", "F")
    tensors = [Tensor(n, PAGE * (6 if n == "D" else 2 if n == "A" else 1), "activation") for n in names]
    tensors[0] = Tensor("X", PAGE, "input")
    reads = ((0,), (1,), (2,), (3,), (4,), (5, 0, 1, 2))
    ops = [Op(n, "any", r, (k + 1,)) for k, (n, r) in enumerate(zip("fghijk", reads, strict=True))]
    graph = Graph("recomputable", 1, "weights", tuple(tensors), tuple(ops), (6,))
    graph.validate()
    return graph, profile_of(graph, [op_s, 1.0, 1.0, 1.0, 1.0, 1.0], bandwidth=PAGE / 100)


def test_what_saves_most_per_second_is_computed_again() -> None:
    """A saves two pages, B one. With f ten times as slow, B is better; but then A must stay for B's op."""
    graph, profile = recomputable()
    system = scheduled(graph, profile, 9 * PAGE)
    assert [run.op for run in system.axis.runs] == [0, 1, 2, 3, 4, 0, 5]
    assert system.usage.peak().nbytes == 9 * PAGE
    checked_plan(system)
    graph, profile = recomputable(10.0)
    system = scheduled(graph, profile, 10 * PAGE)
    assert [run.op for run in system.axis.runs] == [0, 1, 2, 3, 4, 1, 5]
    assert system.usage.peak().nbytes == 10 * PAGE
    checked_plan(system)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seeds)
def test_schedules_become_plans_that_hold_what_was_counted(seed: int) -> None:
    """Transfers do not meet. A swap-out follows what made its version, meets no access, and is over when the tensor
    leaves; a swap-in is over when the tensor is needed, and it was out in between."""
    case = some_case(seed)
    bare = MemoryUsage(Axis(case.graph, case.profile)).peak().nbytes
    system = case.scheduled()
    axis, peak = system.axis, system.usage.peak().nbytes
    assert peak <= bare
    actions, residents = actions_of(axis)
    assert sequence_peak_bytes(case.graph, actions, residents) <= peak
    assert transfers_are_apart(axis)
    updated = sum(track.kind == "state" and track.released for track in axis.tracks.values())
    accessed = sum(bool(track.accesses) for track in axis.tracks.values())
    assert swapped(axis) <= case.most_swapped * accessed + updated, "updated weights do not count"
    for track in axis.tracks.values():
        for version, out in track.outs.items():
            assert out.start_ns >= axis.end_of(track.changes[version - 1] if version else None)
            assert all(out.end_ns <= r.start_ns or r.end_ns <= out.start_ns for r in track.accesses)
        for gap in track.gaps:
            if gap.back is not None:
                assert gap.back.end_ns <= (axis.end_ns if gap.early else gap.after.start_ns)
                assert (gap.across and not gap.early) or axis.gone_ns(track, gap) < gap.back.start_ns
    checked_plan(system)
    system.press_out(case.memory)
    assert system.usage.peak().nbytes <= case.memory
    checked_plan(system)
    gaps = Gaps(case.graph)
    choices = choices_of(axis, gaps)
    if Choice.RECOMPUTE not in choices:  # their inputs may be brought back in another way
        assert no_wait(gaps, case.memory, choices) is not None


def transfers_are_apart(axis: Axis) -> bool:
    spans = sorted(axis.spans())
    return all(a.end_ns <= b.start_ns for a, b in pairwise(spans))


def test_choices_are_what_the_schedule_says_between_uses() -> None:
    """A is computed again; of the chain's weights, all but the first come back in the next iteration."""
    graph, profile = recomputable()
    gaps = Gaps(graph)
    choices = choices_of(scheduled(graph, profile, 9 * PAGE).axis, gaps)
    assert {g.tensor: f for g, f in zip(gaps.all, choices, strict=True)} == {
        0: Choice.KEEP,
        1: Choice.RECOMPUTE,
        2: Choice.KEEP,
    }
    graph = chain([4 * PAGE] * 8)
    gaps = Gaps(graph)
    choices = choices_of(scheduled(graph, profile_of(graph, bandwidth=8.0 * PAGE)).axis, gaps)
    assert choices == [Choice.RESTORE] + [Choice.SWAP] * 7


# Section IV-A: the latency predictor


def test_recomputation_uses_nothing_that_was_released() -> None:
    """Once A is computed again, B cannot be: its op reads A, which is not there."""
    graph, profile = recomputable()
    system = scheduled(graph, profile)
    assert [run.op for run in system.axis.runs] == [0, 1, 2, 3, 4, 0, 5]
