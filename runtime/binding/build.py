"""Builds programs from plans: a plan is checked, drafted, and bound to addresses."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from cohabit.planner.check import check
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Compute, Plan
from cohabit.planner.profile import Profile
from cohabit.runtime.binding.calls import Call, bind_with_store, static_value, weight_at
from cohabit.runtime.binding.draft import Draft, DraftCall, Drafter, Statics, StaticWeight, SwapStep
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.errors import UnsupportedPlan
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.memory import Destination, DeviceArena, HostStore
from cohabit.runtime.offload.activation import OffloadedActivation


def draft(lowered: Lowered, plan: Plan, profile: Profile | None, device: torch.device) -> Draft:
    """Check a plan and draft it. Raises InvalidPlan, FingerprintMismatch or UnsupportedPlan."""
    buckets = {graph.fingerprint: bucket for bucket, graph in lowered.graphs.items()}
    bucket = buckets.get(plan.graph, lowered.buckets[0])
    graph = lowered.graphs[bucket]
    check(graph, profile, plan)
    require_supported(graph, plan)
    return Drafter(graph, lowered.traces[bucket], lowered.manifest, plan, device).draft(profile)


def build(
    lowered: Lowered,
    plan: Plan,
    profile: Profile | None,
    arena: DeviceArena[Destination],
    bases: Bases,
    store: HostStore[Destination],
) -> Program:
    """Check a plan and bind it. Raises what `draft` raises, and MemoryExceeded."""
    drafted = draft(lowered, plan, profile, arena.device)
    statics: list[Any] = []
    for static in drafted.statics:
        if isinstance(static, StaticWeight):
            statics.append(weight_at(arena, bases.offset(static.segment), static.piece))
        else:
            statics.append(static_value(static.template, _values(static.statics, statics)))
    buffers = store.spill_buffers([s.nbytes for s in drafted.spills]) if drafted.spills else []
    offloaded = tuple(OffloadedActivation(s, b) for s, b in zip(drafted.spills, buffers, strict=True))
    of_tensor = {a.spill.tensor: a for a in offloaded}
    after = _calls_after(offloaded)

    def bound(calls: Sequence[DraftCall]) -> tuple[Call, ...]:
        return tuple(bind_with_store(c.template, _values(c.statics, statics), c.frees, store) for c in calls)

    def swap(step: SwapStep) -> SwapStep:
        activation = of_tensor.get(step.tensor)
        if activation is not None:
            copy = activation.restore if step.lane == "swap_in" else activation.save
            return replace(step, copy=copy, activation=activation)
        assert step.address is not None
        offset = bases.offset(step.address)
        return replace(step, offset=offset, copy=store.copy(step.tensor, arena.bytes(offset, step.nbytes)))

    return Program(
        name=drafted.graph.name,
        draft=drafted,
        computes=tuple(c.with_calls((*bound(c.calls), *after.get(n, ()))) for n, c in enumerate(drafted.computes)),
        swap_ins=tuple(map(swap, drafted.swap_ins)),
        swap_outs=tuple(map(swap, drafted.swap_outs)),
        offloaded=offloaded,
        residents=tuple(map(swap, drafted.residents)),
        final_calls=bound(drafted.final_calls),
        constants=_values(drafted.constants, statics),
        epilogue=drafted.epilogue,
    )


def require_supported(graph: Graph, plan: Plan) -> None:
    """Refuse unsupported plans: each op is computed once, and parameters have addresses."""
    computes = [s for s in plan.steps if isinstance(s, Compute)]
    if len({s.op for s in computes}) < len(computes):
        raise UnsupportedPlan(f"{graph.name}: the plan computes an op again, which this runtime does not do")
    if plan.memory.counted:
        raise UnsupportedPlan(f"{graph.name}: the plan has one budget for everything; plan with a partition")


def _values(static_slots: Statics, statics: Sequence[Any]) -> dict[int, Any]:
    return {slot: statics[index] for slot, index in static_slots}


def _calls_after(offloaded: Sequence[OffloadedActivation]) -> dict[int, list[Call]]:
    """Return what is done with spilled activations after each compute step."""
    after: dict[int, list[Call]] = defaultdict(list)
    for activation in offloaded:
        after[activation.spill.maker].append(activation.begin)
    for activation in offloaded:
        for interval in activation.spill.intervals:
            call = activation.forget if interval.is_last else activation.release
            after[interval.last_use].append(call)
    return after
