"""Live ranges: the intervals in which a tensor is in memory.

`lifespans` counts ops, for graphs whose tensors stay from their first to their last use. `live_ranges` counts steps
of a plan, in which a tensor may leave memory and return.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Address, Compute, Drop, Plan, SwapIn, SwapOut

START: Final = -1
"""Step index that stands for the time before the first step."""


@dataclass(frozen=True, slots=True)
class Lifespan:
    """Half-open interval of positions in a schedule: alive at `first <= position < end`."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class LiveRange:
    """Bytes that a tensor or an op's scratch occupies during steps `start <= index < end` of a plan."""

    tensor: int | None
    """None for scratch."""
    address: Address | None
    """None for counted tensors."""
    nbytes: int
    start: int
    """Index of the step that writes the tensor or swaps it in; START for inputs and residents."""
    end: int
    """Index of the tensor's `Drop`; the number of steps if there is none. For scratch, `start` + 1."""
    uses: tuple[int, ...]
    """Indices of the compute steps that read or write the bytes and the swap-outs that read them, in order."""


def live_ranges(graph: Graph, plan: Plan) -> list[LiveRange]:
    """Return all live ranges of a checked plan, in order of `start`. A tensor that returns has several."""
    found: list[LiveRange] = []
    open_: dict[int, tuple[Address | None, int, list[int]]] = {i: (None, START, []) for i in graph.inputs}
    open_ |= {p.tensor: (p.address, START, []) for p in plan.residents}

    def close(tensor: int, end: int) -> None:
        address, start, uses = open_.pop(tensor)
        found.append(LiveRange(tensor, address, graph.tensors[tensor].nbytes, start, end, tuple(uses)))

    for index, step in enumerate(plan.steps):
        match step:
            case Compute():
                op = graph.ops[step.op]
                open_ |= {t: (None, index, []) for t in op.writes}
                for t in op.touched:
                    open_[t][2].append(index)
                if op.scratch_bytes:
                    found.append(LiveRange(None, None, op.scratch_bytes, index, index + 1, (index,)))
            case SwapIn():
                open_[step.tensor] = (step.address, index, [])
            case SwapOut():
                open_[step.tensor][2].append(index)
            case Drop():
                close(step.tensor, index)
    for tensor in tuple(open_):
        close(tensor, len(plan.steps))
    return sorted(found, key=lambda r: r.start)


def live_bytes(blocks: Iterable[tuple[Lifespan, int]], positions: int) -> list[int]:
    """Return the bytes alive at each position, given pairs of a lifespan and a size."""
    change = [0] * (positions + 1)
    for span, nbytes in blocks:
        change[span.first] += nbytes
        change[span.end] -= nbytes
    return list(accumulate(change[:positions]))


def lifespans(graph: Graph) -> tuple[Lifespan | None, ...]:
    """Return the lifespan of every tensor, by id, when ops run in the graph's order.

    Inputs live from 0, outputs until the end. Unused tensors have None, except inputs: these are always delivered
    and live for at least one position.
    """
    first: dict[int, int] = dict.fromkeys(graph.inputs, 0)
    end: dict[int, int] = dict.fromkeys(graph.inputs, 1)
    for position, op in enumerate(graph.ops):
        for i in op.touched:
            first.setdefault(i, position)
            end[i] = max(end.get(i, 0), position + 1)
    for i in graph.outputs:
        end[i] = max(end.get(i, 1), len(graph.ops))
        first.setdefault(i, end[i] - 1)
    return tuple(Lifespan(first[i], end[i]) if i in first else None for i in range(len(graph.tensors)))


def peak_activation_bytes(graph: Graph) -> int:
    """Return the peak bytes of inputs, activations, state and scratch, without alignment."""
    return max(
        _live_activation_bytes(graph, [t.nbytes for t in graph.tensors], [op.scratch_bytes for op in graph.ops])
    )


def live_activation_bytes(graph: Graph) -> tuple[int, ...]:
    """Return, per op, the aligned bytes of inputs, activations, state and scratch alive while it runs.

    A graph without ops counts as a single no-op.
    """
    scratch = [op.aligned_scratch_bytes for op in graph.ops]
    return _live_activation_bytes(graph, [t.aligned_bytes for t in graph.tensors], scratch)


def _live_activation_bytes(graph: Graph, nbytes: Sequence[int], scratch_bytes: Sequence[int]) -> tuple[int, ...]:
    scratch_bytes = scratch_bytes or [0]
    spans = zip(graph.tensors, nbytes, lifespans(graph), strict=True)
    blocks = ((span, n) for t, n, span in spans if span is not None and t.kind != "parameter")
    return tuple(n + s for n, s in zip(live_bytes(blocks, len(scratch_bytes)), scratch_bytes, strict=True))
