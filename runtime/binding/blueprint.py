"""A plan drafted: every call, view and copy of one inference, with addresses that still count from the regions' starts.

Drafting walks the plan once. Where the model lies in the arena comes later, and may come again: a model that moves, or
is loaded again, is bound from the same blueprint.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from planner.graph import Graph
from planner.plan import Address, Compute, Drop, Plan, SwapIn, SwapOut
from planner.profile import Profile
from runtime.binding.calls import Call, Form, form_of
from runtime.cpu.vacancy import Stay, stays
from runtime.lowering.specialize import Instruction, Trace
from runtime.lowering.weights import Manifest, Piece
from runtime.offload.journeys import Journey, journeys

Statics = tuple[tuple[int, int], ...]
"""Slots whose values are known as soon as addresses are, with their places in `Blueprint.statics`."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter, whose segment is at an address."""

    piece: Piece
    segment: Address


@dataclass(frozen=True, slots=True)
class View:
    """A view of parameters alone."""

    form: Form
    statics: Statics


@dataclass(frozen=True, slots=True)
class CallDraft:
    """A call, and the slots that die with it."""

    form: Form
    statics: Statics
    frees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputeDraft:
    step: int
    calls: tuple[CallDraft, ...]
    swap_ins_before: int
    swap_outs_before: int
    first_reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapInDraft:
    """A copy to an address, or of an activation that comes back to wherever its allocator puts it."""

    step: int
    tensor: int
    address: Address
    nbytes: int
    computes_before: int
    swap_outs_before: int = 0


@dataclass(frozen=True, slots=True)
class SwapOutDraft:
    step: int
    tensor: int
    nbytes: int
    computes_before: int
    swap_ins_before: int


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What `runtime.binding.program.Program` has, before the model has a place."""

    plan: Plan
    profile: Profile | None
    """What the plan was checked against."""
    device: torch.device
    trace: Trace
    statics: tuple[Weight | View, ...]
    """Each is made of earlier ones alone."""
    computes: tuple[ComputeDraft, ...]
    swap_ins: tuple[SwapInDraft, ...]
    swap_outs: tuple[SwapOutDraft, ...]
    journeys: tuple[Journey, ...]
    residents: tuple[SwapInDraft, ...]
    final_calls: tuple[CallDraft, ...]
    constants: Statics
    prefix: int
    own_prefix: int
    epilogue: int
    stays: tuple[Stay, ...]
    """What a run uses of the workspace, and until when."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A blueprint's calls in one place: all but those that read a table of the store, which stand as None."""

    blueprint: Blueprint
    arena: object
    place: tuple[int, int]
    """Where partition and workspace begin."""
    statics: list[Any]
    """The values of `Blueprint.statics`: views of the arena."""
    computes: tuple[tuple[Call | None, ...], ...]
    final_calls: tuple[Call | None, ...]


