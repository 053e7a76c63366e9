"""A draft: the calls, views and copies of one inference, with addresses relative to the plan's regions.

Drafting walks the plan once. The same draft is bound to the arena again when a model moves or is reloaded.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Address, Compute, Drop, Plan, SwapIn, SwapOut
from cohabit.planner.profile import Profile
from cohabit.runtime.binding.calls import Call, CallTemplate, template_of
from cohabit.runtime.binding.offloaded import OffloadedTensor
from cohabit.runtime.binding.spills import Spill, spills_of
from cohabit.runtime.binding.statics import Statics
from cohabit.runtime.lowering.trace import Instruction, Trace
from cohabit.runtime.lowering.weights import Manifest
from cohabit.runtime.memory import Copy


@dataclass(frozen=True, slots=True)
class DraftCall:
    """A call, the static slots that it reads, and `frees`: the slots whose values no later call reads."""

    template: CallTemplate
    statics: tuple[int, ...]
    frees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DraftCalls:
    """The calls of a compute step, or those after the last one."""

    calls: tuple[DraftCall, ...]
    addresses: Mapping[int, Address]
    """Addresses of the segments that their static slots depend on."""
    unpacking: int = 0
    """Number of trailing getitem calls; each result is freed after its own last use."""


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """An op with the views that it needs. `*_before` fields count the steps on other lanes that must end first."""

    lane: ClassVar[Literal["compute"]] = "compute"
    step: int
    """Index in the plan."""
    op: int
    swap_ins_before: int
    swap_outs_before: int = 0
    first_reads: tuple[int, ...] = ()
    """Initial residents that this step is the first to read: the last run's epilogue may still be copying them."""
    calls: tuple[Call, ...] = ()
    """Empty in a draft."""


def _not_bound() -> None:
    raise AssertionError("a draft's copy has no addresses yet")


@dataclass(frozen=True, slots=True)
class SwapStep:
    """A copy on one of the swap lanes.

    A swap-in fills the bytes at `offset`, relative to the region's start in a draft, to the arena's in a program.
    If `offloaded` is set, the allocator chooses that tensor's address instead.
    """

    lane: Literal["swap_in", "swap_out"]
    step: int
    """Index in the plan."""
    tensor: int
    nbytes: int
    computes_before: int
    """Number of this run's compute steps that must finish first."""
    others_before: int = 0
    """Number of the other swap lane's steps that must finish first."""
    address: Address | None = None
    """Address of a parameter in the plan; None for other tensors."""
    offset: int = 0
    copy: Copy = _not_bound
    offloaded: OffloadedTensor | None = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Draft:
    """A plan for one bucket. `runtime.binding.program.Program` is a draft bound to addresses."""

    graph: Graph
    trace: Trace
    plan: Plan
    profile: Profile | None
    """The profile that the plan was checked against."""
    statics: Statics
    computes: tuple[ComputeStep, ...]
    calls: tuple[DraftCalls, ...]
    """Of each compute step."""
    swap_ins: tuple[SwapStep, ...]
    swap_outs: tuple[SwapStep, ...]
    spills: tuple[Spill, ...]
    residents: tuple[SwapStep, ...]
    """Copies of the initial residents to their addresses."""
    final_calls: DraftCalls
    """Views that are outputs and belong to no op."""
    constants: tuple[int, ...]
    """Outputs that are static slots, at the addresses of `final_calls`."""
    epilogue: int
    """Index of the first swap-in after the last compute step."""
    restored: Mapping[int, int]
    """Initial residents that a run restores, with the index into `swap_ins` of the last copy that does so.

    The run itself does not wait for that copy: the next run does.
    """


@dataclass(frozen=True, slots=True)
class _PendingCalls:
    """Calls whose `DraftCall.frees` are not known yet."""

    instructions: tuple[Instruction, ...]
    addresses: Mapping[int, Address]
    unpacking: int = 0


