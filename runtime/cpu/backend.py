"""CPU backend: anonymous memory, host stores, and executors with two or three threads each."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from cohabit.planner.plan import Plan
from cohabit.planner.profile import NOISY, Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend, OnProgress
from cohabit.runtime.binding.build import build
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.cpu.arena import CpuArena
from cohabit.runtime.cpu.executor import CpuExecutor
from cohabit.runtime.heap import KEPT_BYTES, keep_freed_memory
from cohabit.runtime.lowering.encoding.int8_kernel import kernel
from cohabit.runtime.lowering.fused_ops import INT8_OPS
from cohabit.runtime.lowering.lower import Lowered, NotCached
from cohabit.runtime.lowering.packing import processor
from cohabit.runtime.lowering.weights import BLOCK_BYTES, Manifest
from cohabit.runtime.measure.link import measured_bytes
from cohabit.runtime.measure.other_work import current_share
from cohabit.runtime.measure.profile import cached_profiles, measure, traced_profiles
from cohabit.runtime.measure.stopwatch import last_level_cache_bytes
from cohabit.runtime.memory import DeviceArena, HostStore, StoreKind
from cohabit.runtime.stores.host import LimitedStore, Links, open_store
from cohabit.runtime.stores.pages import HUGE_PAGES_SETTING, Bytes, huge_pages_are_off

_log = logging.getLogger("cohabit.runtime")


class CpuBackend(Backend):
    """`link_bandwidth_bytes_per_s` limits the speed of copies, to emulate another bus or flash.

    `verify_reads` checks all reads from weights files against their checksums. `unmap_tables`: see `FileStore`.
    `lost_on_change`: see `CpuExecutor`.
    """

    name = "cpu"

    def __init__(
        self,
        link_bandwidth_bytes_per_s: float | None = None,
        *,
        verify_reads: bool = False,
        unmap_tables: bool = False,
        lost_on_change: bool = True,
    ) -> None:
        self._bandwidth = link_bandwidth_bytes_per_s
        self._verify_reads = verify_reads
        self._unmap_tables = unmap_tables
        self._lost_on_change = lost_on_change
        self._links = Links()
        self._executors: list[CpuExecutor] = []
        self._activation_bytes = 0
        """Maximum activation bytes of one inference, over all plans so far."""

    def arena(self, nbytes: int) -> CpuArena:
        if huge_pages_are_off():
            fields = {"setting": str(HUGE_PAGES_SETTING), "is": "never", "better": "madvise"}
            _log.warning("copies and reads of parameters take longer without huge pages", extra={"fields": fields})
        return CpuArena(nbytes)

    def open_store(self, kind: StoreKind, path: Path, manifest: Manifest) -> HostStore[Bytes]:
        store = open_store(kind, path, manifest, verify_reads=self._verify_reads, unmap_tables=self._unmap_tables)
        return store if self._bandwidth is None else LimitedStore(store, self._bandwidth, self._links)

    def executors(self, count: int) -> Sequence[CpuExecutor]:
        """Return one executor per compute lane, started on first use."""
        while len(self._executors) < count:
            self._executors.append(CpuExecutor(lost_on_change=self._lost_on_change))
            self._executors[-1].start()
        return self._executors[:count]

    def measure(
        self,
        lowered: Lowered,
        store: HostStore[Bytes],
        cache: Path | None,
        on_progress: OnProgress,
        *,
        quick: bool = False,
        known_only: bool = False,
    ) -> tuple[Lowered, dict[Bucket, Profile]]:
        limit = "" if self._bandwidth is None else f" at {self._bandwidth:.0f} B/s"
        if self._verify_reads and store.kind == "file":
            limit += ", verified"
        threads = torch.get_num_threads()
        device = f"{processor()}, {threads} threads, torch {torch.__version__}, {store.kind} store{limit}"

        def measured() -> dict[Bucket, Profile]:
            if known_only:
                raise NotCached(f"{lowered.name}: the cache has no undamaged profile of it")
            window = self._window_bytes(lowered.manifest, store)
            if quick and (traced := traced_profiles(lowered, device, CpuArena, store, window)) is not None:
                return traced
            with CpuArena(measured_bytes(lowered.manifest, window)) as arena, CpuExecutor() as executor:
                return measure(lowered, device, self.build, arena, store, executor, window, on_progress)

        def is_quiet() -> bool:
            return not known_only and _is_quiet()

        profiles = cached_profiles(lowered, device, cache, measured, quick=quick, is_quiet=is_quiet)
        return lowered, profiles

    def _window_bytes(self, manifest: Manifest, store: HostStore[Bytes]) -> int:
        """Return a third of the last-level cache: copies' sources and ops' results pass through it, too.

        0 if memory does not limit the link, and if a segment is larger than that.
        """
        window = last_level_cache_bytes() // 3 // BLOCK_BYTES * BLOCK_BYTES
        largest = max((s.nbytes for s in manifest.segments), default=0)
        return window if store.kind == "ram" and self._bandwidth is None and largest <= window else 0

    def build(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: DeviceArena[Bytes],
        bases: Bases,
        store: HostStore[Bytes],
    ) -> Program:
        self.keep_activations(plan)
        if any(call.target in INT8_OPS for call in lowered.traces[max(lowered.buckets)].instructions):
            kernel()
        return build(lowered, plan, profile, arena, bases, store)

    def keep_activations(self, plan: Plan) -> None:
        """Make the C library keep freed activations, which the budget counts already, for the next inference.

        The limit allows for the heap's gaps: once the free bytes at the heap's end exceed it, the C library returns all
        of them, and the next inference takes a page fault for each page.
        """
        self._activation_bytes = max(self._activation_bytes, plan.pool_bytes or plan.memory.workspace_bytes)
        keep_freed_memory(max(1, len(self._executors)) * (self._activation_bytes * 5 // 4 + KEPT_BYTES))

    def close(self) -> None:
        for executor in self._executors:
            executor.close()


def _is_quiet() -> bool:
    """Whether other work leaves the CPUs to a measurement."""
    return current_share() <= NOISY
