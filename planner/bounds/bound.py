"""Lower bound on the latency of every plan in a given memory, for any order of the ops.

It is the maximum of three bounds: the time of all ops; the copies of weights that cannot be resident, in case the
solver gives up; and a linear relaxation (`planner.bounds.relaxation`)."""

from typing import Final

import numpy as np

from cohabit.planner.bounds.relaxation import most_resident_bytes, relax
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.profile import Profile

ROUNDING: Final = 1e-12
"""Relative rounding error: the simulator adds in another order."""


def latency_bound(graph: Graph, profile: Profile, memory: Memory) -> float:
    """Return the lower bound in seconds."""
    if not graph.ops:
        return 0.0
    resident_limit_bytes = most_resident_bytes(graph, memory)
    bounds = [profile.compute_s]
    if not _all_fits(graph, resident_limit_bytes, memory.nbytes):
        bounds.append(_copying_bound(graph, profile, resident_limit_bytes))
        relaxed = relax(graph, profile, memory)
        if relaxed is not None:
            bounds.append(relaxed.latency_s)
    return max(bounds) * (1 - ROUNDING)


def _all_fits(graph: Graph, resident_limit_bytes: int, memory_bytes: int) -> bool:
    """Whether no step ever waits for memory. Parameters have `resident_limit_bytes` at the start."""
    total = sum(t.nbytes for t in graph.tensors) + max(op.scratch_bytes for op in graph.ops)
    return graph.weight_bytes <= resident_limit_bytes and total <= memory_bytes


def _copying_bound(graph: Graph, profile: Profile, resident_limit_bytes: int) -> float:
    """Return the least link time: all weights that ops read are resident, or copied before their op starts."""
    read = {t for op in graph.ops for t in op.reads if graph.tensors[t].is_weight}
    nbytes = np.array([graph.tensors[t].nbytes for t in read], dtype=np.float64)
    missing = float(nbytes.sum()) - resident_limit_bytes
    if missing <= 0:
        return 0.0
    largest_first = np.cumsum(np.sort(nbytes)[::-1])
    transfers = int(np.searchsorted(largest_first, missing)) + 1
    links = [profile.link_of(graph.tensors[t]) for t in read]
    fastest = max(link.bandwidth_bytes_per_s for link in links)
    return transfers * min(link.latency_s for link in links) + missing / fastest
