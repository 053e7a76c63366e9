"""A chain of ops that every plan runs in the same order: the time axis of the relaxation.

The ops of a chain depend on one another, so their first runs end in the same order in every plan. These ends are
*moments*. Further moments are the start of the inference (moment 0), the end of its last op (the last moment), and
*joins*: if an op of the chain waits for several branches, the end of the last of these branches. Dependencies bound
the first run of every other op by two moments. Ops that are comparable with all others are in every longest chain."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cohabit.planner.graph import Graph
from cohabit.planner.order import predecessors
from cohabit.planner.profile import Profile

STEEPNESS: Final = 4
"""Exponent of an op's share of the largest need when choosing a chain: one op with a large need outweighs several
with smaller ones."""
MOST_EXCLUSIONS: Final = 8
"""Maximum number of tensor sizes tried as thresholds in `exclusions`."""
LEAST_WEIGHT: Final = 1e-6
"""Weight of an op without memory needs when choosing a chain."""


@dataclass(frozen=True, slots=True)
class ChainUse:
    """An op (or the end of the inference) that needs a tensor in memory, between moments `after` and `by`."""

    op: int
    """Position in the graph; the number of ops for the end of the inference."""
    after: int
    by: int
    pinned: bool
    """Whether the op is in the chain: it ends at moment `by` and starts no earlier than moment `after`."""


@dataclass(frozen=True, slots=True)
class UseInterval:
    """A tensor between two successive uses: the share that is not kept is copied in or recomputed."""

    tensor: int
    nbytes: int
    is_before_first_use: bool
    """Whether this is a parameter or state before its first use: the kept share is resident."""
    kept_from: int
    """First moment at which the kept share occupies memory in addition to the needs of the chain's ops."""
    until: int
    """Last such moment. A copy that has arrived by this moment is still in memory then."""
    arrives_from: int
    """First moment at which part of a copy can have arrived."""
    due: int
    """The copy arrives before the start of the chain's op that ends at this moment."""
    copy_s: float
    recompute_s: float | None
    """Least time to recompute it; None if that is impossible."""


@dataclass(frozen=True, slots=True)
class OpChain:
    """A graph along a chain. Lists are indexed by moment; entry 0 is the start of the inference."""

    op_s: Sequence[float]
    """Time of all ops whose first run is certainly between the previous moment and this one."""
    chain_op_s: Sequence[float]
    """Time of the chain's op that ends at this moment."""
    needed_bytes: Sequence[int]
    """Memory that this op needs."""
    unordered: Sequence[tuple[int, int, float]]
    """Ops whose first run may be in several of these windows: moment after which, moment by which, time."""
    intervals: Sequence[UseInterval]

    @property
    def moments(self) -> int:
        """Index of the last moment."""
        return len(self.op_s) - 1


def longest_chain(graph: Graph, profile: Profile, most_ops: int, latest: bool = True) -> OpChain:
    """Return a graph along one of its longest chains, thinned out to `most_ops`.

    Among branches with equal memory needs, the chain takes the one whose op is latest (or earliest) in the graph.
    """
    before = predecessors(graph)
    longest = _longest(graph, before, 1 if latest else -1)
    chain = _thin(longest, graph, most_ops)
    moment, joins = _moments(before, chain, len(chain) == len(longest))
    last = len(moment) + len(joins) + 1
    spans = _spans(before, moment, joins, last)
    op_s, chain_op_s, needed = [0.0] * (last + 1), [0.0] * (last + 1), [0] * (last + 1)
    needed[last] = sum(graph.tensors[t].nbytes for t in {*graph.outputs})
    unordered = []
    for k, span in enumerate(spans):
        if span.by == span.after + 1:
            op_s[span.by] += profile.op_seconds[k]
        else:
            unordered.append((span.after, span.by, profile.op_seconds[k]))
        if span.pinned:
            chain_op_s[span.by] = profile.op_seconds[k]
            needed[span.by] = _needed_bytes(graph, k)
    intervals = list(_intervals(graph, profile, spans, last))
    _add_joins(graph, joins, intervals, needed)
    return OpChain(op_s, chain_op_s, needed, unordered, intervals)


def exclusions(graph: Graph, profile: Profile, memory_bytes: int) -> Iterator[tuple[float, set[int]]]:
    """Yield the total time of some ops, and weights whose first copies cannot overlap any of these ops.

    A copy reserves all of its bytes from its start, and ops that read it run after it.
    """
    needed = [_needed_bytes(graph, k) for k in range(len(graph.ops))]
    read = {t for op in graph.ops for t in op.reads if graph.tensors[t].is_weight}
    for least in sorted({graph.tensors[t].nbytes for t in read} - {0}, reverse=True)[:MOST_EXCLUSIONS]:
        tensors = {t for t in read if graph.tensors[t].nbytes >= least}
        ops_s = 0.0
        for k, op in enumerate(graph.ops):
            others = tensors.difference(op.reads) if needed[k] + least <= memory_bytes else ()
            if all(needed[k] + graph.tensors[t].nbytes > memory_bytes for t in others):
                ops_s += profile.op_seconds[k]
        if ops_s:
            yield ops_s, tensors


def _moments(
    before: Sequence[set[int]], chain: Sequence[int], with_joins: bool
) -> tuple[dict[int, int], dict[int, set[int]]]:
    """Return the moment of each op of the chain, and the ops of each join by its moment."""
    moment: dict[int, int] = {}
    joins: dict[int, set[int]] = {}
    members = set(chain)
    seen: set[int] = set()
    previous: int | None = None
    for k in chain:
        at = len(moment) + len(joins) + 1
        branches = before[k] - members - seen
        if with_joins and previous is not None and branches:
            seen |= branches
            joins[at] = branches | {previous}
            at += 1
        moment[k] = at
        previous = k
    return moment, joins


