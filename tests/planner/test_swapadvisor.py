"""SwapAdvisor's search: its operators stay in their spaces, its planner is Belady's, its costs are the simulator's."""

import itertools
import random
from functools import cache
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.ablated import AblatedGenetic, UnrestrictedSpace, Way, drawn_by_softmax, survival
from cohabit.planner.check import check
from cohabit.planner.genetic.schedules import (
    Ints,
    Precedence,
    Run,
    cross_schedules,
    mutate_schedule,
    precedence,
    random_schedule,
)
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.papers.swapadvisor.allocations import Allocation, AllocationSpace, raised, shrink
from cohabit.planner.papers.swapadvisor.pool_schedule import schedule_of_pool
from cohabit.planner.papers.swapadvisor.pools import MemoryPool, object_bytes, pool_of, uses_of
from cohabit.planner.papers.swapadvisor.searcher import Chromosome, SwapAdvisor, fastest
from cohabit.planner.plan import Plan, SwapIn, SwapOut
from cohabit.planner.problem import UNFIT, Cost, Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.schedule.simulate import evaluate, simulate
from cohabit.planner.schedule.write import write
from cohabit.planner.search.driver import search
from tests.support.planner.graphs import (
    PAGE,
    any_graph,
    chain,
    profile_of,
    random_profile,
    random_training_graph,
)

seeds = st.integers(0, 10**6)


def random_case(seed: int) -> tuple[Graph, Profile, random.Random]:
    rng = random.Random(seed)
    graph = any_graph(rng)
    return graph, random_profile(rng, graph), rng


def swaps_of(
    graph: Graph, profile: Profile, order: Ints, pool: MemoryPool, threshold: float, *, double_pass: bool = True
) -> tuple[Cost, Plan | None]:
    """What a pool's swap plan costs, and the plan in as much memory as the pool has; None if the ops cannot run."""
    problem, (uses, _) = Problem(graph, profile, single_budget(pool.nbytes)), uses_of(graph, profile)
    schedule = schedule_of_pool(problem, uses, order, pool, threshold, double_pass)
    if schedule is None:
        return UNFIT, None
    return evaluate(problem, schedule, np.inf), write(problem, schedule, pool.nbytes)


def random_allocation(space: AllocationSpace, rng: random.Random) -> Allocation:
    """As few objects as ops need at once, or a few more."""
    classes = space.random_classes(np.random.default_rng(rng.randrange(10**6)))
    least = space.least(classes)
    return Allocation(classes, least + [rng.choice((0, 0, 1, 2, 5)) for _ in least])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=seeds)
def test_costs_are_those_of_the_written_plan(seed: int) -> None:
    """And what is counted fits in the objects of the pool."""
    graph, profile, rng = random_case(seed)
    _, sizes = uses_of(graph, profile)
    if not len(sizes.nbytes):
        return
    space = rng.choice((AllocationSpace, UnrestrictedSpace))(sizes, 0)
    order = random_schedule(precedence(graph), np.random.default_rng(seed))
    allocation = random_allocation(space, rng)
    pool = pool_of(sizes, allocation.classes, allocation.counts)
    threshold, double_pass = rng.choice((0.0, 1.0, 3.0)), rng.random() < 0.8
    cost, plan = swaps_of(graph, profile, order, pool, threshold, double_pass=double_pass)
    if plan is None:  # another last op may need more than the one that `least` goes by
        assert order[-1] != len(order) - 1
        return
    check(graph, profile, plan)
    timeline = simulate(graph, plan, profile)
    assert timeline.latency_s == cost.latency_s
    assert timeline.period_s == cost.period_s
    assert timeline.link_bytes == cost.link_bytes


@settings(max_examples=60, deadline=None, derandomize=True)
@given(reads=st.lists(st.integers(0, 4), min_size=1, max_size=9), objects=st.integers(1, 3))
def test_the_first_pass_swaps_in_no_more_than_it_must(reads: list[int], objects: int) -> None:
    """Belady's rule is optimal for pages of one size that are read only: compared with every choice of evictions."""
    ops = tuple(Op(f"op{i}", "any", (r,), ()) for i, r in enumerate(reads))
    graph = Graph("reads", 1, "weights", tuple(Tensor(f"W{i}", PAGE, "parameter") for i in range(5)), ops, ())
    profile = profile_of(graph)

    @cache
    def fewest(k: int, held: frozenset[int]) -> int:
        if k == len(reads):
            return 0
        if reads[k] in held:
            return fewest(k + 1, held)
        kept = [held] if len(held) < objects else [held - {gone} for gone in held]
        return 1 + min(fewest(k + 1, rest | {reads[k]}) for rest in kept)

    _, sizes = uses_of(graph, profile)
    pool = pool_of(sizes, np.array([1]), np.array([objects]))
    cost, _ = swaps_of(graph, profile, np.arange(len(ops)), pool, 0.0, double_pass=False)
    assert cost.link_bytes == PAGE * fewest(0, frozenset())


