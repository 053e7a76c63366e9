"""A program whose parameters lie wherever there is room: drafted and bound once, given their places at every visit.

Its calls take parameters (and views of them) from the frame. Right before the step that first reads one, and again
where it has moved since, the frame is told where it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from planner.plan import Compute, Plan, SwapIn, SwapOut
from planner.profile import Profile
from runtime.binding.blueprint import Blueprint, CallDraft, View, Weight
from runtime.binding.calls import Call, apply, bind
from runtime.binding.program import ComputeStep, Program, SwapInStep, blueprint_of, joined
from runtime.binding.slots import Frame
from runtime.cpu.scripted import Script, bind_script, compiled
from runtime.cpu.stretches import between, stretches
from runtime.errors import UnsupportedPlan
from runtime.lowering.lower import Lowered
from runtime.lowering.weights import Manifest, dtype_of
from runtime.memory import Memory, Source
from runtime.shared_region.region import Uses, Visit


class Movable:
    """One model at one batch size. `home` is the program without any place: it cannot be run as it is."""

    is_admitted: ClassVar[bool] = False
    """Whether programs get something of the device when they are first loaded, which should be before requests come."""

    def __init__(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: Memory[Any],
        store: Source[Any],
        *,
        scripted: bool = False,
    ) -> None:
        """Check a plan that keeps every parameter, and bind it. Raises what `runtime.binding.program.build` raises.

        With `scripted`, stretches of its calls are compiled: those of a visit for which nothing comes while it runs,
        and those of all others, which end wherever a parameter may be waited for.
        """
        _require_movable(lowered.name, plan)
        blueprint = blueprint_of(lowered, plan, profile, arena.device)
        trace = blueprint.trace
        graph = lowered.graphs[trace.batch]
        self._values = _Values(blueprint, lowered.manifest, arena)
        self._arena = arena
        self._store = store
        calls = [c.calls for c in blueprint.computes]
        self._statics = [_statics(step) for step in calls] or [{}]
        self._statics[-1] |= _statics(blueprint.final_calls)
        self._constants = dict(blueprint.constants)
        self.home = Program(
            name=lowered.name,
            batch=trace.batch,
            plan=plan,
            graph=graph,
            frame_slots=trace.slots,
            computes=tuple(ComputeStep(c.step, self._bound(c.calls), 0, ()) for c in blueprint.computes),
            swap_ins=(),
            swap_outs=(),
            travellers=(),
            prefix=0,
            own_prefix=0,
            epilogue=0,
            final_calls=self._bound(blueprint.final_calls),
            residents=(),
            restored={},
            input_slots=trace.input_slots,
            output_slots=trace.output_slots,
            constants={},
            link_bytes=0,
            workspace=0,
            stays=blueprint.stays,
        )
        kinds = [t.kind for t in graph.tensors]
        ops = [graph.ops[s.op].reads for s in plan.steps if isinstance(s, Compute)] or [()]
        ops[-1] = (*ops[-1], *graph.outputs)
        steps = tuple(tuple(dict.fromkeys(t for t in op if kinds[t] == "parameter")) for op in ops)
        used = sorted({t for step in steps for t in step})
        self.uses = Uses(lowered.name, {t: lowered.manifest.segments[t].nbytes for t in used}, steps)
        self._whole: tuple[Script, ...] = ()
        self._by_layer: tuple[Script, ...] = ()
        if scripted:
            reading = [n for n, step in enumerate(steps) if step or self._statics[n]]
            self._whole = compiled(lowered.name, blueprint, stretches(blueprint)).scripts
            self._by_layer = compiled(lowered.name, blueprint, between(reading, len(blueprint.computes))).scripts

    def placed(self, visit: Visit, *, blocking: bool, lasting: bool) -> Program:
        """The program for a visit. With `blocking`, loading it brings everything and a run nothing.

        `lasting` says that visits like this one will come again, so that it pays to prepare much.
        """
        return replace(self.home, **self._changes(visit, blocking))

    def _changes(self, visit: Visit, blocking: bool) -> dict[str, Any]:
        """What differs between visits, by the names that `Program` has for it."""
        addresses = dict(visit.places)
        coming: dict[int, list[tuple[int, int]]] = {}
        for fetch in visit.fetches:
            coming.setdefault(fetch.needed_by, []).append((fetch.segment, fetch.offset))
        computes: list[ComputeStep] = []
        put: dict[int, Any] = {}
        puts: list[dict[int, Any]] = []
        # Where nothing has to come while it runs, no op waits.
        scripts = self._whole if blocking or not visit.fetches else self._by_layer
        beginning = {script.steps.start: script for script in scripts}
        calls: dict[int, Call] = {}
        at_its_place = partial(self._values.at, addresses=addresses)
        fetched = 0
        for index, statics in enumerate(self._statics):
            addresses.update(coming.get(index, ()))
            fetched += len(coming.get(index, ()))
            if index in beginning:
                calls[index] = bind_script(beginning[index], at_its_place, self._store.table)
            new = {}
            for slot, static in statics.items():
                value = self._values.at(static, addresses)
                if put.get(slot) is not value:
                    new[slot] = put[slot] = value
            puts.append(new)
            if index < len(self.home.computes):
                step = self.home.computes[index]
                own = (_putting(new), *step.calls) if new else step.calls
                computes.append(ComputeStep(2 * index + 1, own, 0 if blocking else fetched, ()))
        joins = [(s.steps, (_putting(_all(puts, s.steps)), calls[s.steps.start])) for s in scripts]
        final_calls = self.home.final_calls if computes else (_putting(put), *self.home.final_calls)
        swap_ins = () if blocking else self._fetches(visit)
        return {
            "computes": tuple(computes),
            "stretched": joined(computes, joins),
            "final_calls": final_calls,
            "swap_ins": swap_ins,
            "epilogue": len(swap_ins),
            "residents": tuple(self._copy(-1, s, at, 0) for s, at in sorted(addresses.items())) if blocking else (),
            "constants": {slot: self._values.at(static, addresses) for slot, static in self._constants.items()},
            "link_bytes": sum(step.nbytes for step in swap_ins),
        }

    def _fetches(self, visit: Visit) -> tuple[SwapInStep, ...]:
        """Copies in the order of need, numbered to stand right behind the step that they wait for."""
        steps: list[SwapInStep] = []
        behind = 0
        for fetch in visit.fetches:
            behind = max(behind, fetch.behind)
            steps.append(self._copy(2 * behind, fetch.segment, fetch.offset, fetch.behind))
        return tuple(steps)

    def _copy(self, step: int, segment: int, offset: int, behind: int) -> SwapInStep:
        nbytes = self.uses.nbytes[segment]
        copy = self._store.copy(segment, self._arena.bytes(offset, nbytes))
        return SwapInStep(step, segment, copy, nbytes, behind, offset)

    def _bound(self, calls: tuple[CallDraft, ...]) -> tuple[Call, ...]:
        return tuple(
            bind(c.form, {}, c.frees, None if c.form.table is None else self._store.table(c.form.table))
            for c in calls
        )


class _Values:
    """The tensors of a blueprint's statics, where their segments are now. The last value of each is kept."""

    def __init__(self, blueprint: Blueprint, manifest: Manifest, arena: Memory[Any]) -> None:
        self._statics = blueprint.statics
        self._arena = arena
        by_name = {p.name: n for n, segment in enumerate(manifest.segments) for p in segment.pieces}
        self._segments: list[tuple[int, ...]] = []
        for static in self._statics:
            if isinstance(static, Weight):
                self._segments.append((by_name[static.piece.name],))
            else:
                behind = {s for _, index in static.statics for s in self._segments[index]}
                self._segments.append(tuple(sorted(behind)))
        self._last: list[tuple[tuple[int, ...], Any] | None] = [None] * len(self._statics)

    def at(self, index: int, addresses: Mapping[int, int]) -> Any:
        key = tuple(addresses[s] for s in self._segments[index])
        last = self._last[index]
        if last is not None and last[0] == key:
            return last[1]
        value = self._made(self._statics[index], key, addresses)
        self._last[index] = (key, value)
        return value

    def _made(self, static: Weight | View, key: tuple[int, ...], addresses: Mapping[int, int]) -> Any:
        if isinstance(static, Weight):
            piece = static.piece
            return self._arena.tensor(key[0] + piece.offset, dtype_of(piece.dtype), piece.shape, piece.stride)
        return apply(static.form, {slot: self.at(index, addresses) for slot, index in static.statics})


def _require_movable(name: str, plan: Plan) -> None:
    if any(isinstance(step, SwapIn | SwapOut) for step in plan.steps):
        raise UnsupportedPlan(f"{name}: only a program whose plan keeps every parameter can move")
    places = [p.address for p in plan.inputs]
    places += [a for step in plan.steps if isinstance(step, Compute) for a in (*step.outputs, step.scratch) if a]
    if any(place.region == "partition" for place in places):
        raise UnsupportedPlan(
            f"{name}: the plan has activations beside parameters; a program that moves needs them in a workspace"
        )


def _statics(calls: tuple[CallDraft, ...]) -> dict[int, int]:
    return {slot: index for call in calls for slot, index in call.statics}


def _all(puts: Sequence[Mapping[int, Any]], steps: range) -> dict[int, Any]:
    """What the steps of a stretch are told, which those behind it may need."""
    return {slot: value for n in steps for slot, value in puts[n].items()}


def _putting(values: Mapping[int, Any]) -> Callable[[Frame], None]:
    pairs = tuple(values.items())

    def put(frame: Frame) -> None:
        for slot, value in pairs:
            frame[slot] = value

    return put
