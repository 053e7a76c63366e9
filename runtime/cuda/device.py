"""A CUDA device: one arena, pinned stores, streams for each compute lane, captured programs."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from planner.plan import Plan
from planner.profile import Profile
from runtime.binding.program import Bases
from runtime.cpu.store import open_store
from runtime.cuda.arena import CudaArena
from runtime.cuda.executor import CudaExecutor, Shared
from runtime.cuda.host import Pinned, PinnedStore, Ring, StagedStore
from runtime.cuda.issue import Lanes
from runtime.cuda.moving import CudaMovable
from runtime.cuda.program import CudaProgram, prepare
from runtime.cuda.surface import Driver, HostBytes
from runtime.lowering.lower import Lowered
from runtime.lowering.weights import Manifest
from runtime.memory import Memory, Source, StoreKind

_log = logging.getLogger("cohabit.cuda")
PINNED_SHARE = 0.5
"""Share of the machine's memory that may be pinned unless told otherwise."""


class CudaDevice:
    """One device. `pinned_limit_bytes` caps pinned host memory: models beyond it pass through a staging ring."""

    def __init__(self, driver: Driver, pinned_limit_bytes: int | None = None) -> None:
        self.driver = driver
        self.name = driver.name
        self.pinned = Pinned(driver, pinned_limit_bytes or _default_limit_bytes())
        self.lanes = Lanes.of(driver)
        self._ring = Ring(driver, self.pinned)
        self._shared = Shared()
        self._executors = [CudaExecutor(self.lanes, self._shared)]
        self.executor.start()

    @property
    def executor(self) -> CudaExecutor:
        return self._executors[0]

    def executors(self, count: int) -> Sequence[CudaExecutor]:
        """One per compute lane, each with streams of its own."""
        while len(self._executors) < count:
            self._executors.append(CudaExecutor(Lanes.of(self.driver), self._shared))
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
            "pinned_bytes": self.pinned.used_bytes,
            "pinned_limit_bytes": self.pinned.limit_bytes,
        }
        _log.info("device memory taken", extra={"fields": fields})
        return arena

    def open_store(self, kind: StoreKind, path: Path, manifest: Manifest) -> Source[torch.Tensor]:
        """Pinned where it fits under the cap, else staged from pageable memory; a file is read as it is needed."""
        if kind == "ram" and self.pinned.fits(manifest.file_bytes):
            return PinnedStore(path, manifest, self.driver, self.pinned)
        return self.staged(open_store(kind, path, manifest), manifest)

    def staged(self, source: Source[HostBytes], manifest: Manifest) -> StagedStore:
        """Any host store, behind the staging ring."""
        for executor in self._executors:
            executor.settle()
        return StagedStore(source, manifest, self.driver, self._ring, self.pinned)

    def build(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: Memory[torch.Tensor],
        bases: Bases,
        store: Source[torch.Tensor],
    ) -> CudaProgram:
        """Check a plan and bind it; for any thread. The executor admits it to the device when it is first loaded."""
        return prepare(self.driver, self.pinned, lowered, plan, profile, arena, bases, store)

    def movable(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: Memory[torch.Tensor],
        bases: Bases,
        store: Source[torch.Tensor],
    ) -> CudaMovable:
        """Check a plan that keeps every parameter, and bind it to no place; for any thread."""
        return CudaMovable(self.driver, self.pinned, lowered, plan, profile, arena, bases, store)

    def close(self) -> None:
        """Dismiss every program, and take the pins off what is still pinned."""
        for executor in self._executors:
            executor.close()
        if self._shared.lost is None:
            self._ring.close()
            self.pinned.close()


def _default_limit_bytes() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * PINNED_SHARE)
