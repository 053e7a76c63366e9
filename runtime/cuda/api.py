"""The part of CUDA that the backend uses, as protocols. `driver` implements it; tests have an adversarial fake.

Work is issued to the calling thread's current stream. Streams run on their own, in order each; between them there is
no order but that of events. An event stands for the work that its stream had when the event was last recorded; a wait
issued before that record waits for nothing.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cohabit.runtime.options import Tf32

Kernels = Callable[[], None]
STAGING_SLOTS, SLOT_BYTES = 4, 2 << 20
"""Of a stream's buffer for encoded bytes on their way. A copy as large as a slot has nearly the link's full speed."""
HostBytes = npt.NDArray[np.uint8]


Stream: TypeAlias = Any
"""A queue of work on the device: the driver's own type."""
Event: TypeAlias = Any
"""A place in a stream's work: the driver's own type."""


class AllocatorPool(Protocol):
    """A range of device memory, from which tensors are allocated while the pool is in use."""

    @property
    def held_bytes(self) -> int:
        """Bytes of live tensors, as the allocator counts them."""
        ...

    @property
    def refused_bytes(self) -> int | None:
        """The least allocation that was refused, even if the operator then used less; None if none was."""
        ...

    @property
    def layout(self) -> Hashable:
        """Which bytes have tensors, and which are free: with the same layout, the same allocations have room."""
        ...

    def leaving(self, nbytes: int) -> AbstractContextManager[None]:
        """Leave no free range larger than `nbytes` while the pool is in use."""
        ...

    def close(self) -> None:
        """Release the bytes. No tensor and no graph of the pool may be left."""
        ...


class CapturedGraph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Issue all of it to the current stream: after the stream's earlier work, and before its later work."""
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
    """Reached when what was in it is decoded; None before the buffer is used."""


class Staging:
    """A stream's buffer for encoded bytes, in slots that are used in turn, and the stream whose copies fill them.

    Copies run ahead of the decoding, which alone waits for the places that it fills.
    """

    def __init__(self, memory: torch.Tensor, link: Stream, *, captured: bool) -> None:
        self.link = link
        self.captured = captured
        """Whether it is used once, for a capture."""
        self.turn = threading.Lock()
        """Held while something passes through a slot."""
        self.slots = [StagingSlot(part) for part in memory.chunk(STAGING_SLOTS)]


class Driver(Protocol):
    """One device. Errors on it raise RuntimeError, perhaps from a later call than the failing one."""

    @property
    def device(self) -> torch.device: ...

    @property
    def name(self) -> str: ...

    def adopt_thread(self, compute: Stream) -> None:
        """Prepare the calling thread to issue kernels to a stream: allocate what libraries keep per thread and stream.

        Costs nothing the next time.
        """
        ...

    def stream(self, *, urgent: bool = False) -> Stream:
        """A new stream. The kernels of an urgent one go before those of others that wait for the processors."""
        ...

    def event(self, *, timed: bool = False) -> Event:
        """An event, recorded once."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Issue to this stream inside of the block; for the calling thread."""
        ...

    def launch(self, kernels: Kernels) -> None:
        """Issue kernels: the call makes torch operators run on the current stream."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy. A pinned buffer must stay unchanged until an event recorded after the copy has been reached."""
        ...

    def staging(self) -> "Staging":
        """Return where the bytes arrive that the current stream decodes next.

        Work that may run at once never shares a buffer: what is issued directly, graphs that are replayed on this
        stream, and graphs that are replayed on another have one each. A capture allocates nothing, so the stream must
        have asked before.
        """
        ...

    def decode(self, kernels: Kernels) -> None:
        """Issue kernels of torch's own that allocate nothing; any thread."""
        ...

    def carry(self, ends: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Issue a copy whose destination and source, one of them pinned, launched kernels have made by then."""
        ...

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None:
        """Let what is issued to the current stream from here on wait for the event's last record."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block the calling thread until the event's last record has been reached."""
        ...

    def seconds(self, start: Event, end: Event) -> float:
        """Device time between two timed events that have been reached."""
        ...

    def hold(self, seconds: float) -> None:
        """Keep the current stream busy, so that what is issued meanwhile runs without gaps."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate device memory outside of torch's allocator, until `free`. Raises MemoryExceeded.

        Torch has one map of addresses for its own blocks and those of all pools, so a pool's bytes must not be its own.
        """
        ...

    def free(self, memory: torch.Tensor) -> None:
        """Release memory of `allocate`. Nothing may use it, and no pool may have its bytes.

        A lost device releases nothing before the process ends.
        """
        ...

    def pin(self, host: HostBytes) -> None:
        """Let copies read and write this host memory at the link's full speed. Raises MemoryExceeded."""
        ...

    def unpin(self, host: HostBytes) -> None: ...

    def near(self) -> AbstractContextManager[None]:
        """Run the calling thread near the device inside of the block: pages that it touches first then lie there."""
        ...

    def mapped(self, host: torch.Tensor) -> torch.Tensor:
        """Pinned host memory as a device tensor: kernels read it through the link."""
        ...

    def pool(self, memory: torch.Tensor, large_bytes: int) -> AllocatorPool:
        """A pool of the given device bytes: the first ones in one piece, the rest in segments for small tensors.

        For tensors of the current stream. Pools may overlap: using two with the same bytes at a time corrupts data.
        """
        ...

    def allocating(self, pool: Any) -> AbstractContextManager[None]:
        """Make tensors in the pool; for the calling thread."""
        ...

    def capture(self, pool: Any, issue: Callable[[], None]) -> CapturedGraph:
        """Capture what `issue` issues to the current stream, and to those that join it by events.

        Nothing runs. Tensors are allocated from the pool. Raises CaptureFailed, or MemoryExceeded where memory is what
        it lacks; then nothing can be captured in this pool any more, because torch's allocator of host memory still
        has its number.
        """
        ...

    def release(self, graphs: Sequence[Any]) -> None:
        """Release graphs, and their references to the pool. No replay of theirs may be in progress."""
        ...

    def peak_bytes(self, kernels: Kernels) -> int:
        """Run kernels and wait for them: the most bytes that torch's allocator gave them at once."""
        ...

    def random_state(self) -> torch.Tensor:
        """Return the state of the generator from which kernels take random numbers."""
        ...

    def set_random_state(self, state: torch.Tensor) -> None: ...

    def tf32(self, allowed: Tf32) -> AbstractContextManager[None]:
        """Let these float32 kernels use TF32 inside of the block, and no others; for the whole process."""
        ...

    def memory(self) -> DeviceMemory: ...

    @property
    def allocated_bytes(self) -> int:
        """Bytes of `allocate` that have not been freed. Staging buffers are not among them."""
        ...

    def well(self) -> bool:
        """Whether the device still answers."""
        ...

    def drain(self) -> None:
        """Block until all issued work has ended."""
        ...
