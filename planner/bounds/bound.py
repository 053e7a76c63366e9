"""A lower bound of the latency of every plan in a given memory, in any order of its ops.

It is the maximum of four bounds: the time of all ops; the copies of what cannot be in memory at the start; a path
bound; and a linear relaxation (`planner.bounds.relaxation`)."""

from typing import Final

import numpy as np

from planner.arrays import Floats, Ints
from planner.bounds.relaxation import relax
from planner.graph import Graph
from planner.order import predecessors
from planner.profile import Link, Profile

MOST_PATH_OPS: Final = 500
"""The path bound takes time and memory that grow with the square of the ops; larger graphs do without."""
ROUNDING: Final = 1e-12
"""The simulator adds in another order."""


def latency_bound(graph: Graph, profile: Profile, partition_bytes: int, workspace_bytes: int) -> float:
    """Seconds below which no plan's latency can be."""
    if not graph.ops:
        return 0.0
    bounds = [profile.compute_s, _copying_bound(graph, profile, partition_bytes, workspace_bytes)]
    if _all_fits(graph, partition_bytes, workspace_bytes):
        return max(bounds) * (1 - ROUNDING)
    if len(graph.ops) <= MOST_PATH_OPS:
        bounds.append(_path_bound(graph, profile, partition_bytes, workspace_bytes))
    relaxed = relax(graph, profile, partition_bytes, workspace_bytes)
    if relaxed is not None:
        bounds.append(relaxed.latency_s)
    return max(bounds) * (1 - ROUNDING)


def _all_fits(graph: Graph, partition_bytes: int, workspace_bytes: int) -> bool:
    """Whether nothing ever has to wait for memory."""
    stored = sum(t.nbytes for t in graph.tensors if t.kind in ("parameter", "state"))
    others = sum(t.nbytes for t in graph.tensors) - stored
    scratch = max(op.scratch_bytes for op in graph.ops)
    inputs = sum(t.nbytes for t in graph.tensors if t.kind == "input")
    room = min(partition_bytes, partition_bytes + workspace_bytes - inputs)
    return stored <= room and stored + others + scratch <= partition_bytes + workspace_bytes


def _copying_bound(graph: Graph, profile: Profile, partition_bytes: int, workspace_bytes: int) -> float:
    """Every parameter and state that some op reads is resident or copied, before the op starts."""
    read = {t for op in graph.ops for t in op.reads if graph.tensors[t].kind in ("parameter", "state")}
    inputs = sum(t.nbytes for t in graph.tensors if t.kind == "input")
    room = min(partition_bytes, partition_bytes + workspace_bytes - inputs)
    nbytes = np.array([graph.tensors[t].nbytes for t in read], dtype=np.float64)
    return transfer_bound(nbytes, room, profile.swap_in)


def _path_bound(graph: Graph, profile: Profile, partition_bytes: int, workspace_bytes: int) -> float:
    """The longest path through the waits between ops.

    Between the start of an op k and the start of an op j that depends on it, two things must happen: all ops on the
    way run, and of all parameters that these read, whatever memory could not hold when k started is copied. Before
    the first op, memory holds what the partition held.
    """
    op_s = np.array(profile.op_seconds)
    upstream = _upstream(graph)  # [j, k]: j is k or depends on it
    nbytes, reader = _first_reads(graph)
    run_s = _sum_between(upstream, op_s)  # [k, j], both ends included
    copy_s = _sum_between(upstream, _copy_seconds(nbytes, reader, len(op_s), profile.swap_in))
    start_s = np.zeros(len(op_s))
    latency = 0.0
    for j in range(len(op_s)):
        needed = nbytes[upstream[j, reader] > 0]
        start_s[j] = max(upstream[j] @ op_s - op_s[j], transfer_bound(needed, partition_bytes, profile.swap_in))
        before = np.flatnonzero(upstream[j])[:-1]
        if len(before):
            start_s[j] = max(start_s[j], float((start_s[before] + run_s[before, j]).max()) - op_s[j])
            start_s[j] = max(start_s[j], float((start_s[before] + copy_s[before, j]).max()))
        room = partition_bytes + workspace_bytes - _held_bytes(graph, j)
        downstream = nbytes[upstream[reader, j] > 0]
        copy_s[j] -= _most_held_seconds(downstream, room, profile.swap_in)
        latency = max(latency, start_s[j] + float(upstream[:, j] @ op_s))
    return float(latency)


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
    reach = np.eye(len(graph.ops))
    for k, before in enumerate(predecessors(graph)):
        for j in before:
            np.maximum(reach[k], reach[j], out=reach[k])
    return reach


def _sum_between(upstream: Floats, weight: Floats) -> Floats:
    """[k, j]: weight of all ops that depend on k and that j depends on, k and j included."""
    between: Floats = (upstream.T * weight) @ upstream.T
    return between


def _first_reads(graph: Graph) -> tuple[Floats, Ints]:
    """Size of every parameter that is read, and the op that is the first to read it."""
    reader: dict[int, int] = {}
    for k, op in enumerate(graph.ops):
        for t in op.reads:
            if graph.tensors[t].kind == "parameter":
                reader.setdefault(t, k)
    sizes = [graph.tensors[t].nbytes for t in reader]
    return np.array(sizes, dtype=np.float64), np.array([*reader.values()], dtype=np.int64)


def _copy_seconds(nbytes: Floats, reader: Ints, ops: int, link: Link) -> Floats:
    """Link time of the parameters that each op is the first to read."""
    copy_s = nbytes / link.bandwidth_bytes_per_s + link.latency_s
    return np.asarray(np.bincount(reader, weights=copy_s, minlength=ops), dtype=np.float64)


def _held_bytes(graph: Graph, op: int) -> int:
    """Memory that an op needs for other things than parameters."""
    touched = (graph.tensors[t] for t in {*graph.ops[op].reads, *graph.ops[op].writes})
    return sum(t.nbytes for t in touched if t.kind != "parameter") + graph.ops[op].scratch_bytes
