"""Fits one model into free memory: the split between partition and workspace, and the plans."""

from collections.abc import Mapping, Sequence

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.graph import Graph
from cohabit.planner.layout.feasible import PAGE_BYTES
from cohabit.planner.library import Library
from cohabit.planner.plan import Placement, Plan
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.curves import estimate_latency_s
from cohabit.planner.sizing.demand import Demand, workspaces
from cohabit.planner.sizing.deployment import ModelDemand, Room


def split_budget(
    graphs: Mapping[Bucket, Graph], profiles: Mapping[Bucket, Profile], budget_bytes: int
) -> tuple[int, int]:
    """Split one model's memory into partition and workspace for the least latency in the smallest bucket.

    Every bucket is feasible with the result. Raises InfeasibleBudget.
    """
    budget = budget_bytes // PAGE_BYTES * PAGE_BYTES
    demand = Demand.of(ModelDemand(next(iter(graphs.values())).name, graphs, profiles))
    if budget < demand.least_bytes:
        demand = demand.leaner()
    footprints, neediest = demand.footprints, demand.neediest
    if budget < neediest.least_bytes:
        raise InfeasibleBudget(neediest.graph.name, neediest.neediest_op, budget_bytes, neediest.least_bytes)
    smallest = min(graphs)
    best: tuple[float, int] | None = None
    for workspace in workspaces([demand], budget):
        partition = budget - workspace
        if any(f.least_workspace_bytes(partition) > workspace for f in footprints.values()):
            continue
        latency_s = estimate_latency_s(footprints[smallest], profiles[smallest], partition, workspace)
        if best is None or latency_s < best[0]:
            best = (latency_s, workspace)
    assert best is not None  # the whole budget as workspace is always feasible
    return budget - best[1], best[1]


def fit(model: ModelDemand, rooms: Sequence[Room]) -> Room | None:
    """Choose the workspace and partition of least latency for one more model; None if it fits in no room."""
    demand = Demand.of(model)
    chosen = _fit(demand, rooms)
    return chosen if chosen is not None else _fit(demand.leaner(), rooms)


def _fit(demand: Demand, rooms: Sequence[Room]) -> Room | None:
    model = demand.model
    smallest = demand.smallest
    best: tuple[float, Room] | None = None
    for room in rooms:
        least = demand.least_partition_bytes(room.workspace_bytes)
        if least is None or least > room.partition_bytes:
            continue
        partition = max(least, min(room.partition_bytes // PAGE_BYTES * PAGE_BYTES, demand.parameter_bytes))
        footprint, profile = demand.footprints[smallest], model.profiles[smallest]
        latency_s = estimate_latency_s(footprint, profile, partition, room.workspace_bytes)
        if best is None or latency_s < best[0] * (1 - 1e-6):
            best = (latency_s, Room(room.workspace_bytes, partition))
    return None if best is None else best[1]


def workspaces_for(model: ModelDemand, memory_bytes: int) -> list[int]:
    """Division of the workspace that are worth trying for a model."""
    demand = Demand.of(model)
    return sorted({*workspaces([demand], memory_bytes), *workspaces([demand.leaner()], memory_bytes)})


def plan_model(
    model: ModelDemand, room: Room, library: Library | None = None, searcher: str = "best", *, quick: bool = False
) -> dict[Bucket, Plan]:
    """Plan every bucket; the smallest chooses the residents of all. Raises InfeasibleBudget.

    Plans are read from the library, or stored there; `quick` takes the first that works, and stores none.
    """
    plans: dict[Bucket, Plan] = {}
    residents: tuple[Placement, ...] | None = None
    for bucket in sorted(model.graphs):
        graph, profile = model.graphs[bucket], model.profiles[bucket]
        problem = Problem(graph, profile, room.partition_bytes, room.workspace_bytes, residents)
        if quick:
            plans[bucket] = search(problem, searcher, limit=Limit(evaluations=1))
        else:
            plans[bucket] = known_or_searched(problem, library, searcher)
        residents = plans[bucket].residents
    return plans


def known_or_searched(problem: Problem, library: Library | None, searcher: str = "best") -> Plan:
    """Return the library's plan by this searcher, or search for one and store it. Raises InfeasibleBudget."""
    known = None if library is None else library.plan(problem, searcher)
    if known is not None:
        return known
    plan = search(problem, searcher)
    if library is not None:
        library.store(problem, searcher, plan)
    return plan
