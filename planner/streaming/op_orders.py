"""Orders of a problem's ops that are worth planning, in addition to the graph's own."""

from collections.abc import Iterator
from dataclasses import dataclass

from planner.errors import InfeasibleBudget, UnsupportedProblem
from planner.layout.feasible import Footprint
from planner.order import by_parameters, has_reuse, reordered
from planner.problem import Problem
from planner.profile import Profile
from planner.streaming.memory_order import by_memory
from planner.streaming.workload import Workload

WORTHWHILE = 0.01
"""Share of the memory that another order must save on average to be planned."""


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
    for order, always in _orders(problem):
        try:
            view = in_order(problem, order)
        except InfeasibleBudget as refusal:
            refusals.append(refusal)
            continue
        if first is None or always or _saves_memory(view, first):
            first = first or view
            yield view
    if first is None:
        raise min(refusals, key=lambda r: r.least_bytes)


def _orders(problem: Problem) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Different orders to consider, and whether they are planned even where they save no memory."""
    graph = problem.graph
    own = tuple(range(len(graph.ops)))
    yield own, True
    by_use = by_parameters(graph) if has_reuse(graph) else own
    if by_use != own:
        yield by_use, True
    if problem.overlay and (order := by_memory(graph, problem.profile.op_seconds)) not in (own, by_use):
        yield order, graph.parameter_bytes > problem.memory_bytes


def _saves_memory(view: OpOrder, own: OpOrder) -> bool:
    """Whether activations take clearly less of the memory in one order, on average over the ops."""
    pages = own.work.arrays.partition_pages + own.work.arrays.workspace_pages
    saved = own.work.arrays.zone.mean() - view.work.arrays.zone.mean()
    return bool(saved > WORTHWHILE * pages)


def _workload(footprint: Footprint, profile: Profile, problem: Problem) -> Workload:
    return Workload.of(
        footprint, profile, problem.partition_bytes, problem.workspace_bytes, problem.residents or ()
    )
