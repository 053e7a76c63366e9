"""Shared memory of requests: bodies, input tensors and outputs.

One anonymous file, mapped by the front end and the engine; leases allocate blocks of it. Its size limits the memory of
all unanswered requests (`--queue-memory`).
"""

import math
import mmap
import os
from collections.abc import Callable

import numpy as np

from cohabit.planner.errors import format_bytes
from cohabit.planner.free_list import FreeList
from cohabit.server.errors import ConfigError, Overloaded
from cohabit.server.ipc.model import Array, Inputs, ModelInfo
from cohabit.server.ipc.request import MARK_BYTES, Request
from cohabit.server.ipc.shared_memory import HEARTBEAT, PAGE_BYTES, SharedMemory, round_up
from cohabit.server.protocol.datatypes import DTYPES

_TEXT_BYTES = 5
"""Maximum bytes of memory per byte of a text: as it was sent, and as characters."""
_KEPT_BYTES = 64 << 20
"""Maximum bytes of pages that an idle pool keeps; it returns the others to the system."""


class RequestMemory(SharedMemory):
    """A bounded pool of shared memory. Belongs to the event loop's thread."""

    def __init__(self, nbytes: int) -> None:
        """Raises ConfigError if the system cannot create the file."""
        size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        try:
            self.descriptor = os.memfd_create("cohabit-requests", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, size)
            os.posix_fallocate(self.descriptor, 0, PAGE_BYTES)
        except OSError as error:
            raise ConfigError(
                f"--queue-memory: the system has no shared memory of {format_bytes(nbytes)}: {error.strerror}"
            ) from error
        super().__init__(mmap.mmap(self.descriptor, size))
        self._free = FreeList(PAGE_BYTES, size - PAGE_BYTES)
        self.used_bytes = 0
        self._highest = PAGE_BYTES
        """End of the highest block allocated since pages were last returned to the system."""
        self._filled = PAGE_BYTES
        """End of the contiguous range that has pages."""

    def lease(self) -> "Lease":
        return Lease(self)

    def take(self, nbytes: int) -> int:
        """Allocate a block, perhaps without pages, and return its offset. Raises Overloaded if there is no room."""
        size = round_up(nbytes)
        offset = self._free.take(size)
        if offset is None:
            raise Overloaded(
                f"requests that are not answered yet take {format_bytes(self.used_bytes)} of"
                f" {format_bytes(self.nbytes - PAGE_BYTES)}, which leaves no {format_bytes(nbytes)} in one piece;"
                " send fewer at once, or start the server with a larger --queue-memory"
            )
        self.used_bytes += size
        self._highest = max(self._highest, offset + size)
        return offset

    def fill(self, offset: int, nbytes: int) -> None:
        """Give pages to a part of a block before it is written. Raises Overloaded if the system has none.

        Otherwise, without memory left, the first write would kill the process. Announced bytes that have not arrived
        have no pages.
        """
        end = round_up(offset + nbytes)  # the next block begins there
        if end <= self._filled:
            return
        is_next = offset <= self._filled
        start = self._filled if is_next else offset
        try:
            os.posix_fallocate(self.descriptor, start, end - start)
        except OSError as error:
            raise Overloaded(
                f"the system has no memory for the {format_bytes(nbytes)} of a request: {error.strerror}"
            ) from error
        if is_next:
            self._filled = end

    def release(self, offset: int, nbytes: int) -> None:
        size = round_up(nbytes)
        self._free.release(offset, size)
        self.used_bytes -= size
        if self.used_bytes == 0 and self._highest > PAGE_BYTES + _KEPT_BYTES:
            self.map.madvise(
                mmap.MADV_REMOVE, PAGE_BYTES, -(-self._highest // PAGE_BYTES) * PAGE_BYTES - PAGE_BYTES
            )
            self._highest = self._filled = PAGE_BYTES

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.map)[offset : offset + nbytes]

    def holds(self, data: bytes | memoryview) -> bool:
        """Whether bytes are in the pool."""
        return len(data) > 0 and self.offset_of(np.frombuffer(data, np.uint8)) is not None

    @property
    def beat_s(self) -> float:
        """Last iteration of the engine's event loop, by `time.monotonic`; 0 before the first."""
        return float(self.array(0, HEARTBEAT, (1,))[0])

    def clear_heartbeat(self) -> None:
        self.array(0, HEARTBEAT, (1,))[0] = 0.0

    def close(self) -> None:
        """Close the file; the mapping is released with its last array."""
        os.close(self.descriptor)


