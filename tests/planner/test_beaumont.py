"""Beaumont's DYNPROG and GREEDY find what exhaustive search finds, and what they choose happens in the plans."""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import pytest

from benchmarks.planner.chains import on_one_channel_s, proposition_3_s
from cohabit.planner.check import check
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import single_budget
from cohabit.planner.papers.beaumont import dynprog as module
from cohabit.planner.papers.beaumont.dynprog import Offloaded, incumbents, optima
from cohabit.planner.papers.beaumont.grouping import alive_bytes, grouped, short_layers, turn, virtual_layers
from cohabit.planner.papers.beaumont.layers import LayerChain
from cohabit.planner.papers.beaumont.offload import greedy, relaxed_s, whole
from cohabit.planner.papers.beaumont.searcher import LEAN, SERIAL, DynProg, Greedy
from cohabit.planner.plan import Compute, Plan, SwapIn, SwapOut
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.alap import alap, codes, tables
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.schedule.no_wait import delay_drops, no_wait
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.driver import search
from tests.support.planner.actions import listed, plan_of, plan_of_choices
from tests.support.planner.graphs import (
    PAGE,
    chain,
    profile_of,
    random_graph,
    random_profile,
    random_training_graph,
)

State = tuple[int, int, tuple[int, ...]]


def dynprog(chain: LayerChain, memory_bytes: float) -> Offloaded | None:
    """The choice of DYNPROG that offloads least."""
    found = optima(chain, memory_bytes)
    return found[0] if found else None


def fractions(chain: LayerChain, memory_bytes: float) -> tuple[float, ...]:
    """Theorem 2: bytes to offload where parts can be, just M_peak - M_GPU, the first first."""
    excess = max(chain.peak_bytes() - memory_bytes, 0.0)
    found = []
    for x in chain.x_bytes[: chain.layers]:
        found.append(min(x, excess))
        excess -= found[-1]
    return tuple(found)


def bound(chain: LayerChain, memory_bytes: float) -> float:
    """Proposition 3: seconds that no schedule beats."""
    excess = max(chain.peak_bytes() - memory_bytes, 0.0)
    copies = excess / chain.offload_bytes_per_s + excess / chain.prefetch_bytes_per_s
    return max(chain.compute_s, copies)


