"""CUDA backend: one arena, pinned stores, streams per compute lane, captured programs."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend, OnProgress
from cohabit.runtime.binding.build import build
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.arena import CudaArena
from cohabit.runtime.cuda.driver import CudaDriver
from cohabit.runtime.cuda.executor import CudaExecutor, SharedDevice
from cohabit.runtime.cuda.issue import Streams
from cohabit.runtime.cuda.profiling.measure import measured
from cohabit.runtime.cuda.program import CudaProgram, prepare
from cohabit.runtime.cuda.stores import PinnedStore, Ring, StagedStore
from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.weights import Manifest
from cohabit.runtime.memory import DeviceArena, HostStore, StoreKind
from cohabit.runtime.stores.host import open_store
from cohabit.runtime.stores.pages import Bytes
from cohabit.runtime.stores.pinned import PinnedMemory, default_limit_bytes

_log = logging.getLogger("cohabit.cuda")


class CudaBackend(Backend):
    """One device. `pinned_limit_bytes` caps pinned host memory: models beyond it pass through a staging ring.

    `verify_reads` checks all reads from weights files against their checksums.
    """

    pinned_memory: PinnedMemory

    def __init__(
        self, driver: CudaDriver, pinned_limit_bytes: int | None = None, *, verify_reads: bool = False
    ) -> None:
        self.driver = driver
        self._verify_reads = verify_reads
        self.name = driver.name
        self.pinned_memory = PinnedMemory(driver, pinned_limit_bytes or default_limit_bytes())
        self.streams = Streams.of(driver)
        self._ring = Ring(driver, self.pinned_memory)
        self._shared = SharedDevice()
        self._executors = [CudaExecutor(self.streams, self._shared)]
        self._executors[0].start()

    @property
    def outside_bytes(self) -> int:
        return self._shared.outside_bytes

    def executors(self, count: int) -> Sequence[CudaExecutor]:
        """Return one executor per compute lane, each with its own streams."""
        while len(self._executors) < count:
            self._executors.append(CudaExecutor(Streams.of(self.driver), self._shared))
            self._executors[-1].start()
        return self._executors[:count]

    def arena(self, nbytes: int) -> CudaArena:
        before = self.driver.memory()
        arena = CudaArena(self.driver, nbytes)
        fields = {
            "device": self.name,
            "arena_bytes": nbytes,
            "total_bytes": before.total_bytes,
            "free_bytes_before": before.free_bytes,
            "process_bytes_before": before.process_bytes,
            "outside_bytes": self.outside_bytes,
            "pinned_bytes": self.pinned_memory.used_bytes,
            "pinned_limit_bytes": self.pinned_memory.limit_bytes,
        }
        _log.info("device memory taken", extra={"fields": fields})
        return arena

    def open_store(self, kind: StoreKind, path: Path, manifest: Manifest) -> HostStore[torch.Tensor]:
        """Pin parameters in host memory if they fit under the cap; else, and for files, stage them."""
        if kind == "ram":
            try:
                return PinnedStore(path, manifest, self.driver, self.pinned_memory, verify_reads=self._verify_reads)
            except MemoryExceeded as error:
                fields = {"model": path.parent.name, "reason": str(error)}
                _log.warning("parameters are copied through the staging ring", extra={"fields": fields})
        return self.staged(open_store(kind, path, manifest, verify_reads=self._verify_reads), manifest)

    def staged(self, source: HostStore[Bytes], manifest: Manifest) -> StagedStore:
        """Return a store whose copies pass through the staging ring."""
        return StagedStore(source, manifest, self.driver, self._ring, self.pinned_memory)

    def measure(
        self,
        lowered: Lowered,
        store: HostStore[torch.Tensor],
        cache: Path | None,
        on_progress: OnProgress,
        *,
        quick: bool = False,
        known_only: bool = False,
    ) -> tuple[Lowered, dict[Bucket, Profile]]:
        """Measure everything. `quick` is ignored: plans need the scratch, which takes as long."""
        device_id, pinned = str(self.driver.device), self.pinned_memory
        return measured(
            self, device_id, self._alone, pinned, lowered, store, cache, on_progress, known_only=known_only
        )

    @contextmanager
    def _alone(self) -> Iterator[CudaExecutor]:
        """Return an executor with streams of its own, for measuring: that allocates, and synchronises the device.

        Meanwhile, lanes that capture, or issue op by op, wait. Others go on replaying graphs.
        """
        with self._shared.exclusive:
            executor = CudaExecutor(Streams.of(self.driver), self._shared)
            try:
                yield executor
            finally:
                executor.close()

    def build(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: DeviceArena[torch.Tensor],
        bases: Bases,
        store: HostStore[torch.Tensor],
    ) -> CudaProgram:
        """Check a plan and bind it; any thread. The program's first load admits it to the device."""
        program = build(lowered, plan, profile, arena, bases, store)
        return prepare(self.pinned_memory, lowered, program, profile, arena, bases, store)

    def close(self) -> None:
        """Release every program and unpin all memory."""
        for executor in self._executors:
            executor.close()
        if self._shared.lost is None:
            self._ring.close()
            self.pinned_memory.close()
