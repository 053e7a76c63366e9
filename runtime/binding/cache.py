"""Builds programs from plans, and keeps what the next build of the same model can use again."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from planner.check import check
from planner.graph import Graph
from planner.lifetimes import live_ranges
from planner.plan import Compute, Plan, Region
from planner.profile import Profile
from planner.shapes import Bucket
from runtime.binding.calls import Call, bind_call, bind_with_store, static_value, weight_at
from runtime.binding.draft import Draft, DraftCall, Drafter, Statics, StaticWeight, SwapStep
from runtime.binding.program import Bases, Program
from runtime.errors import UnsupportedPlan
from runtime.lowering.lower import Lowered
from runtime.memory import Destination, DeviceArena, HostStore
from runtime.offload.activation import OffloadedActivation

ByteRange = tuple[Region, int, int]
"""Region, first byte, and the first byte after it."""


@dataclass(slots=True)
class _BoundCalls:
    """A draft's calls at one place of one arena. Calls that read a table of the store are None."""

    draft: Draft
    arena: object
    bases: Bases
    statics: list[Any]
    computes: tuple[tuple[Call | None, ...], ...]
    final_calls: tuple[Call | None, ...]


class ProgramCache:
    """The newest draft and bound calls of each model and bucket, for as long as the lowered model is in use.

    A plan that was the last to be built for its bucket is not checked and drafted again; at the same addresses only
    its copies are new. Builds of different models may run in different threads.
    """

    def __init__(self) -> None:
        self._drafts: WeakKeyDictionary[Lowered, dict[Bucket, Draft]] = WeakKeyDictionary()
        self._bound: WeakKeyDictionary[Lowered, dict[Bucket, _BoundCalls]] = WeakKeyDictionary()

    def draft(self, lowered: Lowered, plan: Plan, profile: Profile | None, device: torch.device) -> Draft:
        """Check a plan and draft it. Raises InvalidPlan, FingerprintMismatch or UnsupportedPlan."""
        buckets = {graph.fingerprint: bucket for bucket, graph in lowered.graphs.items()}
        bucket = buckets.get(plan.graph, lowered.buckets[0])
        drafts = self._drafts.setdefault(lowered, {})
        known = drafts.get(bucket)
        if known is not None and known.plan is plan and known.profile is profile and known.device == device:
            return known
        graph = lowered.graphs[bucket]
        check(graph, profile, plan)
        require_supported(graph, plan)
        drafts[bucket] = Drafter(graph, lowered.traces[bucket], lowered.manifest, plan, device).draft(profile)
        return drafts[bucket]

    def build(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: DeviceArena[Destination],
        bases: Bases,
        store: HostStore[Destination],
    ) -> Program:
        """Check a plan and bind it. Raises what `draft` raises, and MemoryExceeded."""
        drafted = self.draft(lowered, plan, profile, arena.device)
        bound = self._bound.setdefault(lowered, {})
        known = bound.get(drafted.graph.bucket)
        if known is None or known.draft is not drafted or known.arena is not arena or known.bases != bases:
            known = bound[drafted.graph.bucket] = _bind_calls(drafted, arena, bases)
        return _program(known, arena, bases, store)


def require_supported(graph: Graph, plan: Plan) -> None:
    """Refuse unsupported plans: torch's allocator places activations, and each op is computed once."""
    computes = [s for s in plan.steps if isinstance(s, Compute)]
    if len({s.op for s in computes}) < len(computes):
        raise UnsupportedPlan(f"{graph.name}: the plan computes an op again, which this runtime does not do")
    parameters, activations = byte_ranges(graph, plan)
    ranges = [*((*r, True) for r in activations), *((*r, False) for r in parameters)]
    ends: dict[tuple[str, bool], int] = {}  # furthest end so far of a region's activations, and of its parameters
    for region, start, end, is_activation in sorted(ranges):
        if ends.get((region, not is_activation), 0) > start:
            raise UnsupportedPlan(
                f"{graph.name}: the plan lets parameters pass through bytes of activations ({region}+{start});"
                " activations come from an allocator of their own, so plan with a workspace and without overlay"
            )
        ends[region, is_activation] = max(end, ends.get((region, is_activation), 0))


def byte_ranges(graph: Graph, plan: Plan) -> tuple[list[ByteRange], list[ByteRange]]:
    """Return the bytes of all parameters of a checked plan, and those of all else: inputs, activations and scratch."""
    found: tuple[list[ByteRange], list[ByteRange]] = ([], [])
    for live in live_ranges(graph, plan):
        is_parameter = live.tensor is not None and graph.tensors[live.tensor].kind == "parameter"
        if live.nbytes:
            start = live.address.offset
            found[0 if is_parameter else 1].append((live.address.region, start, start + live.nbytes))
    return found


def _bind_calls(drafted: Draft, arena: DeviceArena[Any], bases: Bases) -> _BoundCalls:
    statics: list[Any] = []
    for static in drafted.statics:
        if isinstance(static, StaticWeight):
            statics.append(weight_at(arena, bases.offset(static.segment), static.piece))
        else:
            statics.append(static_value(static.template, _values(static.statics, statics)))

    def bound(calls: Sequence[DraftCall]) -> tuple[Call | None, ...]:
        return tuple(
            bind_call(c.template, _values(c.statics, statics), c.frees) if c.template.table is None else None
            for c in calls
        )

    computes = tuple(bound(c.calls) for c in drafted.computes)
    return _BoundCalls(drafted, arena, bases, statics, computes, bound(drafted.final_calls))


def _values(static_slots: Statics, statics: Sequence[Any]) -> dict[int, Any]:
    return {slot: statics[index] for slot, index in static_slots}


def _program(
    bound: _BoundCalls, arena: DeviceArena[Destination], bases: Bases, store: HostStore[Destination]
) -> Program:
    drafted = bound.draft
    buffers = store.spill_buffers([s.nbytes for s in drafted.spills]) if drafted.spills else []
    offloaded = tuple(OffloadedActivation(s, b) for s, b in zip(drafted.spills, buffers, strict=True))
    of_tensor = {a.spill.tensor: a for a in offloaded}
    after = _calls_after(offloaded)

    def with_tables(drafts: Sequence[DraftCall], calls: Sequence[Call | None]) -> tuple[Call, ...]:
        return tuple(
            bind_with_store(d.template, _values(d.statics, bound.statics), d.frees, store) if call is None else call
            for d, call in zip(drafts, calls, strict=True)
        )

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
        statics=bound.statics,
        computes=tuple(
            c.with_calls((*with_tables(c.calls, calls), *after.get(n, ())))
            for n, (c, calls) in enumerate(zip(drafted.computes, bound.computes, strict=True))
        ),
        swap_ins=tuple(map(swap, drafted.swap_ins)),
        swap_outs=tuple(map(swap, drafted.swap_outs)),
        offloaded=offloaded,
        residents=tuple(map(swap, drafted.residents)),
        final_calls=with_tables(drafted.final_calls, bound.final_calls),
        constants=_values(drafted.constants, bound.statics),
        epilogue=drafted.epilogue,
    )


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
