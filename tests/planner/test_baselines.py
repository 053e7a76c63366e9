"""The baselines follow their papers' rules on examples worked by hand, and all their plans are safe."""

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohabit.planner.check import check
from cohabit.planner.errors import InfeasibleBudget, UnknownSearcher, UnsupportedProblem
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.papers.baselines.checkpointing import (
    SLOTS,
    ChainCheckpointing,
    OptimalCheckpoints,
    SqrtCheckpointing,
)
from cohabit.planner.papers.baselines.layers import SuperNeurons, Tflms, Vdnn, VdnnConv
from cohabit.planner.papers.baselines.scores import Absences, AutoSwap, Capuchin
from cohabit.planner.papers.baselines.searcher import Baseline
from cohabit.planner.papers.beaumont.layers import LayerChain
from cohabit.planner.plan import Compute, Drop, Plan, SwapIn, SwapOut
from cohabit.planner.problem import TIE, Limit, Problem
from cohabit.planner.schedule.alap import RECOMPUTE, SWAP, alap, codes, tables
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.schedule.serial import least_bytes, serial_schedule
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.schedule.write import write
from cohabit.planner.search.driver import search
from cohabit.planner.search.portfolio import CHAIN_MEMBERS
from cohabit.planner.search.registry import BASELINES, SEARCHERS
from tests.support.planner.graphs import PAGE, profile_of

Layer = tuple[str, int]
"""A target, and the pages of the layer's output."""
PLENTY = single_budget(1 << 40)


def trained(layers: Sequence[Layer]) -> Graph:
    """A chain and its backward pass.

    Forward i reads A_i (A0 is the input) and a page of weights, and writes A_(i+1). A dropout writes a mask as well and
    changes the state of the generator. Backward i reads A_i, A_(i+1), the mask and the gradient of A_(i+1).
    """
    count = len(layers)
    tensors = [Tensor(f"W{i}", PAGE, "state", PAGE) for i in range(count)] + [Tensor("rng", 8, "state")]
    ops: list[Op] = []

    def tensor(name: str, nbytes: int) -> int:
        tensors.append(Tensor(name, nbytes, "input" if name == "A0" else "activation"))
        return len(tensors) - 1

    values, masks = [tensor("A0", PAGE)], dict[int, int]()
    for i, (target, pages) in enumerate(layers):
        values.append(tensor(f"A{i + 1}", pages * PAGE))
        if target == "dropout":
            masks[i] = tensor(f"M{i}", PAGE)
        random_reads, mask = ([count], [masks[i]]) if i in masks else ([], [])
        reads, writes = (i, values[i], *random_reads), (values[i + 1], *mask)
        ops.append(Op(f"forward{i}", target, reads, writes, 0, tuple(random_reads)))
    gradient = tensor("loss", 64)
    ops.append(Op("loss", "loss", (values[-1],), (gradient,)))
    gradients = []
    for i in reversed(range(count)):
        below = tensor(f"D{i}", 64)
        gradients.append((i, tensor(f"DW{i}", 64)))
        reads = (i, values[i], values[i + 1], *([masks[i]] if i in masks else []), gradient)
        ops.append(Op(f"backward{i}", f"{layers[i][0]}_backward", reads, (below, gradients[-1][1])))
        gradient = below
    ops += [Op(f"update{i}", "sgd", (i, g), (), 0, (i,)) for i, g in gradients]
    graph = Graph("trained", 1, "weights", tuple(tensors), tuple(ops), (gradient,))
    graph.validate()
    return graph


CONVOLUTIONS: list[Layer] = [("conv", 4), ("relu", 4), ("max_pool", 1), ("conv", 4), ("dropout", 4), ("linear", 1)]


def problem_of(graph: Graph, memory: Memory = PLENTY, op_s: float = 1.0, bandwidth: float = 100 * PAGE) -> Problem:
    return Problem(graph, profile_of(graph, op_s, bandwidth), memory, objective="period")


def named(problem: Problem, plan: Plan) -> list[str]:
    """The steps, as `+A1` for a swap-in, `-A1` for a swap-out, `/A1` for a drop, and the names of ops."""
    graph, marks = problem.graph, {SwapIn: "+", SwapOut: "-", Drop: "/"}
    return [
        graph.ops[s.op].name if isinstance(s, Compute) else marks[type(s)] + graph.tensors[s.tensor].name
        for s in plan.steps
    ]


