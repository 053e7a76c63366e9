"""Divides device memory among models, from their graphs, profiles and request rates."""

from collections.abc import Sequence

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.layout.feasible import PAGE_BYTES
from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.sizing.curves import Estimates, latency_curve
from cohabit.planner.sizing.demand import Demand, workspaces
from cohabit.planner.sizing.deployment import (
    ONE_REGION,
    WHOLE_MODELS,
    Deployment,
    Division,
    LayoutName,
    ModelDemand,
    laid_out,
)
from cohabit.planner.sizing.fitting import plan_model
from cohabit.planner.sizing.shares import Curve, latency_weights, share_out, weighted_latency_s


def deploy(
    models: Sequence[ModelDemand],
    memory_bytes: int,
    layout: LayoutName = "partitioned",
    library: Library | None = None,
    *,
    lanes: int = 1,
) -> Deployment:
    """Size every model and plan every bucket. Raises InfeasibleBudget with the least memory that would do."""
    division = divide(models, memory_bytes, layout, lanes=lanes)
    sizes = [Memory(division.workspace_bytes, partition) for partition in division.partition_bytes]
    plans = [plan_model(model, memory, library) for model, memory in zip(models, sizes, strict=True)]
    return laid_out(layout, models, division, plans, lanes)


def divide(
    models: Sequence[ModelDemand],
    memory_bytes: int,
    layout: LayoutName = "partitioned",
    *,
    least_workspace_bytes: int = 0,
    lanes: int = 1,
) -> Division:
    """Choose the workspace and every partition. Raises InfeasibleBudget with the least memory that would do.

    Plans that stay as they are may need `least_workspace_bytes`. A layout with one region has one lane.
    """
    assert lanes == 1 or layout not in ONE_REGION
    demands = [Demand.of(model) for model in models]
    if layout == "partitioned":
        workspace, partitions = _partition(demands, memory_bytes, least_workspace_bytes, lanes)
    elif layout == "resident":
        workspace, partitions = _all_resident(demands, memory_bytes, lanes)
    else:
        workspace, partitions = _one_region(demands, memory_bytes, layout)
    return Division(memory_bytes // PAGE_BYTES * PAGE_BYTES, workspace, tuple(partitions))


def _partition(demands: Sequence[Demand], memory: int, least_workspace: int, lanes: int) -> tuple[int, list[int]]:
    """Choose the lanes' workspace and the partitions that minimise the sum of rate times latency.

    Where activations do not fit, they are offloaded.
    """
    if not demands:
        return 0, []
    try:
        return _partition_for(demands, memory, least_workspace, lanes)
    except InfeasibleBudget:
        offloading = [demand.with_offloading() for demand in demands]
        return _partition_for(offloading, memory, least_workspace, lanes)


def _partition_for(
    demands: Sequence[Demand], memory: int, least_workspace: int, lanes: int
) -> tuple[int, list[int]]:
    largest_demand = max(demands, key=lambda d: d.least_bytes)
    if lanes == 1 and memory < largest_demand.least_bytes:
        op, least_bytes = largest_demand.largest_demand.neediest_op, largest_demand.least_bytes
        raise InfeasibleBudget(largest_demand.model.name, op, memory, least_bytes, len(demands))
    known: Estimates = {}
    best: tuple[float, int, list[int]] | None = None
    needed: list[int] = []
    sizes = sorted(
        {max(size, least_workspace) for size in workspaces(demands, max(memory, largest_demand.least_bytes))}
    )
    for workspace in sizes:
        floors = [d.least_partition_bytes(workspace) for d in demands]
        least = [b for b in floors if b is not None]
        if len(least) < len(demands):
            continue
        needed.append(sum(least) + lanes * workspace)
        if needed[-1] > memory:
            continue
        cost, partitions = _share_out(demands, least, workspace, memory - lanes * workspace, known)
        if best is None or cost < best[0] * (1 - 1e-6):
            best = (cost, workspace, partitions)
    if best is None:  # partitions of nothing next to one largest workspace are feasible, unless it must be larger
        op = largest_demand.largest_demand.neediest_op
        raise InfeasibleBudget(largest_demand.model.name, op, memory, min(needed), len(demands))
    return best[1], best[2]


def _share_out(
    demands: Sequence[Demand], least: list[int], workspace: int, room: int, known: Estimates
) -> tuple[float, list[int]]:
    """Give memory where it saves most time per byte, then the rest to models that still lack some."""
    lines: list[Curve] = [
        latency_curve(d.footprints[b], d.model.profiles[b], low, d.parameter_bytes, workspace, known)
        for d, low in zip(demands, least, strict=True)
        for b in [d.smallest]
    ]
    weights = latency_weights(
        [d.model.rate_per_s for d in demands], [d.model.profiles[d.smallest].compute_s for d in demands]
    )
    chosen = share_out(lines, weights, room)
    partitions = [point.partition_bytes for point in chosen]
    return weighted_latency_s(chosen, weights), _give_rest(demands, partitions, room - sum(partitions))


def _give_rest(demands: Sequence[Demand], partitions: list[int], left: int) -> list[int]:
    """Fill up partitions, evenly, smallest lack first, until every parameter fits or nothing is left."""
    lack = [max(d.parameter_bytes - p, 0) for d, p in zip(demands, partitions, strict=True)]
    given = list(partitions)
    order = sorted(range(len(demands)), key=lambda i: lack[i])
    for position, i in enumerate(order):
        share = left // (len(order) - position) // PAGE_BYTES * PAGE_BYTES
        more = min(lack[i], share)
        given[i] += more
        left -= more
    return given


def _all_resident(demands: Sequence[Demand], memory: int, lanes: int) -> tuple[int, list[int]]:
    """Every parameter of every model is resident."""
    workspace = max((d.activation_bytes for d in demands), default=0)
    partitions = [d.parameter_bytes for d in demands]
    least = sum(partitions) + lanes * workspace
    if least > memory:
        raise InfeasibleBudget(f"{len(demands)} models", None, memory, least)
    return workspace, partitions


def _one_region(demands: Sequence[Demand], memory: int, layout: LayoutName) -> tuple[int, list[int]]:
    """One region for all models. Plans keep every parameter: residency is decided at run time."""
    workspace = max((d.activation_bytes for d in demands), default=0)
    for least, op, name in sorted(((*_least(d, layout), d.model.name) for d in demands), key=lambda d: d[0])[-1:]:
        if least + workspace > memory:
            raise InfeasibleBudget(name, op, memory, least + workspace, len(demands))
    return workspace, [d.parameter_bytes for d in demands]


def _least(demand: Demand, layout: LayoutName) -> tuple[int, str | None]:
    """What a model needs of a shared region, and the op that needs it (None for the whole model)."""
    if layout in WHOLE_MODELS:
        return demand.parameter_bytes, None
    footprint = demand.largest_demand
    op_pages = max(footprint.op_pages)
    ops = footprint.graph.ops
    return op_pages * PAGE_BYTES, ops[footprint.op_pages.index(op_pages)].name if ops else None
