"""Orders in which a graph's ops can run, other than its own."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import Final

from msgspec.structs import replace

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Compute, Plan
from cohabit.planner.profile import Profile

MUCH_AGAIN: Final = 0.25
"""Bytes read again, as a share of the weights, from which orders by weights are planned: an unrolled recurrent network
has many times as much, a convolutional network whose small parameters are stored together up to a tenth."""


def predecessors(graph: Graph) -> list[set[int]]:
    """Ops that must run before each op: those that wrote what it reads, or used what it changes."""
    writer: dict[int, int] = {}
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
        before.append(needed - {k})
    return before


def has_reuse(graph: Graph) -> bool:
    """Whether ops read weights again, and enough of them that those ops may be worth running together."""
    reads = Counter(t for read in _weights_read(graph) for t in read)
    again_bytes = sum((count - 1) * graph.tensors[t].nbytes for t, count in reads.items())
    return again_bytes > MUCH_AGAIN * graph.weight_bytes


def by_parameters(graph: Graph) -> tuple[int, ...]:
    """Of the ops that can run, always the one whose parameters were used last; ops without any come first.

    In an unrolled recurrent network all time steps of a layer come together, forward and backward, so that its weights
    are needed once in each direction.
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
    """The parameters and the state that each op reads."""
    return [frozenset(t for t in op.reads if graph.tensors[t].is_weight) for op in graph.ops]


def reordered(graph: Graph, profile: Profile, order: Sequence[int]) -> tuple[Graph, Profile]:
    """The graph with its ops in another order, and its profile."""
    changed = replace(graph, ops=tuple(graph.ops[k] for k in order))
    seconds = tuple(profile.op_seconds[k] for k in order)
    return changed, replace(profile, graph=changed.fingerprint, op_seconds=seconds)


def in_original_order(plan: Plan, order: Sequence[int], graph: Graph, profile: Profile) -> Plan:
    """The plan of a reordered graph as a plan of the graph itself, whose ops it runs in that order."""
    return replace(
        plan,
        graph=graph.fingerprint,
        profile=profile.fingerprint,
        steps=tuple(replace(s, op=order[s.op]) if isinstance(s, Compute) else s for s in plan.steps),
    )
