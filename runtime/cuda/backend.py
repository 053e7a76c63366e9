"""CUDA backend: one arena, pinned stores, streams per compute lane, captured programs."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import OnProgress
from cohabit.runtime.binding.build import build
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.api import Driver, HostBytes
from cohabit.runtime.cuda.arena import CudaArena
from cohabit.runtime.cuda.executor import CudaExecutor, SharedDevice
from cohabit.runtime.cuda.issue import Streams
from cohabit.runtime.cuda.profiling.measure import measured
from cohabit.runtime.cuda.program import CudaProgram, prepare
from cohabit.runtime.cuda.stores import PinnedMemory, PinnedStore, Ring, StagedStore
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.weights import Manifest
from cohabit.runtime.memory import DeviceArena, HostStore, StoreKind
from cohabit.runtime.stores.host import open_store

_log = logging.getLogger("cohabit.cuda")
PINNED_SHARE = 0.5
"""Maximum pinned fraction of a process's host memory."""


class CudaBackend:
    """One device. `pinned_limit_bytes` caps pinned host memory: models beyond it pass through a staging ring.

    `verify_reads` checks all reads from weights files against their checksums.
    """

    def __init__(
        self, driver: Driver, pinned_limit_bytes: int | None = None, *, verify_reads: bool = False
    ) -> None:
        self.driver = driver
        self._verify_reads = verify_reads
        self.name = driver.name
        self.pinned_memory = PinnedMemory(driver, pinned_limit_bytes or default_limit_bytes())
        self.streams = Streams.of(driver)
        self._ring = Ring(driver, self.pinned_memory)
        self._shared = SharedDevice()
        self._executors = [CudaExecutor(self.streams, self._shared)]
        self._measuring: CudaExecutor | None = None
        self.executor.start()

    @property
    def outside_bytes(self) -> int:
        return self._shared.outside_bytes

    @property
    def executor(self) -> CudaExecutor:
        return self._executors[0]

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
        if kind == "ram" and self.pinned_memory.fits(manifest.file_bytes):
            return PinnedStore(path, manifest, self.driver, self.pinned_memory, verify_reads=self._verify_reads)
        return self.staged(open_store(kind, path, manifest, verify_reads=self._verify_reads), manifest)

    def staged(self, source: HostStore[HostBytes], manifest: Manifest) -> StagedStore:
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
        """Measure everything, on separate streams. `quick` is ignored: plans need the scratch, which takes as long.

        Measuring allocates, and synchronises the device. In an engine that serves, lanes therefore wait for it if they
        capture, or issue op by op.
        """
        if self._measuring is None:
            self._measuring = CudaExecutor(Streams.of(self.driver), self._shared)
        pinned, executor = self.pinned_memory, self._measuring
        with self._shared.exclusive:
            return measured(self, executor, pinned, lowered, store, cache, on_progress, known_only=known_only)

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
        for executor in (*self._executors, *((self._measuring,) if self._measuring is not None else ())):
            executor.close()
        if self._shared.lost is None:
            self._ring.close()
            self.pinned_memory.close()


def default_limit_bytes(host_memory_bytes: int | None = None) -> int:
    """Return the cap on pinned memory for a process limited to `host_memory_bytes` of RAM (default: the machine's)."""
    if host_memory_bytes is None:
        host_memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(host_memory_bytes * PINNED_SHARE)
