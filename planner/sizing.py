"""How much memory each model gets: from plans, request rates and the device's memory to a deployment.

A deployment's arena holds the partitions, one after the other, and behind them the workspace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from planner.curves import Curve, LatencyCurves
from planner.errors import InfeasibleBudget
from planner.feasible import PAGE_BYTES, Footprint, page_aligned
from planner.graph import Graph
from planner.library import Library
from planner.plan import Placement, Plan
from planner.problem import Problem
from planner.profile import Profile
from planner.search import search
from planner.searchers.streaming import quick_latency_s

LayoutName = Literal["partitioned", "resident", "time_shared"]
Progress = Callable[[int, int, str], None]
"""Told the plans made, the plans to make, and what is being done."""


WINDOWS = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0)
"""Sizes of the window to try, in units of the largest op's parameters."""


@dataclass(frozen=True)
class ModelDemand:
    """A model, by batch size, and how often it is asked for."""

    name: str
    graphs: Mapping[int, Graph]
    profiles: Mapping[int, Profile]
    rate_per_s: float = 1.0


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model's part of a deployment."""

    name: str
    partition_offset: int
    partition_bytes: int
    plans: dict[int, Plan]
    """By batch size; all have the same residents."""
    parameter_bytes: int
    resident_bytes: int


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who gets which bytes of the arena."""

    layout: LayoutName
    memory_bytes: int
    workspace_offset: int
    workspace_bytes: int
    entries: tuple[Entry, ...]


def split_budget(
    graphs: Mapping[int, Graph], profiles: Mapping[int, Profile], budget_bytes: int
) -> tuple[int, int]:
    """Split one model's memory into partition and workspace for the least latency at the smallest batch.

    Every batch size is feasible with the result. Raises InfeasibleBudget.
    """
    footprints = {batch: Footprint.of(graph) for batch, graph in graphs.items()}
    neediest = max(footprints.values(), key=lambda f: f.least_bytes)
    budget = budget_bytes // PAGE_BYTES * PAGE_BYTES
    if budget < neediest.least_bytes:
        raise InfeasibleBudget(neediest.graph.name, neediest.neediest_op, budget_bytes, neediest.least_bytes)
    batch = min(graphs)
    best: tuple[float, int] | None = None
    for workspace in _workspaces([_Demand.of(ModelDemand(neediest.graph.name, graphs, profiles))], budget):
        partition = budget - workspace
        if any(f.least_workspace_bytes(partition) > workspace for f in footprints.values()):
            continue
        latency_s = quick_latency_s(footprints[batch], profiles[batch], partition, workspace)
        if best is None or latency_s < best[0]:
            best = (latency_s, workspace)
    assert best is not None  # the whole budget as workspace is always feasible
    return budget - best[1], best[1]


def deploy(
    models: Sequence[ModelDemand],
    memory_bytes: int,
    layout: LayoutName = "partitioned",
    library: Library | None = None,
    *,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Deployment:
    """Size every model and plan every batch. Raises InfeasibleBudget with the least memory that would do."""
    demands = [_Demand.of(model) for model in models]
    memory = memory_bytes // PAGE_BYTES * PAGE_BYTES
    if layout == "partitioned":
        workspace, partitions = _partition(demands, memory, on_progress)
    elif layout == "resident":
        workspace, partitions = _all_resident(demands, memory)
    else:
        workspace, partitions = _time_share(demands, memory)
    planner = _Planner(library, seed, sum(len(d.model.graphs) for d in demands), on_progress)
    entries = []
    offset = 0
    for demand, partition in zip(demands, partitions, strict=True):
        entries.append(planner.entry(demand, offset, partition, workspace))
        offset += 0 if layout == "time_shared" else partition
    workspace_offset = max((e.partition_offset + e.partition_bytes for e in entries), default=0)
    return Deployment(layout, memory_bytes, workspace_offset, workspace, tuple(entries))


@dataclass(frozen=True)
class _Demand:
    """A model with what its graphs need whatever the plan."""

    model: ModelDemand
    footprints: Mapping[int, Footprint]

    @staticmethod
    def of(model: ModelDemand) -> "_Demand":
        return _Demand(model, {batch: Footprint.of(g) for batch, g in model.graphs.items()})

    @property
    def smallest_batch(self) -> int:
        return min(self.model.graphs)

    @property
    def parameter_bytes(self) -> int:
        """Partition that holds every parameter."""
        graph = self.model.graphs[self.smallest_batch]
        return sum(page_aligned(graph.tensors[i].nbytes) for i in graph.parameters)

    @property
    def activation_bytes(self) -> int:
        return max(f.activation_bytes for f in self.footprints.values())

    @property
    def least_bytes(self) -> int:
        return max(f.least_bytes for f in self.footprints.values())

    @property
    def neediest(self) -> Footprint:
        return max(self.footprints.values(), key=lambda f: f.least_bytes)

    def least_partition_bytes(self, workspace: int) -> int | None:
        """Least partition with which all batches are feasible; None if the workspace is too small."""
        least = [f.least_partition_bytes(workspace) for f in self.footprints.values()]
        return max((b for b in least if b is not None), default=0) if None not in least else None


def _partition(demands: Sequence[_Demand], memory: int, on_progress: Progress | None) -> tuple[int, list[int]]:
    """Choose the shared workspace and the partitions that minimise the sum of rate times latency."""
    if not demands:
        return 0, []
    neediest = max(demands, key=lambda d: d.least_bytes)
    if memory < neediest.least_bytes:
        raise InfeasibleBudget(neediest.model.name, neediest.neediest.neediest_op, memory, neediest.least_bytes)
    curves = LatencyCurves()
    best: tuple[float, int, list[int]] | None = None
    workspaces = _workspaces(demands, memory)
    for done, workspace in enumerate(workspaces):
        if on_progress is not None:
            on_progress(done, len(workspaces), f"workspace of {workspace} bytes")
        floors = [d.least_partition_bytes(workspace) for d in demands]
        least = [b for b in floors if b is not None]
        if len(least) < len(demands) or sum(least) + workspace > memory:
            continue
        cost, partitions = _share_out(demands, least, workspace, memory - workspace, curves)
        if best is None or cost < best[0] * (1 - 1e-6):
            best = (cost, workspace, partitions)
    assert best is not None  # partitions of nothing next to the largest workspace are feasible
    return best[1], best[2]


def _share_out(
    demands: Sequence[_Demand], least: list[int], workspace: int, room: int, curves: LatencyCurves
) -> tuple[float, list[int]]:
    """Give memory where it saves most time per byte, then the rest to whoever still lacks some."""
    lines: list[Curve] = [
        curves.curve(d.footprints[b], d.model.profiles[b], low, d.parameter_bytes, workspace)
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


def _give_rest(demands: Sequence[_Demand], partitions: list[int], left: int) -> list[int]:
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


def _workspaces(demands: Sequence[_Demand], memory: int) -> list[int]:
    """Workspaces worth trying: from the activations alone to the least that needs no partition, and beyond."""
    activations = max(d.activation_bytes for d in demands)
    largest_window = max(d.least_bytes for d in demands) - activations
    sizes = {activations + page_aligned(int(largest_window * f)) for f in WINDOWS}
    sizes.add(max(d.least_bytes for d in demands))
    return sorted(s for s in sizes if s <= memory)


def _all_resident(demands: Sequence[_Demand], memory: int) -> tuple[int, list[int]]:
    """Everything stays in memory."""
    workspace = max((d.activation_bytes for d in demands), default=0)
    partitions = [d.parameter_bytes for d in demands]
    least = sum(partitions) + workspace
    if least > memory:
        raise InfeasibleBudget(f"{len(demands)} models", None, memory, least)
    return workspace, partitions


def _time_share(demands: Sequence[_Demand], memory: int) -> tuple[int, list[int]]:
    """One region, which holds one whole model at a time."""
    workspace = max((d.activation_bytes for d in demands), default=0)
    largest = max(demands, key=lambda d: d.parameter_bytes, default=None)
    if largest is not None and largest.parameter_bytes + workspace > memory:
        least = largest.parameter_bytes + workspace
        raise InfeasibleBudget(largest.model.name, None, memory, least)
    return workspace, [memory - workspace] * len(demands)


class _Planner:
    """Makes the final plans; models that are alike share them."""

    def __init__(self, library: Library | None, seed: int, total: int, on_progress: Progress | None) -> None:
        self.library = library
        self.seed = seed
        self.total = total
        self.on_progress = on_progress
        self.done = 0
        self.made: dict[tuple[str, str, int, int, tuple[Placement, ...] | None], Plan] = {}

    def entry(self, demand: _Demand, offset: int, partition: int, workspace: int) -> Entry:
        """Plan every batch; the smallest chooses the residents of all."""
        plans: dict[int, Plan] = {}
        residents: tuple[Placement, ...] | None = None
        for batch in sorted(demand.model.graphs):
            graph, profile = demand.model.graphs[batch], demand.model.profiles[batch]
            plans[batch] = self._plan(Problem(graph, profile, partition, workspace, residents))
            residents = plans[batch].residents
            self.done += 1
            if self.on_progress is not None:
                self.on_progress(self.done, self.total, f"{demand.model.name} at batch {batch}")
        tensors = demand.model.graphs[demand.smallest_batch].tensors
        return Entry(
            name=demand.model.name,
            partition_offset=offset,
            partition_bytes=partition,
            plans=plans,
            parameter_bytes=demand.model.graphs[demand.smallest_batch].parameter_bytes,
            resident_bytes=sum(tensors[p.tensor].nbytes for p in residents or ()),
        )

    def _plan(self, problem: Problem) -> Plan:
        key = (
            problem.graph.fingerprint,
            problem.profile.fingerprint,
            problem.partition_bytes,
            problem.workspace_bytes,
            problem.residents,
        )
        if key not in self.made:
            if self.library is None:
                self.made[key] = search(problem, seed=self.seed)
            else:
                self.made[key] = self.library.plan(problem, seed=self.seed)
        return self.made[key]