class Lease:
    """The blocks of one request, with a reference count; the last `release` frees them.

    As a context, it lasts from the request's body to its answer. A context that ends with an error has no answer.
    """

    def __init__(self, memory: RequestMemory) -> None:
        self.memory = memory
        self._blocks: dict[int, int] = {}
        self._references = 1
        self._kept: list[Lease] = []
        """Leases that this one retains."""
        self._on_end: list[Callable[[bool], None]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of its blocks, and of those that it keeps."""
        return sum(self._blocks.values()) + sum(lease.nbytes for lease in self._kept)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for on_end in self._on_end:
            on_end(error is None)
        self.release()

    def on_end(self, function: Callable[[bool], None]) -> None:
        """Call a function at the end of the context: with True if the request has an answer."""
        self._on_end.append(function)

    def take(self, nbytes: int) -> int:
        """Allocate a block with its pages and return its offset in the pool. Raises Overloaded."""
        offset = self._reserve(nbytes)
        self.memory.fill(offset, nbytes)
        return offset

    def _reserve(self, nbytes: int) -> int:
        offset = self.memory.take(nbytes)
        self._blocks[offset] = nbytes
        return offset

    def allocate(self, nbytes: int) -> memoryview:
        """Return writable bytes, valid until the lease is released. Raises Overloaded if the pool has no room."""
        if nbytes == 0:
            return memoryview(bytearray())
        return self.memory.view(self.take(nbytes), nbytes)

    def reserve(self, nbytes: int) -> memoryview:
        """Return bytes that become writable with `fill`. Raises Overloaded."""
        if nbytes == 0:
            return memoryview(bytearray())
        return self.memory.view(self._reserve(nbytes), nbytes)

    def fill(self, view: memoryview) -> None:
        """Give pages to a part of a block that `reserve` returned. Raises Overloaded."""
        offset = self.memory.offset_of(np.frombuffer(view, np.uint8))
        assert offset is not None
        self.memory.fill(offset, view.nbytes)

    def free(self, view: memoryview) -> None:
        """Release one block early, such as a body's after a move to a larger block."""
        if view.nbytes:
            offset = self.memory.offset_of(np.frombuffer(view, np.uint8))
            assert offset is not None
            self.memory.release(offset, self._blocks.pop(offset))

    def retain(self) -> None:
        """Add a reference, because the engine uses the blocks."""
        self._references += 1

    def keep(self, other: "Lease") -> None:
        """Retain another lease until this one ends, or calls `drop`: the engine may read both."""
        other.retain()
        self._kept.append(other)

    def drop(self, other: "Lease") -> None:
        """Release a lease that this one keeps."""
        self._kept.remove(other)
        other.release()

    def release(self) -> None:
        """Remove a reference; the last one frees the blocks."""
        self._references -= 1
        if self._references == 0:
            for offset, nbytes in self._blocks.items():
                self.memory.release(offset, nbytes)
            self._blocks.clear()
            while self._kept:
                self.drop(self._kept[-1])


def inputs_in(lease: Lease, inputs: Inputs) -> dict[str, Array]:
    """Return arrays in leased memory, copying those that are elsewhere. Raises Overloaded.

    Texts stay where they are, since only the front end reads them: their memory is counted.
    """
    return {name: _leased(array, lease) for name, array in inputs.items()}


def output_buffer_for(request: Request, info: ModelInfo, lease: Lease) -> Array:
    """Return leased memory for a request's mark and outputs. Raises Overloaded."""
    rows = request.batch if info.max_batch_size else 1
    wanted = [output.name for output in request.outputs]
    symbols = info.dynamic.symbols(request.sizes)
    nbytes = MARK_BYTES
    for tensor in info.outputs:
        if tensor.name in wanted:
            nbytes += round_up(rows * math.prod(tensor.at(symbols)) * DTYPES[tensor.datatype].itemsize)
    return lease.memory.array(lease.take(nbytes), "|u1", (nbytes,))


def _leased(array: Array, lease: Lease) -> Array:
    if array.dtype.hasobject:
        lease.reserve(_TEXT_BYTES * sum(map(len, array.flat)))
        return array
    if lease.memory.offset_of(array) is not None:
        return array
    own = np.ndarray(array.shape, array.dtype, lease.allocate(array.nbytes))
    own[...] = array
    return own