def test_the_double_pass_keeps_what_belady_keeps() -> None:
    """Six parameters and two activations at a time, in five objects.

    The first pass ends with W0, W1 and W5. In the second, W5 is in the way of A3, for which the first had room: it is
    removed. The others are never displaced, so that nothing is restored after the last op.
    """
    graph = chain([PAGE] * 6)
    profile = profile_of(graph)
    _, sizes = uses_of(graph, profile)
    pool = pool_of(sizes, np.array([1]), np.array([5]))
    _, plan = swaps_of(graph, profile, np.arange(6), pool, 1.0)
    assert plan is not None
    check(graph, profile, plan)
    assert [p.tensor for p in plan.residents] == [0, 1]
    assert [s.tensor for s in plan.steps if isinstance(s, SwapIn)] == [2, 3, 4, 5]
    assert not any(isinstance(s, SwapIn | SwapOut) for s in plan.steps[plan.epilogue_start :])


def test_the_threshold_prefers_what_was_used_long_ago() -> None:
    """W1 is needed furthest, but was used only just now; W0's bytes can be filled while op1 runs."""
    tensors = [Tensor(f"W{i}", PAGE, "parameter") for i in range(3)]
    ops = tuple(Op(f"op{i}", "any", (r,), ()) for i, r in enumerate((0, 1, 2, 0, 1)))
    graph = Graph("reads", 1, "weights", tuple(tensors), ops, ())
    profile = profile_of(graph)
    _, sizes = uses_of(graph, profile)
    pool = pool_of(sizes, np.array([1]), np.array([2]))
    swapped = []
    for threshold in (0.0, 1.0):
        _, plan = swaps_of(graph, profile, np.arange(5), pool, threshold, double_pass=False)
        assert plan is not None
        check(graph, profile, plan)
        swapped.append([s.tensor for s in plan.steps if isinstance(s, SwapIn)])
    assert swapped == [[0, 1, 2, 1], [0, 1, 2, 0, 1]]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=seeds)
def test_schedules_stay_schedules(seed: int) -> None:
    graph, _, rng = random_case(seed)
    rule, draw = precedence(graph), np.random.default_rng(seed)
    first, second = random_schedule(rule, draw), random_schedule(rule, draw)
    cut = rng.randint(0, len(first))
    children = cross_schedules(first, second, cut)
    rates = (0.0, 0.1, 1.0)
    mutants = [mutate_schedule(o, rule, p, draw, run) for o in children for run in get_args(Run) for p in rates]
    assert all(is_schedule(o, rule) for o in (np.arange(len(first)), first, second, *children, *mutants))
    assert (mutants[0] == children[0]).all()
    assert (mutants[3] == children[0]).all()
    assert children[0].tolist()[:cut] == second.tolist()[:cut]


def test_a_mutation_by_weights_runs_time_steps_of_a_layer_together() -> None:
    """Ops of a layer are ready together once the layer below has run; each random op fetches other weights."""
    layers, steps = 4, 12
    tensors = [Tensor(f"W{i}", PAGE, "parameter", PAGE) for i in range(layers)]
    tensors += [Tensor(f"h{i}", PAGE, "activation") for i in range(layers * steps)]
    at = [(layer, step) for step in range(steps) for layer in range(layers)]
    value = {key: layers + n for n, key in enumerate(at)}
    ops = tuple(
        Op(f"cell{i}.{t}", "cell", (i, *(value[k] for k in ((i - 1, t), (i, t - 1)) if k in value)), (value[i, t],))
        for i, t in at
    )
    rule = precedence(Graph("recurrent", 1, "weights", tuple(tensors), ops, (value[layers - 1, steps - 1],)))

    def fetches(run: Run) -> int:
        draw, order, found = np.random.default_rng(0), np.arange(len(ops)), 0
        for _ in range(20):
            mutant = mutate_schedule(order, rule, 0.1, draw, run)
            assert is_schedule(mutant, rule)
            found += int((np.diff(rule.weights[mutant]) != 0).sum())
        return found

    assert fetches("weights") < 0.7 * fetches("")


