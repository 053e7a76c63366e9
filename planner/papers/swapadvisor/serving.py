"""The genetic search for served models: a partition with a workspace.

A pool per size class (section 5.3) has no counterpart here: all batch sizes of a model share residents with fixed
addresses, and the runtime places activations. A chromosome therefore has, besides SCH, the decisions that
`planner.streaming.stream` plays: per parameter, whether it is a resident and is released; per use, whether it stays
until the next one, its copy's rule for holes, and how far its copy goes ahead of others. Schedules are crossed over
and mutated as in section 5.2. Decisions are crossed over at one op, as CLS and CNT are at one size, then repaired until
residents fit, and several of them mutate at once.

The first candidate keeps the parameters that are used first; it is not part of the population.
The first generation is random, except for the orders of `planner.streaming.op_orders`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from cohabit.planner.arrays import Bools, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.layout.feasible import PAGE_BYTES
from cohabit.planner.order import predecessors
from cohabit.planner.papers.swapadvisor.evolution import Evolution
from cohabit.planner.papers.swapadvisor.schedules import (
    cross_schedules,
    mutate_schedule,
    precedence,
    random_schedule,
)
from cohabit.planner.problem import UNFIT, Cost, Problem
from cohabit.planner.schedule.table import Schedule
from cohabit.planner.streaming import stream
from cohabit.planner.streaming.anneal import FITS, LINK_WEIGHT, Critical, changed, critical
from cohabit.planner.streaming.emit import emit
from cohabit.planner.streaming.op_orders import OpOrder, OpOrders, in_order
from cohabit.planner.streaming.page_map import NOWHERE
from cohabit.planner.streaming.searcher import is_optimal
from cohabit.planner.streaming.stream import KEPT, RELEASED, STREAMED, Decisions, place_residents, play, uniform
from cohabit.planner.streaming.workload import Arrays

POPULATION: Final = 48
GENERATIONS: Final = 60
"""Number of generations in a search without a limit."""
NEW_ORDERS: Final = 1 / 128
"""Fraction of pairs whose schedules are crossed over, and of children whose schedule mutates: a new schedule takes as
long as a hundred evaluations."""
MUTATION: Final = 0.1
"""Probability, as in the paper, that an op of a mutated schedule is any ready one."""
RANDOM_ORDERS: Final = 8
"""One in this many members of the first generation has a random order."""
CHANGES: Final = 0.5
"""Probability that a child's mutation continues after each changed decision."""
COPIES: Final = 0.2
"""Fraction of changes to one copy: its rule for holes, or how far it goes ahead."""
GUIDED: Final = 0.6
"""Fraction of mutations that mostly change critical copies; finding these takes as long as an evaluation."""
LONGEST_LEAD: Final = 8
ORDERS_KEPT: Final = 256
"""Number of orders whose layouts are cached."""


@dataclass(frozen=True, eq=False)
class ServingChromosome:
    """An order of the ops, and decisions, which are always numbered as in the first order."""

    order: tuple[int, ...]
    decisions: Decisions


@dataclass(frozen=True)
class _Numbered:
    """The problem in some order, and the numbers of its parameters and uses in the first order."""

    view: OpOrder
    parameter: Ints
    use: Ints
    uses: int
    """Number of uses in the first order."""
    given: Ints | None
    """First pages of given residents, if any."""

    def local(self, found: Decisions) -> Decisions:
        use = self.use
        return Decisions(found.choice[self.parameter], found.hold[use], found.fit[use], found.lead[use])

    def numbered(self, local: Decisions) -> Decisions:
        """Inverse of `local`."""
        found = uniform(np.zeros_like(local.choice), np.zeros(self.uses, np.bool_), 0)
        found.choice[self.parameter] = local.choice
        for row, column in zip(found[1:], local[1:], strict=True):
            row[self.use] = column
        return found

    def resident_at(self, local: Decisions) -> Ints:
        return place_residents(self.view.work.arrays, local.choice) if self.given is None else self.given


