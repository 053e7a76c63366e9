"""A CUDA device made of CPU tensors, as hostile as CUDA's rules allow. See `runtime.cuda.driver`.

Device memory and pinned memory are CPU tensors. A stream is a queue of closures; an event gates what waits for its
last record. Nothing runs until somebody blocks, and then streams advance in an order that is drawn from a seed: on
some seeds one stream runs far ahead, on others copies come as late as the events allow. A copy first destroys what
is at its destination and brings the bytes later, so that a reader who does not wait for its end, or an early copy
over bytes that are still read, gives wrong results. Sources are read when the copy runs, not when it is issued.

A graph is a list of closures per stream that joined the capture. A capture belongs to its thread, others go on with
their streams. What CUDA refuses is refused here: waiting outside for an event of a capture, ending a capture with a
stream that does not lead back, synchronizing, allocating, freeing, pinning and unpinning inside of one, copying from
memory that is not pinned, and closing a pool that has tensors. So is what would corrupt data without a word: to release
memory, a pool or a graph that queued work uses, and kernels of a thread that has not been adopted. In a dry run a pool
has two parts, as those of torch have: tensors of up to 1 MiB do not lie where larger ones do. Every call is written
down in `calls`.
"""

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cohabit.runtime.cuda.driver import DeviceMemory
from cohabit.runtime.cuda.staging import SLOT_BYTES, STAGING_SLOTS, Staging
from cohabit.runtime.errors import CaptureFailed, MemoryExceeded
from cohabit.runtime.options import Tf32
from cohabit.runtime.stores.pages import Bytes

_POISON = 0xA5
_POISONED_BYTES = 16 << 20
_TICK_S = 1e-3
_STREAMS = 32
_SMALL_BYTES = 1 << 20
"""Larger tensors come from a pool's large part."""


@dataclass(eq=False)
class Token:
    """One record of an event."""

    done: bool = False
    time_s: float = 0.0


@dataclass(eq=False)
class FakeEvent:
    timed: bool
    token: Token | None = None
    capture: "Capture | None" = None


@dataclass(eq=False)
class Action:
    run: Callable[[], None]
    memory: tuple[torch.Tensor, ...] = ()
    """What a copy reads and writes."""
    pool: "FakePool | None" = None
    """Where kernels allocate."""


@dataclass(eq=False)
class Mark:
    """Reaches a record: of a token, or, in a graph, of an event whose token each replay replaces."""

    of: Token | FakeEvent


@dataclass(eq=False)
class Gate:
    """Waits for a record."""

    of: Token | FakeEvent


Item = Action | Mark | Gate


@dataclass(eq=False)
class FakeStream:
    weight: float
    of_replay: bool = False
    queue: deque[Item] = field(default_factory=deque)


@dataclass(eq=False)
class Capture:
    origin: FakeStream
    items: dict[FakeStream, list[Item]]
    staging: Staging | None = None


