"""A model whose parameters move within the shared region: drafted once, given addresses for every run.

Its calls read parameters (and views of them) from the frame. The frame gets a parameter's current value right before
the step that first reads it, and again after it has moved.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from cohabit.planner.plan import Plan, SwapIn, SwapOut
from cohabit.planner.profile import Profile
from cohabit.runtime.binding.build import draft
from cohabit.runtime.binding.calls import Call, bind_with_store
from cohabit.runtime.binding.draft import ComputeStep, DraftCalls, SwapStep
from cohabit.runtime.binding.program import Program
from cohabit.runtime.binding.statics import StaticValues
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
        if any(isinstance(step, SwapIn | SwapOut) for step in plan.steps):
            raise UnsupportedPlan(f"{lowered.name}: only a program whose plan keeps every parameter can move")
        drafted = draft(lowered, plan, profile, arena.device)
        graph = lowered.graphs[drafted.graph.bucket]
        self._values = StaticValues(drafted.statics, arena)
        self._arena = arena
        self._store = store
        # Static slots by step; those of the final calls come with the last step.
        self._statics = [_statics(calls) for calls in drafted.calls] or [set()]
        self._statics[-1] |= _statics(drafted.final_calls)
        # Compute steps have odd numbers, and the copies between them even ones.
        steps = zip(drafted.computes, drafted.calls, strict=True)
        self.unplaced = Program(
            name=lowered.name,
            graph=graph,
            draft=drafted,
            computes=tuple(
                ComputeStep(2 * n + 1, c.op, 0, calls=self._bound(calls)) for n, (c, calls) in enumerate(steps)
            ),
            swap_ins=(),
            swap_outs=(),
            offloaded=(),
            residents=(),
            contents=(),
            final_calls=self._bound(drafted.final_calls),
            constants={},
            epilogue=0,
        )
        ops = [graph.ops[c.op].reads for c in drafted.computes] or [()]
        ops[-1] = (*ops[-1], *graph.outputs)
        kinds = [t.kind for t in graph.tensors]
        by_step = tuple(tuple(dict.fromkeys(t for t in op if kinds[t] == "parameter")) for op in ops)
        used = sorted({t for step in by_step for t in step})
        self.uses = ParameterUses(lowered.name, {t: lowered.manifest.segments[t].nbytes for t in used}, by_step)

    def placed(self, fetch_plan: FetchPlan, *, blocking: bool, lasting: bool) -> Program:
        """Return the program for a run. With `blocking`, loading it makes all copies, and running it makes none.

        `lasting`: more runs with the same addresses will follow, so that preparation pays.
        """
        return replace(self.unplaced, **self._changes(fetch_plan, blocking))

    def _changes(self, fetch_plan: FetchPlan, blocking: bool) -> dict[str, Any]:
        """Return the fields of `Program` that differ between runs."""
        addresses = dict(fetch_plan.present)
        coming: dict[int, dict[int, int]] = defaultdict(dict)
        for fetch in fetch_plan.fetches:
            coming[fetch.needed_by][fetch.segment] = fetch.offset
        updates: list[tuple[Call, ...]] = []
        current: dict[int, Any] = {}
        fetched = [0]
        for index, slots in enumerate(self._statics):
            addresses |= coming[index]
            fetched.append(fetched[-1] + len(coming[index]))
            values = {slot: self._values.at(slot, addresses) for slot in slots}
            new = {slot: value for slot, value in values.items() if current.get(slot) is not value}
            current |= new
            updates.append((_updating(new),) if new else ())
        computes = tuple(
            ComputeStep(step.step, step.op, 0 if blocking else count, calls=(*update, *step.calls))
            for step, update, count in zip(self.unplaced.computes, updates, fetched[1:], strict=False)
        )
        swap_ins = () if blocking else self._fetches(fetch_plan)
        return {
            "computes": computes,
            "final_calls": (*(() if computes else updates[0]), *self.unplaced.final_calls),
            "swap_ins": swap_ins,
            "epilogue": len(swap_ins),
            "residents": tuple(self._copy(-1, s, at, 0) for s, at in sorted(addresses.items())) if blocking else (),
            "constants": {slot: self._values.at(slot, addresses) for slot in self.unplaced.draft.constants},
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

    def _bound(self, part: DraftCalls) -> tuple[Call, ...]:
        return tuple(bind_with_store(c.template, {}, c.frees, self._store) for c in part.calls)


def _statics(part: DraftCalls) -> set[int]:
    return {slot for call in part.calls for slot in call.statics}


def _updating(values: Mapping[int, Any]) -> Call:
    pairs = tuple(values.items())

    def update(frame: Frame) -> None:
        for slot, value in pairs:
            frame[slot] = value

    return update
