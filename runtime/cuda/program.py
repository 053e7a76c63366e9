"""Programs prepared for a CUDA device: schedule, copies, fixed buffers, pool, and captured graph."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch._ops import HigherOrderOperator

from cohabit.planner.graph import aligned
from cohabit.planner.plan import Plan, SwapIn
from cohabit.planner.profile import Profile
from cohabit.runtime.binding.offloaded import OffloadedTensor
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.cuda.buffers import Buffers, Shapes
from cohabit.runtime.cuda.commands import Command, Forecast, IssueSchedule, schedule
from cohabit.runtime.cuda.driver import CudaDriver, CudaGraph
from cohabit.runtime.cuda.pools import CarvedPool
from cohabit.runtime.lowering.indices import indexed_values
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.memory import DeviceArena, HostStore
from cohabit.runtime.options import Tf32
from cohabit.runtime.stores.pinned import PinnedMemory

ALIGNMENT_BYTES = 512
"""Rounding of torch's allocator."""
MOST_SCRATCH_BYTES = 64 << 20
"""Maximum scratch of a kernel that its library chooses among several. cuDNN tries kernels in order of expected speed
and keeps the first that gets its memory, for all models of the process. One limit for all models keeps outputs
bit-equal at every budget, and no kernel can claim gigabytes."""
_CHOOSES = "conv"
"""Substring of the names of operators whose library chooses kernels."""
_READS_ON_HOST = ("item", "_local_scalar_dense")


@dataclass(frozen=True, slots=True)
class SizedGraph:
    """A graph for inputs smaller than the bucket's largest, and its outputs' views of the buffers."""

    graph: CudaGraph
    outputs: tuple[torch.Tensor, ...]
    nbytes: int
    """Device memory outside the arena."""


@dataclass(slots=True)
class AdmissionState:
    """A program's pool and graphs on the device. Written by the thread that owns the device."""

    pool: CarvedPool | None = None
    graph: CudaGraph | None = None
    """For the bucket's largest shapes."""
    sized: dict[Shapes, SizedGraph] = field(default_factory=dict)
    """For smaller shapes that came more than once, least recently used first."""
    seen: dict[Shapes, None] = field(default_factory=dict)
    """Smaller shapes that came once."""
    residents: CudaGraph | None = None
    """The copies of initial residents, if any."""
    refused: str | None = None
    """Why there is no graph."""
    sized_refused: bool = False
    """Capture of smaller shapes has failed and is not tried again."""
    graph_bytes: int = 0
    """Device memory of `graph` and `residents` outside the arena."""
    choosing: bool = False
    """Libraries choose kernels in this run: scratch is limited to `MOST_SCRATCH_BYTES`."""

    @property
    def graphs(self) -> list[CudaGraph]:
        found = [self.graph, self.residents, *(sized.graph for sized in self.sized.values())]
        return [graph for graph in found if graph is not None]


@dataclass(frozen=True, slots=True)
class CudaProgram(Program):
    """One model in one bucket, ready to be issued or replayed."""

    schedule: IssueSchedule
    copies: tuple[Callable[[], None], ...]
    """One call per copy of the schedule, which issues it."""
    buffers: Buffers
    pool_memory: torch.Tensor
    """The arena's bytes for activations and scratch."""
    examples: Callable[[], list[torch.Tensor]]
    device: torch.device
    staged: bool
    """Copies pass through host code, which a graph cannot contain."""
    compute_s: float | None
    """Time of the kernels alone; None without a profile."""
    copying_s: float
    """Expected end of the last copy that the inference waits for, from its start; 0 without a profile."""
    tf32: Tf32
    admission: AdmissionState
    borrows_buffers: bool = False
    """The buffers belong to another program of the same model."""

    @property
    def pool(self) -> CarvedPool:
        assert self.admission.pool is not None, "not admitted"
        return self.admission.pool

    def begin(self, frame: Frame) -> None:
        """Copy the inputs in."""
        self.buffers.upload(frame, self.input_slots, self.device)

    def compute(self, index: int, frame: Frame) -> None:
        """Launch one op's kernels."""
        for call in self.computes[index].calls:
            call(frame)

    def finish(self, frame: Frame) -> None:
        """Create the outputs that are views, copy all outputs to the buffers, and clear the frame."""
        for call in self.final_calls:
            call(frame)
        values = [self.constants[s] if s in self.constants else frame[s] for s in self.output_slots]
        self.buffers.download(values)
        frame[:] = [None] * len(frame)

    def forget(self) -> None:
        """Drop the activations left by a failed inference."""
        for tensor in self.offloaded:
            tensor.forget()

    def close(self, driver: CudaDriver) -> None:
        """Release graphs, pool, buffers and spill buffers. No work may be in progress."""
        for tensor in self.offloaded:
            tensor.close()
        admission = self.admission
        driver.release(admission.graphs)
        if admission.pool is not None:
            admission.pool.close()
        admission.graph = admission.residents = admission.pool = None
        admission.sized.clear()
        admission.graph_bytes = 0
        if not self.borrows_buffers:
            self.buffers.close()

    def performing(self, driver: CudaDriver, frame: Frame) -> Callable[[Command], None]:
        """Return a function that issues a command of one inference to the current stream."""

        def perform(command: Command) -> None:
            index = command.index
            match command.verb:
                case "compute":
                    with self._limited(index):
                        driver.launch(lambda: self.compute(index, frame))
                case "copy":
                    self.copies[index]()
                case "copy_out":
                    driver.copy_deferred(_offloaded(self.swap_outs[index].offloaded).copy_out)
                case "copy_back":
                    driver.copy_deferred(_offloaded(self.swap_ins[index].offloaded).copy_back)
                case "deallocate":
                    driver.launch(self.offloaded[index].deallocate)
                case "allocate":
                    driver.launch(self.offloaded[index].allocate)
                case _:
                    raise AssertionError(f"{command.verb} is not a command of a program")

        return perform

    def _limited(self, index: int) -> AbstractContextManager[None]:
        """Limit an op's scratch inside the block, if its kernel is being chosen."""
        op = self.graph.ops[self.computes[index].op]
        if not self.admission.choosing or _CHOOSES not in op.target:
            return nullcontext()
        results = sum(aligned(self.graph.tensors[i].nbytes, ALIGNMENT_BYTES) for i in op.writes)
        return self.pool.leaving(results + MOST_SCRATCH_BYTES)


