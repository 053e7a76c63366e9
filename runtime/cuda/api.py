"""Protocols for the part of CUDA that the backend uses. `driver` implements them; tests have an adversarial fake.

Work is issued to the calling thread's current stream. Each stream runs its work in order; only events order work of
different streams. An event stands for the work issued to its stream before the event's last record. A wait issued
before that record waits for nothing.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from cohabit.runtime.options import Tf32
from cohabit.runtime.stores.pinned import Pinning

Kernels = Callable[[], None]
STAGING_SLOTS, SLOT_BYTES = 4, 2 << 20
"""Slots of a stream's buffer for encoded bytes. A copy as large as a slot has nearly the link's full speed."""
Stream: TypeAlias = Any
"""A queue of work on the device; the driver's type."""
Event: TypeAlias = Any
"""A point in a stream's work; the driver's type."""


class AllocatorPool(Protocol):
    """Device memory from which tensors are allocated while the pool is in use."""

    @property
    def held_bytes(self) -> int:
        """Bytes of live tensors, as the allocator counts them."""
        ...

    @property
    def refused_bytes(self) -> int | None:
        """Size of the smallest refused allocation, even if the operator then used less; None if none was refused."""
        ...

    def leaving(self, nbytes: int) -> AbstractContextManager[None]:
        """Leave no free range larger than `nbytes` while the pool is in use."""
        ...

    def close(self) -> None:
        """Release the bytes. The pool's tensors and graphs must be released before."""
        ...


class CapturedGraph(Protocol):
    def replay(self) -> None:
        """Issue the captured work to the current stream: after the stream's earlier work, before its later work."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of device memory: total, free, and held by this process (None if unknown)."""

    total_bytes: int
    free_bytes: int
    process_bytes: int | None


@dataclass(slots=True)
class StagingSlot:
    """A part of a staging buffer."""

    memory: torch.Tensor
    free: Event | None = None
    """Reached when the slot's last contents are decoded; None before the buffer is used."""


class Staging:
    """A stream's buffer for encoded bytes, in slots used in turn, and the stream whose copies fill them.

    Copies run ahead of decoding. Only decoding waits for its destinations to be free.
    """

    def __init__(self, memory: torch.Tensor, link: Stream, *, captured: bool) -> None:
        self.link = link
        self.captured = captured
        """Whether the buffer is used once, for a capture."""
        self.turn = threading.Lock()
        """Held while a copy through a slot is issued."""
        self.slots = [StagingSlot(part) for part in memory.chunk(STAGING_SLOTS)]


class Driver(Pinning, Protocol):
    """One device. Its errors raise RuntimeError, perhaps from a later call than the failing one."""

    @property
    def device(self) -> torch.device: ...

    @property
    def name(self) -> str: ...

    def adopt_thread(self, compute: Stream) -> None:
        """Prepare the calling thread to issue kernels to a stream: allocate libraries' memory per thread and stream.

        Later calls for the same thread and stream do nothing.
        """
        ...

    def stream(self, *, urgent: bool = False) -> Stream:
        """Return an unused stream. Pending kernels of an urgent stream run before those of others."""
        ...

    def give_back(self, stream: Stream, *, urgent: bool = False) -> None:
        """Take a stream back, for later calls of `stream`, and free its staging memory.

        Its work must have ended, and graphs that used its staging memory must be released.
        """
        ...

    def event(self, *, timed: bool = False) -> Event:
        """Return a new event. `seconds` needs timed ones."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Make this the calling thread's current stream inside the block."""
        ...

    def launch(self, kernels: Kernels) -> None:
        """Issue kernels: `kernels` calls torch operators, which run on the current stream."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy. A pinned buffer must stay unchanged until an event recorded after the copy has been reached."""
        ...

    def staging(self) -> "Staging":
        """Return the buffer of the bytes that the current stream decodes next.

        Work that may overlap never shares a buffer: direct issues, graphs replayed on this stream, and graphs replayed
        on another stream have one each. A capture cannot allocate: the decoding stream must have called this before.
        """
        ...

    def decode(self, kernels: Kernels) -> None:
        """Issue torch kernels that do not allocate; any thread."""
        ...

    def copy_deferred(self, ends: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Issue a copy to `ends()[0]` from `ends()[1]`. Work launched before allocates both; one of them is pinned."""
        ...

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None:
        """Make later work of the current stream wait for the event's last record."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until the event's last record has been reached."""
        ...

    def seconds(self, start: Event, end: Event) -> float:
        """Return the device time between two timed events. Both must have been reached."""
        ...

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy, so that work issued meanwhile runs without gaps."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory outside torch's allocator, until `free`. Raises MemoryExceeded.

        Torch maps the addresses of its own blocks and of all pools in one table, so a pool's bytes must not be torch's.
        """
        ...

    def free(self, memory: torch.Tensor) -> None:
        """Release memory of `allocate`. It must not be in use, nor belong to a pool.

        A lost device releases memory only when the process ends.
        """
        ...

    def mapped(self, host: torch.Tensor) -> torch.Tensor:
        """Return pinned host memory as a device tensor: kernels read it through the link."""
        ...

    def pool(self, memory: torch.Tensor, large_bytes: int) -> AllocatorPool:
        """Return a pool of these device bytes: one segment of `large_bytes`, the rest segments for small tensors.

        For tensors of the current stream. Pools may overlap, but using two overlapping pools at a time corrupts data.
        """
        ...

    def allocating(self, pool: Any) -> AbstractContextManager[None]:
        """Allocate the calling thread's tensors from the pool inside the block."""
        ...

    def capture(self, pool: Any, issue: Callable[[], None]) -> CapturedGraph:
        """Capture the work that `issue` issues to the current stream, and to streams that join it by events.

        Nothing runs. Tensors are allocated from the pool. Raises CaptureFailed, or MemoryExceeded if the graph gets no
        memory; then nothing more can be captured in this pool, because torch's host allocator still has its number.
        """
        ...

    def release(self, graphs: Sequence[Any]) -> None:
        """Release graphs and their references to pools. None of them may be running."""
        ...

    def peak_bytes(self, kernels: Kernels) -> int:
        """Run kernels and wait for them. Returns the peak bytes that torch's allocator gave them."""
        ...

    def tf32(self, allowed: Tf32) -> AbstractContextManager[None]:
        """Inside the block, use TF32 in these float32 kernels only; for the whole process."""
        ...

    def memory(self) -> DeviceMemory: ...

    @property
    def allocated_bytes(self) -> int:
        """Bytes of `allocate` not freed yet, without staging memory."""
        ...

    def is_working(self) -> bool:
        """Whether the device still responds."""
        ...

    def drain(self) -> None:
        """Block until all issued work has ended."""
        ...