class ServingGenetic(Evolution[ServingChromosome]):
    """Evolves orders and decisions. Raises InfeasibleBudget if activations do not fit, and UnsupportedProblem for a
    training graph."""

    is_compiled = True

    def __init__(self, problem: Problem, seed: int, *, population: int = POPULATION) -> None:
        super().__init__(seed, population, GENERATIONS)
        self.problem = problem
        self._orders = OpOrders(problem)
        self._first = self._orders[0]
        self._numbered = lru_cache(maxsize=ORDERS_KEPT)(self._number)
        self._precedence = precedence(problem.graph)
        self._steps = self._evolve()

    def tell(self, candidates: Sequence[ServingChromosome], costs: Sequence[Cost]) -> None:
        super().tell(candidates, costs)
        if any(is_optimal(self._first.work, cost) for cost in costs):
            self._steps = iter(())

    def evaluate(self, candidate: ServingChromosome, good_s: float) -> Cost:
        numbered = self._numbered(candidate.order)
        if numbered is None:
            return UNFIT
        local = numbered.local(candidate.decisions)
        work = numbered.view.work
        latency_s, period_s, pages = stream.evaluate(
            work.arrays, work.numbering, numbered.resident_at(local), local, good_s
        )
        return Cost(latency_s, period_s, pages * PAGE_BYTES)

    def pool_bytes(self, candidate: ServingChromosome) -> int:
        numbered = self._numbered(candidate.order)
        assert numbered is not None
        return numbered.view.work.footprint.activation_bytes

    def _schedule(self, candidate: ServingChromosome) -> Schedule:
        numbered = self._numbered(candidate.order)
        assert numbered is not None
        local = numbered.local(candidate.decisions)
        resident_at = numbered.resident_at(local)
        return emit(numbered.view.work, resident_at, play(numbered.view.work.arrays, resident_at, local)[0])

    def seconds(self, cost: Cost) -> float:
        return cost.latency_s + LINK_WEIGHT * cost.link_bytes / self.problem.profile.swap_in.bandwidth_bytes_per_s

    def _evolve(self) -> Iterator[Sequence[ServingChromosome]]:
        uses = len(self._first.work.arrays.use_op)
        choice = self._given
        if choice is None:
            choice = np.where(self._filled(np.arange(len(self._first.work.arrays.size))), RELEASED, STREAMED)
        yield [ServingChromosome(self._first.order, uniform(choice, np.zeros(uses, np.bool_), 0))]
        if uses:
            yield from self._generations(self._first_generation())

    def _first_generation(self) -> list[ServingChromosome]:
        orders = [view.order for view in self._orders]
        members = []
        for i in range(self._population):
            order = orders[i % len(orders)]
            if self._is_free and i % RANDOM_ORDERS == RANDOM_ORDERS - 1:
                order = tuple(random_schedule(self._precedence, self._rng).tolist())
            members.append(ServingChromosome(order, self._random()))
        return members

    def _random(self) -> Decisions:
        """Return random residents as long as they fit, all kept, all released or mixed; likewise held uses.

        Half of the time, residents are drawn at about even distances in the order of use.
        """
        rng, arrays = self._rng, self._first.work.arrays
        count, uses = len(arrays.size), len(arrays.use_op)
        if self._given is None:
            drawn = rng.permutation(count)
            if rng.random() < 0.5:
                drawn = np.argsort((np.arange(count) * rng.random() + rng.random()) % 1)
            resident = self._filled(drawn)
        else:
            resident = self._given != STREAMED
        chance = rng.choice((0.0, 0.5, 1.0))
        choice = np.where(resident, np.where(rng.random(count) < chance, KEPT, RELEASED), STREAMED)
        hold = rng.random(uses) < rng.choice((0.0, 0.5, 1.0))
        return uniform(choice, hold, int(rng.integers(FITS)))

    def _filled(self, drawn: Ints) -> Bools:
        """Return the first of these parameters that fit in the partition together."""
        resident = np.empty(len(drawn), np.bool_)
        resident[drawn] = np.cumsum(self._first.work.arrays.size[drawn]) <= self._first.work.arrays.partition_pages
        return resident

    def _crossed(self, first: ServingChromosome, second: ServingChromosome) -> list[ServingChromosome]:
        """Return two children: decisions are crossed over, schedules seldom."""
        arrays = self._first.work.arrays
        cut = int(self._rng.integers(len(arrays.op_s) + 1))
        at = int(np.searchsorted(arrays.first_use, cut)), int(arrays.use_start[cut])
        decisions = [
            _one_point_crossover(a.decisions, b.decisions, *at) for a, b in ((second, first), (first, second))
        ]
        orders = [first.order, second.order]
        if first.order != second.order and self._rng.random() < NEW_ORDERS:
            cut = int(self._rng.integers(len(first.order) + 1))
            crossed = cross_schedules(np.array(first.order), np.array(second.order), cut)
            orders = [tuple(order.tolist()) for order in crossed]
        return [ServingChromosome(order, found) for order, found in zip(orders, decisions, strict=True)]

    def _mutated(self, child: ServingChromosome) -> ServingChromosome:
        order, rng = child.order, self._rng
        if self._is_free and rng.random() < NEW_ORDERS:
            order = tuple(mutate_schedule(np.array(order), self._precedence, MUTATION, rng).tolist())
        numbered = self._numbered(order)
        if numbered is None:
            return ServingChromosome(order, child.decisions)
        work, local = numbered.view.work, numbered.local(child.decisions)
        resident_at = np.empty(0, np.int64) if numbered.given is None else numbered.given
        changes, draw = int(rng.geometric(1 - CHANGES)), int(rng.integers(2**31))
        found = mutated(work.arrays, local, resident_at, changes, draw)
        return ServingChromosome(order, numbered.numbered(found))

    @cached_property
    def _is_free(self) -> bool:
        """Whether the ops can run in any other order."""
        before = predecessors(self.problem.graph)
        return any(k not in needed for k, needed in enumerate(before[1:]))

    @cached_property
    def _given(self) -> Ints | None:
        """Choices of given residents; None if they are open."""
        if self.problem.residents is None:
            return None
        resident_at = self._first.work.pages_of(self.problem.residents)
        return np.where(resident_at != NOWHERE, RELEASED, STREAMED)

    def _number(self, order: tuple[int, ...]) -> _Numbered | None:
        """Return the problem in an order; None if it does not fit in memory."""
        try:
            view = self._first if order == self._first.order else in_order(self.problem, order)
        except InfeasibleBudget:
            return None
        given = self.problem.residents
        parameter = {t: i for i, t in enumerate(self._first.work.parameters)}
        use = {found: i for i, found in reversed(list(enumerate(_uses(self._first))))}
        use |= {(None, t): i for (_, t), i in reversed(use.items())}  # an output that the last op does not read
        return _Numbered(
            view,
            np.array([parameter[t] for t in view.work.parameters], np.int64),
            np.array([use.get(found, use[None, found[1]]) for found in _uses(view)], np.int64),
            len(self._first.work.arrays.use_op),
            None if given is None else view.work.pages_of(given),
        )