@dataclass(eq=False)
class FakePool:
    memory: torch.Tensor
    small_bytes: int
    held_bytes: int = 0
    refused_bytes: int | None = None
    closed: bool = False
    is_busy: Callable[["FakePool"], bool] = lambda pool: False
    uncapturable: bool = False
    left_bytes: int | None = None
    """Bytes that a kernel may have beside what there is."""
    tensors: dict[int, "weakref.ref[torch.Tensor]"] = field(default_factory=dict)
    """What was made in the pool and is still there."""

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def note(self, tensor: torch.Tensor) -> None:
        key = id(tensor)
        self.tensors[key] = weakref.ref(tensor, lambda _: self.tensors.pop(key, None))

    def require_room(self, made: torch.Tensor) -> None:
        """Refuse the tensor that was made last, if with it those of its part are too many."""
        is_large = made.nbytes > _SMALL_BYTES
        live = [t.nbytes for ref in self.tensors.values() if (t := ref()) is not None]
        held = sum(-(-n // 512) * 512 for n in live if (n > _SMALL_BYTES) == is_large)
        if held > (self.nbytes - self.small_bytes if is_large else self.small_bytes):
            self.refused_bytes = min(made.nbytes, self.refused_bytes or made.nbytes)
            raise torch.OutOfMemoryError("out of the pool's memory")

    @contextmanager
    def leaving(self, nbytes: int) -> Iterator[None]:
        self.left_bytes = nbytes
        try:
            yield
        finally:
            self.left_bytes = None

    def close(self) -> None:
        assert not self.is_busy(self), "a pool is closed that queued kernels use"
        assert not self.tensors, (
            "torch calls back a pool that was closed with tensors, whenever it empties its cache"
        )
        self.closed = True


class _Making(TorchDispatchMode):
    """Notes the tensors that operators make in a pool."""

    supports_higher_order_operators = True

    def __init__(self, pool: FakePool, *, limited: bool) -> None:
        super().__init__()
        self._pool = pool
        self._limited = limited

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and _storage(made) not in given:
                self._pool.note(made)
                if self._limited:
                    self._pool.require_room(made)
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class FakeDriver:
    """Seeded. `is_working()` and errors are as in CUDA: a kernel's failure shows when a thread blocks."""

    def __init__(self, seed: int = 0, total_bytes: int = 1 << 30) -> None:
        self.device = torch.device("cpu")
        self.name = "fake"
        self.calls: list[str] = []
        self.kernel_bytes = 0
        """What any kernel needs at once: pools with less refuse it."""
        self.small_tensors_bytes = 0
        """What small tensors of any kernel need at once: pools with less in segments for them refuse it."""
        self.plan_bytes: tuple[int, ...] = ()
        """The scratch of each plan that a kernel can choose from, in the order in which its library tries them, as
        cuDNN does: one that gets no memory is silently replaced by the next."""
        self.least_pool_bytes = 0
        """What torch's allocator needs: smaller pools refuse to serve."""
        self.broken: str | None = None
        """Set to lose the device."""
        self.uncapturable: str | None = None
        """Set to make captures fail."""
        self.graph_bytes = 0
        """Device memory that a graph takes."""
        self.context_bytes = 0
        """Device memory that the process takes for nothing else."""
        self.names_processes = True
        """Whether it says what of its memory this process takes."""
        self.tf32_allowed: list[Tf32] = []
        """By what was issued or captured."""
        self.graphs = 0
        """That have been captured and not been closed."""
        self.skip_waits: set[int] = set()
        """Numbers of `wait` calls to leave out: mutations that tests must notice."""
        self.waits = 0
        self._rng = random.Random(seed)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._streams: list[FakeStream] = []
        self._default = self._new_stream()
        self._device_memory: list[torch.Tensor] = []
        self._staging: dict[FakeStream, torch.Tensor] = {}
        self._direct: dict[FakeStream, Staging] = {}
        self._idle: dict[bool, list[FakeStream]] = {False: [], True: []}
        self._open_graphs: list[FakeGraph] = []
        self._pools: list[FakePool] = []
        self._pinned: dict[int, int] = {}
        self._total_bytes = total_bytes
        self._captures: list[Capture] = []
        """Of all threads."""
        self._adopted: WeakKeyDictionary[threading.Thread, list[FakeStream]] = WeakKeyDictionary()
        self._errors: list[Exception] = []
        self._ticks = 0

    # Streams and events

    def adopt_thread(self, compute: FakeStream) -> None:
        self._refuse_broken()
        self._adopted.setdefault(threading.current_thread(), []).append(compute)

    @property
    def _capture(self) -> Capture | None:
        """The calling thread's."""
        return getattr(self._local, "capture", None)

    def _refuse_in_capture(self, what: str) -> None:
        assert self._capture is None, f"{what} is not permitted while capturing"

    def stream(self, *, urgent: bool = False) -> FakeStream:
        if self._idle[urgent]:
            return self._idle[urgent].pop()
        assert len(self._streams) <= _STREAMS, "torch gives a stream out for the second time"
        return self._new_stream()

    def give_back(self, stream: FakeStream, *, urgent: bool = False) -> None:
        self._refuse_in_capture("freeing")
        assert stream not in self._idle[urgent], "a stream is given back twice"
        assert not stream.queue, "a stream is given back whose work has not ended"
        if (memory := self._staging.pop(stream, None)) is not None:
            own = [a for graph in self._open_graphs for a in graph.actions]
            assert not _touches([*own, *self._queued()], memory.data_ptr(), memory.nbytes), (
                "staging memory is in use"
            )
            self.give_back(self._direct.pop(stream).link, urgent=True)
        self._idle[urgent].append(stream)

    def _new_stream(self) -> FakeStream:
        stream = FakeStream(self._rng.expovariate(1.0) ** 3 + 1e-6)
        self._streams.append(stream)
        return stream

    def event(self, *, timed: bool = False) -> FakeEvent:
        return FakeEvent(timed)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before = self._current
        self._local.current = stream
        try:
            yield
        finally:
            self._local.current = before

    @property
    def _current(self) -> FakeStream:
        return getattr(self._local, "current", self._default)

    def _call(self, name: str) -> None:
        self._refuse_broken()
        self.calls.append(name)

    def _refuse_broken(self) -> None:
        if self.broken is not None:
            raise RuntimeError(f"CUDA error: {self.broken}")

    def _put(self, *items: Item) -> None:
        with self._lock:
            if self._capture is not None:
                assert self._current in self._capture.items, "issued to a stream that has not joined the capture"
                self._capture.items[self._current].extend(items)
            else:
                assert all(self._current not in c.items for c in self._captures), (
                    "another thread captures the stream"
                )
                self._current.queue.extend(items)

    def _queued(self) -> list[Action]:
        """The copies and kernels that have been issued and have not run."""
        with self._lock:
            return [item for stream in self._streams for item in stream.queue if isinstance(item, Action)]

    def _uses(self, start: int, nbytes: int) -> bool:
        """Whether a queued copy reads or writes some of these bytes."""
        return _touches(self._queued(), start, nbytes)

    def launch(self, kernels: Callable[[], None]) -> None:
        self._call("launch")
        assert self._current in self._adopted.get(threading.current_thread(), ()), (
            "kernels of a thread that has not been adopted: libraries would allocate in the program's pool"
        )
        pool = getattr(self._local, "pool", None)
        left_bytes = None if pool is None else pool.left_bytes

        def run() -> None:
            if pool is not None and self.kernel_bytes > pool.nbytes:
                pool.refused_bytes = self.kernel_bytes
                raise torch.OutOfMemoryError("out of the pool's memory")
            if pool is not None and self.small_tensors_bytes > pool.small_bytes:
                pool.refused_bytes = self.small_tensors_bytes
            self._chosen_plan_bytes(pool, left_bytes)
            with nullcontext() if pool is None else _Making(pool, limited=False):
                kernels()

        self._put(Action(run, pool=pool))

    def _chosen_plan_bytes(self, pool: FakePool | None, left_bytes: int | None = None) -> tuple[int, ...]:
        """The scratch of the first plan that gets its memory; none where kernels have no plans."""
        for wanted in self.plan_bytes:
            if pool is None or wanted <= (pool.nbytes if left_bytes is None else left_bytes):
                return (wanted,)
            pool.refused_bytes = min(wanted, pool.refused_bytes or wanted)
        if self.plan_bytes:
            raise torch.OutOfMemoryError("out of the pool's memory")
        return ()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._call("copy")
        assert destination.nbytes == source.nbytes
        for tensor in (destination, source):
            assert self._is_device(tensor) or self._is_pinned(tensor), (
                "memory that is neither the device's nor pinned"
            )
        raw = destination.view(torch.uint8)
        ends = (destination, source)
        self._put(Action(lambda: _fill(raw), ends), Action(lambda: _assign(destination, source), ends))

    def staging(self) -> Staging:
        with self._lock:
            if self._current not in self._staging:
                self._refuse_in_capture("allocating")
                memory = torch.empty(3 * STAGING_SLOTS * SLOT_BYTES, dtype=torch.uint8)
                self._staging[self._current] = memory
                self._direct[self._current] = Staging(memory.chunk(3)[0], self.stream(urgent=True), captured=False)
            direct = self._direct[self._current]
            if (capture := self._capture) is None:
                return direct
            if capture.staging is None:
                part = 1 if capture.origin is self._current else 2
                memory = self._staging[self._current].chunk(3)[part]
                capture.staging = Staging(memory, direct.link, captured=True)
            return capture.staging

    def decode(self, kernels: Callable[[], None]) -> None:
        self._call("decode")
        self._put(Action(kernels))

    def copy_deferred(self, ends: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Its ends are made by kernels, which have not run yet when it is issued."""
        self._call("copy")

        def begin() -> None:
            destination, source = ends()
            assert destination.nbytes == source.nbytes, "an activation whose bytes are not there"
            assert self._is_pinned(destination) or self._is_pinned(source)
            _fill(destination)

        self._put(Action(begin), Action(lambda: _assign(*ends())))

    def record(self, event: FakeEvent) -> None:
        self._call("record")
        with self._lock:
            if self._capture is not None:
                event.capture = self._capture
                self._put(Mark(event))
            else:
                event.capture = None
                event.token = Token()
                self._put(Mark(event.token))

    def wait(self, event: FakeEvent) -> None:
        self._call("wait")
        self.waits += 1
        with self._lock:
            if self._capture is not None:
                assert event.capture is self._capture, "a capture waits for an event that is not its own"
                self._capture.items.setdefault(self._current, [])
                if self.waits not in self.skip_waits:
                    self._put(Gate(event))
                return
            assert event.capture is None, "an event of a capture is waited for outside"
            if event.token is not None and self.waits not in self.skip_waits:
                self._put(Gate(event.token))

    def synchronize(self, event: FakeEvent) -> None:
        self._call("synchronize")
        self._refuse_in_capture("synchronizing")
        with self._lock:
            while event.token is not None and not event.token.done:
                self._advance()
            self._raise_errors()

    def seconds(self, start: FakeEvent, end: FakeEvent) -> float:
        assert start.timed
        assert end.timed
        assert start.token is not None
        assert end.token is not None
        assert start.token.done
        assert end.token.done
        return end.token.time_s - start.token.time_s

    def hold(self, seconds: float) -> None:
        self._call("hold")

    def drain(self) -> None:
        self._refuse_in_capture("synchronizing")
        with self._lock:
            while any(stream.queue for stream in self._streams):
                self._advance()
            self._raise_errors()

    def is_working(self) -> bool:
        if self.broken is None:
            with self._lock:
                while any(stream.queue for stream in self._streams):
                    self._advance()
                self._errors.clear()
        return self.broken is None

    def _raise_errors(self) -> None:
        if self._errors:
            error, *_ = self._errors
            self._errors.clear()
            raise error

    def _advance(self) -> None:
        """Run one item of one stream that can go on."""
        ready = []
        for stream in self._streams:
            while stream.queue and isinstance(stream.queue[0], Gate) and stream.queue[0].of.done:  # type: ignore[union-attr]
                stream.queue.popleft()
            if stream.queue and not isinstance(stream.queue[0], Gate):
                ready.append(stream)
        if not any(stream.queue for stream in self._streams):
            return
        assert ready, "deadlock: every stream waits"
        stream = self._rng.choices(ready, [s.weight for s in ready])[0]
        item = stream.queue.popleft()
        self._ticks += 1
        if isinstance(item, Mark):
            assert isinstance(item.of, Token)
            item.of.done, item.of.time_s = True, self._ticks * _TICK_S
        elif isinstance(item, Action):
            try:
                with torch.inference_mode():
                    item.run()
            except Exception as error:
                self._errors.append(error)
        if not stream.queue and stream.of_replay:
            self._streams.remove(stream)

    # Memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._refuse_in_capture("allocating")
        if nbytes > self.memory().free_bytes:
            raise MemoryExceeded(f"the device has {self.memory().free_bytes} bytes free, not {nbytes}")
        memory = torch.empty(nbytes, dtype=torch.uint8)
        memory[:_POISONED_BYTES].fill_(_POISON)  # more would cost seconds for arenas of hundreds of MiB
        self._device_memory.append(memory)
        return memory

    def free(self, memory: torch.Tensor) -> None:
        self._refuse_in_capture("freeing")
        if not memory.nbytes or self.broken is not None:
            return
        (own,) = (m for m in self._device_memory if m.data_ptr() == memory.data_ptr())
        assert own.nbytes == memory.nbytes, "what is released is not what was allocated"
        assert all(p.closed or not _inside(p.memory, own.data_ptr(), own.nbytes) for p in self._pools), (
            "a pool has bytes of memory that is released"
        )
        assert not self._uses(own.data_ptr(), own.nbytes), "memory is released that a queued copy uses"
        self._device_memory = [m for m in self._device_memory if m is not own]
        own[:_POISONED_BYTES].fill_(_POISON)

    @property
    def open_pools(self) -> int:
        return sum(not pool.closed for pool in self._pools)

    @property
    def allocated_bytes(self) -> int:
        return sum(m.nbytes for m in self._device_memory)

    def pin(self, host: Bytes) -> None:
        self._refuse_in_capture("pinning")
        self._pinned[host.ctypes.data] = host.nbytes

    def unpin(self, host: Bytes) -> None:
        self._refuse_in_capture("unpinning")
        assert not self._uses(host.ctypes.data, host.nbytes), "memory is unpinned that a queued copy uses"
        del self._pinned[host.ctypes.data]

    def near(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mapped(self, host: torch.Tensor) -> torch.Tensor:
        assert self._is_pinned(host), "only pinned memory can be read by kernels"
        return host

    def _is_device(self, tensor: torch.Tensor) -> bool:
        memory = (*self._device_memory, *self._staging.values())
        return any(_inside(tensor, m.data_ptr(), m.nbytes) for m in memory)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return any(_inside(tensor, start, nbytes) for start, nbytes in self._pinned.items())

    @property
    def pinned_bytes(self) -> int:
        return sum(self._pinned.values())

    def pool(self, memory: torch.Tensor, large_bytes: int) -> FakePool:
        assert self._is_device(memory) or not memory.nbytes
        self._pools.append(FakePool(memory, memory.nbytes - large_bytes, is_busy=self._is_busy))
        return self._pools[-1]

    def _is_busy(self, pool: FakePool) -> bool:
        return any(action.pool is pool for action in self._queued())

    @contextmanager
    def allocating(self, pool: FakePool) -> Iterator[None]:
        assert getattr(self._local, "pool", None) is None, "a pool inside of a pool"
        assert not pool.closed
        if pool.nbytes < self.least_pool_bytes:
            pool.refused_bytes = self.least_pool_bytes
        self._local.pool = pool
        try:
            with _Making(pool, limited=True):
                yield
        finally:
            self._local.pool = None

    def peak_bytes(self, kernels: Callable[[], None]) -> int:
        self.drain()
        with torch.inference_mode():
            kernels()
        return sum(self._chosen_plan_bytes(getattr(self._local, "pool", None))) or self.kernel_bytes

    @contextmanager
    def tf32(self, allowed: Tf32) -> Iterator[None]:
        self.tf32_allowed.append(allowed)
        yield

    def memory(self) -> DeviceMemory:
        staging = sum(memory.nbytes for memory in self._staging.values())
        used = self.context_bytes + self.allocated_bytes + staging + self.graphs * self.graph_bytes
        return DeviceMemory(self._total_bytes, self._total_bytes - used, used if self.names_processes else None)

    # Graphs

    def capture(self, pool: FakePool, issue: Callable[[], None]) -> "FakeGraph":
        self._call("capture")
        assert getattr(self._local, "pool", None) is None, "a pool inside of a capture"
        assert all(not s.queue for s in self._streams if s is self._current), "work is under way"
        capture = self._local.capture = Capture(self._current, {self._current: []})
        self._captures.append(capture)
        self._local.pool = pool
        assert not pool.uncapturable, "a capture in this pool has failed"
        try:
            issue()
            if self.memory().free_bytes < self.graph_bytes:
                pool.uncapturable = True
                raise MemoryExceeded(f"a graph of {self.graph_bytes} bytes got no memory")
            if self.uncapturable is not None:
                pool.uncapturable = True
                raise CaptureFailed(self.uncapturable)
        finally:
            self._captures.remove(capture)
            self._local.capture = self._local.pool = None
        _refuse_unjoined(capture)
        self.graphs += 1
        self._open_graphs.append(FakeGraph(self, capture))
        return self._open_graphs[-1]

    def release(self, graphs: Sequence["FakeGraph"]) -> None:
        self.calls.append("release")
        for graph in graphs:
            graph.close()

    def _replay(self, capture: Capture) -> None:
        """Put a graph's items into queues of its own, between two gates on the current stream."""
        with self._lock:
            tokens: dict[FakeEvent, Token] = {}
            start = Token()
            self._put(Mark(start))
            ends = []
            for items in capture.items.values():
                stream = self._new_stream()
                stream.of_replay = True
                stream.queue.append(Gate(start))
                for item in items:
                    stream.queue.append(self._instance(item, tokens))
                ends.append(Token())
                stream.queue.append(Mark(ends[-1]))
            self._put(*(Gate(end) for end in ends))

    def _instance(self, item: Item, tokens: dict[FakeEvent, Token]) -> Item:
        if isinstance(item, Action):
            return item
        event = item.of
        assert isinstance(event, FakeEvent)
        return type(item)(tokens.setdefault(event, Token()))


class FakeGraph:
    """Replaying makes no call of the backend's but what was captured."""

    def __init__(self, driver: FakeDriver, capture: Capture) -> None:
        self._driver = driver
        self._capture = capture
        self.closed = False
        self.fails: Callable[[], None] | None = None
        """Set to fail the next replay, on the device."""

    @property
    def actions(self) -> list[Action]:
        return [item for items in self._capture.items.values() for item in items if isinstance(item, Action)]

    def replay(self) -> None:
        assert not self.closed
        self._driver._call("replay")
        self._driver._replay(self._capture)
        if self.fails is not None:
            self._driver._put(Action(self.fails))
            self.fails = None

    def close(self) -> None:
        """The driver's `release` does."""
        assert not self.closed
        own = {id(action) for action in self.actions}
        assert all(id(action) not in own for action in self._driver._queued()), (
            "a graph is closed whose replay is queued"
        )
        self.closed = True
        self._driver._open_graphs.remove(self)
        self._driver.graphs -= 1


def _refuse_unjoined(capture: Capture) -> None:
    """A stream that joined must lead back: its last item is a record that one that leads back awaits."""
    leading = {capture.origin}
    while True:
        waited = [item.of for stream in leading for item in capture.items[stream] if isinstance(item, Gate)]
        last = {stream: items[-1] for stream, items in capture.items.items() if stream not in leading}
        back = {stream for stream, item in last.items() if isinstance(item, Mark) and item.of in waited}
        if not back:
            break
        leading |= back
    assert leading == capture.items.keys(), "a capture ends with a stream that does not lead back"


def _touches(actions: Sequence[Action], start: int, nbytes: int) -> bool:
    """Whether a copy reads or writes some of these bytes."""
    touched = (t for action in actions for t in action.memory)
    return any(t.data_ptr() < start + nbytes and start < t.data_ptr() + t.nbytes for t in touched)


def _fill(raw: torch.Tensor) -> None:
    raw.fill_(_POISON)


def _assign(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source)


def _inside(tensor: torch.Tensor, start: int, nbytes: int) -> bool:
    return start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + nbytes


def pinned_array(driver: FakeDriver, nbytes: int) -> Bytes:
    host = np.zeros(nbytes, np.uint8)
    driver.pin(host)
    return host
