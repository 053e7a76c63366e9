"""Reads that bypass the dispatcher: numpy views, pointers, pickling, storages' methods, other threads.

A dispatch mode does not see them, and reading an evicted storage would dereference a null pointer. So torch's methods
that expose a tensor's bytes are replaced while a budget is active: each swaps the bytes in first, and pins them as long
as they may be read.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Final

import torch
from torch._C import StorageBase

from cohabit.runtime.errors import UnsupportedModel
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


class _ArrayRef(weakref.ref[Any]):
    """A weak reference with a C callback; see `StorageRef`."""

    __slots__ = ("tracked",)
    tracked: Tracked


class Pins:
    """Counts readers of storages that bypass ops. The caller holds a lock around every call."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._arrays: dict[int, _ArrayRef] = {}
        """By id of the reference: a reference hashes as its array, and arrays are unhashable."""
        self._gone: deque[_ArrayRef] = deque()
        self._counts: dict[Tracked, int] = {}
        self._temporary: list[Tracked] = []
        self._saving = 0
        """Depth of nested calls that save: their pins end when the outermost one returns."""

    def until_gone(self, tracked: Tracked, array: Any) -> None:
        ref = _ArrayRef(array, self._gone.append)
        ref.tracked = tracked
        self._arrays[id(ref)] = ref
        self.add(tracked)

    def collect(self) -> None:
        """Remove the pins of dead arrays."""
        while self._gone:
            ref = self._gone.popleft()
            del self._arrays[id(ref)]
            self.remove(ref.tracked)

    @property
    def is_saving(self) -> bool:
        return self._saving > 0

    def take(self, tracked: Tracked) -> None:
        self.add(tracked)
        if self._saving:
            self._temporary.append(tracked)

    def add(self, tracked: Tracked) -> None:
        self._counts[tracked] = self._counts.get(tracked, 0) + 1
        self._residency.pin(tracked)

    def remove(self, tracked: Tracked) -> None:
        self._counts[tracked] -= 1
        if not self._counts[tracked]:
            del self._counts[tracked]
            self._residency.unpin(tracked)

    @contextmanager
    def saving(self) -> Iterator[None]:
        self._saving += 1
        try:
            yield
        finally:
            self._saving -= 1
            if not self._saving:
                for tracked in self._temporary:
                    self.remove(tracked)
                self._temporary.clear()


@contextmanager
def watching(residency: Residency, lock: AbstractContextManager[Any]) -> Iterator[Pins]:
    """Inside the block, replace methods that expose a tensor's bytes."""
    pins = Pins(residency)

    # Lookup of the arguments' tracked storages

    def storage_of(value: Any) -> Any:
        if isinstance(value, torch.UntypedStorage):
            return value
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            try:
                return value.untyped_storage()
            except (NotImplementedError, RuntimeError):
                return None  # a wrapper subclass without storage
        return None

    def found(*values: Any) -> list[Tracked]:
        storages = [storage_of(value) for value in values]
        trackeds = [residency.find(storage) for storage in storages if storage is not None]
        return [tracked for tracked in trackeds if tracked is not None]

    # Wrappers, by how long the bytes must stay: with an array, during the call, or until the budget's end

    def viewed(real: Any) -> Any:
        @wraps(real)
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with lock:
                for tracked in found(tensor):
                    pins.add(tracked)
                    try:
                        array = real(tensor, *args, **kwargs)
                        pins.until_gone(tracked, array)
                    finally:
                        pins.remove(tracked)
                    return array
            return real(tensor, *args, **kwargs)

        return method

    def read(real: Any) -> Any:
        @wraps(real)
        def method(*args: Any, **kwargs: Any) -> Any:
            with lock, ExitStack() as stack:
                for tracked in found(*args[:3]):
                    pins.add(tracked)
                    stack.callback(pins.remove, tracked)
                return real(*args, **kwargs)

        return method

    def taken(real: Any) -> Any:
        @wraps(real)
        def method(value: Any, *args: Any, **kwargs: Any) -> Any:
            with lock:
                for tracked in found(value):
                    pins.take(tracked)
                return real(value, *args, **kwargs)

        return method

    def pickled(real: Any) -> Any:
        """`torch.save` reads storages at its end, so they are pinned. Other picklers read each storage at once."""

        @wraps(real)
        def method(value: Any, *args: Any, **kwargs: Any) -> Any:
            with lock:
                for tracked in found(value) if pins.is_saving else ():
                    pins.take(tracked)
                return real(value, *args, **kwargs)

        return method

    # Wrappers that pin nothing: sizes of evicted storages, calls that save, and what is refused

    def sized(real: Any) -> Any:
        @wraps(real)
        def method(storage: Any) -> Any:
            tracked = residency.find(storage)
            return real(storage) if tracked is None else tracked.nbytes

        return method

    def saving(real: Any) -> Any:
        @wraps(real)
        def function(*args: Any, **kwargs: Any) -> Any:
            with lock, pins.saving():
                return real(*args, **kwargs)

        return function

    def refused(real: Any) -> Any:
        @wraps(real)
        def method(*args: Any, **kwargs: Any) -> Any:
            if residency.device.type == "cuda":
                raise UnsupportedModel(
                    "budget: a CUDA graph reads memory at fixed addresses, where evicted tensors are not; run the loop"
                    " without graphs, or without the budget"
                )
            return real(*args, **kwargs)

        return method

    def arithmetic(real: Any) -> Any:
        """It changes what ops compute: what was dropped is computed again before."""

        @wraps(real)
        def function(*args: Any, **kwargs: Any) -> Any:
            with lock:
                residency.forget_recomputations()
                return real(*args, **kwargs)

        return function

    # The stack restores all originals, also if a replacement fails.
    with ExitStack() as stack:
        for owner, names, wrap in (
            (torch.Tensor, _VIEWED, viewed),
            (torch.Tensor, _READ, read),
            (torch.Tensor, _TAKEN, taken),
            (torch.Tensor, ("__reduce_ex__",), pickled),
            (torch.UntypedStorage, _STORAGE_READ, read),
            (torch.UntypedStorage, _STORAGE_TAKEN, taken),
            (torch.UntypedStorage, _STORAGE_SIZE, sized),
            (torch, ("save",), saving),
            (torch, ("tensor_split",), read),
            (torch.utils.dlpack, ("to_dlpack",), taken),
            (torch, ("set_flush_denormal",), arithmetic),
            (sys.modules.get("safetensors.torch"), ("save", "save_file", "save_model"), saving),
            (torch.cuda.CUDAGraph, ("capture_begin", "replay"), refused),
        ):
            for name in names:
                if hasattr(owner, name):
                    stack.enter_context(_replaced(owner, name, wrap))
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


assert issubclass(torch.UntypedStorage, StorageBase), (
    "the residency uses its base's methods, which stay as they are"
)