def plans_of(searcher: Baseline) -> Iterator[Plan]:
    while candidates := searcher.ask():
        yield from map(searcher.write, candidates)


def only_plan(searcher: Baseline) -> Plan:
    (plan,) = plans_of(searcher)
    check(searcher.problem.graph, searcher.problem.profile, plan)
    return plan


def swapped_out(problem: Problem, plan: Plan) -> set[str]:
    return {problem.graph.tensors[s.tensor].name for s in plan.steps if isinstance(s, SwapOut)}


def runs(problem: Problem, plan: Plan) -> Counter[str]:
    return Counter(problem.graph.ops[s.op].name for s in plan.steps if isinstance(s, Compute))


@pytest.mark.long
@pytest.mark.parametrize("baseline", BASELINES)
def test_where_no_plan_of_the_rule_fits_the_serial_schedule_runs(baseline: str) -> None:
    graph = trained(CONVOLUTIONS)
    problem = problem_of(graph, single_budget(least_bytes(graph)))
    found = search(problem, baseline)
    assert found.steps == write(problem, serial_schedule(problem), problem.memory.nbytes).steps
    assert not found.residents
    with pytest.raises(InfeasibleBudget):
        search(problem_of(graph, single_budget(least_bytes(graph) - 1)), baseline)


@pytest.mark.parametrize("baseline", BASELINES)
def test_weights_never_leave_where_the_rule_fits(baseline: str) -> None:
    graph = trained(CONVOLUTIONS)
    plan = search(problem_of(graph), baseline)
    weights = {t for t, tensor in enumerate(graph.tensors) if tensor.is_weight}
    assert "rng" in {graph.tensors[t].name for t in weights}
    assert {p.tensor for p in plan.residents} == weights
    assert weights.isdisjoint(s.tensor for s in plan.steps if not isinstance(s, Compute))


def test_baselines_are_named_apart_from_the_searchers_and_plan_counted_budgets_only() -> None:
    assert set(SEARCHERS).isdisjoint(BASELINES)
    graph = trained(CONVOLUTIONS)
    with pytest.raises(UnsupportedProblem, match="vdnn plans one budget"):
        search(Problem(graph, profile_of(graph), Memory(1 << 30, 1 << 30)), "vdnn")
    with pytest.raises(UnknownSearcher, match="tflms"):
        search(problem_of(graph), "vdnn_all")


# vDNN


def test_vdnn_offloads_the_inputs_of_layers_above_each_threshold_or_every_second_of_them() -> None:
    """Every op takes a second, so a threshold is a size. A6 is the loss's input, and the mask M4 is no layer's."""
    problem = problem_of(trained(CONVOLUTIONS))
    nbytes = {t.name: t.nbytes for t in problem.graph.tensors}
    expected = {frozenset[str]()}
    for most in {nbytes[f"A{i}"] for i in range(6)}:
        small = [f"A{i}" for i in range(6) if nbytes[f"A{i}"] <= most]
        expected |= {frozenset(small), frozenset(small[::2])}
    found = {frozenset(swapped_out(problem, plan)) for plan in plans_of(Vdnn(problem, 0))}
    assert len(found) > 2
    assert found == expected - {frozenset()}


def test_vdnn_with_convolutions_alone_offloads_all_of_their_inputs_or_every_second() -> None:
    problem = problem_of(trained(CONVOLUTIONS))
    found = [swapped_out(problem, plan) for plan in plans_of(VdnnConv(problem, 0))]
    assert found == [{"A0", "A3"}, {"A0"}]


def test_vdnn_waits_for_memory_only() -> None:
    """A copy takes 1.5 s, an op 1 s. With memory for all, no forward op waits for a copy out."""
    problem = problem_of(trained([("conv", 3)] * 3), bandwidth=2 * PAGE)
    for plan in plans_of(VdnnConv(problem, 0)):
        spans = {s.step: s for s in simulate(problem.graph, plan, problem.profile).spans}
        starts = [spans[i].start_s for i, step in enumerate(plan.steps) if isinstance(step, Compute)]
        assert starts[:3] == [0.0, 1.0, 2.0]


