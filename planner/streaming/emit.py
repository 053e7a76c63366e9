"""Writes the plan of a choice of residents and swap-ins. Steps come as early in the total order as lanes allow."""

from collections import defaultdict

import numpy as np

from planner.arrays import Ints
from planner.plan import Address, Placement, Plan
from planner.sequence.plan_writer import PlanWriter
from planner.streaming.page_map import NOWHERE
from planner.streaming.stream import Swaps
from planner.streaming.workload import Workload


def emit(
    partition_bytes: int, workspace_bytes: int, work: Workload, residents: tuple[Placement, ...], swaps: Swaps
) -> Plan:
    """Make a plan in which the ops run in the graph's order and activations have fixed places."""
    graph, layout = work.footprint.graph, work.footprint.activations
    count = int(swaps.length[0])
    tensor = [work.parameters[p] for p in swaps.parameter[:count].tolist()]
    page, after_op, needed_by = (a[:count].tolist() for a in (swaps.page, swaps.after_op, swaps.op))
    initial = {p.tensor: p.address for p in residents}
    drops = _drops(work, frozenset(initial), tensor, needed_by)

    def offset(address: Address) -> int:
        return address.offset + (partition_bytes if address.region == "workspace" else 0)

    def activation(relative: int) -> int:
        return offset(work.activation_address(relative))

    inputs = {i: activation(layout.tensors[i]) for i, t in enumerate(graph.tensors) if t.kind == "input"}
    writer = PlanWriter(graph, partition_bytes, workspace_bytes, inputs, {t: offset(a) for t, a in initial.items()})
    issued = 0
    for k in range(-1, len(graph.ops)):
        if k >= 0:
            op = graph.ops[k]
            writer.compute(
                k,
                [activation(layout.tensors[t]) for t in op.writes],
                activation(layout.scratch[k]) if op.scratch_bytes else None,
                [t for t in work.footprint.uses[k] if t not in op.reads],
            )
        for t in drops.get(k, ()):
            writer.drop(t)
        while issued < count and after_op[issued] <= k:
            writer.swap_in(tensor[issued], offset(work.address(page[issued])))
            issued += 1
    return writer.plan(work.profile.fingerprint)


def placements(work: Workload, home: Ints) -> tuple[Placement, ...]:
    """Residents of a plan, in page order."""
    chosen = sorted(np.flatnonzero(home != NOWHERE).tolist(), key=lambda p: (int(home[p]), p))
    return tuple(Placement(work.parameters[p], work.address(int(home[p]))) for p in chosen)


def _drops(
    work: Workload, residents: frozenset[int], tensor: list[int], needed_by: list[int]
) -> dict[int, list[int]]:
    """Tensors to drop after each op (-1: before the first op): after the last read of each live range."""
    graph = work.footprint.graph
    drops: dict[int, list[int]] = defaultdict(list)
    last_touch = {i: 0 for i, t in enumerate(graph.tensors) if t.kind == "input"}
    for k, op in enumerate(graph.ops):
        for t in (*op.reads, *op.writes):
            last_touch[t] = k
    for t, k in last_touch.items():
        if graph.tensors[t].kind != "parameter" and t not in graph.outputs:
            drops[k].append(t)
    for k, parameters in parameter_drops(work, residents, tensor, needed_by).items():
        drops[k] += parameters
    return drops


def parameter_drops(
    work: Workload, residents: frozenset[int], tensor: list[int], needed_by: list[int]
) -> dict[int, list[int]]:
    """Parameters to drop after each op. `tensor[i]` is swapped in for op `needed_by[i]`."""
    ops = len(work.footprint.uses)
    drops: dict[int, list[int]] = defaultdict(list)
    reads: dict[int, list[int]] = {t: [] for t in residents}
    for k, uses in enumerate(work.footprint.uses):
        for t in uses:
            reads.setdefault(t, []).append(k)
    arrivals: dict[int, list[int]] = defaultdict(list)
    for t, k in zip(tensor, needed_by, strict=True):
        arrivals[t].append(k)
    for t, uses_of_t in reads.items():
        starts = [-1, *arrivals[t]] if t in residents else arrivals[t]
        ends = [*starts[1:], ops]
        for start, end in zip(starts, ends, strict=True):
            stays_on = end == ops and start == starts[-1]
            if stays_on and t in residents:
                continue
            drops[max((k for k in uses_of_t if start <= k < end), default=-1)].append(t)
    return drops
