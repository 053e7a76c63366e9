"""Pinned host memory of one device, in exact sizes and under a cap, for serving and for training."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch

from cohabit.planner.errors import format_bytes
from cohabit.planner.memory import parse_size
from cohabit.runtime.errors import DeviceError, MemoryExceeded
from cohabit.runtime.stores.libcuda import LibCuda, LibCudaError
from cohabit.runtime.stores.numa import local_cpus, running_on
from cohabit.runtime.stores.pages import Bytes, anonymous_memory, use_huge_pages

LIMIT_VARIABLE = "COHABIT_PINNED_MEMORY"
"""Environment variable with the cap, as a size such as `8GiB`."""
_PINNED_SHARE = 0.5
"""Maximum pinned fraction of a process's RAM without the variable."""
_HUGE_PAGE_BYTES = 2 << 20
_registered: dict[int, Bytes] = {}
"""Pinned host memory by address, referenced so that the system cannot reuse the addresses before they are unpinned."""


class HostPinning:
    """Pins host memory for one device, by torch's index. Any thread.

    The calling thread's current device stays what it is.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._libcuda = LibCuda()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Make the device's context current in the calling thread: the runtime API's first call does."""
        with torch.cuda.device(self._index):
            torch.cuda.mem_get_info(self._index)
            yield

    def pin(self, host: Bytes) -> None:
        """Let copies read and write this host memory at the link's full speed. Raises MemoryExceeded."""
        try:
            with self._entered():
                self._libcuda.pin(host.ctypes.data, host.nbytes)
        except LibCudaError as error:
            raise MemoryExceeded(
                f"pinning {format_bytes(host.nbytes)} of host memory failed ({error}); raise the limit on locked memory"
                f" (ulimit -l), or set {LIMIT_VARIABLE} to less than may be locked"
            ) from error
        _registered[host.ctypes.data] = host

    def unpin(self, host: Bytes) -> None:
        with self._entered():
            self._libcuda.unpin(host.ctypes.data)
        del _registered[host.ctypes.data]

    def near(self) -> AbstractContextManager[None]:
        """Run the calling thread on the device's NUMA node inside the block; pages it touches first lie there."""
        return running_on(self._near_cpus)

    @cached_property
    def _near_cpus(self) -> frozenset[int]:
        its: Any = torch.cuda.get_device_properties(self._index)
        return local_cpus(its.pci_domain_id, its.pci_bus_id, its.pci_device_id)


class PinnedMemory:
    """Pinned host memory with a cap on its total size. Any thread."""

    def __init__(self, pinning: HostPinning, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._pinning = pinning
        self._held: dict[int, Bytes] = {}
        self._lock = threading.Lock()

    def fits(self, nbytes: int) -> bool:
        return self.used_bytes + nbytes <= self.limit_bytes

    def take(self, nbytes: int, what: str) -> Bytes:
        """Return zeroed, page-aligned pinned memory near the device. Raises MemoryExceeded over the cap."""
        with self._lock:  # counted before it is pinned, which takes long: other threads' memory counts, too
            if not self.fits(nbytes):
                raise MemoryExceeded(
                    f"{what}: pinning {format_bytes(nbytes)} on top of {format_bytes(self.used_bytes)} exceeds the cap"
                    f" of {format_bytes(self.limit_bytes)}; set the environment variable {LIMIT_VARIABLE} to more"
                )
            self.used_bytes += nbytes
        try:
            host = self._pinned(nbytes)
        except BaseException:
            with self._lock:
                self.used_bytes -= nbytes
            raise
        if nbytes:
            self._held[host.ctypes.data] = host
        return host

    def take_several(self, sizes: Sequence[int], what: str) -> list[Bytes]:
        """Return memory of each size, or raise MemoryExceeded and take none."""
        taken: list[Bytes] = []
        try:
            for nbytes in sizes:
                host = self.take(nbytes, what)
                taken.append(host)
        except BaseException:
            for host in taken:
                self.release(host)
            raise
        return taken

    def _pinned(self, nbytes: int) -> Bytes:
        host = np.frombuffer(anonymous_memory(nbytes), np.uint8, count=nbytes)
        with self._pinning.near():  # pinning touches all pages not touched yet
            if nbytes >= _HUGE_PAGE_BYTES:
                host.fill(0)
                use_huge_pages(host)  # before pinning: pinned pages cannot be moved
            if nbytes:
                self._pinning.pin(host)
        return host

    def release(self, host: Bytes) -> None:
        """Unpin memory; does nothing if it is unpinned already. No copy may be in progress."""
        with self._lock:
            held = self._held.pop(host.ctypes.data, None)
        if held is not None:
            self._pinning.unpin(host)
            with self._lock:
                self.used_bytes -= host.nbytes

    def close(self) -> None:
        """Unpin everything."""
        for host in list(self._held.values()):
            self.release(host)


def default_limit_bytes(host_memory_bytes: int | None = None) -> int:
    """Return the cap for a process limited to `host_memory_bytes` of RAM (default: the machine's).

    Raises DeviceError if the environment variable is no size.
    """
    given = os.environ.get(LIMIT_VARIABLE)
    if given:
        try:
            return parse_size(given)
        except ValueError as error:
            raise DeviceError(f"the environment variable {LIMIT_VARIABLE}: {error}") from error
    if host_memory_bytes is None:
        host_memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(host_memory_bytes * _PINNED_SHARE)
