"""The link by size of copy: one behind the other in a graph, as programs have them, each way.

What a plain copy of all bytes at once reaches, from the faster of two kinds of pinned memory, is what the others are
compared with. A program joins neighbouring segments up to the size from which on the rate is little better.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu import steps
from benchmarks.gpu.common import REPLAYS, open_gpu, pinned_by_torch, replay_s
from benchmarks.record import markdown_table
from cohabit.runtime.cuda.backend import CudaBackend

WHOLE_BYTES = 256 << 20
SIZES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20, WHOLE_BYTES)
MOST_COPIES = 512
DIRECTIONS = ("to the device", "to the host")
BY_TORCH = "to the device, pin_memory=True"


@dataclass(frozen=True, slots=True)
class Row:
    direction: str
    nbytes: int
    copies: int
    seconds: float

    @property
    def to_device(self) -> bool:
        return self.direction != DIRECTIONS[1]


def cells() -> list[str]:
    return [*DIRECTIONS, BY_TORCH]


def measure(cell: str) -> Iterator[Row | str]:
    backend = open_gpu()
    device = backend.driver.allocate(WHOLE_BYTES)
    if cell == BY_TORCH:
        yield _row(backend, cell, device, pinned_by_torch(backend, WHOLE_BYTES), WHOLE_BYTES)
        return
    host = torch.from_numpy(backend.pinned_memory.take(WHOLE_BYTES, "measuring copies"))
    for nbytes in SIZES:
        yield _row(backend, cell, device, host, nbytes)


def _row(backend: CudaBackend, direction: str, device: torch.Tensor, host: torch.Tensor, nbytes: int) -> Row:
    driver, count = backend.driver, min(WHOLE_BYTES // nbytes, MOST_COPIES)
    ends = (host, device) if direction == DIRECTIONS[1] else (device, host)

    def issue() -> None:
        for n in range(count):
            driver.copy(*(end[n * nbytes : (n + 1) * nbytes] for end in ends))

    with driver.on(backend.streams.swap_in):
        pool = driver.pool(device[:0], 0)
    seconds = replay_s(backend, pool, issue)
    pool.close()
    return Row(direction, nbytes, count, seconds)


def _sections(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    plain: dict[bool, float] = {}
    for r in rows:
        if r.nbytes == WHOLE_BYTES:
            plain[r.to_device] = max(plain.get(r.to_device, 0.0), r.nbytes * r.copies / r.seconds)
    table = []
    for r in rows:
        rate = r.nbytes * r.copies / r.seconds
        share = f"{rate / plain[r.to_device]:.1%}" if r.to_device in plain else ""
        each = f"{r.seconds / r.copies * 1e6:.1f}"
        table.append([f"{r.direction}, {r.nbytes >> 10} KiB", str(r.copies), each, f"{rate / 1e9:.2f}", share])
    header = ("copies of", "copies", "us each", "GB/s", "of the plain copy")
    about = f"Medians of {REPLAYS} replays of a graph of copies from and to pinned memory, on an idle device.\n"
    return [about, markdown_table(header, table), *(f"{note}\n" for note in notes)]


STEP = steps.Step("benchmarks.gpu.copies", "Copies by size on a GPU", Row, cells, measure, _sections, cell_s=120.0)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))
