"""Divides device memory among models, from their graphs, profiles and request rates."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.layout.feasible import PAGE_BYTES
from cohabit.planner.sizing.demand import MemoryDemand, workspaces
from cohabit.planner.sizing.fitting import (
    Estimate,
    Estimates,
    Ladders,
    estimate_latency_s,
    latency_curve,
    rough_latency_s,
)
from cohabit.planner.sizing.problem import (
    ONE_REGION,
    WHOLE_MODELS,
    Division,
    LayoutName,
    ModelDemand,
)
from cohabit.planner.sizing.shares import Curve, latency_weights, share_out, weighted_latency_s

LEAST_GAIN = 0.1
"""Fraction of the weighted latency that leaving out batches must save."""
ALIKE = 0.05
"""Fraction by which a cost may exceed the best and count as equal; among equal costs, more batches win."""
LEAST_STEP = 0.05
"""Fraction of the memory that a step of leaving out batches must save."""


def divide(
    models: Sequence[ModelDemand],
    memory_bytes: int,
    layout: LayoutName = "partitioned",
    *,
    least_workspace_bytes: int = 0,
    lanes: int = 1,
    rough: bool = False,
    ladders: Sequence[Ladders] = (),
) -> Division:
    """Choose the workspace and every partition. Raises InfeasibleBudget with the least sufficient memory.

    Plans that stay unchanged may need `least_workspace_bytes`. A layout with one region has one lane. With `rough`,
    latencies are estimated by a rule of thumb, which takes no time. `ladders` has each model's searched plans: if every
    model has one for the same workspace, and memory suffices, nothing is estimated.

    Models that may split batches lose their largest ones if these cost more than batching gains: their activations
    take memory from parameters.
    """
    assert lanes == 1 or layout not in ONE_REGION
    demands = [MemoryDemand.of(model) for model in models]
    if layout == "partitioned" and demands:
        estimate = rough_latency_s if rough else estimate_latency_s
        room = _Room(memory_bytes, least_workspace_bytes, lanes, estimate, ladders)
        shares = _partition(demands, room)
    elif layout in ("resident", "partitioned"):
        shares = _all_resident(demands, memory_bytes, lanes)
    else:
        shares = _one_region(demands, memory_bytes, layout)
    most_batches = tuple(demand.model.batches[-1] for demand in shares.demands)
    memory = memory_bytes // PAGE_BYTES * PAGE_BYTES
    return Division(memory, shares.workspace_bytes, tuple(shares.partition_bytes), most_batches)


@dataclass(frozen=True, slots=True)
class _Room:
    """The memory to divide."""

    memory_bytes: int
    least_workspace_bytes: int
    lanes: int
    estimate: Estimate
    ladders: Sequence[Ladders]
    """Each model's curves of searched plans by workspace size; empty if no model has any."""

    @property
    def planned_workspaces(self) -> list[int]:
        """Workspaces for which every model has a ladder."""
        each = [ladders.keys() for ladders in self.ladders]
        common = set(each[0]).intersection(*each) if each else ()
        return sorted(size for size in common if size >= self.least_workspace_bytes)


@dataclass(frozen=True, slots=True)
class _Shares:
    """A division of memory, and its cost: the sum of weight times latency."""

    demands: Sequence[MemoryDemand]
    workspace_bytes: int
    partition_bytes: Sequence[int]
    cost: float = 0.0


def _partition(demands: Sequence[MemoryDemand], room: _Room) -> _Shares:
    """Choose batches, the lanes' workspace and the partitions that minimise the sum of rate times latency.

    If activations do not fit, the largest batches are left out. If that is not enough, activations are offloaded.
    """
    found: list[tuple[float, _Shares]] = []
    for fewer in _with_fewer_batches(demands, room.memory_bytes):
        with suppress(InfeasibleBudget):
            shares = _partition_for(fewer, room)
            found.append((shares.cost + _batching_loss_s(demands, fewer), shares))
            if found[0][1] is shares and _resident_cost_s(demands) >= (1 - LEAST_GAIN) * shares.cost:
                break  # more memory for parameters would hardly help
    if not found:
        *_, fewest = _with_fewer_batches(demands, 0)
        for tried in (demands, fewest)[: 1 + (fewest is not demands)]:
            try:
                return _partition_for([demand.with_offloading() for demand in tried], room)
            except InfeasibleBudget as error:
                refusal = error
        raise refusal
    best_s = min(cost for cost, _ in found)
    enough_s = max(best_s, min(best_s * (1 + ALIKE), (1 - LEAST_GAIN) * found[0][0]))
    if best_s > (1 - LEAST_GAIN) * found[0][0]:
        return found[0][1]
    return next(shares for cost, shares in found if cost <= enough_s)