class Drafter:
    """Walks a checked plan once, tracking the address of each parameter. Raises UnsupportedPlan."""

    def __init__(self, graph: Graph, trace: Trace, manifest: Manifest, plan: Plan, device: torch.device) -> None:
        self.graph, self.trace, self.plan, self.device = graph, trace, plan, device
        self.op_instructions = {i.op: i for i in trace.instructions if i.op is not None}
        self.views = {i.out: i for i in trace.instructions if i.op is None}
        self.parts: dict[int, list[Instruction]] = defaultdict(list)
        """Getitem calls on a slot's value, by slot."""
        for i in self.views.values():
            if i.target is operator.getitem:
                self.parts[i.reads[0]].append(i)
        self.numbers = [i for i in trace.instructions if i.out in trace.numbers]
        self.statics = Statics.of(trace, manifest, device)
        self.made: set[int] = set()
        """Slots of views whose value is current."""
        self.addresses = {p.tensor: _required(p.address) for p in plan.residents}
        self.unread = set(self.addresses)
        self.computes: list[ComputeStep] = []
        self.pending: list[_PendingCalls] = []
        """Calls of each compute step."""
        self.swap_ins: list[SwapStep] = []
        self.swap_outs: list[SwapStep] = []
        self.spills = spills_of(graph, trace, plan)
        self.position: dict[int, int] = {}
        """Position of each step on its lane, by index in the plan."""

    def draft(self, profile: Profile | None) -> Draft:
        final = self._walk()
        outputs, initial = self.trace.output_slots, {p.tensor for p in self.plan.residents}
        frees = _frees([*(p.instructions for p in self.pending), final.instructions], outputs)
        return Draft(
            graph=self.graph,
            trace=self.trace,
            plan=self.plan,
            profile=profile,
            statics=self.statics,
            computes=tuple(self.computes),
            calls=tuple(map(self._drafted, self.pending, frees)),
            swap_ins=tuple(self.swap_ins),
            swap_outs=tuple(self.swap_outs),
            spills=self.spills,
            residents=tuple(
                SwapStep("swap_in", -1, p.tensor, self._nbytes(p.tensor), 0, address=p.address)
                for p in self.plan.residents
            ),
            final_calls=self._drafted(final, [()] * len(final.instructions)),
            constants=tuple(slot for slot in outputs if slot in self.statics.segments),
            epilogue=sum(s.step < self.plan.epilogue_start for s in self.swap_ins),
            restored={s.tensor: i for i, s in enumerate(self.swap_ins) if s.tensor in initial},
        )

    def _walk(self) -> _PendingCalls:
        """Return the final calls, with the addresses after the last op of parameters that are outputs."""
        final: _PendingCalls | None = None
        for index, step in enumerate(self.plan.steps):
            if index == self.plan.epilogue_start and self.computes:
                final = self._final_calls()
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
        return self._final_calls() if final is None else final

    def _add_swap_in(self, index: int, step: SwapIn) -> None:
        computes, swap_outs = self._finished(step.after, Compute), self._finished(step.after, SwapOut)
        address: Address | None = None
        if self.graph.tensors[step.tensor].is_weight:
            address = self.addresses[step.tensor] = _required(step.address)
        self.position[index] = len(self.swap_ins)
        nbytes = self._nbytes(step.tensor)
        self.swap_ins.append(SwapStep("swap_in", index, step.tensor, nbytes, computes, swap_outs, address))

    def _add_swap_out(self, index: int, step: SwapOut) -> None:
        computes, swap_ins = self._finished(step.after, Compute), self._finished(step.after, SwapIn)
        self.position[index] = len(self.swap_outs)
        nbytes = self._nbytes(step.tensor)
        self.swap_outs.append(SwapStep("swap_out", index, step.tensor, nbytes, computes, swap_ins))

    def _add_compute(self, index: int, step: Compute) -> None:
        swap_ins, swap_outs = self._finished(step.after, SwapIn), self._finished(step.after, SwapOut)
        self.position[index] = len(self.computes)
        # Sizes are read first: reading them later would keep tensors in memory for longer than planned.
        numbers = [] if self.computes else self.numbers
        self.made.update(i.out for i in numbers)
        instruction = self.op_instructions[step.op]
        parts = self.parts[instruction.out]
        instructions = (*numbers, *self._needed_by(instruction), *parts)
        self.made.update(part.out for part in parts)
        read = (slot for i in instructions for slot in i.reads)
        self.pending.append(_PendingCalls(instructions, self._addresses_of(read), len(parts)))
        first = self.unread.intersection(self.graph.ops[step.op].reads)
        self.unread -= first
        self.computes.append(ComputeStep(index, step.op, swap_ins, swap_outs, tuple(sorted(first))))

    def _final_calls(self) -> _PendingCalls:
        """Return the views that are outputs and belong to no op, with the addresses of outputs that are static."""
        final: list[Instruction] = []
        for slot in self.trace.output_slots:
            if slot in self.views and slot not in self.made and slot not in self.statics.segments:
                final += [*self._needed_by(self.views[slot]), self.views[slot]]
                self.made.add(slot)
        read = (*(slot for i in final for slot in i.reads), *self.trace.output_slots)
        return _PendingCalls(tuple(final), self._addresses_of(read))

    def _addresses_of(self, slots: Iterable[int]) -> dict[int, Address]:
        """Return the current addresses of the segments that the static ones among these slots depend on."""
        segments = self.statics.segments
        return {s: self.addresses[s] for slot in slots if slot in segments for s in segments[slot]}

    def _finished(self, after: Sequence[int], kind: type[Compute] | type[SwapIn] | type[SwapOut]) -> int:
        """Return the number of another lane's steps that must have finished; lanes run in order."""
        return max((self.position[i] + 1 for i in after if isinstance(self.plan.steps[i], kind)), default=0)

    def _drafted(self, pending: _PendingCalls, frees: Iterable[tuple[int, ...]]) -> DraftCalls:
        calls = tuple(
            DraftCall(template_of(i, self.device), tuple(r for r in i.reads if r in self.statics.segments), freed)
            for i, freed in zip(pending.instructions, frees, strict=True)
        )
        return DraftCalls(calls, pending.addresses, pending.unpacking)

    def _nbytes(self, tensor: int) -> int:
        return self.graph.tensors[tensor].nbytes

    def _needed_by(self, instruction: Instruction) -> list[Instruction]:
        """Return the views that an op needs and that do not exist yet, in order, followed by the op."""
        needed: list[Instruction] = []
        pending = [(slot, False) for slot in reversed(instruction.reads)]
        while pending:
            slot, is_ready = pending.pop()
            view = self.views.get(slot)
            if view is None or slot in self.made or slot in self.statics.segments:
                continue
            if is_ready:
                self.made.add(slot)
                needed.append(view)
            else:
                pending.append((slot, True))
                pending.extend((s, False) for s in reversed(view.reads))
        if instruction.op is not None:
            needed.append(instruction)
        return needed


def _required(address: Address | None) -> Address:
    """Return a parameter's address: `build` refuses plans without them."""
    assert address is not None
    return address


def _frees(steps: Sequence[Sequence[Instruction]], kept: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Return, per step and call, the slots whose values the call is the last to use."""
    last: dict[int, tuple[int, int]] = {}
    for n, step in enumerate(steps):
        for m, instruction in enumerate(step):
            last |= dict.fromkeys((*instruction.reads, instruction.out), (n, m))
    frees: list[list[list[int]]] = [[[] for _ in step] for step in steps]
    for slot, (n, m) in last.items():
        if slot not in kept:
            frees[n][m].append(slot)
    return [[tuple(slots) for slots in step] for step in frees]
