"""A program prepared for a CUDA device: its schedule, prepared copies, fixed buffers, pool, and captured graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from planner.plan import Plan
from planner.profile import Profile
from runtime.binding.program import Bases, Program, build
from runtime.binding.slots import Frame
from runtime.cuda.buffers import Buffers
from runtime.cuda.host import Pinned
from runtime.cuda.issue import Perform
from runtime.cuda.lower import Copy, Empty, Kernels, Refill, Return, Save, Schedule, Work, schedule
from runtime.cuda.surface import Driver, Event, Graph, Pool
from runtime.cuda.zone import zone_of
from runtime.lowering.lower import Lowered
from runtime.lowering.specialize import Trace
from runtime.memory import Memory, Source
from runtime.offload.traveller import Traveller

_READS_ON_HOST = ("item", "_local_scalar_dense")


@dataclass(slots=True)
class Readiness:
    """What a program gets when it is admitted to the device, by the thread that owns that."""

    pool: Pool | None = None
    whole: Graph | None = None
    """The captured program that brings the prefix in,"""
    rest: Graph | None = None
    """and the one that counts on it to be there."""
    refused: str | None = None
    """Why there are no graphs."""
    graph_bytes: int = 0
    """Device memory that the graphs have taken beside the arena."""


@dataclass(frozen=True, slots=True)
class CudaProgram(Program):
    """One model at one batch size, ready to be issued or replayed."""

    schedule: Schedule
    copies: Mapping[Copy, Callable[[], None]]
    buffers: Buffers
    zone: torch.Tensor
    """The bytes of the workspace for activations and scratch."""
    examples: Callable[[], list[torch.Tensor]]
    device: torch.device
    link_free: Event
    """Reached when the last copy of a replayed graph has ended."""
    staged: bool
    """Copies pass through host code, which no graph can hold."""
    compute_s: float | None
    """Time of the kernels alone, where there is a profile."""
    tf32: bool
    ready: Readiness
    borrows: bool = False
    """Its buffers are those of another program of its model."""

    @property
    def pool(self) -> Pool:
        assert self.ready.pool is not None, "not admitted"
        return self.ready.pool

    def begin(self, frame: Frame) -> None:
        """Bring the inputs in."""
        self.buffers.upload(frame, self.input_slots, self.device)

    def compute(self, index: int, frame: Frame) -> None:
        """Run one op's kernels."""
        for call in self.computes[index].calls:
            call(frame)

    def finish(self, frame: Frame) -> None:
        """Make the outputs that are views, and copy all of them out."""
        for call in self.final_calls:
            call(frame)
        values = [self.constants[s] if s in self.constants else frame[s] for s in self.output_slots]
        self.buffers.download(values)
        frame[:] = [None] * len(frame)

    def returning(self, index: int) -> Traveller:
        """The activation that a swap-in brings back."""
        traveller = self.swap_ins[index].traveller
        assert traveller is not None
        return traveller

    def forget(self) -> None:
        """Let go of activations that an inference has left behind because it failed."""
        for traveller in self.travellers:
            traveller.forget()

    def close(self) -> None:
        """Give up graphs, pool, buffers and places in the host. Nothing may be under way."""
        for traveller in self.travellers:
            traveller.close()
        ready = self.ready
        for graph in {id(g): g for g in (ready.whole, ready.rest) if g is not None}.values():
            graph.close()
        if ready.pool is not None:
            ready.pool.close()
        ready.whole = ready.rest = ready.pool = None
        ready.graph_bytes = 0
        if not self.borrows:
            self.buffers.close()

    def performing(self, driver: Driver, frame: Frame) -> Perform:
        """How commands are carried out for one inference."""

        def perform(command: Work) -> None:
            match command:
                case Kernels(index):
                    driver.launch(lambda: self.compute(index, frame))
                case Copy():
                    self.copies[command]()
                case Save(index):
                    driver.carry(self.swap_outs[index].traveller.way_out)
                case Return(index):
                    driver.carry(self.returning(index).way_back)
                case Empty(traveller):
                    driver.launch(self.travellers[traveller].empty)
                case Refill(traveller):
                    driver.launch(self.travellers[traveller].refill)

        return perform


def prepare(
    driver: Driver,
    pinned: Pinned,
    lowered: Lowered,
    plan: Plan,
    profile: Profile | None,
    arena: Memory[torch.Tensor],
    bases: Bases,
    store: Source[torch.Tensor],
) -> CudaProgram:
    """Check a plan and bind it. For any thread; nothing runs. Raises what `runtime.binding.program.build` raises."""
    program = build(lowered, plan, profile, arena, bases, store)
    return equip(driver, pinned, lowered, program, profile, arena, bases, store)


def equip(
    driver: Driver,
    pinned: Pinned,
    lowered: Lowered,
    program: Program,
    profile: Profile | None,
    arena: Memory[torch.Tensor],
    bases: Bases,
    store: Source[torch.Tensor],
) -> CudaProgram:
    """Give a bound program what it needs to be issued. Raises UnsupportedPlan, and MemoryExceeded for its buffers."""
    graph = lowered.graphs[program.batch]
    staged = bool(getattr(store, "staged", False))
    lowered_to = schedule(program, join=not staged)
    zone = zone_of(graph, program.plan)
    own: dict[str, Any] = {f.name: getattr(program, f.name) for f in fields(Program)}
    own["prefix"] = program.own_prefix  # a replayed graph does not say how much of the workspace it has left
    return CudaProgram(
        **own,
        schedule=lowered_to,
        copies=prepared_copies(lowered_to, arena, store),
        buffers=Buffers(program.name, lowered.inputs, lowered.outputs, program.batch, pinned),
        zone=arena.bytes(bases.offset(zone.address), zone.nbytes),
        examples=lambda: lowered.examples(program.batch),
        ready=Readiness(refused=obstacle(lowered.traces[program.batch], staged=staged)),
        device=arena.device,
        link_free=driver.event(external=True),
        staged=staged,
        compute_s=None if profile is None else profile.compute_s,
        tf32=lowered.options.tf32,
    )


def obstacle(trace: Trace, *, staged: bool) -> str | None:
    """Why a program cannot be captured, as far as can be told beforehand."""
    if staged:
        return "its parameters are not pinned: copies pass through the staging ring, which the host fills"
    for instruction in trace.instructions:
        if isinstance(instruction.target, HigherOrderOperator):
            return f"op {instruction.name} chooses what to run by values"
        if getattr(instruction.target, "_opname", "") in _READS_ON_HOST:
            return f"op {instruction.name} reads a number on the host"
    return None


def prepared_copies(
    lowered_to: Schedule, arena: Memory[torch.Tensor], store: Source[torch.Tensor]
) -> dict[Copy, Callable[[], None]]:
    """Every copy of a schedule, ready to be issued."""
    parts = (lowered_to.prefix, lowered_to.epilogue, lowered_to.residents)
    copies = {c for part in parts for c in part}
    for commands in (lowered_to.whole, lowered_to.rest):
        copies |= {i.command for i in commands.issues if isinstance(i.command, Copy)}
    return {c: store.copy(c.segment, arena.bytes(c.offset, c.nbytes)) for c in copies}
