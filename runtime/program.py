"""A program: one plan bound to addresses. Whatever can be decided before a request comes is decided here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch

from planner.check import check
from planner.graph import Graph
from planner.plan import Address, Compute, Drop, Plan, SwapIn, SwapOut
from planner.profile import Profile
from runtime.binding import Call, Statics, bind, frees, on_device
from runtime.errors import UnsupportedPlan
from runtime.lower import Lowered
from runtime.memory import Copy, Memory, Room, Source
from runtime.rewrite import host_gather
from runtime.specialize import Instruction


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """An op with the views that lead to it. Counts are of this run's finished swap-ins."""

    step: int
    calls: tuple[Call, ...]
    swap_ins_before: int
    first_reads: tuple[int, ...]
    """Initial residents that this step is the first to read: the last run's epilogue may still be copying them."""


@dataclass(frozen=True, slots=True)
class SwapInStep:
    """A prepared copy to `offset` of the arena. `computes_before` counts this run's finished compute steps."""

    step: int
    segment: int
    copy: Copy
    nbytes: int
    computes_before: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """One model at one batch size, ready to be issued."""

    name: str
    batch: int
    plan: Plan
    frame_slots: int
    computes: tuple[ComputeStep, ...]
    swap_ins: tuple[SwapInStep, ...]
    prefix: int
    """So many leading swap-ins go to the model's own partition and wait for nothing: they may start before its turn."""
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


@dataclass(frozen=True, slots=True)
class Bases:
    """Where a model's regions start in the arena."""

    partition: int
    workspace: int

    def offset(self, address: Address) -> int:
        return address.offset + (self.partition if address.region == "partition" else self.workspace)


def build(
    lowered: Lowered, plan: Plan, profile: Profile | None, arena: Memory[Room], bases: Bases, store: Source[Room]
) -> Program:
    """Check a plan and bind it. Raises InvalidPlan, FingerprintMismatch, MemoryExceeded or UnsupportedPlan."""
    batches = {graph.fingerprint: batch for batch, graph in lowered.graphs.items()}
    batch = batches.get(plan.graph, lowered.batches[0])
    check(lowered.graphs[batch], profile, plan)
    require_supported(lowered.graphs[batch], plan)
    return _Builder(lowered, batch, plan, arena, bases, store).build()


def require_supported(graph: Graph, plan: Plan) -> None:
    """Refuse what this runtime cannot do: activations come from torch's allocator, and each op is bound once."""
    computes = [s for s in plan.steps if isinstance(s, Compute)]
    if len({s.op for s in computes}) < len(computes):
        raise UnsupportedPlan(f"{graph.name}: the plan computes an op again, which this runtime does not do")
    activations = [(p.address, graph.tensors[p.tensor].nbytes) for p in plan.inputs]
    parameters = [(p.address, graph.tensors[p.tensor].nbytes) for p in plan.residents]
    for step in plan.steps:
        if isinstance(step, SwapIn):
            parameters.append((step.address, graph.tensors[step.tensor].nbytes))
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


@dataclass(frozen=True, slots=True)
class _Pending:
    """A compute step whose calls wait for the last use of each slot to be known."""

    step: int
    instructions: list[Instruction]
    statics: list[dict[int, torch.Tensor]]
    swap_ins_before: int
    first_reads: tuple[int, ...]


