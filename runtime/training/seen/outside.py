"""Reads that bypass the dispatcher: numpy views, pointers, pickling, storages' methods, other threads.

A dispatch mode does not see them, and reading an evicted storage would dereference a null pointer. So torch's methods
that expose a tensor's bytes are replaced while ops are seen: each swaps the bytes in first, and pins them as long as
they may be read.
"""

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Final

import torch

from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.training.owners import storages_of
from cohabit.runtime.training.residency import Residency
from cohabit.runtime.training.tracked import Tracked

_VIEWED: Final = ("numpy", "__array__")
"""Tensor methods that return an array over the same bytes: pinned until the array and its views are gone."""
_READ: Final = (
    "__deepcopy__", "__format__", "__repr__", "apply_", "map2_", "map_", "tensor_split", "tolist",
)  # fmt: skip
"""Tensor methods that read or write only during the call."""
_TAKEN: Final = ("__dlpack__", "data_ptr", "share_memory_")
"""Tensor methods with unknown later readers: pinned until the budget's end, or the end of a call that saves."""
_STORAGE_READ: Final = (
    "__copy__", "__deepcopy__", "__getitem__", "__iter__", "__reduce__", "__repr__", "__setitem__", "__str__",
    "_byteswap", "_set_from_file", "_to", "_write_file", "bfloat16", "bool", "byte", "byteswap", "char", "clone",
    "complex_double", "complex_float", "copy_", "cpu", "cuda", "double", "fill_", "float", "half", "int", "long",
    "new", "short", "to", "tolist", "type",
)  # fmt: skip
_STORAGE_TAKEN: Final = (
    "_resize_with_addr_", "_set_cdata", "_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_", "_swap_data_ptr_",
    "data_ptr", "pin_memory", "resize_", "share_memory_",
)  # fmt: skip
_STORAGE_SIZE: Final = ("__len__", "nbytes", "size")


class _ReaderRef(weakref.ref[Any]):
    """A weak reference with a C callback; see `StorageRef`."""

    __slots__ = ("tracked",)
    tracked: Tracked


class _Reader:
    """Lives as long as bytes are read whose pointers were taken."""


