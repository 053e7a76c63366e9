"""Memory shared by a front end and the engine: its layout, and arrays in it as messages name them."""

import mmap
from typing import Any

import numpy as np

from cohabit.server.ipc.model import Array

PAGE_BYTES = mmap.PAGESIZE
ALIGNMENT = 64

HEARTBEAT = np.dtype("<f8")
"""Layout at offset 0: the last iteration of the engine's event loop, by `time.monotonic`. Blocks begin after the first
page."""

Place = tuple[str, tuple[int, ...], int]
"""An array in a message: its dtype in numpy's short form, such as `<f4`, its shape, and its offset."""


def round_up(nbytes: int) -> int:
    """Return the size of a block for `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SharedMemory:
    """One process's mapping of the shared memory."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.map = mapped
        self.nbytes = len(mapped)
        self._base = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]

    def array(self, offset: int, dtype: str | np.dtype[Any], shape: tuple[int, ...]) -> Array:
        return np.ndarray(shape, dtype, self.map, offset)

    def offset_of(self, array: Array) -> int | None:
        """Return an array's offset; None if it is elsewhere or not contiguous."""
        offset: int = array.__array_interface__["data"][0] - self._base
        inside = offset >= PAGE_BYTES and offset + array.nbytes <= self.nbytes
        return offset if inside and array.flags.c_contiguous else None

    def place_of(self, array: Array) -> Place:
        """Return a message's value for an array, which must be contiguous in this memory, or empty."""
        interface = array.__array_interface__
        offset: int = interface["data"][0] - self._base
        if not 0 <= offset < self.nbytes:
            assert array.nbytes == 0
            offset = 0
        return interface["typestr"], interface["shape"], offset

    def array_at(self, _: type, place: Place) -> Array:
        """Return the array that a message names; msgspec passes the field's type."""
        dtype, shape, offset = place
        return np.ndarray(shape, dtype, self.map, offset)
