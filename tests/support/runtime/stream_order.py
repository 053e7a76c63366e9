"""A checker of stream order: finds accesses to memory that only luck orders.

`FakeCuda` has the interface of `torch.cuda` that `cohabit.budget` uses. Ops run at once on CPU tensors, so their
results are right whatever the order. Vector clocks tell the order that a device is bound to: that of each stream, of
waits for events, and of what the host has seen end. Two accesses to the same memory, one a write, are a race if
no order is given. So is memory that is freed on the stream that allocated it while another stream may still use
it. (Lamport, CACM 1978; torch's CUDA sanitizer does the same on a GPU.)
"""

import random
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cohabit.runtime.training.seen.schema import schema_of

Clock = dict[int, int]
"""Per stream, the number of its pieces of work that come before."""


def _join(clock: Clock, other: Mapping[int, int]) -> None:
    for stream, time in other.items():
        clock[stream] = max(clock.get(stream, 0), time)


class FakeStream:
    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda
        self.cuda_stream = len(cuda.streams)
        self.clock: Clock = {}
        cuda.streams.append(self)

    def issue(self) -> tuple[int, int]:
        """Issue a piece of work. Returns the stream's number and the work's number in it."""
        _join(self.clock, self._cuda.host)
        self.clock[self.cuda_stream] = self.clock.get(self.cuda_stream, 0) + 1
        return self.cuda_stream, self.clock[self.cuda_stream]

    def record_event(self) -> "FakeEvent":
        return FakeEvent(self._cuda, dict(self.clock))

    def wait_event(self, event: "FakeEvent") -> None:
        _join(self.clock, event.clock)

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        _join(self._cuda.host, self.clock)


@dataclass
class FakeEvent:
    cuda: "FakeCuda"
    clock: Clock

    def query(self) -> bool:
        """Whether the host sees it reached: by chance, as on a device."""
        if self.cuda.chance.random() < self.cuda.speed:
            _join(self.cuda.host, self.clock)
            return True
        return False


@dataclass
class _Block:
    """Memory of a storage, from its allocation to its release."""

    stream: FakeStream
    reads: list[tuple[int, int]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    """Streams that delay its reuse (`Tensor.record_stream`)."""


class FakeCuda:
    """`speed` is the probability that a copy has ended whenever the host asks."""

    def __init__(self, seed: int, speed: float) -> None:
        self.chance, self.speed = random.Random(seed), speed
        self.host: Clock = {}
        self.streams: list[FakeStream] = []
        self.races: list[str] = []
        self.copies = 0
        self._main = FakeStream(self)
        self._local = threading.local()
        self._blocks: dict[int, _Block] = {}
        """By the storage's id."""

    def Stream(self, device: torch.device | None = None) -> FakeStream:  # noqa: N802 - torch.cuda's name
        return FakeStream(self)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        stream: FakeStream = getattr(self._local, "stream", self._main)
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    # Memory

    def allocate(self, storage: Any) -> None:
        stream = self.current_stream()
        block = self._blocks[id(storage)] = _Block(stream)
        block.writes.append(stream.issue())
        weakref.finalize(storage, self.free, id(storage), block).atexit = False

    def free(self, key: int, block: _Block | None = None) -> None:
        """Release a storage's memory to its stream, whose next work may reuse it."""
        found = self._blocks.get(key)
        if found is None or (block is not None and found is not block):
            return
        del self._blocks[key]
        clock = {**found.stream.clock}
        _join(clock, self.host)
        for stream, time in (*found.reads, *found.writes):
            if clock.get(stream, 0) < time and stream not in found.recorded:
                self.races.append(f"memory of stream {found.stream.cuda_stream} is freed; stream {stream} uses it")

    def access(self, storage: Any, *, is_write: bool, what: str) -> None:
        if id(storage) not in self._blocks:
            self._blocks[id(storage)] = _Block(self.current_stream())
        block, stream = self._blocks[id(storage)], self.current_stream()
        number, time = stream.issue()
        for other, earlier in (*block.writes, *(block.reads if is_write else ())):
            if stream.clock.get(other, 0) < earlier:
                self.races.append(f"{what} on stream {number} is not ordered with stream {other}")
        (block.writes if is_write else block.reads).append((number, time))

    def record_stream(self, storage: Any, stream: FakeStream) -> None:
        self._blocks[id(storage)].recorded.add(stream.cuda_stream)


@dataclass
class SharedBytes:
    """Stands for `bytes_of(storage)` where a stream is recorded: CPU tensors have no streams."""

    cuda: FakeCuda
    storage: Any

    def record_stream(self, stream: FakeStream) -> None:
        self.cuda.record_stream(self.storage, stream)


class CheckedOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what ops read and write, on their stream. Enter it before the budget."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuda = cuda

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        given: dict[int, Any] = {}
        for key, value in (*enumerate(args), *kwargs.items()):
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    given[id(storage)] = storage
                    if not schema.is_view:
                        self._cuda.access(storage, is_write=key in schema.written, what=schema.name)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in given:
                self._cuda.allocate(storage)
        return result


def checked_copy(
    cuda: FakeCuda, real: Callable[[Any, Any], None], *, is_load: bool, blocks: bool
) -> Callable[[Any, Any], None]:
    """Return a slot's `save` or `load` that notes its access on the current stream.

    If it `blocks`, the host sees its end.
    """

    def copy(slot: Any, storage: Any) -> None:
        cuda.copies += 1
        cuda.access(storage, is_write=is_load, what="a load" if is_load else "a save")
        cuda.access(slot, is_write=not is_load, what="a slot's copy")
        real(slot, storage)
        if blocks:
            cuda.current_stream().synchronize()

    return copy


def checked_resize(cuda: FakeCuda, real: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """Return `resize_storage` that notes allocations and releases."""

    def resize(storage: Any, nbytes: int) -> Any:
        if nbytes == 0:
            cuda.free(id(storage))
        result = real(storage, nbytes)
        if nbytes:
            cuda.allocate(storage)
        return result

    return resize
