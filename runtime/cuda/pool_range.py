"""The bytes of the workspace that activations may use: one piece without any parameter of the plan."""

from dataclasses import dataclass

from cohabit.planner.graph import Graph, aligned
from cohabit.planner.plan import Address, Plan
from cohabit.runtime.binding.build import byte_ranges
from cohabit.runtime.errors import UnsupportedPlan

ALIGNMENT_BYTES = 512
"""What torch's allocator rounds to."""


@dataclass(frozen=True, slots=True)
class PoolRange:
    """`nbytes` at `address`, aligned as torch's allocator wants it."""

    address: Address
    nbytes: int


def pool_range(graph: Graph, plan: Plan) -> PoolRange:
    """The largest range around a plan's activations that no parameter passes through.

    Raises UnsupportedPlan where there is none: activations in both regions, or parameters in between.
    """
    parameters, activations = byte_ranges(graph, plan)
    if not activations:
        return PoolRange(Address("workspace", 0), 0)
    regions = {region for region, _, _ in activations}
    if len(regions) > 1:
        raise UnsupportedPlan(
            f"{graph.name}: the plan puts activations into partition and workspace; they come from one pool, so plan"
            " them into one region"
        )
    (region,) = regions
    start, end = min(a for _, a, _ in activations), max(b for _, _, b in activations)
    low, high = 0, plan.partition_bytes if region == "partition" else plan.workspace_bytes
    for place, first, last in parameters:
        if place != region:
            continue
        if first < end and last > start:
            raise UnsupportedPlan(
                f"{graph.name}: the plan has parameters at {region}+{first}, between activations at {start} to {end};"
                " these come from one pool, so plan without overlay"
            )
        low = max(low, last) if last <= start else low
        high = min(high, first) if first >= end else high
    low = aligned(low, ALIGNMENT_BYTES)
    return PoolRange(Address(region, low), max(0, high - low) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
