"""How much memory each model gets: from models, request rates and device memory to a deployment.

A deployment's arena begins with the workspaces, one per compute lane and all of one size. The partitions end where the
arena ends, the first model's last, so that workspaces and partitions can grow into the bytes between them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from planner.errors import InfeasibleBudget
from planner.layout.feasible import PAGE_BYTES
from planner.library import Library
from planner.plan import Plan
from planner.problem import Problem
from planner.search.driver import search
from planner.sizing.curves import Curve, Estimates, latency_curve
from planner.sizing.demand import Demand, ModelDemand, workspaces
from planner.sizing.entries import DeploymentEntry, Progress, plan_batches

__all__ = [
    "ONE_REGION",
    "Deployment",
    "DeploymentEntry",
    "LayoutName",
    "ModelDemand",
    "Progress",
    "deploy",
    "shares",
]

LayoutName = Literal["partitioned", "resident", "time_shared", "pipelined", "lru", "on_demand"]
WHOLE_MODELS: tuple[LayoutName, ...] = ("time_shared", "lru")
"""Layouts with one region, in which a model is there as a whole while it runs."""
PARAMETERS: tuple[LayoutName, ...] = ("pipelined", "on_demand")
"""Layouts with one region, in which each op's parameters must be there, and the model may be larger."""
ONE_REGION: tuple[LayoutName, ...] = (*WHOLE_MODELS, *PARAMETERS)


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The workspaces and every model's partition in the arena."""

    layout: LayoutName
    memory_bytes: int
    workspace_bytes: int
    """Of each lane; the arena begins with them."""
    entries: tuple[DeploymentEntry, ...]
    lanes: int = 1

    @property
    def taken_bytes(self) -> int:
        """Bytes of workspaces and partitions."""
        lowest = min((entry.partition_offset for entry in self.entries), default=self.memory_bytes)
        return self.lanes * self.workspace_bytes + self.memory_bytes - lowest


def deploy(
    models: Sequence[ModelDemand],
    memory_bytes: int,
    layout: LayoutName = "partitioned",
    library: Library | None = None,
    *,
    lanes: int = 1,
    on_progress: Progress | None = None,
) -> Deployment:
    """Size every model and plan every batch. Raises InfeasibleBudget with the least memory that would do.

    Models with the same graph and profile share their plans. A layout with one region has one lane.
    """
    assert lanes == 1 or layout not in ONE_REGION
    demands = [Demand.of(model) for model in models]
    memory = memory_bytes // PAGE_BYTES * PAGE_BYTES
    if layout == "partitioned":
        workspace, partitions = _partition(demands, memory, 0, lanes, on_progress)
    elif layout == "resident":
        workspace, partitions = _all_resident(demands, memory, lanes)
    else:
        workspace, partitions = _one_region(demands, memory, layout)
    done, total = 0, sum(len(model.graphs) for model in models)
    made: dict[tuple[Any, ...], Plan] = {}

    def plan(name: str, problem: Problem) -> Plan:
        nonlocal done
        if problem.key not in made:
            made[problem.key] = search(problem) if library is None else library.plan(problem)
        done += 1
        if on_progress is not None:
            on_progress(done, total, f"{name} at batch {problem.graph.batch}")
        return made[problem.key]

    entries: list[DeploymentEntry] = []
    top = memory
    for demand, partition in zip(demands, partitions, strict=True):
        planned_bytes = demand.parameter_bytes if layout in ONE_REGION else partition
        plans = plan_batches(demand.model, planned_bytes, workspace, partial(plan, demand.model.name))
        graph = demand.model.graphs[demand.smallest_batch]
        top -= partition
        entries.append(
            DeploymentEntry(
                name=demand.model.name,
                partition_offset=workspace if layout in ONE_REGION else top,
                partition_bytes=partition,
                plans=plans,
                parameter_bytes=graph.parameter_bytes,
                resident_bytes=sum(graph.tensors[p.tensor].nbytes for p in plans[demand.smallest_batch].residents),
            )
        )
    return Deployment(layout, memory, workspace, tuple(entries), lanes)