def _with_fewer_batches(demands: Sequence[MemoryDemand], memory_bytes: int) -> Iterator[Sequence[MemoryDemand]]:
    """Yield the demands, then without the batches with the most activations, until those of one model must stay.

    Steps that save less than LEAST_STEP of the memory are combined.
    """
    left, yielded_bytes = list(demands), max(demand.activation_bytes for demand in demands)
    yielded: Sequence[MemoryDemand] = demands
    yield yielded
    while True:
        largest = max(range(len(left)), key=lambda i: left[i].activation_bytes)
        model = left[largest].model
        if not model.splits_batches or len(model.batches) == 1:
            if any(now is not then for now, then in zip(left, yielded, strict=True)):
                yield tuple(left)
            return
        left[largest] = MemoryDemand.of(model.up_to(model.batches[-2]))
        now_bytes = max(demand.activation_bytes for demand in left)
        if yielded_bytes - now_bytes >= LEAST_STEP * memory_bytes:
            yielded_bytes, yielded = now_bytes, tuple(left)
            yield yielded


def _batching_loss_s(demands: Sequence[MemoryDemand], fewer: Sequence[MemoryDemand]) -> float:
    """Return the time that omitted batches would have saved, weighted like latencies.

    At half load, which the weights assume, the number of requests in an M/M/1 queue is geometrically distributed; so
    is that of one model's requests, with the odds of its share of the rate.
    """
    weights, rates = _weights(demands), [demand.model.rate_per_s for demand in demands]
    loss_s = 0.0
    for weight, rate, all_of_it, left in zip(weights, rates, demands, fewer, strict=True):
        share = rate / max(sum(rates), 1e-9)
        batches, most = all_of_it.model.batches, left.model.batches[-1]
        for smaller, batch in pairwise(batches):
            if smaller >= most:
                saved_s = batch / smaller * _compute_s(all_of_it, smaller) - _compute_s(all_of_it, batch)
                loss_s += weight * (share / (1 + share)) ** (smaller + 1) * max(saved_s, 0.0)
    return loss_s


def _compute_s(demand: MemoryDemand, batch: int) -> float:
    return min(p.compute_s for bucket, p in demand.model.profiles.items() if bucket.batch == batch)


def _weights(demands: Sequence[MemoryDemand]) -> list[float]:
    rates = [d.model.rate_per_s for d in demands]
    return latency_weights(rates, [d.model.profiles[d.smallest].compute_s for d in demands])


def _resident_cost_s(demands: Sequence[MemoryDemand]) -> float:
    """Return the cost if every parameter is resident."""
    compute_s = [d.model.profiles[d.smallest].compute_s for d in demands]
    return sum(weight * seconds for weight, seconds in zip(_weights(demands), compute_s, strict=True))


def _partition_for(demands: Sequence[MemoryDemand], room: _Room) -> _Shares:
    """Choose the workspace and the partitions for all batches of these demands."""
    memory, lanes = room.memory_bytes, room.lanes
    largest_demand = max(demands, key=lambda d: d.least_bytes)
    if lanes == 1 and memory < largest_demand.least_bytes:
        raise _refusal(largest_demand, memory, largest_demand.least_bytes, len(demands))
    # Where every model has a ladder and the first rungs fit, plans are ready and nothing is estimated.
    ready = [shares for size in room.planned_workspaces if (shares := _on_ladders(demands, size, room)) is not None]
    if ready:
        return min(ready, key=lambda shares: shares.cost)
    known: Estimates = {}
    best: _Shares | None = None
    needed: list[int] = []
    sizes = sorted(
        {
            max(size, room.least_workspace_bytes)
            for size in workspaces(demands, max(memory, largest_demand.least_bytes))
        }
    )
    for workspace in sizes:
        floors = [d.least_partition_bytes(workspace) for d in demands]
        least = [b for b in floors if b is not None]
        if len(least) < len(demands):
            continue
        needed.append(sum(least) + lanes * workspace)
        if needed[-1] > memory:
            continue
        shares = _share_out(demands, least, workspace, room, known)
        if best is None or shares.cost < best.cost * (1 - 1e-6):
            best = shares
    if best is None:  # empty partitions with one largest workspace fit, unless it must be larger
        raise _refusal(largest_demand, memory, min(needed), len(demands))
    return best