def draft(
    graph: Graph, trace: Trace, manifest: Manifest, plan: Plan, profile: Profile | None, device: torch.device
) -> Blueprint:
    """Draft a checked plan. Raises UnsupportedPlan."""
    return _Drafter(graph, trace, manifest, plan, device).draft(profile)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A compute step whose calls wait for the last use of each slot to be known."""

    step: int
    instructions: list[Instruction]
    statics: list[Statics]
    swap_ins_before: int
    swap_outs_before: int
    first_reads: tuple[int, ...]


class _Drafter:
    """Walks a plan once, with the addresses as they are at each step."""

    def __init__(self, graph: Graph, trace: Trace, manifest: Manifest, plan: Plan, device: torch.device) -> None:
        self.graph, self.trace, self.plan, self.device = graph, trace, plan, device
        self.op_instructions = {i.op: i for i in trace.instructions if i.op is not None}
        self.views = {i.out: i for i in trace.instructions if i.op is None}
        self.statics = _StaticValues(trace, manifest, device)
        self.made: set[int] = set()
        self.addresses = {p.tensor: p.address for p in plan.residents}
        self.unread = set(self.addresses)
        self.computes: list[_Pending] = []
        self.swap_ins: list[SwapInDraft] = []
        self.swap_outs: list[SwapOutDraft] = []
        self.journeys = {j.tensor: j for j in journeys(graph, trace, plan)}
        self.position: dict[int, int] = {}
        """Index in its lane of each step that has one."""

    def draft(self, profile: Profile | None) -> Blueprint:
        final, final_statics, constants = self._walk()
        dying = _frees([*(p.instructions for p in self.computes), final], self.trace.output_slots)
        return Blueprint(
            plan=self.plan,
            profile=profile,
            device=self.device,
            trace=self.trace,
            computes=tuple(
                ComputeDraft(
                    p.step,
                    self._calls(p.instructions, p.statics, dying),
                    p.swap_ins_before,
                    p.swap_outs_before,
                    p.first_reads,
                )
                for p in self.computes
            ),
            swap_ins=tuple(self.swap_ins),
            swap_outs=tuple(self.swap_outs),
            journeys=tuple(self.journeys.values()),
            residents=tuple(
                SwapInDraft(-1, p.tensor, p.address, self._nbytes(p.tensor), 0) for p in self.plan.residents
            ),
            final_calls=self._calls(final, final_statics, {}),
            constants=constants,
            prefix=_count(self.swap_ins, self._may_lead),
            own_prefix=_count(self.swap_ins, lambda s: self._may_lead(s) and s.address.region == "partition"),
            epilogue=sum(s.step < self.plan.epilogue_start for s in self.swap_ins),
            stays=stays(self.graph, self.plan),
            statics=tuple(self.statics.values),
        )

    def _walk(self) -> tuple[list[Instruction], list[Statics], Statics]:
        """Returns the views that belong to no op, and the outputs that are parameters, as they are at the answer."""
        answer: tuple[list[Instruction], list[Statics], Statics] | None = None
        for index, step in enumerate(self.plan.steps):
            if index == self.plan.epilogue_start and self.computes:
                answer = self._answer()
            match step:
                case SwapIn():
                    self._add_swap_in(index, step)
                case Compute():
                    self._add_compute(index, step)
                case Drop():
                    self.addresses.pop(step.tensor, None)
                    self.unread.discard(step.tensor)
                case SwapOut():
                    self._add_swap_out(index, step)
        return self._answer() if answer is None else answer

    def _answer(self) -> tuple[list[Instruction], list[Statics], Statics]:
        final = self._final_views()
        constants = self.statics.of(self.trace.output_slots, self.addresses)
        return final, [self.statics.of(i.reads, self.addresses) for i in final], constants

    def _add_swap_in(self, index: int, step: SwapIn) -> None:
        """An activation comes back to the storage that it left, so everyone who used it there must be done."""
        computes, swap_outs = self._finished(step.after, Compute), self._finished(step.after, SwapOut)
        if step.tensor in self.journeys:
            used = self.journeys[step.tensor].used_before(len(self.computes))
            computes = max(computes, used + 1)
        else:
            self.addresses[step.tensor] = step.address
        self.position[index] = len(self.swap_ins)
        nbytes = self._nbytes(step.tensor)
        self.swap_ins.append(SwapInDraft(index, step.tensor, step.address, nbytes, computes, swap_outs))

    def _add_swap_out(self, index: int, step: SwapOut) -> None:
        computes, swap_ins = self._finished(step.after, Compute), self._finished(step.after, SwapIn)
        self.position[index] = len(self.swap_outs)
        self.swap_outs.append(SwapOutDraft(index, step.tensor, self._nbytes(step.tensor), computes, swap_ins))

    def _add_compute(self, index: int, step: Compute) -> None:
        swap_ins, swap_outs = self._finished(step.after, SwapIn), self._finished(step.after, SwapOut)
        self.position[index] = len(self.computes)
        instructions = self._needed_by(self.op_instructions[step.op])
        statics = [self.statics.of(i.reads, self.addresses) for i in instructions]
        first = self.unread.intersection(self.graph.ops[step.op].reads)
        self.unread -= first
        pending = _Pending(index, instructions, statics, swap_ins, swap_outs, tuple(sorted(first)))
        self.computes.append(pending)

    def _finished(self, after: Sequence[int], kind: type[Compute] | type[SwapIn] | type[SwapOut]) -> int:
        """How many steps of another lane must have finished, which is in order."""
        return max((self.position[i] + 1 for i in after if isinstance(self.plan.steps[i], kind)), default=0)

    def _calls(
        self,
        instructions: Iterable[Instruction],
        statics: Iterable[Statics],
        dying: Mapping[int, tuple[int, ...]],
    ) -> tuple[CallDraft, ...]:
        return tuple(
            CallDraft(form_of(i, self.device), known, dying.get(id(i), ()))
            for i, known in zip(instructions, statics, strict=True)
        )

    def _nbytes(self, tensor: int) -> int:
        return self.graph.tensors[tensor].nbytes

    def _may_lead(self, swap: SwapInDraft) -> bool:
        """Whether it waits for nothing of this run, and is not part of the epilogue."""
        waits = swap.computes_before or swap.swap_outs_before or swap.tensor in self.journeys
        return not waits and swap.step < self.plan.epilogue_start

    def _needed_by(self, instruction: Instruction) -> list[Instruction]:
        """The views that an op needs and that nothing made yet, in order, and the op itself."""
        needed: list[Instruction] = []
        pending = [(slot, False) for slot in reversed(instruction.reads)]
        while pending:
            slot, ready = pending.pop()
            view = self.views.get(slot)
            if view is None or slot in self.made or self.statics.has(slot):
                continue
            if ready:
                self.made.add(slot)
                needed.append(view)
            else:
                pending.append((slot, True))
                pending.extend((s, False) for s in reversed(view.reads))
        if instruction.op is not None:
            needed.append(instruction)
        return needed

    def _final_views(self) -> list[Instruction]:
        """Views that are outputs and belong to no op."""
        final: list[Instruction] = []
        for slot in self.trace.output_slots:
            if slot in self.views and slot not in self.made and not self.statics.has(slot):
                final += [*self._needed_by(self.views[slot]), self.views[slot]]
                self.made.add(slot)
        return final


class _StaticValues:
    """Parameters and views of parameters alone, each once for every address that it has in a plan."""

    def __init__(self, trace: Trace, manifest: Manifest, device: torch.device) -> None:
        self.values: list[Weight | View] = []
        self._device = device
        self._views = {i.out: i for i in trace.instructions if i.op is None}
        self._pieces = {p.name: (n, p) for n, s in enumerate(manifest.segments) for p in s.pieces}
        self._weights = trace.weight_slots
        self._segments = {slot: frozenset({self._pieces[w][0]}) for slot, w in trace.weight_slots.items()}
        """The segments behind each static slot."""
        for i in trace.instructions:
            if i.op is None and i.reads and all(r in self._segments for r in i.reads):
                self._segments[i.out] = frozenset().union(*(self._segments[r] for r in i.reads))
        self._known: dict[tuple[int, tuple[Address, ...]], int] = {}

    def has(self, slot: int) -> bool:
        return slot in self._segments

    def of(self, slots: Iterable[int], addresses: Mapping[int, Address]) -> Statics:
        """Those of some slots that are static, with segments at these addresses."""
        return tuple((slot, self._index(slot, addresses)) for slot in slots if slot in self._segments)

    def _index(self, slot: int, addresses: Mapping[int, Address]) -> int:
        key = (slot, tuple(addresses[s] for s in sorted(self._segments[slot])))
        if key not in self._known:
            value = self._make(slot, addresses)
            self._known[key] = len(self.values)
            self.values.append(value)
        return self._known[key]

    def _make(self, slot: int, addresses: Mapping[int, Address]) -> Weight | View:
        if slot in self._weights:
            segment, piece = self._pieces[self._weights[slot]]
            return Weight(piece, addresses[segment])
        view = self._views[slot]
        return View(form_of(view, self._device), self.of(view.reads, addresses))


def _count(swaps: Iterable[SwapInDraft], leads: Callable[[SwapInDraft], bool]) -> int:
    """How many swap-ins there are before the first of another kind."""
    return sum(1 for _ in takewhile(leads, swaps))


def _frees(steps: Sequence[Sequence[Instruction]], kept: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each instruction (by identity) the slots that die with it, in the order in which the plan runs them."""
    last: dict[int, Instruction] = {}
    for step in steps:
        for instruction in step:
            last[instruction.out] = instruction
            for slot in instruction.reads:
                last[slot] = instruction
    frees: dict[int, list[int]] = {}
    for slot, instruction in last.items():
        if slot not in kept:
            frees.setdefault(id(instruction), []).append(slot)
    return {key: tuple(slots) for key, slots in frees.items()}