def _uses(view: OpOrder) -> list[tuple[int | None, int]]:
    """Return the graph's op and parameter of each use, in order."""
    ops = view.order or (None,)  # without ops, there is one no-op
    return [(op, t) for op, use in zip(ops, view.work.footprint.uses, strict=True) for t in use]


def _one_point_crossover(head: Decisions, tail: Decisions, parameters: int, uses: int) -> Decisions:
    """Return decisions that begin like one parent's and continue like another's."""
    cuts = parameters, uses, uses, uses
    return Decisions(*(np.concatenate([a[:n], b[n:]]) for a, b, n in zip(head, tail, cuts, strict=True)))


@compiled
def mutated(work: Arrays, decisions: Decisions, resident_at: Ints, changes: int, seed: int) -> Decisions:
    """Evict random residents until the rest fit, then change some decisions.

    `resident_at` is empty if the residents are open.
    """
    np.random.seed(seed)
    fixed = len(resident_at) > 0
    choice = decisions.choice.copy()
    pages = work.size[choice != STREAMED].sum()
    while not fixed and pages > work.partition_pages:
        p = np.random.randint(len(choice))
        if choice[p] != STREAMED:
            choice[p] = STREAMED
            pages -= work.size[p]
    found = Decisions(choice, decisions.hold.copy(), decisions.fit.copy(), decisions.lead.copy())
    none = np.empty(0, np.int64)
    urgent = Critical(none, none, none)
    if np.random.random() < GUIDED:
        urgent = critical(work, play(work, resident_at if fixed else place_residents(work, choice), found)[0])
    for _ in range(changes):
        if np.random.random() < COPIES:
            j = np.random.randint(len(found.fit))
            if len(urgent.parameter) > 0:
                p = urgent.parameter[np.random.randint(len(urgent.parameter))]
                for i in range(work.use_start[work.first_use[p]], work.use_start[work.first_use[p] + 1]):
                    if work.use_parameter[i] == p:
                        j = i
            if np.random.random() < 0.5:
                found.fit[j] = np.random.randint(FITS)
            else:
                found.lead[j] = 0 if found.lead[j] > 0 else np.random.randint(1, LONGEST_LEAD + 1)
        else:
            found = changed(work, found, fixed, urgent)
    return found