def _add_joins(
    graph: Graph, joins: dict[int, set[int]], intervals: Sequence[UseInterval], needed: list[int]
) -> None:
    """Set the needs at joins: the least of any op that may end last. Intervals active then are counted separately."""
    active: dict[int, set[int]] = {at: set() for at in joins}
    for s in intervals:
        for at in range(min(s.kept_from, s.arrives_from), s.until + 1):
            if at in active:
                active[at].add(s.tensor)
    for at, ops in joins.items():
        needed[at] = min(_needed_bytes(graph, k, active[at]) for k in ops)


def _needed_bytes(graph: Graph, op: int, without: Collection[int] = ()) -> int:
    touched = {*graph.ops[op].reads, *graph.ops[op].writes}.difference(without)
    return graph.ops[op].scratch_bytes + sum(graph.tensors[t].nbytes for t in touched)


def _longest(graph: Graph, before: Sequence[set[int]], later: int) -> list[int]:
    """Return a maximal chain through the branches with the largest memory needs."""
    needed = [_needed_bytes(graph, k) for k in range(len(graph.ops))]
    most = max(needed, default=0) or 1
    length: list[float] = []
    came_from: list[int | None] = []
    for k in range(len(graph.ops)):
        best = max(before[k], key=lambda j: (round(length[j], 9), later * j), default=None)
        length.append(LEAST_WEIGHT + (needed[k] / most) ** STEEPNESS + (length[best] if best is not None else 0.0))
        came_from.append(best)
    at = max(range(len(length)), key=lambda k: (length[k], k), default=None)
    chain = []
    while at is not None:
        chain.append(at)
        at = came_from[at]
    return chain[::-1]


def _thin(chain: list[int], graph: Graph, most_ops: int) -> list[int]:
    """Keep one of several consecutive ops: the one that needs the most memory."""
    share = -(-len(chain) // most_ops)
    return [
        max(chain[i : i + share], key=lambda k: _needed_bytes(graph, k)) for i in range(0, len(chain), share or 1)
    ]


def _spans(
    before: Sequence[set[int]], moment: dict[int, int], joins: dict[int, set[int]], last: int
) -> list[ChainUse]:
    """Return the moments between which each op runs for the first time."""
    count = len(before)
    after, by = [0] * count, [last] * count
    for at, ops in joins.items():
        for k in ops:
            by[k] = min(by[k], at)
    for k in range(count):
        for j in before[k]:
            after[k] = max(after[k], moment.get(j, after[j]))
    for k in reversed(range(count)):
        for j in before[k]:
            by[j] = min(by[j], moment.get(k, by[k]))
    return [
        ChainUse(k, moment[k] - 1, moment[k], True) if k in moment else ChainUse(k, after[k], by[k], False)
        for k in range(count)
    ]


def _intervals(graph: Graph, profile: Profile, spans: Sequence[ChainUse], last: int) -> Iterator[UseInterval]:
    uses: list[list[ChainUse]] = [[] for _ in graph.tensors]
    for op, span in zip(graph.ops, spans, strict=True):
        for t in {*op.reads, *op.writes}:
            uses[t].append(span)
    for t in {*graph.outputs}:
        uses[t].append(ChainUse(len(graph.ops), last - 1, last, True))
    writer = {t: k for k, op in enumerate(graph.ops) for t in op.writes}
    changed_by: dict[int, int] = {}
    for k, op in enumerate(graph.ops):
        for t in op.mutates:
            changed_by.setdefault(t, k)
    for t, tensor in enumerate(graph.tensors):
        if not tensor.nbytes:
            continue
        copy_s = profile.swap_in_seconds(tensor)
        previous: ChainUse | None = None
        for use in _one_after_another(uses[t]):
            if previous is None:
                if tensor.is_weight:
                    yield UseInterval(t, tensor.nbytes, True, 0, use.after, 1, use.by, copy_s, None)
                elif tensor.kind == "input" and use.after > 0:
                    yield UseInterval(t, tensor.nbytes, False, 1, use.after, 1, use.by, copy_s, None)
            else:
                kept_from = previous.by + previous.pinned
                arrives_from = (previous.by if previous.pinned else previous.after) + 1
                if kept_from <= use.after:
                    recompute_s = _recompute_s(graph, profile, writer.get(t), changed_by.get(t), previous)
                    yield UseInterval(
                        t, tensor.nbytes, False, kept_from, use.after, arrives_from, use.by, copy_s, recompute_s
                    )
            previous = use


def _one_after_another(uses: Sequence[ChainUse]) -> Iterator[ChainUse]:
    """Yield the most uses that are certainly in different windows, including all uses by the chain."""
    free = 0
    for use in sorted(uses, key=lambda u: (u.by, -u.after, not u.pinned)):
        if use.after >= free:
            yield use
            free = use.by


def _recompute_s(
    graph: Graph, profile: Profile, writer: int | None, changed_by: int | None, previous: ChainUse
) -> float | None:
    """Return the time to recompute one result: a rerun op produces all of its results, so each costs a share."""
    if writer is None or graph.ops[writer].mutates or (changed_by is not None and changed_by <= previous.op):
        return None
    return profile.op_seconds[writer] / len(graph.ops[writer].writes)
