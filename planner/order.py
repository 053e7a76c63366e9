"""Alternative execution orders of a graph's ops."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import Final

from msgspec.structs import replace

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Compute, Plan
from cohabit.planner.profile import Profile

MUCH_AGAIN: Final = 0.25
"""Minimum ratio of reread to all weight bytes for planning orders by weights. An unrolled recurrent network exceeds
it many times; a convolutional network with grouped small parameters reaches 0.1."""


def predecessors(graph: Graph) -> list[set[int]]:
    """Return the ops that must run before each op: writers of its reads, and earlier readers of tensors it changes.

    An op that writes no tensor reads a number out of one, which any later op may take.
    """
    writer: dict[int, int] = {}
    numbers: list[int] = []
    readers: dict[int, list[int]] = defaultdict(list)
    before: list[set[int]] = []
    for k, op in enumerate(graph.ops):
        needed = {writer[t] for t in op.reads if t in writer}
        for t in op.mutates:
            needed.update(readers[t])
            readers[t].clear()
            writer[t] = k
        for t in op.reads:
            readers[t].append(k)
        writer.update((t, k) for t in op.writes)
        before.append(needed.union(numbers) - {k})
        if not op.writes and not op.mutates:
            numbers.append(k)
    return before


def has_reuse(graph: Graph) -> bool:
    """Whether ops reread enough weights that running these ops together may pay."""
    reads = Counter(t for read in _weights_read(graph) for t in read)
    again_bytes = sum((count - 1) * graph.tensors[t].nbytes for t, count in reads.items())
    return again_bytes > MUCH_AGAIN * graph.weight_bytes


def by_parameters(graph: Graph) -> tuple[int, ...]:
    """Return an order that always runs the ready op with the most recently used weights; ops without any come first.

    In an unrolled recurrent network, this runs all time steps of a layer together, so that its weights are needed
    once per direction.
    """
    read = _weights_read(graph)
    used: dict[int, int] = {}

    def cost(k: int) -> tuple[int, int]:
        return -min((used.get(t, -1) for t in read[k]), default=len(read) + 1), k

    sorter = TopologicalSorter(dict(enumerate(predecessors(graph))))
    sorter.prepare()
    ready: set[int] = set()
    order: list[int] = []
    while sorter.is_active():
        ready.update(sorter.get_ready())
        k = min(ready, key=cost)
        ready.remove(k)
        order.append(k)
        used.update(dict.fromkeys(read[k], len(order)))
        sorter.done(k)
    return tuple(order)


def _weights_read(graph: Graph) -> list[frozenset[int]]:
    return [frozenset(t for t in op.reads if graph.tensors[t].is_weight) for op in graph.ops]


def reordered(graph: Graph, profile: Profile, order: Sequence[int]) -> tuple[Graph, Profile]:
    """Return the graph with its ops in another order, and its profile."""
    changed = replace(graph, ops=tuple(graph.ops[k] for k in order))
    seconds = tuple(profile.op_seconds[k] for k in order)
    return changed, replace(profile, graph=changed.fingerprint, op_seconds=seconds)


def in_original_order(plan: Plan, order: Sequence[int], graph: Graph, profile: Profile) -> Plan:
    """Translate the plan of a reordered graph into one of the original graph; the execution order stays."""
    return replace(
        plan,
        graph=graph.fingerprint,
        profile=profile.fingerprint,
        steps=tuple(replace(s, op=order[s.op]) if isinstance(s, Compute) else s for s in plan.steps),
    )
