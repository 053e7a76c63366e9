"""Builds programs from plans: checks a plan, drafts it, and binds the draft to addresses."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import count
from weakref import WeakValueDictionary

import torch

from cohabit.planner.check import check
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Compute, Plan
from cohabit.planner.profile import Profile
from cohabit.runtime.binding.calls import Call, bind_with_store
from cohabit.runtime.binding.draft import ComputeStep, Draft, DraftCalls, Drafter, SwapStep
from cohabit.runtime.binding.offloaded import OffloadedTensor
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.binding.statics import StaticValues
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
    graph, of_tensor = lowered.graphs[drafted.graph.bucket], _offloaded(drafted, store)
    offloaded = tuple(of_tensor.values())
    values = StaticValues(drafted.statics, arena)
    # Offloaded tensors take results after the op, before its getitem calls free them, and end their uses last.
    adopting: dict[int, list[Call]] = defaultdict(list)
    finishing: dict[int, list[Call]] = defaultdict(list)
    for own in offloaded:
        adopting[own.spill.maker].append(own.adopt)
        for interval in own.spill.intervals:
            if interval.last_use >= 0:
                finishing[interval.last_use].append(own.finish_use if interval.frees_storage else own.forget)

    def offsets(part: DraftCalls) -> dict[int, int]:
        return {segment: bases.offset(address) for segment, address in part.addresses.items()}

    def bound(part: DraftCalls) -> list[Call]:
        at = offsets(part)
        return [
            bind_with_store(c.template, {slot: values.at(slot, at) for slot in c.statics}, c.frees, store)
            for c in part.calls
        ]

    def compute(n: int, step: ComputeStep, part: DraftCalls) -> ComputeStep:
        calls, op = bound(part), len(part.calls) - part.unpacking
        return replace(step, calls=(*calls[:op], *adopting[n], *calls[op:], *finishing[n]))

    def swap(step: SwapStep) -> SwapStep:
        tensor = of_tensor.get(step.tensor)
        if tensor is not None:
            return replace(step, copy=tensor.restore if step.lane == "swap_in" else tensor.save, offloaded=tensor)
        assert step.address is not None
        offset = bases.offset(step.address)
        return replace(step, offset=offset, copy=store.copy(step.tensor, arena.bytes(offset, step.nbytes)))

    at_end = offsets(drafted.final_calls)
    return Program(
        name=graph.name,
        graph=graph,
        draft=drafted,
        computes=tuple(map(compute, count(), drafted.computes, drafted.calls)),
        swap_ins=tuple(map(swap, drafted.swap_ins)),
        swap_outs=tuple(map(swap, drafted.swap_outs)),
        offloaded=offloaded,
        residents=tuple(map(swap, drafted.residents)),
        contents=tuple(store.source(step.tensor) for step in drafted.residents),
        final_calls=tuple(bound(drafted.final_calls)),
        constants={slot: values.at(slot, at_end) for slot in drafted.constants},
        epilogue=drafted.epilogue,
    )


def _require_served(graph: Graph, plan: Plan) -> None:
    """Raise UnsupportedPlan unless parameters have addresses and each op runs once, as in every plan that is served."""
    way_out = "plan it for a partition and a workspace, not for a single budget"
    pooled = [graph.tensors[t].name for t in sorted(plan.pooled) if graph.tensors[t].is_weight]
    if pooled:
        raise UnsupportedPlan(f"{graph.name}: the plan has no address for {pooled[0]}; {way_out}")
    times = Counter(step.op for step in plan.steps if isinstance(step, Compute))
    repeated = [graph.ops[op].name for op in sorted(times) if times[op] > 1]
    if repeated:
        raise UnsupportedPlan(f"{graph.name}: the plan computes {repeated[0]} more than once; {way_out}")


def _offloaded(drafted: Draft, store: HostStore[Destination]) -> dict[int, OffloadedTensor]:
    """Return the offloaded tensors by tensor id, with their buffers."""
    if not drafted.spills:
        return {}
    buffers = store.spill_buffers([s.nbytes for s in drafted.spills])
    spilled = zip(drafted.spills, buffers, strict=True)
    return {spill.tensor: OffloadedTensor(spill, buffer) for spill, buffer in spilled}
