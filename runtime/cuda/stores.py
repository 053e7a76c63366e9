"""Host stores of a CUDA device: pinned up to a cap, beyond it staged through a small pinned ring.

Pinned parameters are copied directly. Other stores (pageable memory, a file) fill the ring's slots in turn, in the
thread that issues the copies. The link may wait until a slot is filled, but no copy in progress meets a page fault.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from cohabit.runtime.cuda.decoding import EncodedCopy
from cohabit.runtime.cuda.driver import CudaDriver
from cohabit.runtime.lowering.weights import Manifest, Segment, open_files, stored_ranges
from cohabit.runtime.memory import Copy, HostStore, SpillBuffer, StoreKind
from cohabit.runtime.pieces import key_of
from cohabit.runtime.stores.host import find_table, read_weights, table_view
from cohabit.runtime.stores.pages import Bytes
from cohabit.runtime.stores.pinned import PinnedMemory
from cohabit.runtime.stores.spill_buffers import RamSpillBuffer

RING_SLOTS = 3


class PinnedStore:
    """A whole weights file in one pinned region, as stored: the device decodes encoded segments.

    A copy may continue into the following segments.
    """

    kind: StoreKind = "ram"
    staged = False
    check_tables = None

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        driver: CudaDriver,
        pinned: PinnedMemory,
        *,
        verify_reads: bool = False,
    ) -> None:
        self._driver = driver
        self._pinned = pinned
        self._manifest = manifest
        self._host = pinned.take(manifest.file_bytes, path.parent.name)
        try:
            read_weights(path, manifest, self._host, verify_reads=verify_reads)
            ranges = stored_ranges(path, manifest)
            with open_files(ranges) as files:
                self._keys = [key_of("ram", files[r.path], r.offset, r.digest) for r in ranges]
        except BaseException:
            self.close()
            raise
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

    def source(self, index: int) -> Hashable:
        key = self._keys[index]
        return key if key.digest else (self, index)

    def table(self, name: str) -> torch.Tensor:
        table = find_table(self._manifest, name)
        return self._driver.mapped(table_view(self._host, table, table.offset))

    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        return pinned_spill_buffers(self._pinned, sizes)

    def close(self) -> None:
        self._pinned.release(self._host)


def pinned_spill_buffers(pinned: PinnedMemory, sizes: Sequence[int]) -> list[SpillBuffer]:
    """Return pinned buffers for activations. Raises MemoryExceeded over the cap."""
    hosts = pinned.take_several(sizes, "activations that leave memory")
    return [_PinnedSpillBuffer(pinned, host) for host in hosts]


class _PinnedSpillBuffer(RamSpillBuffer):
    """Programs issue their copies through `pinned`."""

    def __init__(self, pool: PinnedMemory, host: Bytes) -> None:
        super().__init__(host)
        self._pool = pool
        self.pinned = torch.from_numpy(host)

    def close(self) -> None:
        self._pool.release(self._memory)


@dataclass(slots=True)
class _Slot:
    host: Bytes
    tensor: torch.Tensor
    emptied: torch.cuda.Event | None = None


class Ring:
    """Pinned staging slots shared by the copies of all lanes, one copy at a time. Any thread."""

    def __init__(self, driver: CudaDriver, pinned: PinnedMemory) -> None:
        self._driver = driver
        self._pinned = pinned
        self._slots: list[_Slot] = []
        self._next = 0
        self.slot_bytes = 0
        self._turn = threading.Lock()

    def fit(self, nbytes: int) -> None:
        """Grow the slots to at least `nbytes` each. Raises MemoryExceeded, and keeps the slots, over the cap."""
        with self._turn:
            if nbytes <= self.slot_bytes:
                return
            hosts = self._pinned.take_several([nbytes] * RING_SLOTS, "the staging ring")
            self.close()
            self._slots = [_Slot(host, torch.from_numpy(host)) for host in hosts]
            self.slot_bytes = nbytes

    def pass_through(self, fill: Callable[[Bytes], None], destination: torch.Tensor) -> None:
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
        self, source: HostStore[Bytes], manifest: Manifest, driver: CudaDriver, ring: Ring, pinned: PinnedMemory
    ) -> None:
        self.kind = source.kind
        self._source = source
        self._driver = driver
        self._ring = ring
        self._pinned = pinned
        self._manifest = manifest
        self._hosts: dict[str, Bytes] = {}
        ring.fit(max((s.nbytes for s in manifest.segments), default=0))

    def copy(self, segment: int, destination: torch.Tensor) -> Copy:
        return lambda: self._ring.pass_through(lambda host: self._source.copy(segment, host)(), destination)

    def source(self, index: int) -> Hashable:
        return self._source.source(index)

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