class Clock:
    """Shortest schedules by breadth-first search over unit steps of time; nothing of section 5 is in here.

    All numbers are whole; the link copies a byte per unit of time. A state is (ops ended or running, time left of the
    running one, progress of the copies). What can start does or waits, what can be copied is or is not.
    """

    def __init__(self, chain: LayerChain, memory: int) -> None:
        self.chain, self.memory = chain, memory
        self.op_s = [int(s) for s in (*chain.forward_s, *reversed(chain.backward_s))]

    def outside(self, copies: tuple[int, ...]) -> int:
        """Bytes that are not in memory."""
        raise NotImplementedError

    def ready(self, op: int, copies: tuple[int, ...]) -> bool:
        """Whether the activations that an op reads are in memory."""
        raise NotImplementedError

    def copied(self, op: int, running: bool, copies: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        """Progress after one more byte. What a forward op reads may leave while it runs."""
        raise NotImplementedError

    def shortest(self, copies: tuple[int, ...], limit: float = math.inf) -> float:
        level: set[State] = {(0, 0, copies)}
        seen = set(level)
        now = 0
        while level and now < limit:
            waiting = list(level)
            while waiting:
                op, left, copies = waiting.pop()
                if op == len(self.op_s):
                    return now
                if left == 0 and self.ready(op, copies) and self.held(op, True, copies) <= self.memory:
                    begun = (op, self.op_s[op], copies) if self.op_s[op] else (op + 1, 0, copies)
                    if begun not in seen:
                        seen.add(begun)
                        level.add(begun)
                        waiting.append(begun)
            level = {s for state in level for s in self.later(*state)} - seen
            seen |= level
            now += 1
        return math.inf

    def later(self, op: int, left: int, copies: tuple[int, ...]) -> Iterator[State]:
        for progress in (*self.copied(op, left > 0, copies), copies):
            if self.held(op, left > 0, progress) <= self.memory:
                after = (op, left - 1, progress) if left > 1 else (op + left, 0, progress)
                if self.held(after[0], after[1] > 0, progress) <= self.memory:
                    yield after

    def held(self, op: int, running: bool, copies: tuple[int, ...]) -> float:
        chain, last = self.chain, self.chain.layers
        x, y = chain.x_bytes, chain.y_bytes
        if op < last:
            own = x[op + 1] + chain.forward_extra_bytes[op]
            return sum(x[: op + 1]) + running * own - self.outside(copies)
        i = 2 * last - 1 - op
        held = sum(x[: i + 2]) + (y[i + 1] if i < last - 1 or running else 0)
        return held + running * (y[i] + chain.backward_extra_bytes[i]) - self.outside(copies)


class Ordered(Clock):
    """Given activations leave in order, then come back in reverse order (Lemma 3)."""

    def __init__(self, chain: LayerChain, memory: int, out: Sequence[float]) -> None:
        super().__init__(chain, memory)
        self.out = [int(n) for n in out]
        self.total = sum(self.out)

    def outside(self, copies: tuple[int, ...]) -> int:
        return min(copies[0], self.total) - max(copies[0] - self.total, 0)

    def ready(self, op: int, copies: tuple[int, ...]) -> bool:
        last = self.chain.layers
        due = sum(self.out[2 * last - 1 - op :]) if op >= last else 0
        return due == 0 or copies[0] - self.total >= due

    def copied(self, op: int, running: bool, copies: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        there = 2 * self.total if copies[0] >= self.total else sum(self.out[: op + running])
        return [(copies[0] + 1,)] if copies[0] < there else []


class Free(Clock):
    """Any byte of any activation leaves and comes back at any time (section 4)."""

    def outside(self, copies: tuple[int, ...]) -> int:
        return sum(copies)

    def ready(self, op: int, copies: tuple[int, ...]) -> bool:
        last = self.chain.layers
        i = op if op < last else 2 * last - 1 - op
        return not copies[i] and (op < last or i + 1 == last or not copies[i + 1])

    def copied(self, op: int, running: bool, copies: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        """What a backward op reads stays, and what none reads any more is no longer there to leave."""
        last = self.chain.layers
        begun = op + running if op < last else 2 * last - 1 - op
        for i, (out, x) in enumerate(zip(copies, self.chain.x_bytes, strict=False)):
            if i < begun and out < x:
                yield (*copies[:i], out + 1, *copies[i + 1 :])
            if out:
                yield (*copies[:i], out - 1, *copies[i + 1 :])


def random_chain(rng: random.Random, most_layers: int, most: int = 4) -> tuple[LayerChain, int]:
    """Whole numbers, and a memory between the least and the peak."""
    layers = rng.randint(1, most_layers)

    def some(count: int, most: int) -> list[int]:
        return [rng.randint(0, most) for _ in range(count)]

    extra = [[n * rng.randint(0, 1) for n in some(layers, 3)] for _ in range(2)]
    made = LayerChain(
        some(layers, 3), some(layers, 3), some(layers + 1, most), some(layers + 1, 2), extra[0], extra[1], 1, 1
    )
    return made, rng.randint(int(made.least_bytes()), int(made.peak_bytes()))


def subsets(chain: LayerChain) -> Iterator[tuple[bool, ...]]:
    return product((False, True), repeat=chain.layers)


def test_equations_agree_with_the_clock() -> None:
    """Equations (1) to (9), for every set of activations of many chains, which have to wait or do not fit."""
    waits = 0
    for seed in range(250):
        made, memory = random_chain(random.Random(seed), 4)
        for offloaded in subsets(made):
            out = whole(made, offloaded)
            expected = Ordered(made, memory, out).shortest((0,))
            assert relaxed_s(made, memory, out) == expected, (seed, offloaded)
            waits += made.compute_s < expected < math.inf
    assert waits > 300


@pytest.mark.long
def test_dynprog_is_exhaustive_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GREEDY's choices to fall back on: hundreds of chains, against all 2^L sets."""
    monkeypatch.setattr(module, "incumbents", lambda made: [(True,) * made.layers])
    waits = greedy_worse = 0
    for seed in range(600):
        made, memory = random_chain(random.Random(seed), 8)
        found = dynprog(made, memory)
        assert found is not None
        found_s = relaxed_s(made, memory, whole(made, found))
        assert found_s == min(relaxed_s(made, memory, whole(made, o)) for o in subsets(made)), seed
        waits += found_s > made.compute_s
        greedy_worse += relaxed_s(made, memory, whole(made, greedy(made, memory))) > found_s
    assert waits > 150
    assert greedy_worse > 10


def test_dynprog_is_the_shortest_of_all_schedules_on_the_clock() -> None:
    for seed in range(100):
        made, memory = random_chain(random.Random(seed), 5)
        found = dynprog(made, memory)
        assert found is not None
        found_s = relaxed_s(made, memory, whole(made, found))
        assert Ordered(made, memory, whole(made, found)).shortest((0,)) == found_s
        for other in subsets(made):
            assert Ordered(made, memory, whole(made, other)).shortest((0,), limit=found_s) >= found_s


def test_eager_fractions_are_the_best_of_all_fractional_schedules() -> None:
    """Theorem 2, against schedules that know neither of order nor of eagerness."""
    waits = 0
    for seed in range(250):
        made, memory = random_chain(random.Random(seed), 3, most=3)
        shortest = Free(made, memory).shortest((0,) * made.layers)
        assert relaxed_s(made, memory, fractions(made, memory)) == shortest, seed
        assert bound(made, memory) <= shortest
        waits += shortest > made.compute_s
    assert waits > 40


def test_greedy_offloads_too_much_where_dynprog_picks() -> None:
    """Two bytes must leave. GREEDY's x_0 has nine, of which F_1 and B_1 hide four each; x_1 leaves after F_1."""
    made = LayerChain([0, 4, 0], [0, 4, 0], [9, 2, 0, 0], [0] * 4, [0, 0, 2], [0, 0, 2], 1, 1)
    assert (made.peak_bytes(), bound(made, 11)) == (13, 8)
    assert greedy(made, 11) == (True, False, False)
    assert dynprog(made, 11) == (False, True, False)
    assert relaxed_s(made, 11, (9, 0, 0)) == 8 + 5 + 5
    assert relaxed_s(made, 11, (0, 2, 0)) == 8 + 2


def test_rounding_keeps_sums_and_loses_little(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        layers = 40
        x = [rng.uniform(1, 9) * 1e7 for _ in range(layers + 1)]
        op_s = [rng.uniform(0.5, 1.5) * 5e-3 for _ in range(layers)]
        made = LayerChain(op_s, [2 * s for s in op_s], x, x, [0.0] * layers, [0.0] * layers, 6e9, 6e9)
        memory = made.least_bytes() + rng.random() * (made.peak_bytes() - made.least_bytes())
        found = []
        for units in (200, 1500):
            monkeypatch.setattr(module, "GRID_UNITS", units)
            found.append(dynprog(made, memory))
        coarse, fine = found
        assert coarse is not None
        assert fine is not None
        coarse_s, fine_s = (relaxed_s(made, memory, whole(made, o)) for o in (coarse, fine))
        eager_s = min(relaxed_s(made, memory, whole(made, o)) for o in incumbents(made))
        assert max(coarse_s, fine_s) <= eager_s
        assert coarse_s <= 1.02 * fine_s


def layers_of(sizes: Sequence[int]) -> Graph:
    """A network whose layer i reads A_i and W_i; backward reads them and A_(i+1); the weights change at once."""
    count = len(sizes) - 1
    tensors = [Tensor(f"W{i}", PAGE, "state", PAGE) for i in range(count)]
    tensors += [Tensor(f"A{i}", n, "activation" if i else "input") for i, n in enumerate(sizes)]
    tensors += [Tensor(f"D{i}", n, "activation") for i, n in enumerate(sizes)]
    tensors += [Tensor(f"G{i}", PAGE, "activation") for i in range(count)]
    a, d, g = count, 2 * count + 1, 3 * count + 2
    ops = [Op(f"forward{i}", "any", (i, a + i), (a + i + 1,)) for i in range(count)]
    ops.append(Op("loss", "any", (a + count,), (d + count,)))
    for i in reversed(range(count)):
        ops.append(Op(f"backward{i}", "any", (i, a + i, a + i + 1, d + i + 1), (d + i, g + i)))
        ops.append(Op(f"update{i}", "any", (i, g + i), (), 0, (i,)))
    graph = Graph("layers", 1, "weights", tuple(tensors), tuple(ops), (d,))
    graph.validate()
    return graph


def test_training_graph_becomes_the_papers_chain() -> None:
    sizes = [PAGE * n for n in (2, 5, 3, 4, 1)]
    graph = layers_of(sizes)
    gaps = Gaps(graph)
    at = turn(gaps)
    assert graph.ops[at].name == "loss"
    assert virtual_layers(gaps, at) == [0, 1, 2, 3]
    found = grouped(gaps, profile_of(graph), at, virtual_layers(gaps, at))
    assert [sum(graph.tensors[t].nbytes for t in ts) for ts in found.saved] == [*sizes[:4], 0]
    assert found.chain.forward_s == [1, 1, 1, 1]
    assert found.chain.backward_s == [2, 2, 2, 3]
    assert found.chain.y_bytes == sizes
    assert found.chain.offload_bytes_per_s == PAGE


def test_residual_blocks_are_layers() -> None:
    """Each block's input passes by two ops; only the adding op ends a layer."""
    tensors = [Tensor("X", PAGE, "input"), *(Tensor(f"A{i}", PAGE, "activation") for i in range(7))]
    ops = [Op("stem", "conv", (0,), (1,))]
    for block in range(2):
        x = 1 + 3 * block
        ops += [
            Op(f"conv{block}", "conv", (x,), (x + 1,)),
            Op(f"norm{block}", "norm", (x + 1,), (x + 2,)),
            Op(f"add{block}", "add", (x, x + 2), (x + 3,)),
        ]
    graph = Graph("residual", 1, "weights", tuple(tensors), tuple(ops), (7,))
    graph.validate()
    assert virtual_layers(Gaps(graph), len(ops)) == [0, 3, 6]


def test_peak_of_every_chain_is_that_of_its_graph() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        graph = random_training_graph(rng) if seed % 2 else random_graph(rng)
        gaps = Gaps(graph)
        at = turn(gaps)
        for ends in (virtual_layers(gaps, at), short_layers(at, 4)):
            found = grouped(gaps, random_profile(rng, graph), at, ends).chain
            assert found.peak_bytes() == pytest.approx(alive_bytes(gaps).max())
            assert found.least_bytes() <= found.peak_bytes()


def swapped(plan: Plan) -> set[int]:
    return {s.tensor for s in plan.steps if isinstance(s, SwapOut)}


@pytest.mark.parametrize(("searcher", "offloaded", "latency_s"), [("greedy", {"A0"}, 21), ("dynprog", {"A1"}, 16)])
def test_plans_offload_what_was_chosen(searcher: str, offloaded: set[str], latency_s: float) -> None:
    """A page too little. GREEDY offloads the nine of the input and waits for them; DYNPROG one, and for nothing.

    A0 leaves from 0 to 9; backward3, which needs its bytes, runs until 10; A0 is back at 19; backward0 and update0.
    """
    graph = layers_of([PAGE * n for n in (9, 1, 3, 5, 5, 1)])
    profile = profile_of(graph)
    enough = int(alive_bytes(Gaps(graph)).max()) + 5 * PAGE
    plan = search(Problem(graph, profile, single_budget(enough - PAGE)), searcher)
    assert {graph.tensors[t].name for t in swapped(plan)} == offloaded
    assert len(plan.residents) == 5
    assert simulate(graph, plan, profile).latency_s == latency_s
    unhurried = search(Problem(graph, profile, single_budget(enough + 2 * PAGE)), searcher)
    assert not any(isinstance(s, SwapIn | SwapOut) for s in unhurried.steps)


def test_sequences_by_the_clock_are_safe() -> None:
    """Whatever is swapped and computed again, in just enough memory and in more."""
    moved = 0
    for seed in range(150):
        rng = random.Random(seed)
        graph = random_training_graph(rng) if seed % 2 else random_graph(rng)
        gaps, profile = Gaps(graph), random_profile(rng, graph)
        choices = [rng.choice(gap.choices) for gap in gaps.all]
        held = alap(tables(gaps), codes(choices)).held
        if not len(held):
            continue
        memory = int(held.max() * rng.uniform(1, 2))
        decided, residents = listed(no_wait(gaps, memory, choices))
        actions = delay_drops(graph, profile, decided, residents, memory)
        assert sorted(actions) == sorted(decided)
        plan = plan_of(Problem(graph, profile, single_budget(memory)), actions, residents)
        assert plan is not None, "no drop is delayed for longer than memory allows"
        check(graph, profile, plan)
        moved += actions != decided
    assert moved > 20


def test_bytes_on_their_way_out_are_not_written_while_others_are_free() -> None:
    """A0 leaves until 2 s; with a page to spare, A2 need not wait for that."""
    graph = chain([0] * 3)
    w = 3
    read_again = Op("again", "any", (w,), (w + 4,))
    tensors = (*graph.tensors, Tensor("A4", PAGE, "activation"))
    graph = Graph("again", 1, "weights", tensors, (*graph.ops, read_again), (w + 4,))
    profile = profile_of(graph, bandwidth=0.5 * PAGE)
    gaps = Gaps(graph)
    choices = [Choice.SWAP if gap.tensor == w else Choice.KEEP for gap in gaps.all]
    ends = []
    for memory in (2 * PAGE, 3 * PAGE):
        plan = plan_of_choices(Problem(graph, profile, single_budget(memory)), gaps, choices, delayed=True)
        assert plan is not None
        check(graph, profile, plan)
        ends.append([s.end_s for s in simulate(graph, plan, profile).spans if s.lane == "compute"])
    assert ends == [[1, 3, 4, 7], [1, 2, 3, 5]]


def test_dynprog_keeps_up_with_greedy_on_training_graphs() -> None:
    total = {"greedy": 0.0, "dynprog": 0.0}
    for seed in range(6):
        rng = random.Random(seed)
        graph = layers_of([PAGE * rng.randint(1, 9) for _ in range(13)])
        profile = profile_of(graph, bandwidth=2.5 * PAGE)
        peak = int(alive_bytes(Gaps(graph)).max()) + 12 * PAGE
        for searcher in total:
            plan = search(Problem(graph, profile, single_budget(int(0.75 * peak))), searcher)
            check(graph, profile, plan)
            total[searcher] += simulate(graph, plan, profile).latency_s / profile.compute_s
    assert total["dynprog"] <= 1.01 * total["greedy"]
    assert total["dynprog"] < 6 * 1.2


def test_no_plan_on_one_channel_beats_the_papers_bound() -> None:
    """Proposition 3. A second channel helps where swap-ins and swap-outs alternate, as when everything leaves."""
    at_the_bound = slower = 0
    for seed in range(8):
        rng = random.Random(seed)
        graph = layers_of([PAGE * rng.randint(1, 9) for _ in range(9)])
        profile = profile_of(graph, bandwidth=PAGE * rng.choice((1.0, 2.5, 10.0)))
        gaps = Gaps(graph)
        peak = int(alive_bytes(gaps).max()) + 8 * PAGE
        problem = Problem(graph, profile, single_budget(int(rng.uniform(0.7, 1) * peak)))
        everything = plan_of_choices(problem, gaps, [Choice.SWAP] * len(gaps.all), delayed=True)
        assert everything is not None
        for plan in (search(problem, "dynprog"), everything):
            one_s, both_s = on_one_channel_s(plan, problem), simulate(graph, plan, profile).latency_s
            assert max(both_s, proposition_3_s(problem)) <= one_s * (1 + 1e-9)
            at_the_bound += one_s == pytest.approx(proposition_3_s(problem))
            slower += one_s > both_s * 1.001
    assert at_the_bound > 2
    assert slower > 2


@pytest.mark.parametrize("searcher", ["greedy", "dynprog"])
def test_where_the_weights_do_not_fit_next_to_the_chain_everything_leaves_over_every_gap(searcher: str) -> None:
    """The paper keeps all weights in memory."""
    graph = chain([PAGE * n for n in (4, 1, 2, 3, 1, 2, 4, 1)])
    problem = Problem(graph, profile_of(graph, bandwidth=2.0 * PAGE), single_budget(14 * PAGE))
    made = {"greedy": Greedy, "dynprog": DynProg}[searcher](problem, 0)
    assert made.ask() == [LEAN, SERIAL]
    plan = search(problem, searcher)
    assert plan.residents == ()
    assert {s.tensor for s in plan.steps if isinstance(s, SwapIn)} == set(range(8))
    assert sum(isinstance(s, Compute) for s in plan.steps) == 8
    assert plan.provenance is not None
    assert plan.provenance.latency_s < simulate(graph, made.write(SERIAL), problem.profile).latency_s


def test_choices_that_are_equal_are_evaluated_once() -> None:
    graph = layers_of([PAGE] * 6)
    problem = Problem(graph, profile_of(graph), single_budget(100 * PAGE))
    for made in (Greedy(problem, 0), DynProg(problem, 0)):
        assert made.ask() == [(), LEAN, SERIAL]
        assert made.evaluations == 3
    tight = Problem(graph, profile_of(graph), single_budget(least_bytes(graph)))
    assert search(tight, "dynprog").steps
