"""No plan is faster than the bound: not the best there is, not what searches find, not random ones."""

import itertools
import random
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cohabit.planner.arrays import GraphArrays
from cohabit.planner.bounds import linear, relaxation
from cohabit.planner.bounds.relaxation import latency_bound, relax
from cohabit.planner.check import check
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.order import predecessors
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.serial import least_bytes, serial
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.schedule.table import Action, columns, peak_bytes
from tests.support.planner.actions import plan_of
from tests.support.planner.graphs import (
    PAGE,
    any_graph,
    chain,
    parameter,
    profile_of,
    random_actions,
    random_profile,
)

seeds = st.integers(0, 10**6)


def only_parameters(
    reads: Sequence[Sequence[int]], pages: Sequence[int], after: Sequence[Sequence[int]] | None = None
) -> Graph:
    """Ops that read parameters of so many pages and, of no size, what the ops in `after` (else the last one) write."""
    tensors = [parameter(f"W{i}", n * PAGE) for i, n in enumerate(pages)]
    tensors += [Tensor(f"A{k}", 0, "activation") for k in range(len(reads))]
    before = after if after is not None else [[k - 1] if k else [] for k in range(len(reads))]
    ops = [
        Op(f"op{k}", "any", (*needed, *(len(pages) + j for j in before[k])), (len(pages) + k,))
        for k, needed in enumerate(reads)
    ]
    graph = Graph("parameters", 1, "weights", tuple(tensors), tuple(ops), ())
    graph.validate()
    return graph


