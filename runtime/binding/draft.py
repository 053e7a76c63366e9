"""A draft: the calls, views and copies of one inference, with addresses relative to the plan's regions.

Drafting walks the plan once. The same draft is bound to the arena again when a model moves or is reloaded.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

import torch

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Address, Compute, Drop, Plan, SwapIn, SwapOut
from cohabit.planner.profile import Profile
from cohabit.runtime.binding.calls import CallTemplate, template_of
from cohabit.runtime.binding.offloaded import OffloadedTensor
from cohabit.runtime.binding.spills import Spill, spills_of
from cohabit.runtime.lowering.trace import Instruction, Trace
from cohabit.runtime.lowering.weights import Manifest, Piece
from cohabit.runtime.memory import Copy

C = TypeVar("C")
D = TypeVar("D")
"""C and D: types of a step's calls (`DraftCall` in a draft, `Call` in a program)."""

Statics = tuple[tuple[int, int], ...]
"""Slots whose values are known before a run, once the model has addresses: (slot, index into `Draft.statics`)."""

PendingCall = tuple[Instruction, Statics]
"""A call whose `DraftCall.frees` are not known yet."""


@dataclass(frozen=True, slots=True)
class StaticWeight:
    """A parameter, with its segment's address."""

    piece: Piece
    segment: int
    address: Address


@dataclass(frozen=True, slots=True)
class DraftCall:
    """A call, its static slots, and `frees`: the slots whose values no later call reads."""

    template: CallTemplate
    statics: Statics
    frees: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ComputeStep(Generic[C]):
    """An op with the views that it needs. `*_before` fields count the steps on other lanes that must end first."""

    lane: ClassVar[Literal["compute"]] = "compute"
    step: int
    """Index in the plan."""
    calls: tuple[C, ...]
    swap_ins_before: int
    swap_outs_before: int = 0
    first_reads: tuple[int, ...] = ()
    """Initial residents that this step is the first to read: the last run's epilogue may still be copying them."""
    unpacking: int = 0
    """Number of trailing getitem calls; each result is freed after its own last use."""

    def with_calls(self, calls: tuple[D, ...]) -> "ComputeStep[D]":
        """Return the same step with other calls."""
        return ComputeStep(
            self.step, calls, self.swap_ins_before, self.swap_outs_before, self.first_reads, self.unpacking
        )


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
    device: torch.device
    statics: tuple[StaticWeight | DraftCall, ...]
    """Parameters and views of them. Each uses earlier ones only."""
    computes: tuple[ComputeStep[DraftCall], ...]
    swap_ins: tuple[SwapStep, ...]
    swap_outs: tuple[SwapStep, ...]
    spills: tuple[Spill, ...]
    residents: tuple[SwapStep, ...]
    """Copies of the initial residents to their addresses."""
    final_calls: tuple[DraftCall, ...]
    """Views that are outputs and belong to no op."""
    constants: Statics
    """Outputs that are parameters or views of them."""
    epilogue: int
    """Index of the first swap-in after the last compute step."""
    restored: Mapping[int, int]
    """Initial residents that a run restores, with the index into `swap_ins` of the last copy that does so.

    The run itself does not wait for that copy: the next run does.
    """


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
        self.statics = _StaticValues(trace, manifest, device)
        self.made: set[int] = set()
        """Slots of views whose value is current."""
        self.addresses = {p.tensor: _required(p.address) for p in plan.residents}
        self.unread = set(self.addresses)
        self.computes: list[ComputeStep[PendingCall]] = []
        self.swap_ins: list[SwapStep] = []
        self.swap_outs: list[SwapStep] = []
        self.spills = spills_of(graph, trace, plan)
        self.position: dict[int, int] = {}
        """Position of each step on its lane, by index in the plan."""

    def draft(self, profile: Profile | None) -> Draft:
        final_calls, constants = self._walk()
        initial = {p.tensor for p in self.plan.residents}
        frees = iter(_frees([*(c.calls for c in self.computes), final_calls], self.trace.output_slots))
        return Draft(
            graph=self.graph,
            trace=self.trace,
            plan=self.plan,
            profile=profile,
            device=self.device,
            statics=tuple(self.statics.values),
            computes=tuple(c.with_calls(self._calls(c.calls, next(frees))) for c in self.computes),
            swap_ins=tuple(self.swap_ins),
            swap_outs=tuple(self.swap_outs),
            spills=self.spills,
            residents=tuple(
                SwapStep("swap_in", -1, p.tensor, self._nbytes(p.tensor), 0, address=p.address)
                for p in self.plan.residents
            ),
            final_calls=self._calls(final_calls, [()] * len(final_calls)),
            constants=constants,
            epilogue=sum(s.step < self.plan.epilogue_start for s in self.swap_ins),
            restored={s.tensor: i for i, s in enumerate(self.swap_ins) if s.tensor in initial},
        )

    def _walk(self) -> tuple[tuple[PendingCall, ...], Statics]:
        """Return the final calls, and the outputs that are parameters, at their addresses after the last op."""
        answer: tuple[tuple[PendingCall, ...], Statics] | None = None
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

    def _answer(self) -> tuple[tuple[PendingCall, ...], Statics]:
        final = self._pending(self._final_views())
        return final, self.statics.of(self.trace.output_slots, self.addresses)

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
        calls = self._pending([*numbers, *self._needed_by(instruction), *parts])
        self.made.update(part.out for part in parts)
        first = self.unread.intersection(self.graph.ops[step.op].reads)
        self.unread -= first
        self.computes.append(ComputeStep(index, calls, swap_ins, swap_outs, tuple(sorted(first)), len(parts)))

    def _pending(self, instructions: Iterable[Instruction]) -> tuple[PendingCall, ...]:
        return tuple((i, self.statics.of(i.reads, self.addresses)) for i in instructions)

    def _finished(self, after: Sequence[int], kind: type[Compute] | type[SwapIn] | type[SwapOut]) -> int:
        """Return the number of another lane's steps that must have finished; lanes run in order."""
        return max((self.position[i] + 1 for i in after if isinstance(self.plan.steps[i], kind)), default=0)

    def _calls(self, pending: Iterable[PendingCall], frees: Iterable[tuple[int, ...]]) -> tuple[DraftCall, ...]:
        return tuple(
            DraftCall(template_of(instruction, self.device), statics, freed)
            for (instruction, statics), freed in zip(pending, frees, strict=True)
        )

    def _nbytes(self, tensor: int) -> int:
        return self.graph.tensors[tensor].nbytes

    def _needed_by(self, instruction: Instruction) -> list[Instruction]:
        """Return the views that an op needs and that do not exist yet, in order, followed by the op."""
        needed: list[Instruction] = []
        pending = [(slot, False) for slot in reversed(instruction.reads)]
        while pending:
            slot, is_ready = pending.pop()
            view = self.views.get(slot)
            if view is None or slot in self.made or self.statics.has(slot):
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

    def _final_views(self) -> list[Instruction]:
        """Return the views that are outputs and belong to no op."""
        final: list[Instruction] = []
        for slot in self.trace.output_slots:
            if slot in self.views and slot not in self.made and not self.statics.has(slot):
                final += [*self._needed_by(self.views[slot]), self.views[slot]]
                self.made.add(slot)
        return final


