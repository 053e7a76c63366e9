"""A lower bound of the latency of every plan in a given memory, whatever the order of its ops.

Between the start of an op k and the start of an op j that depends on it, two things must happen: all ops on the
way run, and of all parameters that these read, whatever memory could not hold when k started is copied. Before
the first op, memory holds what the partition held. The longest path through these waits is the bound.
"""

import numpy as np
from numpy.typing import NDArray

from planner.graph import Graph
from planner.profile import Link, Profile

Floats = NDArray[np.float64]


def latency_bound(graph: Graph, profile: Profile, partition_bytes: int, workspace_bytes: int) -> float:
    """Seconds below which no plan's latency can be."""
    if not graph.ops:
        return 0.0
    op_s = np.array(profile.op_seconds)
    upstream = _upstream(graph)  # [j, k]: j is k or depends on it
    nbytes = _bytes_first_read(graph)
    run_s = _sum_between(upstream, op_s)  # [k, j], both ends included
    copy_s = _sum_between(upstream, _copy_seconds(graph, profile.swap_in))
    start_s = np.zeros(len(op_s))
    latency = 0.0
    for j in range(len(op_s)):
        needed = np.concatenate([nbytes[k] for k in np.flatnonzero(upstream[j])])
        start_s[j] = max(upstream[j] @ op_s - op_s[j], transfer_bound(needed, partition_bytes, profile.swap_in))
        before = np.flatnonzero(upstream[j])[:-1]
        if len(before):
            start_s[j] = max(start_s[j], float((start_s[before] + run_s[before, j]).max()) - op_s[j])
            start_s[j] = max(start_s[j], float((start_s[before] + copy_s[before, j]).max()))
        room = partition_bytes + workspace_bytes - _held_bytes(graph, j)
        behind = np.concatenate([nbytes[k] for k in np.flatnonzero(upstream[:, j])])
        copy_s[j] -= _most_held_seconds(behind, room, profile.swap_in)
        latency = max(latency, start_s[j] + float(upstream[:, j] @ op_s))
    return float(latency) * (1 - 1e-12)  # the simulator adds in another order


def transfer_bound(nbytes: Floats, room_bytes: int, link: Link) -> float:
    """Least link time to bring in parameters of these sizes when `room_bytes` of them are in memory already."""
    missing = float(nbytes.sum()) - room_bytes
    if missing <= 0:
        return 0.0
    largest_first = np.cumsum(np.sort(nbytes)[::-1])
    transfers = int(np.searchsorted(largest_first, missing)) + 1
    return transfers * link.latency_s + missing / link.bandwidth_bytes_per_s


def _most_held_seconds(nbytes: Floats, room_bytes: int, link: Link) -> float:
    """Most link time that having some of these parameters in `room_bytes` of memory can save; one may be half here."""
    fitting = int(np.searchsorted(np.cumsum(np.sort(nbytes)), room_bytes, side="right"))
    return (fitting + 1) * link.latency_s + max(room_bytes, 0) / link.bandwidth_bytes_per_s


def _upstream(graph: Graph) -> Floats:
    """[ops, ops]: 1 where the column's op is the row's op or one that it depends on."""
    producer = {t: k for k, op in enumerate(graph.ops) for t in op.writes}
    reach = np.eye(len(graph.ops))
    for k, op in enumerate(graph.ops):
        for t in op.reads:
            if t in producer:
                np.maximum(reach[k], reach[producer[t]], out=reach[k])
    return reach


def _sum_between(upstream: Floats, weight: Floats) -> Floats:
    """[k, j]: weight of all ops that depend on k and that j depends on, k and j included."""
    between: Floats = (upstream.T * weight) @ upstream.T
    return between


def _bytes_first_read(graph: Graph) -> list[Floats]:
    """Sizes of the parameters that each op is the first to read; no parameter is counted twice."""
    seen: set[int] = set()
    found = []
    for op in graph.ops:
        new = [t for t in op.reads if graph.tensors[t].kind == "parameter" and t not in seen]
        seen.update(new)
        found.append(np.array([graph.tensors[t].nbytes for t in new], dtype=np.float64))
    return found


def _copy_seconds(graph: Graph, link: Link) -> Floats:
    """Link time of the parameters that each op is the first to read."""
    return np.array(
        [n.sum() / link.bandwidth_bytes_per_s + len(n) * link.latency_s for n in _bytes_first_read(graph)]
    )


def _held_bytes(graph: Graph, op: int) -> int:
    """Memory that an op needs for other things than parameters."""
    touched = (graph.tensors[t] for t in {*graph.ops[op].reads, *graph.ops[op].writes})
    return sum(t.nbytes for t in touched if t.kind != "parameter") + graph.ops[op].scratch_bytes
