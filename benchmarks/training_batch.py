"""HOME's Table 2 and Figure 6, executed: the largest batch that trains in so much memory, and throughput by batch size.

    python -m benchmarks.training_batch --record

Eager and `cohabit.budget`. The largest batch is found by bisection. A cell is a process of `benchmarks.training_step`
in a memory cgroup, and is kept in the working folder. Needs root and cgroups of version 1.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bisection import largest
from benchmarks.edge.cgroup import EXIT_UNAVAILABLE, MIB, is_possible
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.training import NAMES, cell_of
from benchmarks.training_nets import TINY
from benchmarks.training_step import BUDGETS

MODULE = "benchmarks.training_batch"
EAGER = "eager"
CONTESTANTS = ("budget",)
MULTIPLES = (1, 1.5, 2, 3, 4)
"""Of eager's largest batch."""
WARM_UP = 1
"""Steps with the limit before those that are measured."""


@dataclass
class Cells:
    """Measured cells by net, contestant and batch, which are kept in a file."""

    path: Path
    budget_bytes: int
    steps: int
    console: Console
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def at(self, net: str, contestant: str, batch: int) -> dict[str, Any]:
        """Return a cell, measured if it is not known."""
        key = f"{net} {contestant} {batch} {self.budget_bytes} {self.steps}"
        if key not in self.found:
            flags = ["--tiny", "--batch", str(batch), "--budget", str(self.budget_bytes)]
            flags += ["--warm-up", str(WARM_UP), "--steps", str(self.steps)]
            began_s = time.monotonic()
            cell = cell_of(net, contestant, flags)
            self.found[key] = {**cell, "took_s": time.monotonic() - began_s}
            self.path.write_text(json.dumps(self.found, indent=1))
            said = f"{cell['step_s']:.2f} s per step" if "step_s" in cell else cell["failed"]
            self.console.print(f"{net}, {contestant}, {batch} samples: {said} ({time.monotonic() - began_s:.0f} s)")
        return self.found[key]

    def trains(self, net: str, contestant: str, batch: int) -> bool:
        """Whether a batch trains."""
        return "step_s" in self.at(net, contestant, batch)


def largest_batches(cells: Cells, net: str, names: Sequence[str]) -> dict[str, int]:
    """The largest batch of eager and of each contestant; 0 where none trains."""
    own = TINY[net].samples
    first = cells.at(net, EAGER, own)
    guess = int(own / first["peak_over_budget"]) if "step_s" in first else own // 2
    eager = largest(lambda batch: cells.trains(net, EAGER, batch), guess, max(1, guess // 16))
    found = {EAGER: eager}
    guess = 3 * eager // 2
    for name in names if eager else ():
        found[name] = largest(lambda batch: cells.trains(net, name, batch), guess, max(1, eager // 8))  # noqa: B023
        guess = found[name] or guess
    return found


def row(cells: Cells, net: str, names: Sequence[str]) -> list[str]:
    """The largest batches over eager's, and their samples per second."""
    found, shown = largest_batches(cells, net, names), list[str]()
    for name in (EAGER, *names):
        most = found.get(name, 0)
        over = "" if name == EAGER else f" ({most / found[EAGER]:.2f})" if most else ""
        shown.append(f"{most}{over}, {rate(cells, net, name, most)}" if most else "none")
    return [net, *shown]


def rates(cells: Cells, net: str, names: Sequence[str]) -> Iterator[list[str]]:
    """Samples per second of each contestant with multiples of eager's largest batch."""
    most = largest_batches(cells, net, names)
    for multiple in MULTIPLES if most[EAGER] else ():
        batch = int(multiple * most[EAGER])
        shown = [rate(cells, net, name, batch) if batch <= most[name] else "-" for name in (EAGER, *names)]
        yield [f"{net}, {batch}", *shown]


def rate(cells: Cells, net: str, name: str, batch: int) -> str:
    """Samples per second; a dash for a batch that does not train."""
    return f"{batch / cells.at(net, name, batch)['step_s']:.1f}" if cells.trains(net, name, batch) else "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--nets", nargs="+", default=["unet", "gpt"], choices=list(TINY))
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), help="beside eager (default: all)")
    parser.add_argument("--budget", type=int, default=128, help="MiB for tensors (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="measured, after two others (default: %(default)s)")
    parser.add_argument("--record-as", metavar="NAME", help="name of the result file (default: %(default)s)")
    arguments = parser.parse_args(argv)
    console = Console()
    if not is_possible(console):
        return EXIT_UNAVAILABLE
    path = arguments.folder / "training-batch.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    cells = Cells(path, arguments.budget * MIB, arguments.steps, console, known)
    names = arguments.contestants
    shown = [EAGER, *(NAMES[name] if name in BUDGETS else name for name in names)]
    most = markdown_table(["net", *shown], [row(cells, net, names) for net in arguments.nets])
    by_batch = [row for net in arguments.nets for row in rates(cells, net, names)]
    sections = [
        ABOUT.format(budget=arguments.budget, steps=arguments.steps),
        most,
        "## Throughput by batch size (HOME, Figure 6)\n",
        RATES,
        markdown_table(["net, batch", *shown], by_batch),
    ]
    publish(
        arguments, "The largest batch, and throughput by batch size, executed: HOME, Table 2, Figure 6", sections
    )
    return 0


ABOUT = """**Executed.** The largest batch that trains, in brackets over eager's, and samples per second. Each cell is a
process with one thread in a memory cgroup of its base (what it takes, but for tensors, after a first step without the
limit), {budget} MiB for tensors, and 16 MiB, without swap. `cohabit.budget` runs the eager loop, with what the cgroup
allows as the total of its process. Eager's largest batch is found to a 16th, the other's to an eighth of eager's.
{steps} steps are measured after two others; tensors go to a file. The nets are the small ones of
`benchmarks.training_nets`: U-Net on 128 by 128 images, GPT with two blocks on 128 tokens. Theirs, measured on an RTX
2080Ti: HOME 2.2 times PyTorch's batch on average, Capuchin 1.97 times; HOME has 1.12 times Capuchin's batch, and 1.2
times its throughput.
"""
RATES = """Samples per second in the same memory, with multiples of eager's largest batch. Where there is no figure, the
batch does not train. Theirs, for four networks: HOME has up to 5.7 times vDNN's, 2 times SuperNeurons' and 1.3 times
Capuchin's throughput.
"""


if __name__ == "__main__":
    sys.exit(main())
