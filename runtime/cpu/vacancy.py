"""When a run is done with which bytes of the workspace: the next model's copies may go there while it still computes.

Models share the workspace, one run after the other. Towards its end a run needs less and less of it, and the swap-in
lane has nothing left to do for it: what the next run would wait for first can come meanwhile.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.graph import Graph
from planner.plan import Address, Compute, Drop, Plan, SwapIn, SwapOut


@dataclass(frozen=True, slots=True)
class Stay:
    """Bytes from `start` to `stop` of the workspace, used until `computes` compute steps of the run have finished."""

    start: int
    stop: int
    computes: int


def stays(graph: Graph, plan: Plan) -> tuple[Stay, ...]:
    """The bytes of the workspace that a run of `plan` uses, by address, each with the last step that uses them.

    They do not overlap. What lies between them is free all the time. Activations that leave memory and come back count
    to the end of the run.
    """
    return tuple(_flattened(sorted(_uses(graph, plan), key=lambda stay: stay.start)))


def free_after(used: Sequence[Stay], start: int, stop: int) -> int:
    """How many compute steps of a run with these stays must have finished before it leaves `start` to `stop`."""
    first = max(bisect_right(used, start, key=lambda stay: stay.start) - 1, 0)
    computes = 0
    for n in range(first, len(used)):
        if used[n].start >= stop:
            break
        if used[n].stop > start:
            computes = max(computes, used[n].computes)
    return computes


def _uses(graph: Graph, plan: Plan) -> Iterator[Stay]:
    """Each tensor's and scratch's bytes in the workspace until they are given up; they may overlap."""
    last = sum(isinstance(step, Compute) for step in plan.steps)
    places: dict[int, Address] = {}
    done = 0

    def used(address: Address, nbytes: int, computes: int) -> Iterator[Stay]:
        if address.region == "workspace" and nbytes:
            yield Stay(address.offset, address.offset + nbytes, computes)

    for placed in (*plan.inputs, *plan.residents):
        places[placed.tensor] = placed.address
    for step in plan.steps:
        match step:
            case SwapIn():
                places[step.tensor] = step.address
            case SwapOut():
                yield from used(places[step.tensor], graph.tensors[step.tensor].nbytes, last)
            case Compute():
                done += 1
                op = graph.ops[step.op]
                places.update(zip(op.writes, step.outputs, strict=True))
                if step.scratch is not None:
                    yield from used(step.scratch, op.scratch_bytes, done)
            case Drop():
                yield from used(places.pop(step.tensor), graph.tensors[step.tensor].nbytes, done)
    for tensor, address in places.items():
        yield from used(address, graph.tensors[tensor].nbytes, last)


def _flattened(by_start: Sequence[Stay]) -> Iterator[Stay]:
    """The same bytes without overlaps: each with the latest of the steps that use it."""
    edges = sorted({edge for stay in by_start for edge in (stay.start, stay.stop)})
    open_stays: list[tuple[int, int]] = []  # the latest first, with where it stops
    coming = 0
    pending: Stay | None = None
    for start, stop in pairwise(edges):
        while coming < len(by_start) and by_start[coming].start == start:
            heapq.heappush(open_stays, (-by_start[coming].computes, by_start[coming].stop))
            coming += 1
        while open_stays and open_stays[0][1] <= start:
            heapq.heappop(open_stays)
        if not open_stays:
            continue
        computes = -open_stays[0][0]
        if pending is not None and pending.stop == start and pending.computes == computes:
            pending = Stay(pending.start, stop, computes)
            continue
        if pending is not None:
            yield pending
        pending = Stay(start, stop, computes)
    if pending is not None:
        yield pending