class Pins:
    """Storages that are read without ops, and for how long. The caller holds a lock around every call."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._readers: dict[int, _ReaderRef] = {}
        """By id of the reference: a reference hashes as its array, and arrays are unhashable."""
        self._gone: deque[_ReaderRef] = deque()
        self._counts: Counter[Tracked] = Counter()
        self._saved: list[list[Tracked]] = []
        """Per call under way that saves: what it has taken pointers of."""

    def find(self, *values: Any) -> list[Tracked]:
        storages = [s for v in values if isinstance(v, torch.Tensor) for s in storages_of(v)]
        storages += [v for v in values if isinstance(v, torch.UntypedStorage)]
        return [tracked for s in storages if (tracked := self._residency.find(s)) is not None]

    @contextmanager
    def held(self, trackeds: list[Tracked]) -> Iterator[None]:
        try:
            for tracked in trackeds:
                self._add(tracked)
            yield
        finally:
            for tracked in trackeds:
                self._remove(tracked)

    def until_gone(self, tracked: Tracked, reader: Any) -> None:
        ref = _ReaderRef(reader, self._gone.append)
        ref.tracked = tracked
        self._readers[id(ref)] = ref
        self._add(tracked)

    def collect(self) -> None:
        """Remove the pins of readers that are gone."""
        while self._gone:
            ref = self._gone.popleft()
            del self._readers[id(ref)]
            self._remove(ref.tracked)

    def take(self, tracked: Tracked) -> None:
        """Pin until the outermost call under way that saves has ended; otherwise for ever."""
        self._add(tracked)
        if self._saved:
            self._saved[0].append(tracked)

    @contextmanager
    def saving(self, reader: Any) -> Iterator[None]:
        """Pin what is taken inside the block until `reader` is gone."""
        self._saved.append([])
        try:
            yield
        finally:
            for tracked in self._saved.pop():
                self.until_gone(tracked, reader)
                self._remove(tracked)

    @property
    def is_saving(self) -> bool:
        return bool(self._saved)

    def _add(self, tracked: Tracked) -> None:
        self._residency.pin(tracked)
        self._counts[tracked] += 1

    def _remove(self, tracked: Tracked) -> None:
        self._counts[tracked] -= 1
        if self._counts[tracked] <= 0:
            del self._counts[tracked]
            self._residency.unpin(tracked)


@contextmanager
def watching(residency: Residency, lock: AbstractContextManager[Any]) -> Iterator[Pins]:
    """Inside the block, replace methods that expose a tensor's bytes."""
    pins = Pins(residency)

    def viewed(real: Any, *args: Any, **kwargs: Any) -> Any:
        found = pins.find(args[0])
        with pins.held(found):
            array = real(*args, **kwargs)
            for tracked in found:
                pins.until_gone(tracked, array)
        return array

    def read(real: Any, *args: Any, **kwargs: Any) -> Any:
        with pins.held(pins.find(*args[:3])):
            return real(*args, **kwargs)

    def taken(real: Any, *args: Any, **kwargs: Any) -> Any:
        found = pins.find(args[0])
        for tracked in found:
            pins.take(tracked)
        result = real(*args, **kwargs)
        for tracked in found:
            residency.resized(tracked)
        return result

    def pickled(real: Any, *args: Any, **kwargs: Any) -> Any:
        """`torch.save` reads storages at its end. Other picklers read each storage at once."""
        if pins.is_saving:
            return taken(real, *args, **kwargs)
        return real(*args, **kwargs)

    def sized(real: Any, storage: Any) -> Any:
        tracked = residency.find(storage)
        return real(storage) if tracked is None else tracked.nbytes

    def saving(real: Any, *args: Any, **kwargs: Any) -> Any:
        with pins.saving(_Reader()):
            return real(*args, **kwargs)

    def pointing(real: Any, tensors: Any, buffer: list[Any]) -> Any:
        """safetensors reads by these pointers as long as the buffer lives."""
        buffer.append(_Reader())
        with pins.saving(buffer[-1]):
            return real(tensors, buffer)

    def refused(real: Any, *args: Any, **kwargs: Any) -> Any:
        if residency.device.type == "cuda":
            raise UnsupportedModel(
                "budget: a CUDA graph reads memory at fixed addresses, where evicted tensors are not; run the loop"
                " without graphs, or without the budget"
            )
        return real(*args, **kwargs)

    def under_lock(call: Callable[..., Any], real: Any) -> Any:
        @wraps(real)
        def method(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return call(real, *args, **kwargs)

        return method

    # The stack restores all originals, also if a replacement fails. What torch and safetensors call is replaced, not
    # what users import.
    with ExitStack() as stack:
        for owner, names, call in (
            (torch.Tensor, _VIEWED, viewed),
            (torch.Tensor, _READ, read),
            (torch.Tensor, _TAKEN, taken),
            (torch.Tensor, ("__reduce_ex__",), pickled),
            (torch.UntypedStorage, _STORAGE_READ, read),
            (torch.UntypedStorage, _STORAGE_TAKEN, taken),
            (torch.UntypedStorage, _STORAGE_SIZE, sized),
            (torch.serialization, ("_save", "_legacy_save"), saving),
            (torch, ("tensor_split",), read),
            (torch.utils.dlpack, ("to_dlpack",), taken),
            (sys.modules.get("safetensors.torch"), ("_flatten_as_ptr",), pointing),
            (torch.cuda.CUDAGraph, ("capture_begin", "replay"), refused),
        ):
            for name in names:
                if hasattr(owner, name):
                    stack.enter_context(_replaced(owner, name, partial(under_lock, call)))
        yield pins


def threads_in(make_context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[None]:
    """Return a block inside which threads that start run in a context of their own."""

    def started(real: Any) -> Any:
        @wraps(real)
        def start(thread: threading.Thread) -> None:
            run = thread.run

            def run_in_context() -> None:
                with make_context():
                    run()

            thread.run = run_in_context  # type: ignore[method-assign]
            real(thread)

        return start

    return _replaced(threading.Thread, "start", started)


@contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    is_own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, wrap(before))
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