class _StaticValues:
    """Parameters and views of parameters, one value per address that they have in the plan."""

    def __init__(self, trace: Trace, manifest: Manifest, device: torch.device) -> None:
        self.values: list[StaticWeight | DraftCall] = []
        self._device = device
        self._views = {i.out: i for i in trace.instructions if i.op is None}
        self._pieces = {p.name: (n, p) for n, s in enumerate(manifest.segments) for p in s.pieces}
        self._weights = trace.weight_slots
        self._segments = {slot: frozenset({self._pieces[w][0]}) for slot, w in trace.weight_slots.items()}
        """The segments that each static slot depends on."""
        for i in trace.instructions:
            if i.op is None and i.reads and all(r in self._segments for r in i.reads):
                self._segments[i.out] = frozenset().union(*(self._segments[r] for r in i.reads))
        self._known: dict[tuple[int, tuple[Address, ...]], int] = {}

    def has(self, slot: int) -> bool:
        return slot in self._segments

    def of(self, slots: Iterable[int], addresses: Mapping[int, Address]) -> Statics:
        """Return the static slots among `slots`, with their values for segments at these addresses."""
        return tuple((slot, self._index(slot, addresses)) for slot in slots if slot in self._segments)

    def _index(self, slot: int, addresses: Mapping[int, Address]) -> int:
        key = (slot, tuple(addresses[s] for s in sorted(self._segments[slot])))
        if key not in self._known:
            value = self._make(slot, addresses)
            self._known[key] = len(self.values)
            self.values.append(value)
        return self._known[key]

    def _make(self, slot: int, addresses: Mapping[int, Address]) -> StaticWeight | DraftCall:
        if slot in self._weights:
            segment, piece = self._pieces[self._weights[slot]]
            return StaticWeight(piece, segment, addresses[segment])
        view = self._views[slot]
        return DraftCall(template_of(view, self._device), self.of(view.reads, addresses), ())


def _required(address: Address | None) -> Address:
    """Return a parameter's address: `build` refuses plans without them."""
    assert address is not None
    return address


def _frees(steps: Sequence[Sequence[PendingCall]], kept: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Return, per step and call, the slots whose values the call is the last to use."""
    last: dict[int, tuple[int, int]] = {}
    for n, step in enumerate(steps):
        for m, (instruction, _) in enumerate(step):
            last |= dict.fromkeys((*instruction.reads, instruction.out), (n, m))
    frees: list[list[list[int]]] = [[[] for _ in step] for step in steps]
    for slot, (n, m) in last.items():
        if slot not in kept:
            frees[n][m].append(slot)
    return [[tuple(slots) for slots in step] for step in frees]
