"""Builds programs from plans: checks a plan, drafts it, and binds the draft to addresses."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from cohabit.planner.check import check
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Compute, Plan
from cohabit.planner.profile import Profile
from cohabit.runtime.binding.calls import Call, bind_with_store, static_value, weight_at
from cohabit.runtime.binding.draft import ComputeStep, Draft, DraftCall, Drafter, Statics, StaticWeight, SwapStep
from cohabit.runtime.binding.offloaded import OffloadedTensor
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.errors import UnsupportedPlan
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.memory import Destination, DeviceArena, HostStore

_drafts: WeakValueDictionary[tuple[str, ...], Draft] = WeakValueDictionary()
"""Drafts in use, by trace, graph, plan, profile and device."""


def draft(lowered: Lowered, plan: Plan, profile: Profile | None, device: torch.device) -> Draft:
    """Check a plan and draft it. Raises InvalidPlan, FingerprintMismatch or UnsupportedPlan.

    Models that differ in the values of their weights only share drafts.
    """
    buckets = {graph.fingerprint: bucket for bucket, graph in lowered.graphs.items()}
    bucket = buckets.get(plan.graph, lowered.buckets[0])
    graph, trace = lowered.graphs[bucket], lowered.traces[bucket]
    used = "" if profile is None else profile.fingerprint
    key = trace.digest, graph.fingerprint, plan.fingerprint, used, str(device)
    if trace.digest and (known := _drafts.get(key)) is not None:
        return known
    check(graph, profile, plan)
    _require_served(graph, plan)
    made = Drafter(graph, trace, lowered.manifest, plan, device).draft(profile)
    if trace.digest:
        _drafts[key] = made
    return made


def build(
    lowered: Lowered,
    plan: Plan,
    profile: Profile | None,
    arena: DeviceArena[Destination],
    bases: Bases,
    store: HostStore[Destination],
) -> Program:
    """Check a plan and bind it. Raises the errors of `draft`, and MemoryExceeded."""
    drafted = draft(lowered, plan, profile, arena.device)
    graph = lowered.graphs[drafted.graph.bucket]
    return bind(drafted, graph, _offloaded(drafted, store), arena, bases, store)


def bind(
    drafted: Draft,
    graph: Graph,
    of_tensor: Mapping[int, OffloadedTensor],
    arena: DeviceArena[Destination],
    bases: Bases,
    store: HostStore[Destination],
) -> Program:
    """Bind a draft to the addresses of the model with this graph. Raises MemoryExceeded.

    `of_tensor` has its spilled tensors, by tensor id.
    """
    offloaded = tuple(of_tensor.values())
    statics: list[Any] = []
    for static in drafted.statics:
        if isinstance(static, StaticWeight):
            statics.append(weight_at(arena, bases.offset(static.address), static.piece))
        else:
            statics.append(static_value(static.template, _values(static.statics, statics)))
    # Offloaded tensors take results after the op, before its getitem calls free them, and end their uses last.
    adopting, finishing = _adopting(offloaded), _finishing(offloaded)

    def bound(calls: Sequence[DraftCall]) -> tuple[Call, ...]:
        return tuple(bind_with_store(c.template, _values(c.statics, statics), c.frees, store) for c in calls)

    def compute(n: int, step: ComputeStep[DraftCall]) -> ComputeStep[Call]:
        calls = bound(step.calls)
        op = len(calls) - step.unpacking
        return step.with_calls((*calls[:op], *adopting.get(n, ()), *calls[op:], *finishing.get(n, ())))

    def swap(step: SwapStep) -> SwapStep:
        tensor = of_tensor.get(step.tensor)
        if tensor is not None:
            return replace(step, copy=tensor.restore if step.lane == "swap_in" else tensor.save, offloaded=tensor)
        assert step.address is not None
        offset = bases.offset(step.address)
        return replace(step, offset=offset, copy=store.copy(step.tensor, arena.bytes(offset, step.nbytes)))

    return Program(
        name=graph.name,
        graph=graph,
        draft=drafted,
        computes=tuple(compute(n, step) for n, step in enumerate(drafted.computes)),
        swap_ins=tuple(map(swap, drafted.swap_ins)),
        swap_outs=tuple(map(swap, drafted.swap_outs)),
        offloaded=offloaded,
        residents=tuple(map(swap, drafted.residents)),
        final_calls=bound(drafted.final_calls),
        constants=_values(drafted.constants, statics),
        epilogue=drafted.epilogue,
    )


def _require_served(graph: Graph, plan: Plan) -> None:
    """Raise UnsupportedPlan unless parameters have addresses and each op runs once, as in every plan that is served."""
    way_out = "plan it for a partition and a workspace, not for a single budget"
    pooled = [graph.tensors[t].name for t in sorted(plan.pooled) if graph.tensors[t].is_weight]
    if pooled:
        raise UnsupportedPlan(f"{graph.name}: the plan has no address for {pooled[0]}; {way_out}")
    count = Counter(step.op for step in plan.steps if isinstance(step, Compute))
    repeated = [graph.ops[op].name for op in sorted(count) if count[op] > 1]
    if repeated:
        raise UnsupportedPlan(f"{graph.name}: the plan computes {repeated[0]} more than once; {way_out}")


def _offloaded(drafted: Draft, store: HostStore[Destination]) -> dict[int, OffloadedTensor]:
    """Return the offloaded tensors by tensor id, with their buffers."""
    if not drafted.spills:
        return {}
    buffers = store.spill_buffers([s.nbytes for s in drafted.spills])
    spilled = zip(drafted.spills, buffers, strict=True)
    return {spill.tensor: OffloadedTensor(spill, buffer) for spill, buffer in spilled}


def _values(static_slots: Statics, statics: Sequence[Any]) -> dict[int, Any]:
    return {slot: statics[index] for slot, index in static_slots}


def _adopting(offloaded: Sequence[OffloadedTensor]) -> dict[int, list[Call]]:
    """Return, per compute step, the calls with which offloaded tensors take the storages of its results."""
    calls: dict[int, list[Call]] = defaultdict(list)
    for tensor in offloaded:
        maker = tensor.spill.intervals[0].maker
        if maker is not None:
            calls[maker].append(tensor.adopt)
    return calls


def _finishing(offloaded: Sequence[OffloadedTensor]) -> dict[int, list[Call]]:
    """Return, per compute step, the calls after it that end its use of offloaded tensors."""
    calls: dict[int, list[Call]] = defaultdict(list)
    for tensor in offloaded:
        for interval in tensor.spill.intervals:
            if interval.last_use >= 0:
                calls[interval.last_use].append(tensor.finish_use if interval.frees_storage else tensor.forget)
    return calls