# SuperNeurons

SEGMENTS: list[Layer] = [("conv", 4), ("relu", 1), ("norm", 1), ("conv", 1), ("linear", 1)]
LARGE_SEGMENTS: list[Layer] = [("conv", 1), ("relu", 4), ("norm", 4), ("pool", 4), ("conv", 1), ("linear", 1)]


def test_superneurons_recomputes_a_small_segment_once_and_keeps_it() -> None:
    problem = problem_of(trained(SEGMENTS))
    steps = [s for s in named(problem, only_plan(SuperNeurons(problem, 0))) if s[0] in "fb-"]
    again = [*("forward1", "forward2"), "backward3", "backward2", "backward1", "backward0"]
    assert steps[5:] == ["backward4", *again]  # nothing is offloaded


def test_superneurons_recomputes_a_large_segment_for_each_backward_op() -> None:
    problem = problem_of(trained(LARGE_SEGMENTS))
    steps = [s for s in named(problem, only_plan(SuperNeurons(problem, 0))) if s[0] in "fb"]
    assert steps[6:] == [
        *("backward5", "forward1", "forward2", "forward3", "backward4", "forward1", "forward2", "forward3"),
        *("backward3", "forward1", "forward2", "backward2", "forward1", "backward1", "backward0"),
    ]


def test_superneurons_offloads_the_first_outputs_of_convolutions_only_as_memory_gets_short() -> None:
    graph = trained([("conv", 4), ("linear", 1)] * 5)
    found = []
    for pages in range(40, 0, -1):
        problem = problem_of(graph, single_budget(pages * PAGE))
        if pages * PAGE >= least_bytes(graph) and (plan := only_plan(SuperNeurons(problem, 0))).residents:
            found.append(swapped_out(problem, plan))
    outputs = ["A1", "A3", "A5", "A7", "A9"]
    assert all(some == set(outputs[: len(some)]) for some in found)
    assert found[0] == set()
    assert len(found[-1]) >= 2
    assert all(less <= more for less, more in pairwise(found))


# TFLMS, AutoSwap, Capuchin

FOUR: list[Layer] = [("linear", 4)] * 4
"""Forward at 0 to 3, loss at 4, backward at 5 to 8. Gaps: A0 (a page) from 0 to 8, A1 1 to 7, A2 2 to 6, A3 3 to 5."""


def of_gaps(problem: Problem, values: Sequence[float]) -> dict[str, float]:
    """By the name of the activation or the input."""
    tensors = problem.graph.tensors
    named = zip((tensors[g.tensor] for g in Gaps(problem.graph).all), values, strict=True)
    return {t.name: v for t, v in named if not t.is_weight}


def test_tflms_swaps_what_is_further_away_than_each_threshold_or_the_first_of_it() -> None:
    problem = problem_of(trained(FOUR))
    found = [swapped_out(problem, plan) for plan in plans_of(Tflms(problem, 0))]
    assert found == [set(), {"A0", "A1"}, {"A0"}, {"A0", "A1", "A2"}, {"A0", "A1", "A2", "A3"}]


def test_free_time_is_what_copies_leave_and_copies_queue() -> None:
    """A copy of A1, A2 or A3 takes 2 s, and of A0 half a second. A1 leaves from 2 to 4 and returns from 5 to 7."""
    problem = problem_of(trained(FOUR), bandwidth=2 * PAGE)
    gaps = Gaps(problem.graph)
    absences = Absences(problem, gaps)
    alone = of_gaps(problem, absences.free_s())
    assert [alone[f"A{i}"] for i in range(4)] == [7 - 1, 5 - 4, 3 - 4, 1 - 4]
    absences.choose(next(i for i, g in enumerate(gaps.all) if problem.graph.tensors[g.tensor].name == "A1"), SWAP)
    later = of_gaps(problem, absences.free_s())
    assert later["A2"] == 3 - 6  # from the end of its swap-out, 4 + 2, to the start of its swap-in, 5 - 2
    assert later["A0"] == 6  # leaves and returns when the link is free


