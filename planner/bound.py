"""A lower bound of the latency of every plan in a given memory, whatever the order of its ops."""

import numpy as np
from numpy.typing import NDArray

from planner.graph import Graph
from planner.profile import Profile

Floats = NDArray[np.float64]


def latency_bound(graph: Graph, profile: Profile, partition_bytes: int, workspace_bytes: int) -> float:
    """Seconds below which no plan's latency can be.

    Before an op can end, every parameter that it or an op upstream reads has arrived or was in the partition; what
    is left then is its own time and that of all ops downstream. And whatever the ops from some point on read
    beyond all of the memory is still to be copied at that point.
    """
    if not graph.ops:
        return 0.0
    op_s = np.array(profile.op_seconds)
    upstream = _upstream(graph)
    reads = _parameter_reads(graph)
    nbytes = np.array([graph.tensors[i].nbytes for i in graph.parameters], dtype=np.float64)
    downstream_s = upstream.T @ op_s  # upstream[k, j]: j is k or must run before k
    earliest_s = upstream @ op_s - op_s
    latency = float(op_s.sum())
    for k in range(len(op_s)):
        before = nbytes[(upstream[k] @ reads) > 0]
        behind = nbytes[(upstream[:, k] @ reads) > 0]
        starts_s = max(float(earliest_s[k]), transfer_bound(before, partition_bytes, profile))
        beyond = max(float(behind.sum()) - partition_bytes - workspace_bytes, 0.0)
        rest_s = max(float(downstream_s[k]), beyond / profile.swap_in.bandwidth_bytes_per_s)
        latency = max(latency, starts_s + rest_s)
    return latency * (1 - 1e-12)  # the simulator adds in another order


def transfer_bound(nbytes: Floats, room_bytes: int, profile: Profile) -> float:
    """Least link time to bring in parameters of these sizes when `room_bytes` of them are in memory already."""
    missing = float(nbytes.sum()) - room_bytes
    if missing <= 0:
        return 0.0
    largest_first = np.cumsum(np.sort(nbytes)[::-1])
    transfers = int(np.searchsorted(largest_first, missing)) + 1
    return transfers * profile.swap_in.latency_s + missing / profile.swap_in.bandwidth_bytes_per_s


def _upstream(graph: Graph) -> Floats:
    """[ops, ops]: 1 where the column's op is the row's op or one that it depends on."""
    producer = {t: k for k, op in enumerate(graph.ops) for t in op.writes}
    reach = np.eye(len(graph.ops))
    for k, op in enumerate(graph.ops):
        for t in op.reads:
            if t in producer:
                np.maximum(reach[k], reach[producer[t]], out=reach[k])
    return reach


def _parameter_reads(graph: Graph) -> Floats:
    """[ops, parameters]: 1 where the op reads the parameter."""
    column = {t: i for i, t in enumerate(graph.parameters)}
    reads = np.zeros((len(graph.ops), len(column)))
    for k, op in enumerate(graph.ops):
        for t in op.reads:
            if t in column:
                reads[k, column[t]] = 1
    return reads
