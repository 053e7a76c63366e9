"""A program: one plan bound to addresses. Whatever can be decided before a request comes is decided here."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import torch

from planner.check import check
from planner.graph import Graph
from planner.plan import Address, Compute, Plan, SwapIn
from planner.profile import Profile
from runtime.binding.blueprint import (
    Blueprint,
    Bound,
    CallDraft,
    Statics,
    SwapInDraft,
    SwapOutDraft,
    View,
    Weight,
    draft,
)
from runtime.binding.calls import Call, apply, bind
from runtime.binding.slots import Frame
from runtime.cpu.scripted import bind_script, compiled
from runtime.cpu.stretches import stretches
from runtime.cpu.vacancy import Stay
from runtime.errors import UnsupportedPlan
from runtime.lowering.lower import Lowered
from runtime.lowering.weights import dtype_of
from runtime.memory import Copy, Memory, Room, Source
from runtime.offload.traveller import Traveller, travellers


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """An op with the views that lead to it. Counts are of this run's finished swap-ins."""

    step: int
    calls: tuple[Call, ...]
    swap_ins_before: int
    first_reads: tuple[int, ...]
    """Initial residents that this step is the first to read: the last run's epilogue may still be copying them."""
    swap_outs_before: int = 0
    length: int = 1
    """How many compute steps of the plan it stands for."""


@dataclass(frozen=True, slots=True)
class SwapInStep:
    """A prepared copy to `offset` of the arena, or back into an activation's storage (`traveller`).

    `computes_before` counts this run's finished compute steps, `others_before` its finished swap-outs.
    """

    step: int
    tensor: int
    copy: Copy
    nbytes: int
    computes_before: int
    offset: int = 0
    others_before: int = 0
    traveller: Traveller | None = None


@dataclass(frozen=True, slots=True)
class SwapOutStep:
    """A prepared copy of an activation to the host. `others_before` counts this run's finished swap-ins."""

    step: int
    tensor: int
    copy: Copy
    nbytes: int
    computes_before: int
    others_before: int
    traveller: Traveller


SwapStep = SwapInStep | SwapOutStep


@dataclass(frozen=True, slots=True)
class Program:
    """One model at one batch size, ready to be issued."""

    name: str
    batch: int
    plan: Plan
    graph: Graph
    frame_slots: int
    computes: tuple[ComputeStep, ...]
    swap_ins: tuple[SwapInStep, ...]
    swap_outs: tuple[SwapOutStep, ...]
    travellers: tuple[Traveller, ...]
    """Activations that leave memory and come back."""
    prefix: int
    """So many leading swap-ins wait for nothing of this run: they may start before it, once their bytes are free."""
    own_prefix: int
    """So many of these go to the model's own partition, where their bytes are free."""
    epilogue: int
    """Index of the first swap-in behind the last compute step."""
    final_calls: tuple[Call, ...]
    """Views of results that belong to no op, made after the last compute step."""
    residents: tuple[SwapInStep, ...]
    """Copies that put the initial residents in place."""
    restored: dict[int, int]
    """Initial residents that a run brings back, with the index into `swap_ins` of the last copy that does.

    It may stand before the last op without being waited for: the next run waits for it.
    """
    input_slots: tuple[int, ...]
    output_slots: tuple[int, ...]
    constants: dict[int, torch.Tensor]
    """Output slots that are parameters or views of them."""
    link_bytes: int
    workspace: int
    """Where the workspace begins in the arena."""
    stays: tuple[Stay, ...]
    """What a run uses of the workspace, from there on, and until when."""
    stretched: tuple[ComputeStep, ...] = field(default=(), kw_only=True)
    """The compute steps where stretches of them are one, if any are (`runtime.cpu.scripted`)."""

    @property
    def only_computes(self) -> bool:
        """Whether it waits for no copy."""
        return not (self.swap_ins or self.swap_outs)

    @property
    def returns(self) -> int:
        """How many swap-ins there are up to the last that brings an activation back."""
        return max((i + 1 for i, s in enumerate(self.swap_ins) if s.traveller is not None), default=0)

    def frame(self) -> Frame:
        """Room for every value of a run."""
        return [None] * self.frame_slots


def joined(
    computes: Sequence[ComputeStep], stretches: Sequence[tuple[range, tuple[Call, ...]]]
) -> tuple[ComputeStep, ...]:
    """The compute steps with each stretch of them, in order, as one that has these calls; nothing without stretches."""
    steps: list[ComputeStep] = []
    done = 0
    for stretch, calls in stretches:
        inside = computes[stretch.start : stretch.stop]
        # The last run may have been another batch's, whose epilogue brings back what this plan never displaces.
        first_reads = tuple(segment for step in inside for segment in step.first_reads)
        steps += computes[done : stretch.start]
        steps.append(replace(inside[0], calls=calls, first_reads=first_reads, length=len(inside)))
        done = stretch.stop
    return (*steps, *computes[done:]) if stretches else ()


