"""A model whose parameters move within the shared region: drafted once, given addresses for every run.

Its calls read parameters (and views of them) from the frame. The frame gets a parameter's current value right before
the step that first reads it, and again after it has moved.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cohabit.planner.plan import Compute, Plan, SwapIn, SwapOut
from cohabit.planner.profile import Profile
from cohabit.runtime.binding.build import draft
from cohabit.runtime.binding.calls import Call, bind_with_store, static_value, weight_at
from cohabit.runtime.binding.draft import ComputeStep, Draft, DraftCall, StaticWeight, SwapStep
from cohabit.runtime.binding.program import Program
from cohabit.runtime.errors import UnsupportedPlan
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.memory import DeviceArena, HostStore
from cohabit.runtime.shared_region.region import FetchPlan, ParameterUses


class RelocatableModel:
    """One model in one bucket. `unplaced` is the program without addresses, which cannot be run itself."""

    is_admitted: ClassVar[bool] = False
    """Whether programs allocate device resources at their first load, which must precede requests."""

    def __init__(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: DeviceArena[Any],
        store: HostStore[Any],
    ) -> None:
        """Check a plan that keeps every parameter, and draft it. Raises the errors of `runtime.binding.build`."""
        _require_relocatable(lowered.name, plan)
        drafted = draft(lowered, plan, profile, arena.device)
        graph = lowered.graphs[drafted.graph.bucket]
        self._values = _StaticsAt(drafted, arena)
        self._arena = arena
        self._store = store
        self._statics = [_statics(c.calls) for c in drafted.computes] or [{}]
        self._statics[-1] |= _statics(drafted.final_calls)
        self._constants = dict(drafted.constants)
        self.unplaced = Program(
            name=lowered.name,
            graph=graph,
            draft=drafted,
            computes=tuple(ComputeStep(c.step, self._bound(c.calls), 0) for c in drafted.computes),
            swap_ins=(),
            swap_outs=(),
            offloaded=(),
            residents=(),
            final_calls=self._bound(drafted.final_calls),
            constants={},
            epilogue=0,
        )
        kinds = [t.kind for t in graph.tensors]
        ops = [graph.ops[s.op].reads for s in plan.steps if isinstance(s, Compute)] or [()]
        ops[-1] = (*ops[-1], *graph.outputs)
        steps = tuple(tuple(dict.fromkeys(t for t in op if kinds[t] == "parameter")) for op in ops)
        used = sorted({t for step in steps for t in step})
        self.uses = ParameterUses(lowered.name, {t: lowered.manifest.segments[t].nbytes for t in used}, steps)

    def placed(self, fetch_plan: FetchPlan, *, blocking: bool, lasting: bool) -> Program:
        """Return the program for a run. With `blocking`, loading it makes all copies, and running it makes none.

        `lasting`: more runs with the same addresses will follow, so that preparation pays.
        """
        return replace(self.unplaced, **self._changes(fetch_plan, blocking))

    def _changes(self, fetch_plan: FetchPlan, blocking: bool) -> dict[str, Any]:
        """Return the fields of `Program` that differ between runs."""
        addresses = dict(fetch_plan.present)
        coming: dict[int, list[tuple[int, int]]] = {}
        for fetch in fetch_plan.fetches:
            coming.setdefault(fetch.needed_by, []).append((fetch.segment, fetch.offset))
        computes: list[ComputeStep[Call]] = []
        current: dict[int, Any] = {}
        fetched = 0
        for index, statics in enumerate(self._statics):
            addresses.update(coming.get(index, ()))
            fetched += len(coming.get(index, ()))
            new = {}
            for slot, static_index in statics.items():
                value = self._values.at(static_index, addresses)
                if current.get(slot) is not value:
                    new[slot] = current[slot] = value
            if index < len(self.unplaced.computes):
                step = self.unplaced.computes[index]
                own = (_updating(new), *step.calls) if new else step.calls
                computes.append(ComputeStep(2 * index + 1, own, 0 if blocking else fetched))
        final_calls = self.unplaced.final_calls if computes else (_updating(current), *self.unplaced.final_calls)
        swap_ins = () if blocking else self._fetches(fetch_plan)
        residents = tuple(self._copy(-1, s, at, 0) for s, at in sorted(addresses.items())) if blocking else ()
        return {
            "computes": tuple(computes),
            "final_calls": final_calls,
            "swap_ins": swap_ins,
            "epilogue": len(swap_ins),
            "residents": residents,
            "constants": {slot: self._values.at(static, addresses) for slot, static in self._constants.items()},
        }

    def _fetches(self, fetch_plan: FetchPlan) -> tuple[SwapStep, ...]:
        """Return copies in order of need, each numbered right after the compute step that it waits for."""
        steps: list[SwapStep] = []
        latest = 0
        for fetch in fetch_plan.fetches:
            latest = max(latest, fetch.computes_before)
            steps.append(self._copy(2 * latest, fetch.segment, fetch.offset, fetch.computes_before))
        return tuple(steps)

    def _copy(self, step: int, segment: int, offset: int, computes_before: int) -> SwapStep:
        nbytes = self.uses.nbytes[segment]
        copy = self._store.copy(segment, self._arena.bytes(offset, nbytes))
        return SwapStep("swap_in", step, segment, nbytes, computes_before, offset=offset, copy=copy)

    def _bound(self, calls: tuple[DraftCall, ...]) -> tuple[Call, ...]:
        return tuple(bind_with_store(c.template, {}, c.frees, self._store) for c in calls)


class _StaticsAt:
    """Tensors of a draft's statics at their segments' current addresses. Caches the last value of each."""

    def __init__(self, draft: Draft, arena: DeviceArena[Any]) -> None:
        self._statics = draft.statics
        self._arena = arena
        self._segments: list[tuple[int, ...]] = []
        for static in self._statics:
            if isinstance(static, StaticWeight):
                self._segments.append((static.segment,))
            else:
                used = {s for _, index in static.statics for s in self._segments[index]}
                self._segments.append(tuple(sorted(used)))
        self._last: list[tuple[tuple[int, ...], Any] | None] = [None] * len(self._statics)

    def at(self, index: int, addresses: Mapping[int, int]) -> Any:
        """Return a static's value, given the offset of each segment in the arena."""
        key = tuple(addresses[s] for s in self._segments[index])
        last = self._last[index]
        if last is not None and last[0] == key:
            return last[1]
        static = self._statics[index]
        if isinstance(static, StaticWeight):
            value: Any = weight_at(self._arena, key[0], static.piece)
        else:
            value = static_value(static.template, {slot: self.at(i, addresses) for slot, i in static.statics})
        self._last[index] = (key, value)
        return value


def _require_relocatable(name: str, plan: Plan) -> None:
    if any(isinstance(step, SwapIn | SwapOut) for step in plan.steps):
        raise UnsupportedPlan(f"{name}: only a program whose plan keeps every parameter can move")


def _statics(calls: tuple[DraftCall, ...]) -> dict[int, int]:
    return {slot: index for call in calls for slot, index in call.statics}


def _updating(values: Mapping[int, Any]) -> Call:
    pairs = tuple(values.items())

    def update(frame: Frame) -> None:
        for slot, value in pairs:
            frame[slot] = value

    return update
