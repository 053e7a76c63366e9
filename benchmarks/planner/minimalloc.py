"""How close placement comes to the bound: on CSV files in MiniMalloc's format, and on packings known to be perfect.

    python -m benchmarks.planner.minimalloc [FOLDER] [--nodes N] [--record]

FOLDER has CSV files, such as `benchmarks/challenging` of github.com/google/minimalloc, whose names end in a capacity
that is known to suffice. The generated instances are rectangles cut into blocks by random straight cuts: all of the
rectangle's height is used at all times, so that the bound is the optimum.
"""

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.planner.packing import searched
from benchmarks.record import markdown_table, record
from cohabit.planner.layout.placement import Block, most_live_bytes, place
from cohabit.planner.lifetimes import Lifespan

GENERATED = tuple((blocks, seed) for blocks in (30, 100, 300) for seed in (0, 1))
HEIGHT, LENGTH = 1 << 20, 1000
NODES = 200_000


def guillotine(count: int, seed: int) -> tuple[Block, ...]:
    """Cut a rectangle of HEIGHT bytes and LENGTH times into `count` blocks, always the largest that is left."""
    random = np.random.default_rng(seed)
    pieces = [(HEIGHT, 0, LENGTH)]
    while len(pieces) < count:
        pieces.sort(key=lambda p: p[0] * (p[2] - p[1]))
        nbytes, first, end = pieces.pop()
        across = random.random() < 0.5
        if (end - first < 2) if across else (nbytes < 2):
            across = not across
        share = random.uniform(0.2, 0.8)
        if across:
            middle = min(max(first + int(share * (end - first)), first + 1), end - 1)
            pieces += [(nbytes, first, middle), (nbytes, middle, end)]
        else:
            low = min(max(int(share * nbytes), 1), nbytes - 1)
            pieces += [(low, first, end), (nbytes - low, first, end)]
    order = random.permutation(count)
    return tuple(Block(pieces[i][0], 1, Lifespan(*pieces[i][1:])) for i in order)


def read(path: Path) -> tuple[Block, ...]:
    """Read buffers from MiniMalloc's CSV format: `id,lower,upper,size`, and optionally `alignment` and `gaps`.

    `lower` and `upper` bound the half-open lifespan; `start` (or `begin`) and `end`, both inclusive, may replace them.
    In a gap `6-9` the buffer need not exist. Only the longest gap is used; gaps in which part of the buffer is needed
    (`6-9@0:4`) are not.
    """
    with path.open() as file:
        return tuple(_block(row) for row in csv.DictReader(file, skipinitialspace=True))


def _block(row: dict[str, str]) -> Block:
    inclusive = "end" in row
    lower = int(row.get("lower") or row.get("start") or row["begin"])
    upper = int(row["end" if inclusive else "upper"]) + inclusive
    size, alignment = int(row["size"]), int(row.get("alignment") or 1)
    pairs = [text.split("-") for text in (row.get("gaps") or "").split() if "@" not in text]
    gaps = [(int(first), int(end) + inclusive) for first, end in pairs]
    inside = [(first, end) for first, end in gaps if lower < first < end < upper]
    if not inside:
        return Block(size, alignment, Lifespan(lower, upper))
    first, end = max(inside, key=lambda gap: gap[1] - gap[0])
    return Block(size, alignment, Lifespan(lower, first), Lifespan(end, upper))


def row(name: str, blocks: Sequence[Block], known_bytes: int, nodes: int) -> list[str]:
    bound = most_live_bytes(blocks)
    greedy = place(blocks)
    start = time.perf_counter()
    layout = searched(blocks, known_bytes, nodes=nodes)
    seconds = time.perf_counter() - start
    ratios = [f"{peak / (known_bytes or bound):.4f}" for peak in (bound, greedy.peak_bytes, layout.peak_bytes)]
    return [name, str(len(blocks)), *ratios, f"{seconds:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.minimalloc", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="CSV files to place (default: generated ones only)")
    parser.add_argument(
        "--nodes", type=int, default=NODES, help="partial placements to look at (default: %(default)s)"
    )
    parser.add_argument("--record", action="store_true", help="write docs/results/planner-minimalloc.md")
    options = parser.parse_args(argv)
    if options.folder is not None and not any(options.folder.glob("*.csv")):
        parser.error(f"{options.folder} has no .csv files; they are in benchmarks/ of github.com/google/minimalloc")
    rows = [row(f"guillotine {n}, seed {s}", guillotine(n, s), HEIGHT, options.nodes) for n, s in GENERATED]
    for path in sorted(options.folder.glob("*.csv")) if options.folder is not None else []:
        capacity = path.stem.rpartition(".")[2]
        rows.append(row(path.stem, read(path), int(capacity) if capacity.isdecimal() else 0, options.nodes))
    header = ["problem", "blocks", "bound / known", "greedy / known", "searched / known", "seconds"]
    print(table := markdown_table(header, rows))
    if options.record:
        record("planner-minimalloc", "Placement: MiniMalloc's problems", "benchmarks.planner.minimalloc", [
            "Peaks by what is known to do: the cut rectangle's height for the generated packings, the capacity in the"
            " file's name for CSV files (github.com/google/minimalloc, `benchmarks/challenging`). *Greedy* is what"
            f" plans use; *searched* looks at {options.nodes} partial placements at most and stops at the capacity.\n",
            table,
        ])  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