def test_a_depth_first_mutation_runs_a_branch_to_its_end() -> None:
    """Twelve chains whose ops alternate: following what became ready last, there are fewer changes between chains."""
    chains, length = 12, 10
    tensors = tuple(Tensor(f"h{i}", PAGE, "activation") for i in range(chains * length))
    ops = tuple(Op(f"op{i}", "cell", (i - chains,) if i >= chains else (), (i,)) for i in range(chains * length))
    rule = precedence(Graph("chains", 1, "weights", tensors, ops, tuple(range(len(ops) - chains, len(ops)))))

    def changes(run: Run) -> int:
        draw, found = np.random.default_rng(0), 0
        for _ in range(20):
            mutant = mutate_schedule(np.arange(len(ops)), rule, 0.1, draw, run)
            assert is_schedule(mutant, rule)
            found += int((np.diff(mutant % chains) != 0).sum())
        return found

    assert changes("newest") < 0.5 * changes("")


def is_schedule(order: Ints, rule: Precedence) -> bool:
    """Whether every op is there once, and after all that must come before it."""
    if sorted(order.tolist()) != list(range(len(rule.before))):
        return False
    position = np.argsort(order)
    return all(
        position[k] < position[j]
        for k in range(len(order))
        for j in rule.after[rule.start[k] : rule.start[k + 1]].tolist()
    )


def valid_classes(length: int) -> list[tuple[int, ...]]:
    """The restricted space: the first is 1, and each equal to or one greater than the one before."""
    return [tuple(itertools.accumulate((1, *steps))) for steps in itertools.product((0, 1), repeat=length - 1)]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data(), length=st.integers(1, 7))
def test_a_repaired_cls_is_the_least_valid_one_above(data: st.DataObject, length: int) -> None:
    valid = valid_classes(length)
    first, second = data.draw(st.sampled_from(valid)), data.draw(st.sampled_from(valid))
    cut = data.draw(st.integers(0, length))
    joined = (*first[:cut], *second[cut:])
    above = [v for v in valid if all(a >= b for a, b in zip(v, joined, strict=True))]
    assert tuple(raised(np.array(joined)).tolist()) == min(above, key=sum)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    objects=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.integers(1, 500)), min_size=1, max_size=6),
    memory=st.integers(0, 9000),
)
def test_a_repaired_cnt_fits_if_what_is_needed_does(objects: list[tuple[int, int, int]], memory: int) -> None:
    more, least, each = (np.array(column) for column in zip(*objects, strict=True))
    counts = least + more
    repaired = shrink(counts, each, memory, least)
    assert ((least <= repaired) & (repaired <= counts)).all()
    assert repaired @ each <= max(memory, least @ each)
    if counts @ each <= memory:
        assert (repaired == counts).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=seeds)
def test_allocations_stay_in_their_space(seed: int) -> None:
    graph, profile, rng = random_case(seed)
    _, sizes = uses_of(graph, profile)
    if not len(sizes.nbytes):
        return
    draw = np.random.default_rng(seed)
    kind = AllocationSpace if rng.random() < 0.7 else UnrestrictedSpace
    space = kind(sizes, least_bytes(graph) + rng.choice((0, PAGE, 10 * PAGE)))
    parents = [space.random(space.random_classes(draw), draw) for _ in range(2)]
    children = space.cross(*parents, rng.randint(0, len(sizes.nbytes)))
    for child in (*parents, *children, *(space.mutated(c, 0.3, draw) for c in children)):
        used = set(child.classes.tolist())
        assert used == set(range(1, len(child.counts) + 1))
        assert (child.counts >= space.least(child.classes)).all()
        each = object_bytes(sizes, child.classes)
        fits = each @ child.counts <= space.memory_bytes
        assert fits == (each @ space.least(child.classes) <= space.memory_bytes)
        if kind is AllocationSpace:
            assert tuple(child.classes.tolist()) in valid_classes(len(sizes.nbytes))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=seeds)
def test_the_leanest_cls_needs_least_memory(seed: int) -> None:
    graph, profile, _ = random_case(seed)
    _, sizes = uses_of(graph, profile)
    if not 0 < len(sizes.nbytes) <= 9:
        return
    space = AllocationSpace(sizes, 0)

    def needed(classes: tuple[int, ...]) -> int:
        cls = np.array(classes)
        return int(space.least(cls) @ object_bytes(sizes, cls))

    assert needed(tuple(space.leanest.tolist())) == min(map(needed, valid_classes(len(sizes.nbytes))))


def problem_of(memory_bytes: int) -> Problem:
    graph = random_training_graph(random.Random(5), 6)
    return Problem(graph, profile_of(graph), single_budget(memory_bytes))


