"""When each tensor of a graph is alive, and how much memory that takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph import Graph


@dataclass(frozen=True, slots=True)
class Lifespan:
    """Half-open interval of positions in a schedule: alive at `first <= position < end`."""

    first: int
    end: int

    def overlaps(self, other: "Lifespan") -> bool:
        return self.first < other.end and other.first < self.end


def lifespans(graph: Graph, order: Sequence[int] | None = None) -> tuple[Lifespan | None, ...]:
    """Find the lifespan of every tensor, by id, when ops run in `order` (default: the graph's own).

    Inputs live from 0, outputs until the end. A tensor that nothing touches has None, but an input is always
    delivered and so lives for one position at least.
    """
    order = range(len(graph.ops)) if order is None else order
    first: dict[int, int] = {}
    end: dict[int, int] = {}
    for i, tensor in enumerate(graph.tensors):
        if tensor.kind == "input":
            first[i], end[i] = 0, 1
    for position, op in enumerate(order):
        for i in (*graph.ops[op].reads, *graph.ops[op].writes):
            first.setdefault(i, position)
            end[i] = max(end.get(i, 0), position + 1)
    for i in graph.outputs:
        end[i] = max(end.get(i, 1), len(order))
        first.setdefault(i, end[i] - 1)
    return tuple(Lifespan(first[i], end[i]) if i in first else None for i in range(len(graph.tensors)))


def peak_activation_bytes(graph: Graph, order: Sequence[int] | None = None) -> int:
    """Most bytes of inputs, activations and scratch that are alive at once, alignment not counted."""
    order = range(len(graph.ops)) if order is None else order
    change = [0] * (max(len(order), 1) + 1)
    for tensor, span in zip(graph.tensors, lifespans(graph, order), strict=True):
        if span is not None and tensor.kind != "parameter":
            change[span.first] += tensor.nbytes
            change[span.end] -= tensor.nbytes
    peak = live = 0
    for position, delta in enumerate(change):
        live += delta
        scratch = graph.ops[order[position]].scratch_bytes if position < len(order) else 0
        peak = max(peak, live + scratch)
    return peak


def needed_bytes(graph: Graph) -> tuple[int, ...]:
    """Bytes that each op touches: what it reads, what it writes, and its scratch."""
    return tuple(
        sum(graph.tensors[i].nbytes for i in {*op.reads, *op.writes}) + op.scratch_bytes for op in graph.ops
    )
