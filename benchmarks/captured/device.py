"""What a trainer asks of a device: measurements, host memory, and programs with an executor for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.captured.capture import OpCall
from benchmarks.captured.measure import Meter
from benchmarks.captured.store import StateStore
from cohabit.planner.profile import Link
from cohabit.runtime.backend import Executor
from cohabit.runtime.binding.draft import Draft
from cohabit.runtime.binding.offloaded import OffloadedTensor
from cohabit.runtime.binding.program import Program
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.memory import StoreKind


class TrainingDevice(Meter, Protocol):
    """One device, for one trainer."""

    @property
    def name(self) -> str:
        """The device's name, in profiles."""
        ...

    @property
    def store(self) -> StateStore: ...

    @property
    def executor(self) -> Executor: ...

    @property
    def shares_memory(self) -> bool:
        """Whether programs use the user's tensors where they lie; elsewhere both have memory of their own."""
        ...

    def start(self) -> None:
        """Start what the executor needs."""
        ...

    def links(self) -> tuple[Link, Link]:
        """Time tensors that come back into memory, and that leave it."""
        ...

    def slowdowns(self, calls: Sequence[OpCall], seconds: Sequence[float]) -> tuple[float, float]:
        """Return the factors by which ops take longer while copies are made, and copies while ops run: at least 1."""
        ...

    def budget_of(self, tensor_bytes: int) -> int:
        """Return the memory that tensors of so many bytes take, with what the allocator cannot use."""
        ...

    def tensor_bytes_in(self, budget_bytes: int) -> int:
        """Return how many bytes of tensors a plan may have in so much memory."""
        ...

    def bind(
        self, lowered: Lowered, drafted: Draft, of_tensor: Mapping[int, OffloadedTensor], budget_bytes: int
    ) -> Program:
        """Bind a draft to memory of this size, always the same. Raises MemoryExceeded."""
        ...

    def random_state(self) -> torch.Tensor:
        """Return the state of the generator from which ops take random numbers."""
        ...

    def set_random_state(self, state: torch.Tensor) -> None: ...

    def close(self) -> None:
        """Release everything. No program may be used any more."""
        ...


def open_training_device(name: str, store: StoreKind, folder: Path) -> TrainingDevice:
    """Open a device by its name: `cpu`, `cuda`, or `cuda:1`. Raises DeviceError where there is none of that name."""
    if name == "cpu":
        from benchmarks.captured.cpu import CpuTraining

        return CpuTraining(store, folder)
    if store == "file":
        raise DeviceError(f"{name}: tensors leave a GPU for pinned memory; store='file' is for the CPU")
    from benchmarks.captured.cuda import CudaTraining

    return CudaTraining.open(name)
