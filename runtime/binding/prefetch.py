"""Prefetch of the next program's first parameters into bytes of the workspace that a run no longer uses.

Models share the workspace, one run after the other. Towards its end a run uses less of it, and the swap-in lane is
idle: it can start on what the next run would wait for first.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.graph import Graph
from planner.plan import Address, Compute, Drop, Plan, SwapIn, SwapOut


@dataclass(frozen=True, slots=True)
class WorkspaceUse:
    """Bytes [start, stop) of the workspace, in use until `computes` compute steps of the run have finished."""

    start: int
    stop: int
    computes: int


def workspace_uses(graph: Graph, plan: Plan) -> tuple[WorkspaceUse, ...]:
    """Return the bytes of the workspace that a run uses, by address and without overlaps.

    Activations that are spilled count as in use until the run ends.
    """
    return tuple(_flattened(sorted(_uses(graph, plan), key=lambda use: use.start)))


def free_after(uses: Sequence[WorkspaceUse], start: int, stop: int) -> int:
    """Return how many compute steps of the run must have finished before the bytes [start, stop) are free."""
    first = max(bisect_right(uses, start, key=lambda use: use.start) - 1, 0)
    computes = 0
    for n in range(first, len(uses)):
        if uses[n].start >= stop:
            break
        if uses[n].stop > start:
            computes = max(computes, uses[n].computes)
    return computes


def _uses(graph: Graph, plan: Plan) -> Iterator[WorkspaceUse]:
    """Yield the bytes of each tensor and scratch area in the workspace; they may overlap."""
    last = sum(isinstance(step, Compute) for step in plan.steps)
    addresses: dict[int, Address] = {}
    done = 0

    def used(address: Address, nbytes: int, computes: int) -> Iterator[WorkspaceUse]:
        if address.region == "workspace" and nbytes:
            yield WorkspaceUse(address.offset, address.offset + nbytes, computes)

    for placed in (*plan.inputs, *plan.residents):
        addresses[placed.tensor] = placed.address
    for step in plan.steps:
        match step:
            case SwapIn():
                addresses[step.tensor] = step.address
            case SwapOut():
                yield from used(addresses[step.tensor], graph.tensors[step.tensor].nbytes, last)
            case Compute():
                done += 1
                op = graph.ops[step.op]
                addresses.update(zip(op.writes, step.outputs, strict=True))
                if step.scratch is not None:
                    yield from used(step.scratch, op.scratch_bytes, done)
            case Drop():
                yield from used(addresses.pop(step.tensor), graph.tensors[step.tensor].nbytes, done)
    for tensor, address in addresses.items():
        yield from used(address, graph.tensors[tensor].nbytes, last)


def _flattened(by_start: Sequence[WorkspaceUse]) -> Iterator[WorkspaceUse]:
    """Yield the same bytes without overlaps, each with the latest of its uses."""
    edges = sorted({edge for use in by_start for edge in (use.start, use.stop)})
    current: list[tuple[int, int]] = []  # heap of (-computes, stop): the latest use first
    coming = 0
    pending: WorkspaceUse | None = None
    for start, stop in pairwise(edges):
        while coming < len(by_start) and by_start[coming].start == start:
            heapq.heappush(current, (-by_start[coming].computes, by_start[coming].stop))
            coming += 1
        while current and current[0][1] <= start:
            heapq.heappop(current)
        if not current:
            continue
        computes = -current[0][0]
        if pending is not None and pending.stop == start and pending.computes == computes:
            pending = WorkspaceUse(pending.start, stop, computes)
            continue
        if pending is not None:
            yield pending
        pending = WorkspaceUse(start, stop, computes)
    if pending is not None:
        yield pending