@pytest.mark.parametrize(
    ("weights", "pages", "chosen"),
    [
        ((1, 0, 0, 0), 1, {"A0"}),
        ((1, 0, 0, 0), 4, {"A0", "A1"}),
        ((0, 1, 0, 0), 4, {"A1"}),
        ((0, 1, 0, 0), 5, {"A1", "A0"}),
        ((0, 0, 1, 0), 1, {"A0"}),
        ((0.5, 0.5, 0, 0), 1, {"A0"}),
    ],
)
def test_autoswap_chooses_by_its_weighted_score_until_the_peak_fits(
    weights: tuple[float, ...], pages: int, chosen: set[str]
) -> None:
    """A0 and A1 have durations of 6.5 and 3 s, areas of 6.5 and 12 pages times s; half and half, 0.77 and 0.73."""
    problem = problem_of(trained(FOUR), bandwidth=4 * PAGE)
    limit_bytes = peak_bytes(problem) - pages * PAGE
    codes = of_gaps(problem, AutoSwap(problem, 0).chosen(weights, limit_bytes))
    assert {name for name, code in codes.items() if code == SWAP} == chosen


def test_the_submodular_score_counts_the_load_that_earlier_choices_left() -> None:
    """A1's 4 pages are gone during the three ops of A2's gap."""
    problem = problem_of(trained(FOUR))
    gaps, limit_bytes = Gaps(problem.graph), peak_bytes(problem) - 8 * PAGE
    absences = Absences(problem, gaps)
    before = of_gaps(problem, absences.weighted_s(limit_bytes))
    absences.choose(next(i for i, g in enumerate(gaps.all) if problem.graph.tensors[g.tensor].name == "A1"), SWAP)
    after = of_gaps(problem, absences.weighted_s(limit_bytes))
    assert before["A2"] - after["A2"] == 3 * 4 * PAGE


@pytest.mark.parametrize(("pages_per_s", "recomputed"), [(4, set()), (2, {"A2", "A3"}), (1, {"A1", "A2", "A3"})])
def test_capuchin_swaps_as_long_as_copies_are_hidden_then_recomputes_what_is_quicker(
    pages_per_s: int, recomputed: set[str]
) -> None:
    """At 4 pages/s, A3's swap makes ops wait for 1 s, its recomputation as long. At 2 pages/s, A2's does for 3 s."""
    problem = problem_of(trained(FOUR), bandwidth=pages_per_s * PAGE)
    codes = of_gaps(problem, Capuchin(problem, 0).chosen(0))
    assert {name for name, code in codes.items() if code == RECOMPUTE} == recomputed
    assert codes["A0"] == SWAP


def peak_bytes(problem: Problem) -> int:
    """Bytes in memory at most when nothing leaves early."""
    gaps = Gaps(problem.graph)
    return int(alap(tables(gaps), codes([Choice.KEEP] * len(gaps.all))).held.max())


# Checkpointing


def test_sqrt_checkpointing_recomputes_one_segment_at_a_time_and_not_the_last() -> None:
    problem = problem_of(trained([("linear", 1)] * 9))
    steps = [s for s in named(problem, only_plan(SqrtCheckpointing(problem, 0))) if s[0] in "fb"]
    assert steps[9:] == [
        *("backward8", "backward7", "backward6"),
        *("forward3", "forward4", "forward5", "backward5", "backward4", "backward3"),
        *("forward0", "forward1", "forward2", "backward2", "backward1", "backward0"),
    ]


