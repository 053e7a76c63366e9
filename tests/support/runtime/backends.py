"""Every way in which an executor runs programs, for tests that hold for all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend, Executor, Result
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.lowering import fusion
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.lowering.weights import Manifest
from cohabit.runtime.memory import DeviceArena, HostStore, StoreKind
from cohabit.runtime.options import Options
from cohabit.runtime.stores.host import open_store
from tests.support.runtime.cuda_fake import FakeDriver
from tests.support.runtime.plans import with_room

ARENA_BYTES = 64 << 20
ROOM_BYTES = 6 << 20
"""What torch's pools on a real device want beside the bytes of a few small activations."""


def cpu() -> CpuBackend:
    return CpuBackend()


class InlineBackend(CpuBackend):
    """The compute lane makes all copies, however long they take."""

    def build(self, *args: Any, **options: Any) -> Program:
        program = super().build(*args, **options)
        object.__setattr__(program, "copies_inline", bool(program.computes) and not program.swap_outs)
        return program


def inline_cpu() -> CpuBackend:
    return InlineBackend()


def packed_cpu() -> CpuBackend:
    """`opened` lowers the model with packed weights for it."""
    return CpuBackend()


def packed(lowered: Lowered) -> Lowered:
    """The model with every weight packed that can be. Its archive is where the fixtures put it."""
    archive, cache = lowered.weights_path.parents[2] / "model.pt2", lowered.weights_path.parents[1]
    with mock.patch.object(fusion, "LEAST_MULTIPLICATIONS", 0):
        return lower(archive, lowered.name, lowered.batches, cache / "packed", options=Options(packed=True))


def fake_cuda(seed: int = 0) -> CudaBackend:
    return CudaBackend(FakeDriver(seed))


def fake_streams(seed: int = 0) -> CudaBackend:
    """Nothing can be captured."""
    driver = FakeDriver(seed)
    driver.uncapturable = "the test says so"
    return CudaBackend(driver)


class StagedBackend(CudaBackend):
    """No store is pinned: copies pass through the ring."""

    def open_store(self, kind: StoreKind, path: Path, manifest: Manifest) -> HostStore[Any]:
        return self.staged(open_store(kind, path, manifest), manifest)


def fake_staged(seed: int = 0) -> CudaBackend:
    return StagedBackend(FakeDriver(seed))


def real_cuda() -> CudaBackend:
    from cohabit.runtime.cuda.driver import CudaDriver

    return CudaBackend(CudaDriver.open())


def has_gpu() -> bool:
    return torch.cuda.is_available()


BACKENDS = [
    pytest.param(cpu, id="cpu"),
    pytest.param(inline_cpu, id="cpu-inline"),
    pytest.param(packed_cpu, id="cpu-packed"),
    pytest.param(fake_cuda, id="fake-cuda"),
    pytest.param(fake_streams, id="fake-cuda-uncaptured"),
    pytest.param(fake_staged, id="fake-cuda-staged"),
    pytest.param(
        real_cuda, id="cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="no CUDA device")]
    ),
]


@dataclass
class Bench:
    """A model, its store, and an arena that is larger than any plan of the tests needs."""

    backend: Backend
    lowered: Lowered
    store: HostStore[Any]
    arena: DeviceArena[Any]

    @property
    def executor(self) -> Executor:
        return self.backend.executor

    @property
    def graph(self) -> Graph:
        return self.lowered.graphs[Bucket(2)]

    def host(self, source: HostStore[Any]) -> HostStore[Any]:
        """A store of the tests' own, as this backend takes it."""
        if isinstance(self.backend, CudaBackend):
            return self.backend.staged(source, self.lowered.manifest)
        return source

    def program(self, plan: Plan, store: HostStore[Any] | None = None) -> Program:
        return self.beside(self.lowered, plan, Bases(0, plan.memory.partition_bytes), store)

    def beside(self, lowered: Lowered, plan: Plan, bases: Bases, store: HostStore[Any] | None = None) -> Program:
        """Bind a plan, with some room for activations on top, and bring its residents in."""
        roomy = with_room(plan, ROOM_BYTES)
        program = self.backend.build(lowered, roomy, None, self.arena, bases, store or self.store)
        self.executor.load(program)
        return program

    def run(self, program: Program, **options: bool) -> Result:
        return self.executor.run(program, self.lowered.examples(Bucket(2)), **options)


@contextmanager
def opened(make: Callable[[], Backend], lowered: Lowered, arena_bytes: int = ARENA_BYTES) -> Iterator[Bench]:
    backend = make()
    lowered = packed(lowered) if make is packed_cpu else lowered
    arena = backend.arena(arena_bytes)
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    try:
        yield Bench(backend, lowered, store, arena)
    finally:
        backend.close()
        store.close()
        arena.close()
