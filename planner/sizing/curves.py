"""Latency as a function of partition size, from quick plans or a rule of thumb."""

from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.layout.feasible import PAGE_BYTES, Footprint
from cohabit.planner.memory import Memory
from cohabit.planner.offloading import searcher as offloading
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.sizing.shares import Curve, Point
from cohabit.planner.streaming import searcher as streaming

SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0)


Estimate = Callable[[Footprint, Profile, Memory], float]
"""Function that returns the latency of a graph in a given memory."""
Estimates = dict[tuple[str, bool, str, int, int], float]
"""Latencies by graph, whether activations are offloaded, profile, partition and workspace."""


def estimate_latency_s(footprint: Footprint, profile: Profile, memory: Memory) -> float:
    """Return the latency of a quick plan in the better of two op orders; a search finds a plan at least as good.

    Raises InfeasibleBudget.
    """
    if footprint.offloads:
        return offloading.first_latency_s(Problem(footprint.graph, profile, memory))
    latency_s = streaming.first_latency_s(footprint, profile, memory)
    if footprint.by_parameters is not None:
        other, order = footprint.by_parameters
        profile = replace(profile, op_seconds=tuple(profile.op_seconds[k] for k in order))
        with suppress(InfeasibleBudget):
            latency_s = min(latency_s, streaming.first_latency_s(other, profile, memory))
    return latency_s


def rough_latency_s(footprint: Footprint, profile: Profile, memory: Memory) -> float:
    """Estimate the latency by a rule of thumb, without a plan: non-resident parameters are copied while ops compute.

    The less memory there is for the parameters of two ops at a time, the smaller the overlap.
    """
    tensors = footprint.graph.tensors
    parameters = [tensors[i] for i in footprint.graph.parameters]
    parameter_bytes = sum(t.nbytes for t in parameters)
    streamed = max(0, parameter_bytes - memory.partition_bytes)
    all_s = sum(profile.swap_in_seconds(t) for t in parameters)
    compute_s, copy_s = profile.compute_s, all_s * streamed / parameter_bytes if streamed else 0.0
    largest = max(footprint.op_pages, default=0) * PAGE_BYTES
    room = memory.nbytes - footprint.activation_bytes
    overlap = min(max(room / largest - 1, 0.0), 1.0) if largest else 1.0
    slower_s = (profile.compute_slowdown - 1) * min(copy_s, compute_s)
    together_s = max(compute_s + slower_s, copy_s * profile.swap_slowdown)
    return overlap * together_s + (1 - overlap) * (compute_s + copy_s)


def partition_sizes(least: int, most: int) -> list[int]:
    """Return the partition sizes to try: the least, plus whole pages."""
    return [least + int(max(most - least, 0) * share) // PAGE_BYTES * PAGE_BYTES for share in SHARES]


def latency_curve(
    footprint: Footprint,
    profile: Profile,
    least: int,
    most: int,
    workspace_bytes: int,
    known: Estimates,
    estimate: Estimate = estimate_latency_s,
) -> Curve:
    """Return points from `least` to `most` bytes of partition, until more memory no longer helps.

    `known` caches estimates, which models with the same graph and profile share.
    """
    points: list[Point] = []
    for size in partition_sizes(least, most):
        key = (footprint.graph.fingerprint, footprint.offloads, profile.fingerprint, size, workspace_bytes)
        if key not in known:
            known[key] = estimate(footprint, profile, Memory(workspace_bytes, size))
        latency_s = min(known[key], points[-1].latency_s) if points else known[key]
        points.append(Point(size, latency_s))
        if latency_s <= profile.compute_s * (1 + 1e-6):
            break
    return tuple(points)