class _Builder(Generic[Room]):
    """Walks a plan once, with the addresses as they are at each step."""

    def __init__(
        self, lowered: Lowered, batch: int, plan: Plan, arena: Memory[Room], bases: Bases, store: Source[Room]
    ) -> None:
        self.lowered = lowered
        self.trace = lowered.traces[batch]
        self.graph = lowered.graphs[batch]
        self.plan = plan
        self.arena = arena
        self.bases = bases
        self.store = store
        self.statics = Statics(self.trace, lowered.manifest, arena)
        self.op_instructions = {i.op: i for i in self.trace.instructions if i.op is not None}
        self.views = {i.out: i for i in self.trace.instructions if i.op is None}
        self.made: set[int] = set()
        self.addresses = {p.tensor: bases.offset(p.address) for p in plan.residents}
        self.unread = set(self.addresses)
        self.computes: list[_Pending] = []
        self.swap_ins: list[SwapInStep] = []
        self.position: dict[int, int] = {}
        """Index in its lane of each step that has one."""

    def build(self) -> Program:
        residents = tuple(self._swap_in(-1, p.tensor, p.address, 0) for p in self.plan.residents)
        constants: dict[int, torch.Tensor] = {}
        for index, step in enumerate(self.plan.steps):
            if index == self.plan.epilogue_start:
                constants = self._constants()
            match step:
                case SwapIn():
                    self._add_swap_in(index, step)
                case Compute():
                    self._add_compute(index, step)
                case Drop():
                    self.addresses.pop(step.tensor, None)
                    self.unread.discard(step.tensor)
                case SwapOut():
                    raise UnsupportedPlan(
                        f"{self.graph.name}: the plan swaps {self.graph.tensors[step.tensor].name} out; this"
                        " runtime keeps activations in memory, so plan without activation swaps"
                    )
        if not self.computes or self.plan.epilogue_start == len(self.plan.steps):
            constants = self._constants()
        initial = {p.tensor for p in self.plan.residents}
        final = self._final_views()
        dying = frees([*(p.instructions for p in self.computes), final], self.trace.output_slots)
        return Program(
            name=self.lowered.name,
            batch=self.trace.batch,
            plan=self.plan,
            frame_slots=self.trace.slots,
            computes=tuple(self._finish(pending, dying) for pending in self.computes),
            swap_ins=tuple(self.swap_ins),
            prefix=self._prefix(),
            epilogue=sum(s.step < self.plan.epilogue_start for s in self.swap_ins),
            final_calls=tuple(self._bind(i, self._static_inputs(i), ()) for i in final),
            residents=residents,
            restored={s.segment: i for i, s in enumerate(self.swap_ins) if s.segment in initial},
            input_slots=self.trace.input_slots,
            output_slots=self.trace.output_slots,
            constants=constants,
            link_bytes=sum(s.nbytes for s in self.swap_ins),
        )

    def _add_swap_in(self, index: int, step: SwapIn) -> None:
        before = self._finished(step.after, Compute)
        self.position[index] = len(self.swap_ins)
        self.swap_ins.append(self._swap_in(index, step.tensor, step.address, before))
        self.addresses[step.tensor] = self.bases.offset(step.address)

    def _add_compute(self, index: int, step: Compute) -> None:
        before = self._finished(step.after, SwapIn)
        self.position[index] = len(self.computes)
        instructions = self._needed_by(self.op_instructions[step.op])
        statics = [self._static_inputs(i) for i in instructions]
        first = self.unread.intersection(self.graph.ops[step.op].reads)
        self.unread -= first
        self.computes.append(_Pending(index, instructions, statics, before, tuple(sorted(first))))

    def _finished(self, after: Sequence[int], kind: type[Compute] | type[SwapIn]) -> int:
        """How many steps of the other lane must have finished, which is in order."""
        return max((self.position[i] + 1 for i in after if isinstance(self.plan.steps[i], kind)), default=0)

    def _finish(self, pending: "_Pending", dying: dict[int, tuple[int, ...]]) -> ComputeStep:
        calls = tuple(
            self._bind(i, statics, dying.get(id(i), ()))
            for i, statics in zip(pending.instructions, pending.statics, strict=True)
        )
        return ComputeStep(pending.step, calls, pending.swap_ins_before, pending.first_reads)

    def _prefix(self) -> int:
        count = 0
        for swap in self.swap_ins:
            step = self.plan.steps[swap.step]
            if not isinstance(step, SwapIn) or step.address.region != "partition" or swap.computes_before:
                break
            count += 1
        return count

    def _swap_in(self, index: int, segment: int, address: Address, computes_before: int) -> SwapInStep:
        nbytes = self.lowered.manifest.segments[segment].nbytes
        offset = self.bases.offset(address)
        copy = self.store.copy(segment, self.arena.bytes(offset, nbytes))
        return SwapInStep(index, segment, copy, nbytes, computes_before, offset)

    def _needed_by(self, instruction: Instruction) -> list[Instruction]:
        """The views that an op needs and that nothing made yet, in order, and the op itself."""
        needed: list[Instruction] = []
        pending = [(slot, False) for slot in reversed(instruction.reads)]
        while pending:
            slot, ready = pending.pop()
            view = self.views.get(slot)
            if view is None or slot in self.made or self.statics.is_static(slot):
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

    def _static_inputs(self, instruction: Instruction) -> dict[int, torch.Tensor]:
        return {
            slot: self.statics.value(slot, self.addresses)
            for slot in instruction.reads
            if self.statics.is_static(slot)
        }

    def _constants(self) -> dict[int, torch.Tensor]:
        """Outputs that are parameters or views of them, where they are now."""
        slots = (s for s in self.trace.output_slots if self.statics.is_static(s))
        return {slot: self.statics.value(slot, self.addresses) for slot in slots}

    def _final_views(self) -> list[Instruction]:
        """Views that are outputs and belong to no op."""
        final: list[Instruction] = []
        for slot in self.trace.output_slots:
            if slot in self.views and slot not in self.made and not self.statics.is_static(slot):
                final += [*self._needed_by(self.views[slot]), self.views[slot]]
                self.made.add(slot)
        return final

    def _bind(self, instruction: Instruction, statics: dict[int, torch.Tensor], dying: Sequence[int]) -> Call:
        target = instruction.target
        arguments = instruction.args
        if target is host_gather:
            table, slot = arguments
            target, arguments = torch.embedding, (self.store.table(table), slot)
        arguments, keywords = on_device(target, arguments, instruction.kwargs, self.arena.device)
        return bind(target, arguments, keywords, statics, instruction.out, tuple(dying))
