"""Moves each parameter's update to where its gradient is ready, so that the gradient need not be kept."""

from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from cohabit.runtime.lowering.trace import Storage, TracedOp


def updates_early(graph: fx.Graph, ops: Sequence[TracedOp], first_update: str) -> fx.Graph:
    """Return a graph with the same nodes, each update right after the last node that it needs.

    The nodes from `first_update` on are updates. Those that hang together, by values or by what they change, stay
    together and in order. `ops` say which storages nodes read and change.
    """
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    start = next((i for i, n in enumerate(nodes) if n.name == first_update), len(nodes))
    before = _dependencies(nodes, {op.name: op for op in ops})
    groups = _connected(range(start, len(nodes)), before)
    missing = {leader: {b for m in members for b in before[m] if b < start} for leader, members in groups.items()}
    waiting = defaultdict(list)
    for leader, needed in missing.items():
        for b in needed:
            waiting[b].append(leader)
    order: list[int] = []
    for leader in [leader for leader, needed in missing.items() if not needed]:
        order += groups[leader]
    for i in range(start):
        order.append(i)
        for leader in waiting[i]:
            missing[leader].discard(i)
            if not missing[leader]:
                order += groups[leader]
    return _in_order(graph, [nodes[i] for i in order])


def _dependencies(nodes: Sequence[fx.Node], ops: dict[str, TracedOp]) -> list[set[int]]:
    """Return, per node, the nodes that must run before it: what it takes, and what uses storages that it changes."""
    position = {node: i for i, node in enumerate(nodes)}
    before: list[set[int]] = []
    changed: dict[Storage, int] = {}
    readers: defaultdict[Storage, set[int]] = defaultdict(set)
    for i, node in enumerate(nodes):
        needed = {position[n] for n in node.all_input_nodes if n in position}
        op = ops.get(node.name)
        if op is not None:
            for storage in (*op.reads, *op.mutates):
                if storage in changed:
                    needed.add(changed[storage])
                readers[storage].add(i)
            for storage in op.mutates:
                needed |= readers[storage] - {i}
                changed[storage], readers[storage] = i, {i}
        before.append(needed)
    return before


def _connected(nodes: range, before: Sequence[set[int]]) -> dict[int, list[int]]:
    """Return the connected groups of some nodes, each in order, by their first node."""
    leader = {i: i for i in nodes}

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = leader[leader[i]]
            i = leader[i]
        return i

    for i in nodes:
        for b in before[i]:
            if b in leader:
                first, second = sorted((find(i), find(b)))
                leader[second] = first
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for i in nodes:
        groups[find(i)].append(i)
    return groups


def _in_order(graph: fx.Graph, calls: Sequence[fx.Node]) -> fx.Graph:
    """Copy a graph with its calls in another order."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op not in ("call_function", "output"):
            copies[node] = made.node_copy(node)
    for node in calls:
        copies[node] = made.node_copy(node, lambda n: copies[n])
    (output,) = (n for n in graph.nodes if n.op == "output")
    made.node_copy(output, lambda n: copies[n])
    made.lint()
    return made
