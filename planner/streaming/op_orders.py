"""Orders of a problem's ops that are worth planning, in addition to the graph's own."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from cohabit.planner.errors import InfeasibleBudget, UnsupportedProblem
from cohabit.planner.graph import Graph
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.order import by_parameters, has_reuse, reordered
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.streaming.bottleneck import least_latency_s, less_behind
from cohabit.planner.streaming.memory_order import by_memory
from cohabit.planner.streaming.workload import Workload

DESCENTS = 4
"""Orders that are made with other seeds: their layouts differ, and with them what they are worth."""
OTHERS = 2
"""Of all orders that are made here, the most that are planned."""


@dataclass(frozen=True)
class OpOrder:
    """The problem with its ops in some order; `order[k]` is the graph's op that runs as the k-th."""

    order: tuple[int, ...]
    work: Workload


class OpOrders:
    """The orders that are worth planning. All but the first are made when they are asked for."""

    def __init__(self, problem: Problem, zone_bytes: int | None = None) -> None:
        """Raises UnsupportedProblem for a training graph, InfeasibleBudget with the least budget if no order fits.

        With `zone_bytes` activations make do with those, which is known for the graph's own order alone.
        """
        if any(t.kind == "state" for t in problem.graph.tensors):
            raise UnsupportedProblem(
                f"{problem.graph.name}: streaming keeps activations in memory and changes no parameters; ask another"
                " searcher for a training graph, without a workspace"
            )
        self._others = _feasible_views(problem) if zone_bytes is None else _in_zone(problem, zone_bytes)
        self._made = [next(self._others)]

    def __getitem__(self, order: int) -> OpOrder:
        if order >= len(self._made):
            self._made += self._others
        return self._made[order]

    def __len__(self) -> int:
        self._made += self._others
        return len(self._made)

    def __iter__(self) -> Iterator[OpOrder]:
        return (self[i] for i in range(len(self)))


def _in_zone(problem: Problem, zone_bytes: int) -> Iterator[OpOrder]:
    footprint = Footprint.of_zone(problem.graph, zone_bytes)
    yield OpOrder(tuple(range(len(problem.graph.ops))), _workload(footprint, problem.profile, problem))


def in_order(problem: Problem, order: tuple[int, ...]) -> OpOrder:
    """The problem with its ops in this order. Raises InfeasibleBudget."""
    changed, profile = reordered(problem.graph, problem.profile, order)
    return OpOrder(order, _workload(Footprint.of(changed, problem.overlay), profile, problem))


def _feasible_views(problem: Problem) -> Iterator[OpOrder]:
    first: OpOrder | None = None
    refusals: list[InfeasibleBudget] = []

    def feasible(orders: Iterable[tuple[int, ...]]) -> Iterator[OpOrder]:
        for order in orders:
            try:
                yield in_order(problem, order)
            except InfeasibleBudget as refusal:
                refusals.append(refusal)

    for view in feasible(_given_orders(problem.graph)):
        first = first or view
        yield view
    least_s = np.inf if first is None else least_latency_s(first.work.arrays)
    if problem.overlay and least_s > problem.profile.compute_s:
        others = [(least_latency_s(v.work.arrays), v) for v in feasible(_orders_with_room(problem))]
        for estimate_s, view in sorted(others, key=lambda o: o[0])[:OTHERS]:
            if estimate_s <= least_s:
                first = first or view
                yield view
    if first is None:
        raise min(refusals, key=lambda r: r.least_bytes)


def _given_orders(graph: Graph) -> Iterator[tuple[int, ...]]:
    own = tuple(range(len(graph.ops)))
    yield own
    if has_reuse(graph) and (order := by_parameters(graph)) != own:
        yield order


def _orders_with_room(problem: Problem) -> list[tuple[int, ...]]:
    graph, profile = problem.graph, problem.profile
    low = by_memory(graph, profile.op_seconds)
    found = [low, *(less_behind(graph, profile, problem.memory_bytes, low, seed) for seed in range(DESCENTS))]
    given = {*_given_orders(graph)}
    return [order for order in dict.fromkeys(found) if order not in given]


def _workload(footprint: Footprint, profile: Profile, problem: Problem) -> Workload:
    return Workload.of(
        footprint, profile, problem.partition_bytes, problem.workspace_bytes, problem.residents or ()
    )
