"""How many programs, made at random, are lowered rightly: each equals eager PyTorch at three budgets, from two stores.

A program follows from its seed. A process per CPU makes them; what differs is printed with its seed at once.
"""

import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import torch

from benchmarks.record import markdown_table, parser_of, publish
from cohabit.runtime.lowering import fusion
from tests.support.runtime.generated import Skipped, Step, differences

_AT_ONCE = 4
"""Programs that a process makes between two reports."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if no program differs."""
    parser = parser_of("benchmarks.generated", __doc__, has_folder=False)
    parser.add_argument("--programs", type=int, default=20_000, help="number of programs (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="stop after so long (default: a day)")
    options = parser.parse_args(argv)
    found: Counter[str] = Counter()
    began_s = time.monotonic()
    end = options.first + options.programs
    with ProcessPoolExecutor(options.processes, get_context("spawn"), _start) as processes:
        parts = [range(n, min(n + _AT_ONCE, end)) for n in range(options.first, end, _AT_ONCE)]
        pending = {processes.submit(_tried, part) for part in parts}
        for done in as_completed(pending):
            if done.cancelled():
                continue
            for kind, text in done.result():
                found[kind] += 1
                if kind == "different":
                    print(text, flush=True)
            if time.monotonic() > began_s + 60 * options.minutes:
                for waiting in pending:
                    waiting.cancel()
    minutes = (time.monotonic() - began_s) / 60
    rows = [[kind, f"{found[kind]:,}"] for kind in ("equal", "not exported", "different")]
    table = markdown_table(["programs", "number"], rows)
    about = (
        f"{sum(found.values()):,} lists of steps from seed {options.first} on, in {minutes:.0f} minutes. *Not"
        " exported*: eager PyTorch, its export with a dynamic batch and length, or the limits of dynamic shapes"
        " refuse the program. Tolerance: 1e-4 of an output's largest element. A rewrite that validation leaves out"
        " counts as a difference.\n"
    )
    publish(options, "Programs made at random against eager PyTorch", [about, table])
    return 1 if found["different"] else 0


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fusion.LEAST_MULTIPLICATIONS = 0  # small layers are fused, too


def _tried(seeds: range) -> list[tuple[str, str]]:
    return [_outcome(seed) for seed in seeds]


def _outcome(seed: int) -> tuple[str, str]:
    steps, dynamic, packed = program(seed)
    try:
        found = list(differences(steps, dynamic=dynamic, packed=packed))
    except Skipped as error:
        return "not exported", str(error)
    except Exception as error:
        found = [f"{type(error).__name__}: {error}"]
    return ("different", f"seed {seed}: {'; '.join(found)[:500]}") if found else ("equal", "")


def program(seed: int) -> tuple[list[Step], bool, bool]:
    """Return a program's steps, whether its batch and length are dynamic, and whether its weights are packed."""
    draw = random.Random(seed)
    numbers = [draw.randrange(1000) for _ in range(4 * draw.randint(2, 9))]
    steps = list(zip(*[iter(numbers)] * 4, strict=True))
    return steps, bool(seed % 2), seed % 3 > 0


if __name__ == "__main__":
    sys.exit(main())