@dataclass(frozen=True, slots=True)
class Bases:
    """Where a model's regions start in the arena."""

    partition: int
    workspace: int

    def offset(self, address: Address) -> int:
        return address.offset + (self.partition if address.region == "partition" else self.workspace)


def build(
    lowered: Lowered,
    plan: Plan,
    profile: Profile | None,
    arena: Memory[Room],
    bases: Bases,
    store: Source[Room],
    *,
    scripted: bool = False,
) -> Program:
    """Check a plan and bind it. Raises InvalidPlan, FingerprintMismatch, MemoryExceeded or UnsupportedPlan.

    A plan that was built before from the same `lowered` is neither checked nor drafted again, and in the same place
    only its copies are new. With `scripted`, stretches of its calls are compiled, once for all places.
    """
    blueprint = blueprint_of(lowered, plan, profile, arena.device)
    builder = _Builder(blueprint, arena, bases, store)
    program = builder.build(lowered)
    return replace(program, stretched=builder.stretched(lowered, program.computes)) if scripted else program


def blueprint_of(lowered: Lowered, plan: Plan, profile: Profile | None, device: torch.device) -> Blueprint:
    """Check a plan and draft it, unless it was the last one. Raises as `build` does."""
    batches = {graph.fingerprint: batch for batch, graph in lowered.graphs.items()}
    batch = batches.get(plan.graph, lowered.batches[0])
    known = lowered.blueprints.get(batch)
    if known is not None and known.plan is plan and known.profile is profile and known.device == device:
        return known
    graph = lowered.graphs[batch]
    check(graph, profile, plan)
    require_supported(graph, plan)
    drafted = draft(graph, lowered.traces[batch], lowered.manifest, plan, profile, device)
    lowered.blueprints[batch] = drafted
    return drafted


def require_supported(graph: Graph, plan: Plan) -> None:
    """Refuse what this runtime cannot do: activations come from torch's allocator, and each op is computed once."""
    computes = [s for s in plan.steps if isinstance(s, Compute)]
    if len({s.op for s in computes}) < len(computes):
        raise UnsupportedPlan(f"{graph.name}: the plan computes an op again, which this runtime does not do")
    activations = [(p.address, graph.tensors[p.tensor].nbytes) for p in plan.inputs]
    parameters = [(p.address, graph.tensors[p.tensor].nbytes) for p in plan.residents]
    for step in plan.steps:
        if isinstance(step, SwapIn):
            brought = graph.tensors[step.tensor]
            (parameters if brought.kind == "parameter" else activations).append((step.address, brought.nbytes))
        elif isinstance(step, Compute):
            writes = graph.ops[step.op].writes
            activations += [(a, graph.tensors[t].nbytes) for a, t in zip(step.outputs, writes, strict=True)]
            if step.scratch is not None:
                activations.append((step.scratch, graph.ops[step.op].scratch_bytes))
    lines = [(a.region, a.offset, a.offset + n, True) for a, n in activations if n]
    lines += [(a.region, a.offset, a.offset + n, False) for a, n in parameters if n]
    ends: dict[tuple[str, bool], int] = {}  # furthest end so far of a region's activations, and of its parameters
    for region, start, end, is_activation in sorted(lines):
        if ends.get((region, not is_activation), 0) > start:
            raise UnsupportedPlan(
                f"{graph.name}: the plan lets parameters pass through bytes of activations ({region}+{start});"
                " activations come from an allocator of their own, so plan with a workspace and without overlay"
            )
        ends[region, is_activation] = max(end, ends.get((region, is_activation), 0))


