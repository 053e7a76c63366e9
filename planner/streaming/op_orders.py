"""Execution orders of a problem's ops: the graph's own, one grouped by parameters, and those that a search adds."""

from collections.abc import Iterator
from dataclasses import dataclass

from cohabit.planner.errors import InfeasibleBudget, UnsupportedProblem
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.order import by_parameters, has_reuse, reordered
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.streaming.workload import Workload

MOST = 256
"""Maximum number of orders: each has its layout in memory."""


@dataclass(frozen=True)
class OpOrder:
    """A problem with its ops in some order; `order[k]` is the graph's op that runs k-th."""

    order: tuple[int, ...]
    work: Workload


class OpOrders:
    """Orders to plan. All but the first are made on demand. Not thread-safe."""

    def __init__(self, problem: Problem, pool_bytes: int | None = None) -> None:
        """Raise UnsupportedProblem, or InfeasibleBudget with the least budget if no order fits.

        With `pool_bytes`, activations are offloaded to fit this pool; only the graph's own order is planned.
        """
        require_served(problem, "genetic")
        self._problem, self._is_pooled = problem, pool_bytes is not None
        self._others = _feasible_views(problem) if pool_bytes is None else _in_pool(problem, pool_bytes)
        self._made = [next(self._others)]

    def __getitem__(self, order: int) -> OpOrder:
        if order >= len(self._made):
            self._made += self._others
        return self._made[order]

    def number_of(self, order: tuple[int, ...]) -> int | None:
        """Return the number of an order, which is added if it is new.

        Returns None for an order that does not fit in memory, and for a new one in a pool or beyond MOST.
        """
        known = next((i for i, view in enumerate(self) if view.order == order), None)
        if known is not None or self._is_pooled or len(self) >= MOST:
            return known
        try:
            self._made.append(in_order(self._problem, order))
        except InfeasibleBudget:
            return None
        return len(self._made) - 1

    def __len__(self) -> int:
        self._made += self._others
        return len(self._made)

    def __iter__(self) -> Iterator[OpOrder]:
        return (self[i] for i in range(len(self)))


def require_served(problem: Problem, searcher: str) -> None:
    """Raise UnsupportedProblem for all but the latency of an inference in a partition and a shared workspace."""
    if (
        problem.memory.workspace_lasts
        or problem.objective == "period"
        or any(t.kind == "state" for t in problem.graph.tensors)
    ):
        raise UnsupportedProblem(
            f"{problem.graph.name}: {searcher} minimises the latency in a partition and a workspace, of a graph that"
            " changes no parameters; for anything else, plan a single budget, or ask another searcher"
        )


def _in_pool(problem: Problem, pool_bytes: int) -> Iterator[OpOrder]:
    order = tuple(range(len(problem.graph.ops)))
    yield OpOrder(order, _workload(Footprint.of_pool(problem.graph, pool_bytes), problem.profile, problem, order))


def in_order(problem: Problem, order: tuple[int, ...]) -> OpOrder:
    """Return the problem with its ops in this order. Raises InfeasibleBudget."""
    changed, profile = reordered(problem.graph, problem.profile, order)
    return OpOrder(order, _workload(Footprint.of(changed), profile, problem, order))


def _feasible_views(problem: Problem) -> Iterator[OpOrder]:
    """Yield the graph's own order and, if ops reread many weights, the one that groups ops by parameters."""
    graph = problem.graph
    own = tuple(range(len(graph.ops)))
    orders = [own, by_parameters(graph)] if has_reuse(graph) else [own]
    refusals: list[InfeasibleBudget] = []
    for order in dict.fromkeys(orders):
        try:
            yield in_order(problem, order)
        except InfeasibleBudget as refusal:
            refusals.append(refusal)
    if len(refusals) == len(dict.fromkeys(orders)):
        raise min(refusals, key=lambda r: r.least_bytes)


def _workload(footprint: Footprint, profile: Profile, problem: Problem, order: tuple[int, ...]) -> Workload:
    return Workload.of(footprint, profile, problem.memory, problem.arrays, order, problem.residents or ())
