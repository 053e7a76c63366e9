"""Builds programs from plans: checks a plan, drafts it, and binds the draft to addresses."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cohabit.planner.check import check
from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.runtime.binding.calls import Call, bind_with_store, static_value, weight_at
from cohabit.runtime.binding.draft import ComputeStep, Draft, DraftCall, Drafter, Statics, StaticWeight, SwapStep
from cohabit.runtime.binding.offloaded import OffloadedTensor, ParameterSource
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.errors import UnsupportedPlan
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.memory import Destination, DeviceArena, HostStore


def draft(lowered: Lowered, plan: Plan, profile: Profile | None, device: torch.device) -> Draft:
    """Check a plan and draft it. Raises InvalidPlan, FingerprintMismatch or UnsupportedPlan."""
    buckets = {graph.fingerprint: bucket for bucket, graph in lowered.graphs.items()}
    bucket = buckets.get(plan.graph, lowered.buckets[0])
    graph = lowered.graphs[bucket]
    check(graph, profile, plan)
    _require_unpacked(lowered, plan)
    return Drafter(graph, lowered.traces[bucket], lowered.manifest, plan, device).draft(profile)


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
    return bind(drafted, _offloaded(drafted, arena, store), arena, bases, store)


def bind(
    drafted: Draft,
    of_tensor: Mapping[int, OffloadedTensor],
    arena: DeviceArena[Destination],
    bases: Bases,
    store: HostStore[Destination],
) -> Program:
    """Bind a draft to addresses. `of_tensor` has its spilled tensors, by tensor id. Raises MemoryExceeded."""
    offloaded = tuple(of_tensor.values())
    of_storage = {tensor.storage_key: tensor for tensor in offloaded if tensor.spill.is_weight}
    statics: list[Any] = []
    for static in drafted.statics:
        # A view needs its storage at full size: pooled weights get theirs while it is created.
        if not isinstance(static, StaticWeight):
            values = _values(static.statics, statics)
            with ExitStack() as sized:
                for key in {v.untyped_storage()._cdata for v in values.values() if isinstance(v, torch.Tensor)}:
                    if key in of_storage:
                        sized.enter_context(of_storage[key].sized())
                statics.append(static_value(static.template, values))
        elif static.address is None:
            statics.append(of_tensor[static.segment].view(static.piece))
        else:
            statics.append(weight_at(arena, bases.offset(static.address), static.piece))
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
        name=drafted.graph.name,
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


def _require_unpacked(lowered: Lowered, plan: Plan) -> None:
    """Raise UnsupportedPlan for packed parameters without an address: a kernel's layout is made for one address."""
    pooled = (segment for t, segment in enumerate(lowered.manifest.segments) if t in plan.pooled)
    packed = [piece.name for segment in pooled for piece in segment.pieces if piece.layout is not None]
    if packed:
        raise UnsupportedPlan(
            f"{lowered.name}: the plan has no address for weights such as {packed[0]}, which are packed; lower the"
            " model without packed weights"
        )


def _offloaded(
    drafted: Draft, arena: DeviceArena[Destination], store: HostStore[Destination]
) -> dict[int, OffloadedTensor]:
    """Return the offloaded tensors, with the buffers or store bytes that they are filled from."""
    spilled = [s for s in drafted.spills if not s.is_weight]
    buffers = iter(store.spill_buffers([s.nbytes for s in spilled]) if spilled else [])
    return {
        s.tensor: OffloadedTensor(
            s, ParameterSource(store, s.tensor, arena) if s.is_weight else next(buffers), arena.device
        )
        for s in drafted.spills
    }


def _values(static_slots: Statics, statics: Sequence[Any]) -> dict[int, Any]:
    return {slot: statics[index] for slot, index in static_slots}


def _adopting(offloaded: Sequence[OffloadedTensor]) -> dict[int, list[Call]]:
    """Return, per compute step, the calls with which offloaded tensors take the storages of its results."""
    calls: dict[int, list[Call]] = defaultdict(list)
    for tensor in offloaded:
        for n, interval in enumerate(tensor.spill.intervals):
            if interval.maker is not None:
                calls[interval.maker].append(partial(tensor.adopt, n))
    return calls


def _finishing(offloaded: Sequence[OffloadedTensor]) -> dict[int, list[Call]]:
    """Return, per compute step, the calls after it that end its use of offloaded tensors."""
    calls: dict[int, list[Call]] = defaultdict(list)
    for tensor in offloaded:
        for interval in tensor.spill.intervals:
            if interval.last_use >= 0:
                calls[interval.last_use].append(tensor.finish_use if interval.frees_storage else tensor.forget)
    return calls
