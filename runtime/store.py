"""Host stores: where parameters are when they are not in the arena.

`RamStore` keeps the weights file's bytes in host memory. `FileStore` leaves them on disk and reads them with
O_DIRECT where the file system has it, so that the page cache does not hold a second copy.
"""

import mmap
import os
import time
from pathlib import Path

import numpy as np
import torch

from runtime.memory import Copy, Source, StoreKind
from runtime.pages import Bytes, give_back, large_region
from runtime.weights import Manifest, Table, dtype_of

Store = Source[Bytes]
"""One model's host copy. A copy is done by the call, without holding the GIL."""


def open_store(kind: StoreKind, path: Path, manifest: Manifest) -> Store:
    return RamStore(path, manifest) if kind == "ram" else FileStore(path, manifest)


class RamStore:
    """The whole weights file in anonymous memory."""

    kind: StoreKind = "ram"

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._bytes = large_region(manifest.file_bytes)
        with path.open("rb", buffering=0) as file:
            read_fully(file.fileno(), self._bytes[: manifest.file_bytes], 0)

    def copy(self, segment: int, destination: Bytes) -> Copy:
        s = self.manifest.segments[segment]
        source = self._bytes[s.offset : s.offset + min(s.nbytes, destination.nbytes)]
        return lambda: np.copyto(destination, source)

    def table(self, name: str) -> torch.Tensor:
        table = find_table(self.manifest, name)
        return table_view(self._bytes, table, table.offset)

    def close(self) -> None:
        give_back(self._bytes)


class FileStore:
    """The weights file itself. Tables are mapped, so that a gather reads the pages of its rows alone."""

    kind: StoreKind = "file"

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._path = path
        self._fd, self.direct = _open_direct(path)

    def copy(self, segment: int, destination: Bytes) -> Copy:
        offset = self.manifest.segments[segment].offset
        return lambda: read_fully(self._fd, destination, offset)

    def table(self, name: str) -> torch.Tensor:
        table = find_table(self.manifest, name)
        with self._path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped.madvise(mmap.MADV_RANDOM)
        return table_view(np.frombuffer(mapped, np.uint8), table, table.offset)

    def close(self) -> None:
        os.close(self._fd)


class LimitedStore:
    """A store behind a slower link: each copy takes at least `latency_s + bytes / bandwidth`, by really waiting."""

    def __init__(self, store: Store, bandwidth_bytes_per_s: float, latency_s: float = 0.0) -> None:
        self._store = store
        self.kind = store.kind
        self._bandwidth = bandwidth_bytes_per_s
        self._latency_s = latency_s

    def copy(self, segment: int, destination: Bytes) -> Copy:
        copy = self._store.copy(segment, destination)
        least_s = self._latency_s + destination.nbytes / self._bandwidth
        copy_s = 0.0

        def limited() -> None:
            # The bytes arrive at the end of the wait, not at its start: nobody can read them too early unnoticed.
            nonlocal copy_s
            end = time.perf_counter() + least_s
            _sleep_until(end - copy_s)
            start = time.perf_counter()
            copy()
            copy_s = time.perf_counter() - start
            _sleep_until(end)

        return limited

    def table(self, name: str) -> torch.Tensor:
        return self._store.table(name)

    def close(self) -> None:
        self._store.close()


def _sleep_until(end_s: float) -> None:
    if (rest := end_s - time.perf_counter()) > 0:
        time.sleep(rest)


def _open_direct(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT), True
    except (OSError, AttributeError):  # tmpfs and some network file systems have no O_DIRECT
        return os.open(path, os.O_RDONLY), False


def read_fully(fd: int, destination: Bytes, offset: int) -> None:
    """Fill the destination from an offset of the file on. Raises OSError, also where the file ends too early."""
    view = destination.data
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise OSError(f"weights file ends at byte {offset + done}, {len(view) - done} bytes too early")
        done += count


def find_table(manifest: Manifest, name: str) -> Table:
    """The embedding table of this name."""
    return next(t for t in manifest.tables if t.name == name)


def table_view(raw: Bytes, table: Table, offset: int) -> torch.Tensor:
    """The table whose bytes begin at an offset."""
    own = torch.from_numpy(raw[offset : offset + table.nbytes])
    return own.view(dtype_of(table.dtype)).reshape(table.shape)