def _refusal(demand: MemoryDemand, memory_bytes: int, least_bytes: int, models: int) -> InfeasibleBudget:
    largest = demand.largest_demand
    name, op, bucket = demand.model.name, largest.largest_op, largest.graph.bucket
    return InfeasibleBudget(name, op, memory_bytes, least_bytes, models, bucket)


def _share_out(
    demands: Sequence[MemoryDemand], least: list[int], workspace: int, room: _Room, known: Estimates
) -> _Shares:
    """Give memory where it saves the most time per byte, then the rest to models that still lack some."""
    lines: list[Curve] = [
        latency_curve(d.footprints[b], d.model.profiles[b], low, d.parameter_bytes, workspace, known, room.estimate)
        for d, low in zip(demands, least, strict=True)
        for b in [d.smallest]
    ]
    return _shared(demands, lines, workspace, room)


def _on_ladders(demands: Sequence[MemoryDemand], workspace: int, room: _Room) -> _Shares | None:
    """Share out memory by the ladders for a workspace; None if some model's least rung does not fit."""
    curves: list[Curve] = []
    for demand, ladders in zip(demands, room.ladders, strict=True):
        least = demand.least_partition_bytes(workspace)
        if least is None:
            return None
        curves.append(tuple(point for point in ladders[workspace] if point.partition_bytes >= least))
    if not all(curves):
        return None
    if sum(curve[0].partition_bytes for curve in curves) + room.lanes * workspace > room.memory_bytes:
        return None
    return _shared(demands, curves, workspace, room)


def _shared(demands: Sequence[MemoryDemand], curves: Sequence[Curve], workspace: int, room: _Room) -> _Shares:
    weights, left = _weights(demands), room.memory_bytes - room.lanes * workspace
    chosen = share_out(curves, weights, left)
    partitions = [point.partition_bytes for point in chosen]
    given = _give_rest(demands, partitions, left - sum(partitions))
    return _Shares(demands, workspace, given, weighted_latency_s(chosen, weights))


def _give_rest(demands: Sequence[MemoryDemand], partitions: list[int], left: int) -> list[int]:
    """Fill up partitions evenly, smallest lack first, until every parameter fits or no memory is left."""
    lack = [max(d.parameter_bytes - p, 0) for d, p in zip(demands, partitions, strict=True)]
    given = list(partitions)
    order = sorted(range(len(demands)), key=lambda i: lack[i])
    for position, i in enumerate(order):
        share = left // (len(order) - position) // PAGE_BYTES * PAGE_BYTES
        more = min(lack[i], share)
        given[i] += more
        left -= more
    return given


def _all_resident(demands: Sequence[MemoryDemand], memory: int, lanes: int) -> _Shares:
    """Divide memory so that every parameter of every model is resident."""
    workspace = max((d.activation_bytes for d in demands), default=0)
    partitions = [d.parameter_bytes for d in demands]
    least = sum(partitions) + lanes * workspace
    if least > memory:
        raise InfeasibleBudget(f"{len(demands)} models", None, memory, least)
    return _Shares(demands, workspace, partitions)


def _one_region(demands: Sequence[MemoryDemand], memory: int, layout: LayoutName) -> _Shares:
    """Make one region for all models. Plans keep every parameter: residency is decided at run time."""
    workspace = max((d.activation_bytes for d in demands), default=0)
    for least, op, name in sorted(((*_least(d, layout), d.model.name) for d in demands), key=lambda d: d[0])[-1:]:
        if least + workspace > memory:
            raise InfeasibleBudget(name, op, memory, least + workspace, len(demands))
    return _Shares(demands, workspace, [d.parameter_bytes for d in demands])


def _least(demand: MemoryDemand, layout: LayoutName) -> tuple[int, str | None]:
    """Return the bytes that a model needs of a shared region, and the op that needs them (None for the whole model)."""
    if layout in WHOLE_MODELS:
        return demand.parameter_bytes, None
    footprint = demand.largest_demand
    op_pages = max(footprint.op_pages)
    ops = footprint.graph.ops
    return op_pages * PAGE_BYTES, ops[footprint.op_pages.index(op_pages)].name if ops else None
