"""A program prepared for a CUDA device: its schedule, prepared copies, fixed buffers, pool, and captured graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from planner.plan import Plan
from planner.profile import Profile
from runtime.backend import Memory, Source
from runtime.binding import Frame
from runtime.cuda.buffers import Buffers
from runtime.cuda.host import Pinned
from runtime.cuda.issue import Perform
from runtime.cuda.lower import Copy, Kernels, Schedule, schedule
from runtime.cuda.surface import Driver, Event, Graph, Pool
from runtime.cuda.zone import Zone, zone_of
from runtime.lower import Lowered
from runtime.program import Bases, Program, build

SMALL_SEGMENT_BYTES = 2 << 20
"""What torch's allocator carves at once for tensors of up to 1 MiB."""
LEAST_LARGE_BYTES = 10 << 20
"""The least piece that its pools take whole for larger tensors."""


@dataclass(slots=True)
class Captured:
    """The graphs of a program: `whole` brings the prefix in, `rest` counts on it. `refused` says why there are none."""

    whole: Graph | None = None
    rest: Graph | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class CudaProgram(Program):
    """One model at one batch size, ready to be issued or replayed."""

    schedule: Schedule
    copies: Mapping[Copy, Callable[[], None]]
    buffers: Buffers
    pool: Pool
    zone_bytes: int
    device: torch.device
    link_free: Event
    """Reached when the last copy of a replayed graph has ended."""
    staged: bool
    """Copies pass through host code, which no graph can hold."""
    compute_s: float | None
    """Time of the kernels alone, where there is a profile."""
    precision: "Precision"
    captured: Captured = field(default_factory=Captured)

    def begin(self, frame: Frame) -> None:
        """Bring the inputs in."""
        self.buffers.upload(frame, self.input_slots, self.device, self.precision.memory_format)

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

    def performing(self, driver: Driver, frame: Frame) -> Perform:
        """How commands are carried out for one inference."""

        def perform(command: Kernels | Copy) -> None:
            if isinstance(command, Kernels):
                driver.launch(lambda: self.compute(command.index, frame))
            else:
                self.copies[command]()

        return perform


@dataclass(frozen=True, slots=True)
class Precision:
    """How a model's kernels compute: see `runtime.options`."""

    tf32: bool = False
    memory_format: torch.memory_format = torch.contiguous_format


def prepare(
    driver: Driver,
    pinned: Pinned,
    lowered: Lowered,
    plan: Plan,
    profile: Profile | None,
    arena: Memory[torch.Tensor],
    bases: Bases,
    store: Source[torch.Tensor],
    small_segments: int,
    precision: Precision,
) -> CudaProgram:
    """Check a plan and bind it. Raises InvalidPlan, FingerprintMismatch, MemoryExceeded or UnsupportedPlan."""
    program = build(lowered, plan, profile, arena, bases, store)
    graph = lowered.graphs[program.batch]
    staged = bool(getattr(store, "staged", False))
    lowered_to = schedule(program, join=not staged)
    zone = zone_of(graph, plan)
    memory = arena.bytes(bases.offset(zone.address), zone.nbytes)
    own: dict[str, Any] = {f.name: getattr(program, f.name) for f in fields(Program)}
    return CudaProgram(
        **own,
        schedule=lowered_to,
        copies=_prepared(program, lowered_to, arena, store),
        buffers=Buffers(program.name, lowered.inputs, lowered.outputs, program.batch, pinned),
        pool=driver.pool(memory, large_bytes(zone, small_segments)),
        zone_bytes=zone.nbytes,
        device=arena.device,
        link_free=driver.event(external=True),
        staged=staged,
        compute_s=None if profile is None else profile.compute_s,
        precision=precision,
    )


def large_bytes(zone: Zone, small_segments: int) -> int:
    """How much of a zone is one piece for large tensors; none where that would be too small for the allocator."""
    left = zone.nbytes - small_segments * SMALL_SEGMENT_BYTES
    whole = left // SMALL_SEGMENT_BYTES * SMALL_SEGMENT_BYTES
    return whole if whole >= LEAST_LARGE_BYTES else 0


def _prepared(
    program: Program, lowered_to: Schedule, arena: Memory[torch.Tensor], store: Source[torch.Tensor]
) -> dict[Copy, Callable[[], None]]:
    parts = (lowered_to.prefix, lowered_to.epilogue, lowered_to.residents)
    copies = {c for part in parts for c in part}
    for commands in (lowered_to.whole, lowered_to.rest):
        copies |= {i.command for i in commands.issues if isinstance(i.command, Copy)}
    return {c: store.copy(c.segment, arena.bytes(c.offset, c.nbytes)) for c in copies}