def evolve(searcher: SwapAdvisor, generations: int) -> list[list[Chromosome]]:
    asked = []
    for _ in range(generations + 2):
        candidates = list(searcher.ask())
        asked.append(candidates)
        searcher.tell(candidates, [searcher.evaluate(c, 0.0) for c in candidates])
    return asked


def served_problem() -> Problem:
    graph = chain([(7 * i % 5 + 1) * PAGE for i in range(24)])
    return Problem(graph, profile_of(graph, [0.5 + k % 3 for k in range(24)]), Memory(12 * PAGE, 20 * PAGE))


def roomy() -> Problem:
    least = least_bytes(problem_of(0).graph)
    return problem_of(2 * least)


def test_the_first_generation_has_pools_that_fit_where_any_restricted_one_does() -> None:
    """From the least memory of a restricted pool on. One byte less, nothing but the serial plan fits."""
    graph = roomy().graph
    _, sizes = uses_of(graph, profile_of(graph))
    space = AllocationSpace(sizes, 0)
    least = int(space.least(space.leanest) @ object_bytes(sizes, space.leanest))
    for memory, fits in ((least, True), (least - 1, False)):
        searcher = SwapAdvisor(problem_of(memory), 1, population=12)
        asked = evolve(searcher, 0)
        found = [searcher.evaluate(c, 0.0) != UNFIT for c in asked[1]]
        assert any(found) == fits
    assert least - 1 >= least_bytes(graph)
    plan = search(problem_of(least - 1), "swapadvisor", limit=Limit(evaluations=40))
    assert plan.provenance is not None
    assert plan.provenance.latency_s == plan.provenance.baseline_s


def test_an_elitist_population_evolves() -> None:
    """The best never gets worse, nor does the mean; both are better in the end."""
    searcher = SwapAdvisor(roomy(), 0, population=12)
    living = []
    for _ in range(16):
        candidates = searcher.ask()
        searcher.tell(candidates, [searcher.evaluate(c, 0.0) for c in candidates])
        living.append([searcher.problem.seconds(c) for _, c in searcher.living])
    means, bests = [[f(g) for g in living if g] for f in (np.mean, min)]
    for course in (means, bests):
        assert sorted(course, reverse=True) == course
        assert course[-1] < course[0]


def test_before_selection_the_population_is_three_times_its_size() -> None:
    asked = evolve(SwapAdvisor(roomy(), 0, population=12), 2)
    assert [len(candidates) for candidates in asked] == [1, 12, 24, 24]


def test_softmax_selection_is_the_papers_and_loses_its_best() -> None:
    """A member that is 30 % slower has 0.74 of the best one's weight: equation 1 to the letter."""
    chance = survival([1.0, 1.3], 1.0)
    assert chance[1] / chance[0] == pytest.approx(0.74, abs=0.001)
    times_s, rng = [1.0 + i / 20 for i in range(20)], np.random.default_rng(0)
    assert fastest(times_s, 10) == list(range(10))
    drawn = [drawn_by_softmax(times_s, 1.0, 10, rng) for _ in range(20)]
    assert not all(0 in survivors for survivors in drawn)
    assert all(len(set(survivors)) == 10 for survivors in drawn)


def test_an_elitist_selection_keeps_equals_only_where_too_few_differ() -> None:
    assert fastest([2.0, 1.0, 1.0, np.inf, 3.0], 3) == [1, 0, 4]
    assert fastest([2.0, 1.0, 1.0, np.inf, np.inf], 3) == [1, 0, 2]
    assert fastest([np.inf] * 4, 2) == [2, 3]


def test_only_the_unrestricted_space_maps_sizes_out_of_order() -> None:
    def monotone(restricted: bool) -> bool:
        asked = evolve(AblatedGenetic(roomy(), 0, 16, Way(restricted=restricted)), 2)[1:]
        return all((np.diff(c.allocation.classes) >= 0).all() for generation in asked for c in generation)

    assert monotone(True)
    assert not monotone(False)


def test_a_part_that_is_not_searched_is_the_same_in_all() -> None:
    def parts(way: Way) -> tuple[int, int]:
        generations = evolve(AblatedGenetic(roomy(), 0, 8, way), 2)[1:]
        members = [member for generation in generations for member in generation]
        orders = {tuple(m.order.tolist()) for m in members}
        return len(orders), len({(*m.allocation.classes.tolist(), *m.allocation.counts.tolist()) for m in members})

    for order in ("random", "torch's"):
        orders, allocations = parts(Way(order))
        assert orders == 1 < allocations
    orders, allocations = parts(Way(allocations=False))
    assert allocations == 1 < orders