def shares(
    models: Sequence[ModelDemand], memory_bytes: int, least_workspace_bytes: int, lanes: int
) -> tuple[int, list[int]]:
    """A lane's workspace and the partitions that `deploy` would give, without plans. Raises InfeasibleBudget.

    Plans that stay as they are may need `least_workspace_bytes`.
    """
    memory = memory_bytes // PAGE_BYTES * PAGE_BYTES
    return _partition([Demand.of(model) for model in models], memory, least_workspace_bytes, lanes, None)


def _partition(
    demands: Sequence[Demand], memory: int, least_workspace: int, lanes: int, on_progress: Progress | None
) -> tuple[int, list[int]]:
    """Choose the lanes' workspace and the partitions that minimise the sum of rate times latency.

    Where activations do not fit, they are offloaded.
    """
    if not demands:
        return 0, []
    try:
        return _partition_for(demands, memory, least_workspace, lanes, on_progress)
    except InfeasibleBudget:
        leaner = [demand.leaner() for demand in demands]
        return _partition_for(leaner, memory, least_workspace, lanes, on_progress)


def _partition_for(
    demands: Sequence[Demand], memory: int, least_workspace: int, lanes: int, on_progress: Progress | None
) -> tuple[int, list[int]]:
    neediest = max(demands, key=lambda d: d.least_bytes)
    if lanes == 1 and memory < neediest.least_bytes:
        raise InfeasibleBudget(neediest.model.name, neediest.neediest.neediest_op, memory, neediest.least_bytes)
    known: Estimates = {}
    best: tuple[float, int, list[int]] | None = None
    needed: list[int] = []
    sizes = sorted({max(size, least_workspace) for size in workspaces(demands, max(memory, neediest.least_bytes))})
    for done, workspace in enumerate(sizes):
        if on_progress is not None:
            on_progress(done, len(sizes), f"workspace of {workspace} bytes")
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
        raise InfeasibleBudget(neediest.model.name, neediest.neediest.neediest_op, memory, min(needed))
    return best[1], best[2]


def _share_out(
    demands: Sequence[Demand], least: list[int], workspace: int, room: int, known: Estimates
) -> tuple[float, list[int]]:
    """Give memory where it saves most time per byte, then the rest to models that still lack some."""
    lines: list[Curve] = [
        latency_curve(d.footprints[b], d.model.profiles[b], low, d.parameter_bytes, workspace, known)
        for d, low in zip(demands, least, strict=True)
        for b in [d.smallest_batch]
    ]
    at = [0] * len(demands)
    left = room - sum(least)
    while True:
        best: tuple[float, int, int] | None = None
        for i, (demand, line) in enumerate(zip(demands, lines, strict=True)):
            for j in range(at[i] + 1, len(line)):
                more = line[j].partition_bytes - line[at[i]].partition_bytes
                saved = (line[at[i]].latency_s - line[j].latency_s) * max(demand.model.rate_per_s, 1e-9)
                if 0 < more <= left and saved > 0 and (best is None or saved / more > best[0]):
                    best = (saved / more, i, j)
        if best is None:
            break
        _, i, j = best
        left -= lines[i][j].partition_bytes - lines[i][at[i]].partition_bytes
        at[i] = j
    cost = sum(d.model.rate_per_s * line[k].latency_s for d, line, k in zip(demands, lines, at, strict=True))
    partitions = [line[k].partition_bytes for line, k in zip(lines, at, strict=True)]
    return cost, _give_rest(demands, partitions, left)


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
            raise InfeasibleBudget(name, op, memory, least + workspace)
    return workspace, [memory - workspace] * len(demands)


def _least(demand: Demand, layout: LayoutName) -> tuple[int, str | None]:
    """What a model needs of a shared region, and the op that needs it (None for the whole model)."""
    if layout in WHOLE_MODELS:
        return demand.parameter_bytes, None
    footprint = demand.neediest
    op_pages = max(footprint.op_pages)
    ops = footprint.graph.ops
    return op_pages * PAGE_BYTES, ops[footprint.op_pages.index(op_pages)].name if ops else None