@pytest.mark.parametrize("searcher", [SqrtCheckpointing, ChainCheckpointing, SuperNeurons])
def test_ops_that_change_state_are_not_repeated(searcher: type[Baseline]) -> None:
    graph = trained([("linear", 2), ("relu", 2), ("dropout", 2)] * 4)
    resident = peak_bytes(problem_of(graph))
    problem = problem_of(
        graph, single_budget(resident if searcher is not ChainCheckpointing else resident * 3 // 4)
    )
    found = runs(problem, only_plan(searcher(problem, 0)))
    assert max(found.values()) >= 2
    assert all(found[op.name] == 1 for op in graph.ops if op.mutates)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_best_is_no_slower_on_a_training_step_than_plans_of_its_chain(seed: int) -> None:
    rng = random.Random(seed)
    graph = trained([("linear", rng.randint(1, 6)) for _ in range(24)])
    problem = problem_of(graph, single_budget(peak_bytes(problem_of(graph)) // 2), bandwidth=PAGE)
    best = search(problem, limit=Limit(evaluations=20)).provenance
    assert best is not None
    for searcher in CHAIN_MEMBERS:
        other = search(problem, searcher).provenance
        assert other is not None
        assert best.period_s <= other.period_s * TIE


def exhaustive_s(chain: LayerChain, kept: Sequence[float], memory: float) -> float:
    """Least time of all persistent strategies: Dijkstra over what is stored; nothing of the dynamic program is here.

    A state: the layer whose backward pass is next, the layer that can run forward, the inputs that are stored, and the
    layers whose results are saved. Layer i's forward op needs its input at hand: stored, saved with layer i - 1, or
    just made. Its backward op needs it stored or saved, and its own results saved.
    """
    last = chain.layers - 1
    start = (last, 0, frozenset[int](), frozenset[int]())
    seconds = {start: 0.0}
    queue: list[tuple[float, int, tuple[int, int, frozenset[int], frozenset[int]]]] = [(0.0, 0, start)]
    while queue:
        now, _, state = heapq.heappop(queue)
        if now > seconds[state]:
            continue
        b, at, stored, saved = state
        if b < 0:
            return now
        lasting = lambda i: i == 0 or i in stored or i - 1 in saved  # noqa: B023, E731
        held = sum(kept[i] for i in stored) + sum(chain.x_bytes[i + 1] for i in saved) + chain.y_bytes[b + 1]
        reached = []
        if at <= b and not lasting(at):
            reached.append((0.0, (b, at, stored | {at}, saved)))
        if at <= b and at not in saved:
            made = chain.x_bytes[at + 1] + chain.forward_extra_bytes[at]
            if held + made + (0 if lasting(at) else kept[at]) <= memory:
                reached.append((chain.forward_s[at], (b, at + 1, stored, saved)))
                if lasting(at):
                    reached.append((chain.forward_s[at], (b, at + 1, stored, saved | {at})))
        if b in saved and lasting(b) and held + chain.y_bytes[b] + chain.backward_extra_bytes[b] <= memory:
            after = stored - {b}, saved - {b}
            lasting_then = [i for i in range(b + 1) if i == 0 or i in after[0] or i - 1 in after[1]]
            reached += [(chain.backward_s[b], (b - 1, i, *after)) for i in lasting_then]
        for more, state in reached:
            if now + more < seconds.get(state, math.inf):
                seconds[state] = now + more
                heapq.heappush(queue, (now + more, len(seconds), state))
    return math.inf


def random_chain(rng: random.Random) -> tuple[LayerChain, list[int]]:
    layers = rng.randint(1, 6)
    numbers = lambda count, most: [float(rng.randint(1, most)) for _ in range(count)]  # noqa: E731
    extras = [float(rng.randint(0, 3)) for _ in range(2 * layers)]
    x = numbers(layers + 1, 12)
    chain = LayerChain(
        numbers(layers, 9),
        numbers(layers, 9),
        x,
        numbers(layers + 1, 4),
        extras[:layers],
        extras[layers:],
        1.0,
        1.0,
    )
    return chain, [0, *(rng.randint(1, int(n)) for n in x[1:layers])]


@pytest.mark.long
@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_the_optimal_chain_is_as_fast_as_exhaustive_search(seed: int) -> None:
    chain, kept = random_chain(random.Random(seed))
    optimal = OptimalCheckpoints(chain, kept, SLOTS)  # a byte is a slot
    found = optimal.seconds[0, chain.layers - 1]
    for memory in range(5, 80, 5):
        assert found[memory] == exhaustive_s(chain, kept, memory)
        if found[memory] < math.inf:
            steps = Counter(optimal.steps(memory))
            seconds = [
                s
                for (direction, i), n in steps.items()
                for s in [(chain.forward_s, chain.backward_s)[direction][i]] * n
            ]
            assert sum(seconds) == found[memory]
