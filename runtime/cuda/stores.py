"""Host stores of a CUDA device: pinned up to a cap, beyond it staged through a small pinned ring.

Pinned parameters are copied directly. Other stores (pageable memory, a file) fill the ring's slots in turn, in the
thread that issues the copies. The link may wait until a slot is filled, but no copy in progress meets a page fault.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from cohabit.planner.errors import format_bytes
from cohabit.runtime.cuda.api import Driver, Event, HostBytes
from cohabit.runtime.cuda.decoding import EncodedCopy
from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.lowering.weights import Manifest, Segment
from cohabit.runtime.memory import Copy, HostStore, SpillBuffer, StoreKind
from cohabit.runtime.stores.host import find_table, read_weights, table_view
from cohabit.runtime.stores.pages import anonymous_memory, use_huge_pages

RING_SLOTS = 3
_HUGE_PAGE_BYTES = 2 << 20


class PinnedMemory:
    """Pinned host memory with a cap on its total size. Any thread."""

    def __init__(self, driver: Driver, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._driver = driver
        self._held: dict[int, HostBytes] = {}
        self._lock = threading.Lock()

    def fits(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.limit_bytes

    def require(self, nbytes: int, what: str) -> None:
        """Raise MemoryExceeded if `nbytes` more would exceed the cap."""
        if not self.fits(nbytes):
            raise MemoryExceeded(
                f"{what}: pinning {format_bytes(nbytes)} on top of {format_bytes(self.used_bytes)} exceeds the cap of"
                f" {format_bytes(self.limit_bytes)}; raise the cap on pinned memory"
            )

    def take(self, nbytes: int, what: str) -> HostBytes:
        """Return zeroed, page-aligned pinned memory near the device. Raises MemoryExceeded over the cap."""
        self.require(nbytes, what)
        host = np.frombuffer(anonymous_memory(nbytes), np.uint8, count=nbytes)
        with self._driver.near():  # pinning touches all pages not touched yet
            if nbytes >= _HUGE_PAGE_BYTES:
                host.fill(0)
                use_huge_pages(host)  # before pinning: pinned pages cannot be moved
            if nbytes:
                self._driver.pin(host)
        if nbytes:
            with self._lock:
                self._held[host.ctypes.data] = host
                self.used_bytes += nbytes
        return host

    def release(self, host: HostBytes) -> None:
        """Unpin memory; does nothing if it is unpinned already. No copy may be in progress."""
        with self._lock:
            held = self._held.pop(host.ctypes.data, None)
            self.used_bytes -= host.nbytes if held is not None else 0
        if held is not None:
            self._driver.unpin(host)

    def close(self) -> None:
        """Unpin everything."""
        for host in list(self._held.values()):
            self.release(host)


class PinnedStore:
    """A whole weights file in one pinned region, as stored: the device decodes encoded segments.

    A copy may continue into the following segments.
    """

    kind: StoreKind = "ram"
    staged = False
    check_tables = None

    def __init__(
        self, path: Path, manifest: Manifest, driver: Driver, pinned: PinnedMemory, *, verify_reads: bool = False
    ) -> None:
        self._driver = driver
        self._pinned = pinned
        self._manifest = manifest
        self._host = pinned.take(manifest.file_bytes, path.parent.name)
        read_weights(path, manifest, self._host, verify_reads=verify_reads)
        self._region = torch.from_numpy(self._host)

    def copy(self, segment: int, destination: torch.Tensor) -> Copy:
        copied = self._from(segment, destination.nbytes)
        if any(s.is_encoded for s in copied):
            return EncodedCopy(self._driver, self._region, copied, destination, segment)
        offset = copied[0].offset
        source = self._region[offset : offset + destination.nbytes]
        return lambda: self._driver.copy(destination, source)

    def _from(self, segment: int, nbytes: int) -> list[Segment]:
        """Return the segments that fill `nbytes` of device memory, from this one on."""
        ends = accumulate(s.nbytes for s in self._manifest.segments[segment:])
        count = next(n for n, end in enumerate(ends, 1) if end >= nbytes)
        return list(self._manifest.segments[segment : segment + count])

    def link_bytes(self, segment: int) -> int:
        return self._manifest.segments[segment].file_bytes

    def table(self, name: str) -> torch.Tensor:
        table = find_table(self._manifest, name)
        return self._driver.mapped(table_view(self._host, table, table.offset))

    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        return pinned_spill_buffers(self._pinned, sizes)

    def close(self) -> None:
        self._pinned.release(self._host)


def pinned_spill_buffers(pinned: PinnedMemory, sizes: Sequence[int]) -> list[SpillBuffer]:
    """Return pinned buffers for activations. Raises MemoryExceeded over the cap."""
    pinned.require(sum(sizes), "activations that leave memory")
    return [_PinnedSpillBuffer(pinned, nbytes) for nbytes in sizes]


class _PinnedSpillBuffer:
    def __init__(self, pool: PinnedMemory, nbytes: int) -> None:
        self._pool = pool
        self._host = pool.take(nbytes, "an activation that leaves memory")
        self.pinned: torch.Tensor | None = torch.from_numpy(self._host)

    def save(self, source: torch.Tensor) -> None:
        """Copy bytes in, synchronously. Programs issue their copies through `pinned` instead."""
        assert self.pinned is not None
        self.pinned[: source.nbytes].copy_(source)

    def load(self, destination: torch.Tensor) -> None:
        assert self.pinned is not None
        destination.copy_(self.pinned[: destination.nbytes])

    def close(self) -> None:
        self._pool.release(self._host)


@dataclass(slots=True)
class _Slot:
    host: HostBytes
    tensor: torch.Tensor
    emptied: Event | None = None


class Ring:
    """Pinned staging slots shared by the copies of all lanes, one copy at a time. Any thread."""

    def __init__(self, driver: Driver, pinned: PinnedMemory) -> None:
        self._driver = driver
        self._pinned = pinned
        self._slots: list[_Slot] = []
        self._next = 0
        self.slot_bytes = 0
        self._turn = threading.Lock()

    def fit(self, nbytes: int) -> None:
        """Grow the slots to at least `nbytes` each. Raises MemoryExceeded over the cap on pinned memory."""
        with self._turn:
            if nbytes <= self.slot_bytes:
                return
            self.close()
            for _ in range(RING_SLOTS):
                host = self._pinned.take(nbytes, "the staging ring")
                self._slots.append(_Slot(host, torch.from_numpy(host)))
            self.slot_bytes = nbytes

    def pass_through(self, fill: Callable[[HostBytes], None], destination: torch.Tensor) -> None:
        """Fill the next slot, after the copy out of it has ended, and issue the copy to the device."""
        with self._turn:
            slot = self._slots[self._next]
            self._next = (self._next + 1) % len(self._slots)
            if slot.emptied is not None:
                self._driver.synchronize(slot.emptied)
            nbytes = destination.nbytes
            fill(slot.host[:nbytes])
            self._driver.copy(destination, slot.tensor[:nbytes])
            slot.emptied = slot.emptied or self._driver.event()
            self._driver.record(slot.emptied)

    def close(self) -> None:
        """Wait for copies in progress and release the slots."""
        for slot in self._slots:
            if slot.emptied is not None:
                self._driver.synchronize(slot.emptied)
            self._pinned.release(slot.host)
        self._slots = []
        self.slot_bytes = self._next = 0


class StagedStore:
    """Store whose copies pass through the staging ring. Embedding tables are pinned: kernels read them in place."""

    staged = True
    check_tables = None

    def __init__(
        self, source: HostStore[HostBytes], manifest: Manifest, driver: Driver, ring: Ring, pinned: PinnedMemory
    ) -> None:
        self.kind = source.kind
        self._source = source
        self._driver = driver
        self._ring = ring
        self._pinned = pinned
        self._manifest = manifest
        self._hosts: dict[str, HostBytes] = {}
        ring.fit(max((s.nbytes for s in manifest.segments), default=0))

    def copy(self, segment: int, destination: torch.Tensor) -> Copy:
        return lambda: self._ring.pass_through(lambda host: self._source.copy(segment, host)(), destination)

    def link_bytes(self, segment: int) -> int:
        return self._manifest.segments[segment].nbytes

    def table(self, name: str) -> torch.Tensor:
        table = find_table(self._manifest, name)
        if name not in self._hosts:
            host = self._pinned.take(table.nbytes, f"embedding table {name}")
            table_view(host, table, 0).copy_(self._source.table(name))
            self._hosts[name] = host
        return self._driver.mapped(table_view(self._hosts[name], table, 0))

    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        return pinned_spill_buffers(self._pinned, sizes)

    def close(self) -> None:
        for host in self._hosts.values():
            self._pinned.release(host)
        self._hosts = {}
        self._source.close()