def best_possible(graph: Graph, profile: Profile, memory: int) -> float:
    """The least latency of all orders, residents, copies and drops, if bytes need not lie side by side.

    Only parameters take memory. Depth first over sequences of actions; `freed` says since when each free page is.
    """
    pages = [t.nbytes // PAGE for t in graph.tensors]
    before = predecessors(graph)
    needs = [[t for t in op.reads if pages[t]] for op in graph.ops]
    link = profile.swap_in
    best = sum(profile.op_seconds) + sum(link.seconds(graph.tensors[t].nbytes) for n in needs for t in n)

    def go(
        done: frozenset[int],
        here: dict[int, tuple[float, float | None]],  # arrived, last used since then
        freed: tuple[float, ...],
        ops_s: float,
        link_s: float,
        dropped: int,  # the action before dropped tensors up to this one: drops only make room for a copy
    ) -> None:
        nonlocal best
        left = [k for k in range(len(needs)) if k not in done]
        if ops_s + sum(profile.op_seconds[k] for k in left) >= best:
            return
        if not left:
            best = ops_s
            return
        for k in left if dropped < 0 else ():
            if before[k] <= done and all(t in here for t in needs[k]):
                end = max([ops_s, *(here[t][0] for t in needs[k])]) + profile.op_seconds[k]
                go(done | {k}, here | {t: (here[t][0], end) for t in needs[k]}, freed, end, link_s, -1)
        for t in {t for k in left for t in needs[k]} - set(here):
            if len(freed) >= pages[t]:
                free = sorted(freed)
                end = max(link_s, free[pages[t] - 1]) + link.seconds(graph.tensors[t].nbytes)
                if end < best:
                    go(done, here | {t: (end, None)}, tuple(free[pages[t] :]), ops_s, end, -1)
        for t, (_, used) in here.items():
            if used is not None and t > dropped:
                rest = {u: times for u, times in here.items() if u != t}
                go(done, rest, (*freed, *[used] * pages[t]), ops_s, link_s, t)

    room = memory // PAGE
    everything = sorted({t for n in needs for t in n})
    for chosen in range(1 << len(everything)):
        residents = [t for i, t in enumerate(everything) if chosen >> i & 1]
        free = room - sum(pages[t] for t in residents)
        if free >= 0:
            go(frozenset(), dict.fromkeys(residents, (0.0, None)), (0.0,) * free, 0.0, 0.0, -1)
    return best


def tiny(rng: random.Random) -> Graph:
    pages = [rng.choice((1, 1, 2, 3)) for _ in range(rng.randint(2, 4))]
    count = rng.randint(2, 4)
    reads = [sorted(rng.sample(range(len(pages)), rng.choice((0, 1, 1, 1, 2)))) for _ in range(count)]
    after = [[j for j in range(k) if rng.random() < 0.6] for k in range(count)]
    return only_parameters(reads, pages, after if rng.random() < 0.5 else None)


def test_all_that_fits_takes_the_time_of_its_ops() -> None:
    graph = only_parameters([[0], [1], [2]], [4, 4, 4])
    assert latency_bound(graph, profile_of(graph), single_budget(12 * PAGE)) == pytest.approx(3)
    relaxed = relax(graph, profile_of(graph), single_budget(12 * PAGE))
    assert relaxed is not None
    assert relaxed.resident == pytest.approx({0: 1, 1: 1, 2: 1})


ALONE = [[k] for k in range(6)]
BY_TIME_STEPS = [[*([k - 1] if k % 4 else []), *([k - 4] if k >= 4 else [])] for k in range(12)]


@pytest.mark.parametrize(
    ("reads", "pages", "memory", "latency_s", "after", "copy_latency_s"),
    [
        # Two of six equal matrices are resident; once the first op has ended, the link is busy until the last op.
        (ALONE, [4] * 6, 8, 1 + 4 * 4 + 1, None, 0.0),
        (ALONE, [4] * 6, 8 + 3, 1 + 4 * 4 + 1, None, 0.0),  # no matrix fits in the spare pages
        (ALONE, [4] * 6, 8, 1 + 4 * 4.5 + 1, None, 0.5),
        # Weights that every time step reads: one of two fits, and five times the link and the ops wait for each other.
        ([[0], [1]] * 3, [2, 2], 3, 6 * 1 + 5 * 2, None, 0.0),
        ([[0], [1]] * 3, [2, 2], 4, 6, None, 0.0),
        # A large parameter cannot come a little at a time into the two pages that are free beside the first ops.
        ([[0], [0], [1]], [1, 3], 3, 3 + 3, None, 0.0),
        # Branches whose parameters do not fit together: whichever op is first, the other's copy waits for its end.
        ([[0], [1]], [3, 3], 4, 1 + 3 + 1, [[], []], 0.0),
        # Three layers by four time steps in any order, and memory for one layer: in two copies, nothing runs.
        ([[k // 4] for k in range(12)], [5, 5, 5], 9, 12 * 1 + 2 * 5, BY_TIME_STEPS, 0.0),
    ],
)
def test_a_bound_is_what_the_best_plan_takes(
    reads: list[list[int]],
    pages: list[int],
    memory: int,
    latency_s: float,
    after: list[list[int]] | None,
    copy_latency_s: float,
) -> None:
    graph = only_parameters(reads, pages, after)
    profile = profile_of(graph, latency_s=copy_latency_s)
    assert latency_bound(graph, profile, single_budget(memory * PAGE)) == pytest.approx(latency_s)


def test_an_activation_of_later_ops_makes_no_room_for_part_of_a_matrix() -> None:
    """Six equal matrices, with seven pages to spare. One page is between the fourth op and the last."""
    graph = only_parameters([[i] for i in range(6)], [10] * 6)
    between, ops = len(graph.tensors), list(graph.ops)
    ops[3] = replace(ops[3], writes=(*ops[3].writes, between))
    ops[5] = replace(ops[5], reads=(*ops[5].reads, between))
    graph = replace(graph, tensors=(*graph.tensors, Tensor("A", PAGE, "activation")), ops=tuple(ops))
    assert latency_bound(graph, profile_of(graph), single_budget(27 * PAGE)) == pytest.approx(1 + 4 * 10 + 1)


def test_of_equal_solutions_the_relaxation_keeps_what_is_used_late() -> None:
    """One of the last two matrices is copied once the first has been used; nothing runs meanwhile."""
    graph = only_parameters([[0], [1], [2]], [4] * 3)
    relaxed = relax(graph, profile_of(graph, [1.0, 0.0, 1.0]), single_budget(8 * PAGE))
    assert relaxed is not None
    assert relaxed.latency_s == pytest.approx(1 + 4 + 1)
    assert relaxed.resident == pytest.approx({0: 1, 1: 0, 2: 1})


@pytest.mark.parametrize(("first_s", "expected"), [(1.0, 1 + 3 + 1 + 0.5 + 1), (10.0, 10 + 3 + 1 + 3 + 1)])
def test_an_activation_in_the_way_is_copied_or_computed_again(first_s: float, expected: float) -> None:
    """op1's parameter and one of op0's two results, for op2, have three pages each; memory has four."""
    tensors = [parameter("W", 3 * PAGE), Tensor("A", 3 * PAGE, "activation")]
    tensors += [Tensor("B", 0, "activation"), Tensor("C", 0, "activation"), Tensor("D", 0, "activation")]
    ops = [
        Op("op0", "any", (), (1, 2)),
        Op("op1", "any", (0, 2), (3,)),
        Op("op2", "any", (1, 3), (4,)),
    ]
    graph = Graph("across", 1, "weights", tuple(tensors), tuple(ops), (4,))
    profile = profile_of(graph, [first_s, 1.0, 1.0])
    assert latency_bound(graph, profile, single_budget(4 * PAGE)) == pytest.approx(expected)


def test_changes_in_place_keep_ops_in_order() -> None:
    """The same as one op after the other: op1 changes what op0 wrote, op2 reads it."""
    tensors = [parameter("V", 3 * PAGE), parameter("W", 3 * PAGE), Tensor("A", 0, "activation")]
    tensors.append(Tensor("B", 0, "activation"))
    ops = [Op("op0", "any", (0,), (2,)), Op("op1", "any", (2,), (), 0, (2,)), Op("op2", "any", (1, 2), (3,))]
    graph = Graph("in place", 1, "weights", tuple(tensors), tuple(ops), (3,))
    assert predecessors(graph) == [set(), {0}, {1}]
    assert latency_bound(graph, profile_of(graph), single_budget(4 * PAGE)) == pytest.approx(1 + 3 + 1)


@pytest.mark.long
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=seeds)
def test_more_memory_never_raises_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    graph = any_graph(rng)
    profile = random_profile(rng, graph)
    least = least_bytes(graph)
    sizes = sorted(least + rng.randint(0, sum(t.nbytes for t in graph.tensors)) for _ in range(4))
    bounds = [latency_bound(graph, profile, single_budget(m)) for m in (least, *sizes)]
    assert all(a >= b * (1 - 1e-7) for a, b in itertools.pairwise(bounds))
    assert bounds[-1] >= profile.compute_s * (1 - 1e-9)


@pytest.mark.long
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=seeds)
def test_a_thinned_chain_bounds_as_well_and_no_better(seed: int) -> None:
    rng = random.Random(seed)
    graph = only_parameters([[i] for i in range(8)], [rng.randint(1, 5) for _ in range(8)])
    profile = profile_of(graph, [rng.choice((0.0, 0.5, 1.0, 3.0)) for _ in graph.ops])
    memory = least_bytes(graph) + PAGE * rng.randint(0, 9)

    def latency_s(most_ops: int) -> float:
        relax.cache_clear()
        with patch.object(relaxation, "MOST_OPS", most_ops):
            relaxed = relax(graph, profile, single_budget(memory))
        assert relaxed is not None
        return relaxed.latency_s

    assert latency_s(3) <= latency_s(8) * (1 + 1e-5)
    relax.cache_clear()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=seeds)
def test_the_best_possible_plan_is_no_faster(seed: int) -> None:
    rng = random.Random(seed)
    graph = tiny(rng)
    profile = profile_of(
        graph, [rng.choice((0.0, 0.5, 1.0, 3.0)) for _ in graph.ops], latency_s=rng.choice((0.0, 0.5))
    )
    memory = least_bytes(graph) + PAGE * rng.randint(0, 4)
    assert latency_bound(graph, profile, single_budget(memory)) <= best_possible(graph, profile, memory)


@pytest.mark.long
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=seeds)
def test_no_random_plan_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    graph = any_graph(rng)
    profile = random_profile(rng, graph)
    arrays = GraphArrays.of(graph, profile)
    serial_actions: tuple[list[Action], frozenset[int]] = (serial(graph), frozenset())
    for actions, residents in (random_actions(rng, graph), random_actions(rng, graph), serial_actions):
        memory = single_budget(peak_bytes(arrays, *columns(actions), residents))
        plan = plan_of(Problem(graph, profile, memory), actions, residents)
        assert plan is not None
        check(graph, profile, plan)
        assert latency_bound(graph, profile, memory) <= simulate(graph, plan, profile).latency_s


def test_where_keeping_parts_of_tensors_would_be_faster_the_bound_is_that_of_whole_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = chain([pages * PAGE for pages in (2, 1, 5, 1, 2)])
    profile = profile_of(graph, [1.0, 0.5, 0.5, 1.0, 2.0], bandwidth=2 * PAGE)
    bounds_s = []
    for most in (0, linear.MOST_ENTRIES):
        monkeypatch.setattr(linear, "MOST_ENTRIES", most)
        relax.cache_clear()
        bounds_s.append(latency_bound(graph, profile, Memory(0, 9 * PAGE)))
    assert bounds_s == pytest.approx([5.0, 5.5])
