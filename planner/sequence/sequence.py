"""A plan without addresses: actions in order. Placing its tensors and writing it out makes a plan of it.

A searcher that decides what to keep, swap and recompute need not care about offsets. An action that brings a tensor
starts a range of its life in memory, the drop ends it, and ranges that overlap in time get disjoint bytes."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

from cohabit.planner.graph import SCRATCH_ALIGNMENT, Graph
from cohabit.planner.layout.placement import Block, Layout, place, place_within
from cohabit.planner.lifetimes import Lifespan
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Problem
from cohabit.planner.sequence.plan_writer import PlanWriter


class ActionKind(IntEnum):
    COMPUTE = 0
    SWAP_IN = 1
    SWAP_OUT = 2
    DROP = 3


@dataclass(frozen=True, slots=True)
class Action:
    """`what` is an op's id for COMPUTE and a tensor's for all others. An op may be computed again."""

    verb: ActionKind
    what: int


def compute(op: int) -> Action:
    return Action(ActionKind.COMPUTE, op)


def swap_in(tensor: int) -> Action:
    return Action(ActionKind.SWAP_IN, tensor)


def swap_out(tensor: int) -> Action:
    return Action(ActionKind.SWAP_OUT, tensor)


def drop(tensor: int) -> Action:
    return Action(ActionKind.DROP, tensor)


@dataclass(frozen=True, slots=True)
class TensorRange:
    """A tensor in memory while `span.first <= i < span.end`, i counting actions."""

    tensor: int
    span: Lifespan


def tensor_ranges(graph: Graph, actions: Sequence[Action], residents: Collection[int]) -> list[TensorRange]:
    """Return every range of every tensor, inputs and residents from action 0 on, in order of their starts.

    Raises KeyError for a drop of what is not in memory, ValueError for a second copy of what is.
    """
    since = dict.fromkeys((*graph.inputs, *residents), 0)
    found: list[TensorRange] = []
    for i, action in enumerate(actions):
        if action.verb is ActionKind.DROP:
            found.append(TensorRange(action.what, Lifespan(since.pop(action.what), i + 1)))
            continue
        brought = graph.ops[action.what].writes if action.verb is ActionKind.COMPUTE else ()
        for t in (action.what,) if action.verb is ActionKind.SWAP_IN else brought:
            if t in since:
                raise ValueError(f"action {i} brings {graph.tensors[t].name}, which is in memory")
            since[t] = i
    found += (TensorRange(t, Lifespan(first, len(actions) + 1)) for t, first in since.items())
    return sorted(found, key=lambda s: (s.span.first, s.tensor))


@dataclass(frozen=True, slots=True)
class Placed:
    """Offsets for a sequence's ranges (in their order) and for the scratch of each action that has some."""

    ranges: tuple[TensorRange, ...]
    offsets: tuple[int, ...]
    scratch: dict[int, int]
    peak_bytes: int


def lay_out(graph: Graph, actions: Sequence[Action], residents: Collection[int], enough_bytes: int = 0) -> Placed:
    """Give every range an offset. A resident that returns for good returns to the same bytes.

    Stops at the first layout that fits in `enough_bytes`; whether the one found does, `peak_bytes` tells.
    """
    blocks, placed = _blocks(graph, actions, residents)
    return placed(place(blocks, enough_bytes))


def lay_out_within(
    graph: Graph, actions: Sequence[Action], residents: Collection[int], memory_bytes: int, nodes: int = 0
) -> Placed | None:
    """Offsets as of `lay_out` in the memory given; None if `planner.layout.placement.place_within` finds none."""
    blocks, placed = _blocks(graph, actions, residents)
    layout = place_within(blocks, memory_bytes, nodes)
    return None if layout is None else placed(layout)


def _blocks(
    graph: Graph, actions: Sequence[Action], residents: Collection[int]
) -> tuple[list[Block], Callable[[Layout], Placed]]:
    """Return the blocks of a sequence, and a function that gives its ranges and scratch the offsets of a layout."""
    found = tensor_ranges(graph, actions, residents)
    last = len(actions) + 1
    home = {s.tensor: s.span for s in found if s.tensor in residents and s.span.first == 0}
    back = {s.tensor: s.span for s in found if s.tensor in residents and s.span.first > 0 and s.span.end == last}
    blocks: list[Block] = []
    owner: dict[int, int] = {}
    for i, live in enumerate(found):
        tensor, again = graph.tensors[live.tensor], None
        if live.tensor in back:
            if live.span == back[live.tensor]:
                continue
            again = back[live.tensor] if live.span == home[live.tensor] else None
        owner[i] = len(blocks)
        blocks.append(Block(tensor.nbytes, tensor.alignment, live.span, again))
    scratch = {}
    for i, action in enumerate(actions):
        if action.verb is ActionKind.COMPUTE and graph.ops[action.what].scratch_bytes:
            scratch[i] = len(blocks)
            nbytes = graph.ops[action.what].scratch_bytes
            blocks.append(Block(nbytes, SCRATCH_ALIGNMENT, Lifespan(i, i + 1)))
    first_range = {s.tensor: i for i, s in enumerate(found) if s.span.first == 0}
    block_of_range = [owner[i] if i in owner else owner[first_range[s.tensor]] for i, s in enumerate(found)]

    def placed(layout: Layout) -> Placed:
        offsets = tuple(layout.offsets[b] for b in block_of_range)
        return Placed(tuple(found), offsets, {i: layout.offsets[b] for i, b in scratch.items()}, layout.peak_bytes)

    return blocks, placed


def plan_of(problem: Problem, actions: Sequence[Action], residents: Collection[int], nodes: int = 0) -> Plan | None:
    """Return the single-model plan of a sequence, None if no layout was found that fits."""
    placed = lay_out_within(problem.graph, actions, residents, problem.memory_bytes, nodes)
    if placed is None:
        return None
    return write(problem, actions, residents, placed)


def write(problem: Problem, actions: Sequence[Action], residents: Collection[int], placed: Placed) -> Plan:
    """Write a single-model plan: all of the memory is the partition."""
    graph = problem.graph
    starting = {(s.tensor, s.span.first): o for s, o in zip(placed.ranges, placed.offsets, strict=True)}
    inputs, kept = ({t: starting[t, 0] for t in tensors} for tensors in (graph.inputs, residents))
    writer = PlanWriter(graph, problem.memory_bytes, 0, inputs, kept)
    last = max((i for i, a in enumerate(actions) if a.verb is ActionKind.COMPUTE), default=None)
    for i, action in enumerate(actions):
        match action.verb:
            case ActionKind.COMPUTE:
                writes = graph.ops[action.what].writes
                arrived = [t for t in graph.outputs if t not in writes] if i == last else ()
                offsets = [starting[t, i] for t in writes]
                writer.compute(action.what, offsets, placed.scratch.get(i), arrived)
            case ActionKind.SWAP_IN:
                writer.swap_in(action.what, starting[action.what, i])
            case ActionKind.SWAP_OUT:
                writer.swap_out(action.what)
            case ActionKind.DROP:
                writer.drop(action.what)
    return writer.plan(problem.profile.fingerprint)
