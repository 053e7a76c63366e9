"""The link by size of copy: one behind the other in a graph, as programs have them, each way.

What a plain copy of all bytes at once reaches is the last row. A program joins neighbouring segments up to the size
from which on the rate is no better.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu import steps
from benchmarks.gpu.common import REPLAYS, open_gpu, replay_s
from benchmarks.record import markdown_table
from cohabit.runtime.cuda.backend import CudaBackend

WHOLE_BYTES = 256 << 20
SIZES = (64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20, WHOLE_BYTES)
MOST_COPIES = 512
DIRECTIONS = ("to the device", "to the host")


@dataclass(frozen=True, slots=True)
class Row:
    direction: str
    nbytes: int
    copies: int
    seconds: float


def cells() -> list[str]:
    return list(DIRECTIONS)


def measure(cell: str) -> Iterator[Row | str]:
    backend = open_gpu()
    host = torch.from_numpy(backend.pinned_memory.take(WHOLE_BYTES, "measuring copies"))
    device = backend.driver.allocate(WHOLE_BYTES)
    for nbytes in SIZES:
        yield _row(backend, cell, device, host, nbytes)


def _row(backend: CudaBackend, direction: str, device: torch.Tensor, host: torch.Tensor, nbytes: int) -> Row:
    driver, count = backend.driver, min(WHOLE_BYTES // nbytes, MOST_COPIES)
    ends = (device, host) if direction == DIRECTIONS[0] else (host, device)

    def issue() -> None:
        for n in range(count):
            driver.copy(*(end[n * nbytes : (n + 1) * nbytes] for end in ends))

    with driver.on(backend.streams.swap_in):
        pool = driver.pool(device[:0], 0)
    seconds = replay_s(backend, pool, issue)
    pool.close()
    return Row(direction, nbytes, count, seconds)


def _sections(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    plain = {r.direction: r.nbytes * r.copies / r.seconds for r in rows if r.nbytes == WHOLE_BYTES}
    table = []
    for r in rows:
        rate = r.nbytes * r.copies / r.seconds
        share = f"{rate / plain[r.direction]:.1%}" if r.direction in plain else ""
        each = f"{r.seconds / r.copies * 1e6:.1f}"
        table.append([f"{r.direction}, {r.nbytes >> 10} KiB", str(r.copies), each, f"{rate / 1e9:.2f}", share])
    header = ("copies of", "copies", "us each", "GB/s", "of the plain copy")
    about = f"Medians of {REPLAYS} replays of a graph of copies from and to pinned memory, on an idle device.\n"
    return [about, markdown_table(header, table), *(f"{note}\n" for note in notes)]


STEP = steps.Step("benchmarks.gpu.copies", "Copies by size on a GPU", Row, cells, measure, _sections, cell_s=120.0)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))