class _Builder(Generic[Room]):
    """Gives a blueprint's tensors, copies and calls their places."""

    def __init__(self, blueprint: Blueprint, arena: Memory[Room], bases: Bases, store: Source[Room]) -> None:
        self.blueprint = blueprint
        self.arena = arena
        self.bases = bases
        self.store = store
        self.statics: list[Any] = []
        sizes = [journey.nbytes for journey in blueprint.journeys]
        self.travellers = travellers(blueprint.journeys, store.places(sizes)) if sizes else ()
        self.of_tensor = {t.journey.tensor: t for t in self.travellers}

    def build(self, lowered: Lowered) -> Program:
        drafted, bound = self.blueprint, self._bound(lowered)
        initial = {p.tensor for p in drafted.plan.residents}
        behind = self._behind()
        return Program(
            name=lowered.name,
            batch=drafted.trace.batch,
            plan=drafted.plan,
            graph=lowered.graphs[drafted.trace.batch],
            frame_slots=drafted.trace.slots,
            computes=tuple(
                ComputeStep(
                    c.step,
                    (*self._whole(c.calls, calls), *behind.get(n, ())),
                    c.swap_ins_before,
                    c.first_reads,
                    c.swap_outs_before,
                )
                for n, (c, calls) in enumerate(zip(drafted.computes, bound.computes, strict=True))
            ),
            swap_ins=tuple(self._swap_in(s) for s in drafted.swap_ins),
            swap_outs=tuple(self._swap_out(s) for s in drafted.swap_outs),
            travellers=self.travellers,
            prefix=drafted.prefix,
            own_prefix=drafted.own_prefix,
            epilogue=drafted.epilogue,
            final_calls=self._whole(drafted.final_calls, bound.final_calls),
            residents=tuple(self._swap_in(s) for s in drafted.residents),
            restored={s.tensor: i for i, s in enumerate(drafted.swap_ins) if s.tensor in initial},
            input_slots=drafted.trace.input_slots,
            output_slots=drafted.trace.output_slots,
            constants=self._known(drafted.constants),
            link_bytes=sum(s.nbytes for s in drafted.swap_ins) + sum(s.nbytes for s in drafted.swap_outs),
            workspace=self.bases.workspace,
            stays=drafted.stays,
        )

    def stretched(self, lowered: Lowered, computes: Sequence[ComputeStep]) -> tuple[ComputeStep, ...]:
        """The compute steps with each compiled stretch of them as one. Behind `build`."""
        batch = self.blueprint.trace.batch
        known = lowered.scripts.get(batch)
        if known is None or known.blueprint is not self.blueprint:
            known = lowered.scripts[batch] = compiled(lowered.name, self.blueprint, stretches(self.blueprint))
        calls = [(s.steps, (bind_script(s, self.statics.__getitem__, self.store.table),)) for s in known.scripts]
        return joined(computes, calls)

    def _bound(self, lowered: Lowered) -> Bound:
        """The calls, which may have been made before for the same place."""
        drafted, place = self.blueprint, (self.bases.partition, self.bases.workspace)
        known = lowered.bound.get(drafted.trace.batch)
        if known is not None and known.blueprint is drafted and known.arena is self.arena and known.place == place:
            self.statics = known.statics
            return known
        for static in drafted.statics:
            self.statics.append(self._static(static))
        bound = Bound(
            blueprint=drafted,
            arena=self.arena,
            place=place,
            statics=self.statics,
            computes=tuple(self._calls(c.calls) for c in drafted.computes),
            final_calls=self._calls(drafted.final_calls),
        )
        lowered.bound[drafted.trace.batch] = bound
        return bound

    def _static(self, static: Weight | View) -> Any:
        """A tensor (or tuple of tensors) made of parameters alone."""
        if isinstance(static, View):
            return apply(static.form, self._known(static.statics))
        offset, piece = self.bases.offset(static.segment) + static.piece.offset, static.piece
        return self.arena.tensor(offset, dtype_of(piece.dtype), piece.shape, piece.stride)

    def _known(self, statics: Statics) -> dict[int, Any]:
        return {slot: self.statics[index] for slot, index in statics}

    def _swap_in(self, drafted: SwapInDraft) -> SwapInStep:
        d, traveller = drafted, self.of_tensor.get(drafted.tensor)
        if traveller is not None:
            others = d.swap_outs_before
            return SwapInStep(d.step, d.tensor, traveller.bring, d.nbytes, d.computes_before, 0, others, traveller)
        offset = self.bases.offset(d.address)
        copy = self.store.copy(d.tensor, self.arena.bytes(offset, d.nbytes))
        return SwapInStep(d.step, d.tensor, copy, d.nbytes, d.computes_before, offset, d.swap_outs_before)

    def _swap_out(self, d: SwapOutDraft) -> SwapOutStep:
        traveller = self.of_tensor[d.tensor]
        return SwapOutStep(
            d.step, d.tensor, traveller.save, d.nbytes, d.computes_before, d.swap_ins_before, traveller
        )

    def _behind(self) -> dict[int, list[Call]]:
        """What is to be done with travelling activations behind each compute step."""
        behind: dict[int, list[Call]] = defaultdict(list)
        for traveller in self.travellers:
            behind[traveller.journey.made_by].append(traveller.begin)
        for traveller in self.travellers:
            for stay in traveller.journey.stays:
                behind[stay.last_use].append(traveller.forget if stay.is_last else traveller.release)
        return behind

    def _calls(self, drafts: Sequence[CallDraft]) -> tuple[Call | None, ...]:
        return tuple(
            bind(c.form, self._known(c.statics), c.frees) if c.form.table is None else None for c in drafts
        )

    def _whole(self, drafts: Sequence[CallDraft], calls: Sequence[Call | None]) -> tuple[Call, ...]:
        """The calls with those that read a table of this store."""
        return tuple(
            call if call is not None else bind(c.form, self._known(c.statics), c.frees, self._table(c))
            for c, call in zip(drafts, calls, strict=True)
        )

    def _table(self, call: CallDraft) -> torch.Tensor:
        assert call.form.table is not None
        return self.store.table(call.form.table)
