"""Why the thesis' greedy tiling misses the best one: random programs by what they have (Spartan, Figure 3.2).

    python -m benchmarks.planner.tiling_greedy --record

Each dimension is drawn, as in the thesis. No array is read twice, so that the pattern of Figure 3.3 cannot occur.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.record import markdown_table, parser_of, publish
from cohabit.planner.tiling.arrays import newarray
from cohabit.planner.tiling.graph import TilingGraph
from cohabit.planner.tiling.search import plan_tiling

PROGRAMS = 100
WORKERS = 4
SEARCHES = ("greedy", "recursive", "exact")


@dataclass(frozen=True, slots=True)
class Kind:
    """The operators of some programs, and the axis of their folds and scans; None draws it each time."""

    name: str
    operators: tuple[str, ...]
    axis: int | None = None


MAPS, FOLDS = ("map", "map"), ("fold", "scan")
KINDS = (
    Kind("all operators", (*MAPS, "transpose", *FOLDS, "dot")),
    Kind("without transposes", (*MAPS, *FOLDS, "dot")),
    Kind("maps and transposes", (*MAPS, "transpose")),
    Kind("maps and dots", (*MAPS, "dot")),
    Kind("maps, folds and scans", (*MAPS, *FOLDS)),
    Kind("maps, folds and scans along columns", (*MAPS, *FOLDS), 0),
    Kind("maps, folds and scans along rows", (*MAPS, *FOLDS), 1),
    Kind("without transposes, along rows", (*MAPS, *FOLDS, "dot"), 1),
    Kind("all operators, along rows", (*MAPS, "transpose", *FOLDS, "dot"), 1),
)


def random_tree(rng: np.random.Generator, kind: Kind) -> list[Any]:
    """Apply 2 to 15 random operators to arrays that nothing has read yet, and return those that are left."""

    def size() -> int:
        return int(rng.integers(128, 513)) * 1024

    unread = [newarray((size(), size()))]

    def taken(shape: tuple[int, ...]) -> Any:
        """Take a random array of this shape, or make one."""
        fitting = [index for index, array in enumerate(unread) if array.shape == shape]
        return unread.pop(int(rng.choice(fitting))) if fitting else newarray(shape)

    for _ in range(int(rng.integers(2, 16))):
        x = unread.pop(int(rng.integers(len(unread))))
        axis = int(rng.integers(2)) if kind.axis is None else kind.axis
        operator = rng.choice(kind.operators)
        if operator == "map":
            made = x + taken(x.shape)
        elif operator == "transpose":
            made = x * taken(x.shape[::-1]).T
        elif operator == "fold":
            made = np.exp(x) - np.sum(taken(x.shape), axis=axis, keepdims=True)
        elif operator == "scan":
            made = np.cumsum(x, axis=axis)
        else:
            made = np.dot(x, taken((x.shape[1], size())))
        unread.append(made)
    return unread


def row(kind: Kind) -> list[str]:
    """Return how often each search moves as few bytes as the exact one, in the thesis' model."""
    found = dict.fromkeys(SEARCHES, 0)
    equal = dict.fromkeys(SEARCHES, 0)
    for seed in range(PROGRAMS):
        graph = TilingGraph.of(random_tree(np.random.default_rng(seed), kind), WORKERS, 0, thesis=True)
        nbytes = {search: plan_tiling(graph, search).nbytes for search in SEARCHES}
        for search in SEARCHES:
            found[search] += nbytes[search]
            equal[search] += nbytes[search] == nbytes["exact"]
    over = f"{found['greedy'] / found['exact']:.3f}" if found["exact"] else "exact moves none"
    return [
        kind.name,
        str(equal["greedy"]),
        "1.000" if found["greedy"] == found["exact"] else over,
        str(equal["recursive"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.planner.tiling_greedy", __doc__, has_folder=False)
    parser.set_defaults(record_as="tiling-greedy")
    options = parser.parse_args(argv)
    rows = [row(kind) for kind in track(KINDS, "planning", console=Console(stderr=True))]
    header = [
        "programs of",
        "greedy as good as exact",
        "greedy's bytes, over exact's",
        "recursive as good as exact",
    ]
    title = "Where greedy tiling misses the best: Spartan, Figure 3.2"
    publish(options, title, [ABOUT, markdown_table(header, rows)])
    return 0


ABOUT = f"""**Simulated**, in the thesis' model: rows and columns, one way to compute each dot, its count of bytes,
{WORKERS} workers, no copies. {PROGRAMS} programs a row, of 2 to 15 operators, each dimension drawn between 128K and
512K. A fold or scan along an axis moves nothing if its input is tiled by the other axis.

Greedy sees the neighbours of an array. Between tilings that look equally good, it takes rows, which a fold, scan or dot
two steps away may not want. The thesis found 95 of 100 programs of its own solved.
"""


if __name__ == "__main__":
    sys.exit(main())
