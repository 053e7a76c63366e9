"""Fits one model into free memory: the split between partition and workspace, and the plans."""

from collections.abc import Mapping, Sequence

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.graph import Graph
from cohabit.planner.layout.feasible import PAGE_BYTES
from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Placement, Plan
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.curves import estimate_latency_s, partition_sizes
from cohabit.planner.sizing.demand import MemoryDemand, workspaces
from cohabit.planner.sizing.problem import ModelDemand


def split_budget(graphs: Mapping[Bucket, Graph], profiles: Mapping[Bucket, Profile], budget_bytes: int) -> Memory:
    """Split one model's memory into partition and workspace for the least latency in the smallest bucket.

    All buckets are feasible with the result. Raises InfeasibleBudget.
    """
    budget = budget_bytes // PAGE_BYTES * PAGE_BYTES
    demand = MemoryDemand.of(ModelDemand(next(iter(graphs.values())).name, graphs, profiles))
    if budget < demand.least_bytes:
        demand = demand.with_offloading()
    footprints, largest = demand.footprints, demand.largest_demand
    if budget < largest.least_bytes:
        raise InfeasibleBudget(
            largest.graph.name,
            largest.largest_op,
            budget_bytes,
            largest.least_bytes,
            bucket=largest.graph.bucket,
        )
    smallest = min(graphs)
    best: tuple[float, int] | None = None
    for workspace in workspaces([demand], budget):
        partition = budget - workspace
        if any(f.least_workspace_bytes(partition) > workspace for f in footprints.values()):
            continue
        latency_s = estimate_latency_s(footprints[smallest], profiles[smallest], Memory(workspace, partition))
        if best is None or latency_s < best[0]:
            best = (latency_s, workspace)
    assert best is not None  # the whole budget as workspace is always feasible
    return Memory(best[1], budget - best[1])


def fit(model: ModelDemand, choices: Sequence[Memory]) -> Memory | None:
    """Choose the free memory with the least latency for one more model, trimming the partition; None if none fits."""
    demand = MemoryDemand.of(model)
    chosen = _fit(demand, choices)
    return chosen if chosen is not None else _fit(demand.with_offloading(), choices)


def _fit(demand: MemoryDemand, choices: Sequence[Memory]) -> Memory | None:
    model = demand.model
    smallest = demand.smallest
    best: tuple[float, Memory] | None = None
    for free in choices:
        least = demand.least_partition_bytes(free.workspace_bytes)
        if least is None or least > free.partition_bytes:
            continue
        partition = max(least, min(free.partition_bytes // PAGE_BYTES * PAGE_BYTES, demand.parameter_bytes))
        footprint, profile = demand.footprints[smallest], model.profiles[smallest]
        fitting = Memory(free.workspace_bytes, partition)
        latency_s = estimate_latency_s(footprint, profile, fitting)
        if best is None or latency_s < best[0] * (1 - 1e-6):
            best = (latency_s, fitting)
    return None if best is None else best[1]


def workspaces_for(model: ModelDemand, memory_bytes: int) -> list[int]:
    """Return workspace sizes to try for a model."""
    demand = MemoryDemand.of(model)
    return sorted({*workspaces([demand], memory_bytes), *workspaces([demand.with_offloading()], memory_bytes)})


def plan_model(
    model: ModelDemand,
    memory: Memory,
    library: Library | None = None,
    searcher: str = "best",
    *,
    quick: bool = False,
) -> dict[Bucket, Plan]:
    """Plan every bucket; the smallest chooses the residents of all. Raises InfeasibleBudget.

    Plans are read from the library, or stored there. With `quick`, each is the first feasible plan and is not stored.
    """
    plans: dict[Bucket, Plan] = {}
    residents: tuple[Placement, ...] | None = None
    for bucket in sorted(model.graphs):
        graph, profile = model.graphs[bucket], model.profiles[bucket]
        problem = Problem(graph, profile, memory, residents)
        if quick:
            plans[bucket] = search(problem, searcher, limit=Limit(evaluations=1))
        else:
            plans[bucket] = known_or_searched(problem, library, searcher)
        residents = plans[bucket].residents
    return plans


def plans_by_size(model: ModelDemand, workspace_bytes: int, searcher: str = "best") -> list[dict[Bucket, Plan]]:
    """Return quick plans of every bucket for ascending partition sizes, up to one as fast as with all resident.

    Empty if no partition suffices with this workspace.
    """
    demand = MemoryDemand.of(model)
    least = demand.least_partition_bytes(workspace_bytes)
    if least is None:
        demand = demand.with_offloading()
        least = demand.least_partition_bytes(workspace_bytes)
    found: list[dict[Bucket, Plan]] = []
    for size in () if least is None else partition_sizes(least, demand.parameter_bytes):
        found.append(plan_model(model, Memory(workspace_bytes, size), searcher=searcher, quick=True))
        provenance = found[-1][demand.smallest].provenance
        if provenance is not None and provenance.latency_s <= model.profiles[demand.smallest].compute_s * (
            1 + 1e-6
        ):
            break
    return found


def known_or_searched(problem: Problem, library: Library | None, searcher: str = "best") -> Plan:
    """Return the library's plan by this searcher, or search for one and store it. Raises InfeasibleBudget."""
    known = None if library is None else library.plan(problem, searcher)
    if known is not None:
        return known
    plan = search(problem, searcher)
    if library is not None:
        library.store(problem, searcher, plan)
    return plan
