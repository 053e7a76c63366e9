"""Ladders: a model's plans for about eight partition sizes, from the least feasible to all parameters resident.

The sizes depend on the model and the workspace alone, so that every division of memory finds the same plans. Each
rung is searched from the plans of the rung below: neighbouring plans then share most residents, and a resize copies
little more than the bytes that it adds.
"""

from collections.abc import Callable, Mapping

from cohabit.planner.layout.feasible import PAGE_BYTES
from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.demand import MemoryDemand
from cohabit.planner.sizing.fitting import partition_sizes, plan_model
from cohabit.planner.sizing.problem import ModelDemand
from cohabit.planner.sizing.shares import Curve, Point

Plans = Mapping[Bucket, Plan]


def rungs(model: ModelDemand, workspace_bytes: int) -> list[Memory]:
    """Return the memory of each rung, ascending. Empty if no partition suffices with this workspace."""
    demand = MemoryDemand.of(model)
    least = demand.least_partition_bytes(workspace_bytes)
    if least is None:
        demand = demand.with_offloading()
        least = demand.least_partition_bytes(workspace_bytes)
    if least is None:
        return []
    sizes = dict.fromkeys(partition_sizes(least, demand.parameter_bytes))
    assert all(size % PAGE_BYTES == 0 for size in sizes)
    return [Memory(workspace_bytes, size) for size in sizes]


def climb(
    model: ModelDemand,
    workspace_bytes: int,
    library: Library,
    searcher: str = "best",
    pause: Callable[[], None] = lambda: None,
    most_searches: int | None = None,
) -> Curve | None:
    """Search every rung that the library lacks, store the plans, and return the ladder. Raises InfeasibleBudget.

    With `most_searches`, stops after this number of rungs and returns None if others are left.
    """
    points: list[Point] = []
    below: list[Plans] = []
    memories = rungs(model, workspace_bytes)
    is_fast = False
    for memory in memories:
        # Plans of the last rung keep every parameter, and copy nothing: a smaller one can be as fast, but copies.
        if is_fast and memory is not memories[-1]:
            continue
        if most_searches is not None and library.plans(model, memory, searcher) is None:
            if not most_searches:
                return None
            most_searches -= 1
        plans = plan_model(model, memory, library, searcher, neighbours=below, pause=pause)
        provenance = plans[min(plans)].provenance
        assert provenance is not None
        latency_s = min([provenance.latency_s, *(point.latency_s for point in points[-1:])])
        points.append(Point(memory.partition_bytes, latency_s))
        below = [plans]
        is_fast = latency_s <= model.profiles[min(plans)].compute_s * (1 + 1e-6)
    ladder = tuple(points)
    library.store_ladder(model, searcher, workspace_bytes, ladder)
    return ladder


def between(model: ModelDemand, memory: Memory, library: Library, searcher: str = "best") -> list[Plans]:
    """Return the stored plans of the rungs next to a size: the largest within it, and the least above."""
    sizes = [p.partition_bytes for p in library.ladders(model, searcher).get(memory.workspace_bytes, ())]
    below = [size for size in sizes if size <= memory.partition_bytes][-1:]
    above = [size for size in sizes if size > memory.partition_bytes][:1]
    found = (library.plans(model, Memory(memory.workspace_bytes, size), searcher) for size in (*below, *above))
    return [plans for plans in found if plans is not None]


def first_plans_by_size(
    model: ModelDemand, workspace_bytes: int, library: Library, searcher: str = "best"
) -> list[tuple[Plans, bool]]:
    """Return plans for each rung up to one as fast as with all resident, and whether each was searched.

    Rungs that the library lacks have quick plans.
    """
    found: list[tuple[Plans, bool]] = []
    for memory in rungs(model, workspace_bytes):
        known = library.plans(model, memory, searcher)
        plans = plan_model(model, memory, searcher=searcher, quick=True) if known is None else known
        found.append((plans, known is not None))
        provenance = plans[min(plans)].provenance
        if provenance is not None and provenance.latency_s <= model.profiles[min(plans)].compute_s * (1 + 1e-6):
            break
    return found