def _offloaded(tensor: OffloadedTensor | None) -> OffloadedTensor:
    assert tensor is not None, "a copy to the arena"
    return tensor


def prepare(
    pinned: PinnedMemory,
    lowered: Lowered,
    program: Program,
    profile: Profile | None,
    arena: DeviceArena[torch.Tensor],
    bases: Bases,
    store: HostStore[torch.Tensor],
) -> CudaProgram:
    """Prepare a bound program for issuing; nothing runs. Any thread.

    Raises MemoryExceeded if its buffers cannot be pinned.
    """
    scheduled = schedule(program, join=not store.staged)
    try:
        buffers = Buffers(
            program.name,
            lowered.inputs,
            lowered.outputs,
            lowered.shapes(program.bucket),
            pinned,
            is_dynamic=bool(program.bucket.sizes),
            indexed=indexed_values(lowered, program.bucket),
        )
    except BaseException:
        for tensor in program.offloaded:
            tensor.close()
        raise
    own: dict[str, Any] = {f.name: getattr(program, f.name) for f in fields(Program) if f.init}
    return CudaProgram(
        **own,
        schedule=scheduled,
        copies=prepared_copies(scheduled, arena, store),
        buffers=buffers,
        pool_memory=arena.bytes(bases.workspace, _pool_bytes(program.plan)),
        examples=lambda: lowered.examples(program.bucket),
        admission=AdmissionState(refused=_obstacle(program, staged=store.staged)),
        device=arena.device,
        staged=store.staged,
        compute_s=None if profile is None else profile.compute_s,
        copying_s=_copying_s(program, scheduled),
        tf32=lowered.options.tf32,
    )


def _copying_s(program: Program, scheduled: IssueSchedule) -> float:
    """Return the predicted end of the last copy before the epilogue, from the inference's start."""
    copied = max((scheduled.copies[c.index].last for c in scheduled.inference if c.verb == "copy"), default=0)
    return Forecast.of(program).arrivals_s[copied - 1] if copied else 0.0


def _pool_bytes(plan: Plan) -> int:
    """Return the bytes at the workspace's start below all swap-ins: the plan's pool, or more."""
    addresses = (step.address for step in plan.steps if isinstance(step, SwapIn))
    lowest = min((a.offset for a in addresses if a is not None and a.region == "workspace"), default=None)
    return (plan.memory.workspace_bytes if lowest is None else lowest) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def _obstacle(program: Program, *, staged: bool) -> str | None:
    """Return why a program cannot be captured, or None if nothing in its plan, store or trace prevents it."""
    if staged:
        return "its parameters are not pinned: copies pass through the staging ring, which the host fills"
    for instruction in program.draft.trace.instructions:
        if isinstance(instruction.target, HigherOrderOperator):
            return f"op {instruction.name} chooses what to run by values"
        if getattr(instruction.target, "_opname", "") in _READS_ON_HOST:
            return f"op {instruction.name} reads a number on the host"
    return None


def prepared_copies(
    scheduled: IssueSchedule, arena: DeviceArena[torch.Tensor], store: HostStore[torch.Tensor]
) -> tuple[Callable[[], None], ...]:
    """Return one call per copy of a schedule."""
    return tuple(store.copy(c.segment, arena.bytes(c.offset, c.nbytes)) for c in scheduled.copies)
