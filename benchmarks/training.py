"""Five nets trained in memory cgroups of 80, 60 and 40 % of what a step needs.

Contestants are `cohabit.budget` and torch's own ways. Each is a process of its own in a cgroup of its base, which is
everything but tensors, and a share of the step's peak, without swap. Budgets store in a file. Cells are kept in the
working folder as they come, and not measured again. Needs root and cgroups of version 1.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from rich.console import Console

from benchmarks.edge.cgroup import EXIT_UNAVAILABLE, MIB, end_of, is_possible, running
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.training_nets import NETS, TINY, Net
from benchmarks.training_step import BUDGETS, TORCH

NAMES = {
    "eager": "eager",
    "budget": "cohabit.budget",
    "budget_size": "cohabit.budget, size",
    "checkpoint": "torch.utils.checkpoint per block",
    "activation_budget": "activation_memory_budget",
    "saved_to_file": "saved_tensors_hooks to a file",
}
EVERYWHERE = ("budget", "checkpoint", "activation_budget")
"""Contestants at 80 and 40 %, too, by default."""
RESIDENT = "resident"
"""Eager without a limit, which comes before each group of cells that are compared with it."""
PATIENCE_S = 240.0

Group = tuple[str, float, Sequence[str]]
"""A net, a share, and contestants one after the other."""
Cells = dict[str, dict[str, Any]]
Rows = Sequence[Sequence[str]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.training", __doc__)
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.6, 0.8, 0.4])
    parser.add_argument(
        "--contestants",
        nargs="+",
        help="at each of the shares",
    )
    parser.add_argument("--steps", type=int, default=3, help="measured, after five others (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no cell after so many")
    parser.add_argument("--tiny", action="store_true", help="nets of tens of MB, to try this with")
    parser.add_argument("--record-as", metavar="NAME", help="name of the result file (default: %(default)s)")
    arguments = parser.parse_args(argv)
    console = Console()
    if not is_possible(console):
        return EXIT_UNAVAILABLE
    path = arguments.folder / ("training-tiny.json" if arguments.tiny else "training.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    cells: Cells = json.loads(path.read_text()) if path.exists() else {}
    end_s = time.monotonic() + 60 * arguments.minutes
    for net, share, names in jobs(arguments.nets, arguments.shares, arguments.contestants):
        missing = [name for name in names if f"{net} {share:g} {name}" not in cells]
        if missing:
            missing.insert(0, RESIDENT)
        for contestant in missing:
            if time.monotonic() > end_s:
                break
            key = f"{net} {RESIDENT}" if contestant == RESIDENT else f"{net} {share:g} {contestant}"
            cell = measured(net, share, contestant, cells, arguments)
            if contestant != RESIDENT and f"{net} {RESIDENT}" in cells:
                cell["eager_s"] = cells[f"{net} {RESIDENT}"]["step_s"]
            cells[key] = cell
            path.write_text(json.dumps(cells, indent=1))
            console.print(key, {k: v for k, v in cell.items() if k not in ("losses", "seconds")})
    publish(arguments, "A training step in too little memory, executed", list(report(cells, arguments)))
    return 0


def jobs(nets: Sequence[str], shares: Sequence[float], contestants: Sequence[str] | None) -> Iterator[Group]:
    """What to measure, in order: the whole of memory, 60 % by everyone, the other shares."""
    if contestants:
        groups = [(share, tuple(contestants)) for share in shares]
    else:
        groups = [(1.0, ("budget",))]
        groups += [(0.6, (*TORCH, *BUDGETS))] if 0.6 in shares else []
        groups += [(share, EVERYWHERE) for share in shares if share != 0.6]
    yield from ((net, share, names) for share, names in groups for net in nets)


def measured(
    net: str, share: float, contestant: str, cells: Cells, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run one cell. For torch's compiler, the most of its settings at which it is not killed."""
    if contestant == "activation_budget":
        for setting in (share, share / 2, 0.0):
            cell = _measured(net, share, contestant, cells, arguments, ["--setting", str(setting)])
            if "step_s" in cell:
                return {**cell, "setting": setting}
        return cell
    if contestant == RESIDENT:
        return _measured(net, 1.0, "eager", cells, arguments, ["--unlimited"])
    return _measured(net, share, contestant, cells, arguments, ["--unlimited"] if share == 1.0 else [])


def _measured(
    net: str, share: float, contestant: str, cells: Cells, arguments: argparse.Namespace, flags: Sequence[str]
) -> dict[str, Any]:
    eager = cells.get(f"{net} {RESIDENT}")
    peak_bytes = 1 << 30 if eager is None else int(peak_mib(eager) * MIB)
    flags = ["--share", str(share), *flags, "--peak", str(peak_bytes), "--steps", str(arguments.steps)]
    return cell_of(net, contestant, [*flags, *(["--tiny"] if arguments.tiny else [])])


def cell_of(net: str, contestant: str, flags: Sequence[str]) -> dict[str, Any]:
    """Run `benchmarks.training_step` in a cgroup of its own; return what it printed, or how it failed."""
    command = [sys.executable, "-m", "benchmarks.training_step", net, contestant, *flags]
    with running(command, None) as (process, _, log):
        try:
            output, _ = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            return {"failed": f"not within {PATIENCE_S:g} s"}
        cell: dict[str, Any] = {}
        for line in output.splitlines():
            if line.startswith("{"):
                cell |= json.loads(line)
        return cell if "step_s" in cell else {**cell, "failed": end_of(process, log)}


def report(cells: Cells, arguments: argparse.Namespace) -> Iterator[str]:
    """The result file's sections: a table per share, then the papers' tables in kind, from the same cells."""
    yield ABOUT.format(steps=arguments.steps)
    yield markdown_table(
        ["net", "peak of a step, MiB", "state, MiB", "eager step, s"],
        [
            [
                net,
                f"{peak_mib(cells[f'{net} {RESIDENT}']):.0f}",
                f"{cells[f'{net} {RESIDENT}']['held'] / MIB:.0f}",
                f"{cells[f'{net} {RESIDENT}']['step_s']:.2f}",
            ]
            for net in known_nets(cells)
        ],
    )
    for share in shares_of(cells):
        yield f"## {100 * share:g} % of the step's peak\n"
        yield from tables_of(cells, share)
    yield from papers(cells, TINY if arguments.tiny else NETS)


def tables_of(cells: Cells, share: float) -> Iterator[str]:
    nets = known_nets(cells)
    found = [c for c in contestants() if any(f"{net} {share:g} {c}" in cells for net in nets)]
    for title, cell_of in (
        (
            "Throughput over eager without a limit; in the last column, the geometric mean of the nets it trains",
            _speed,
        ),
        ("Peak above base, over the budget", _peak),
        ("Bytes that a step copies to and from the file, MiB", _swapped),
    ):
        rows = []
        for name in found:
            of_net = [cells.get(f"{net} {share:g} {name}") for net in nets]
            row = [_shown(cell, cell_of) for cell in of_net]
            if cell_of is _speed:
                row.append(geometric([c["eager_s"] / c["step_s"] for c in of_net if c and "step_s" in c]))
            if cell_of is _speed or any(value != "-" for value in row):
                rows.append([NAMES.get(name, name), *row])
        header = ["", *nets, *(["mean"] if cell_of is _speed else [])]
        if rows:
            yield f"{title}:\n"
            yield markdown_table(header, rows, shown=cell_of is _speed)
    yield "The losses of all steps have the bits of eager's:\n"
    yield markdown_table(
        ["", *nets],
        [[NAMES.get(n, n), *(_same(cells, net, share, n) for net in nets)] for n in found],
        shown=False,
    )


def papers(cells: Cells, nets_of: Mapping[str, Net]) -> Iterator[str]:
    """The papers' tables in kind, as far as their contestants were measured."""
    yield from step_parts(cells)
    yield from savings(cells)
    yield from rates(cells, nets_of)


def step_parts(cells: Cells) -> Iterator[str]:
    rows = []
    for share in shares_of(cells):
        for net, name in product(known_nets(cells), BUDGETS):
            cell = cells.get(f"{net} {share:g} {name}", {})
            if "step_s" in cell:
                step_s, waited_s = cell["step_s"], cell["waited_s"]
                overlap_s = max(0.0, cell["thread_copies_s"] - (waited_s - cell["loop_copies_s"]))
                parts = (step_s - waited_s - overlap_s, overlap_s, waited_s)
                figures = [f"{step_s:.3f}", f"{cell['eager_s']:.3f}", *(f"{100 * s / step_s:.1f} %" for s in parts)]
                rows.append([f"{net}, {NAMES[name]}, {100 * share:g} %", *figures])
    title = "HOME, Figure 7: a step's time under `cohabit.budget` by its parts"
    header = ["net, contestant, memory", "step, s", "eager's step, s", "computation", "overlap", "swapping"]
    yield from _section(title, PARTS, header, rows, shown=False)


def savings(cells: Cells) -> Iterator[str]:
    rows = []
    for net, name in product(known_nets(cells), BUDGETS):
        cell = cells.get(f"{net} 0.6 {name}", {})
        if "step_s" in cell:
            saved = 1 - peak_mib(cell) / peak_mib(cells[f"{net} {RESIDENT}"])
            cost = cell["step_s"] / cell["eager_s"]
            rows.append([net, NAMES.get(name, name), f"{saved:.3f}", f"{cost:.3f}", f"{saved / cost:.3f}"])
    title = "TENSILE, Tables I and III: memory saving, overhead, and their ratio"
    yield from _section(title, TENSILE, ["net", "", "MSR", "EOR", "CBR"], rows, shown=False)


def rates(cells: Cells, nets_of: Mapping[str, Net]) -> Iterator[str]:
    shares, rows = shares_of(cells), []
    for net in known_nets(cells):
        samples = nets_of[net].samples
        for name in (*BUDGETS, "checkpoint"):
            found = [cells.get(f"{net} {share:g} {name}") for share in shares]
            if any(found):
                shown = [_shown(cell, lambda cell: f"{samples / cell['step_s']:.1f}") for cell in found]  # noqa: B023
                eager = f"{samples / cells[f'{net} {RESIDENT}']['step_s']:.1f}"
                rows.append([f"{net}, {NAMES[name]}", eager, *shown])
    title = "Beaumont et al., Figure 3, in kind: samples per second by memory"
    header = ["net, contestant", "eager without a limit", *(f"{100 * share:g} %" for share in shares)]
    yield from _section(title, RATES, header, rows, shown=True)


def _section(title: str, about: str, header: Sequence[str], rows: Rows, *, shown: bool) -> Iterator[str]:
    if rows:
        yield from (f"## {title}\n", about, markdown_table(header, rows, shown=shown))


def shares_of(cells: Cells) -> list[float]:
    return sorted({float(key.split()[1]) for key in cells if RESIDENT not in key}, reverse=True)


def contestants() -> Sequence[str]:
    return [*BUDGETS, *TORCH]


def known_nets(cells: Cells) -> list[str]:
    return [net for net in NETS if f"{net} {RESIDENT}" in cells]


def peak_mib(cell: Mapping[str, Any]) -> float:
    """The most that was taken above base."""
    return float(cell["peak_over_budget"] * cell["budget_mib"])


def geometric(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f} of {len(ratios)}" if ratios else "-"


def _shown(cell: Mapping[str, Any] | None, cell_of: Callable[[Mapping[str, Any]], str]) -> str:
    """Return a cell of a table; why there is no figure is said once, where the throughput is."""
    if cell is not None and "step_s" in cell:
        return cell_of(cell)
    if cell_of is not _speed:
        return "-"
    return "not recorded" if cell is None else cell["failed"].partition(": ")[0].rpartition(".")[2]


def _speed(cell: Mapping[str, Any]) -> str:
    return f"{cell['eager_s'] / cell['step_s']:.2f}" + (f" (at {cell['setting']:g})" if "setting" in cell else "")


def _peak(cell: Mapping[str, Any]) -> str:
    return f"{cell['peak_over_budget']:.2f}"


def _swapped(cell: Mapping[str, Any]) -> str:
    return f"{cell['swapped_bytes'] / MIB:.0f}" if "swapped_bytes" in cell else "-"


def _same(cells: Cells, net: str, share: float, name: str) -> str:
    """Whether losses are eager's, and the largest relative difference where they are not."""
    cell, eager = cells.get(f"{net} {share:g} {name}", {}), cells[f"{net} {RESIDENT}"]
    if "losses" not in cell:
        return "-"
    pairs = list(zip(cell["losses"], eager["losses"], strict=False))
    return "yes" if all(a == b for a, b in pairs) else f"within {max(abs(a / b - 1) for a, b in pairs):.0e}"


ABOUT = """**Executed.** Each cell is a process with one thread in a memory cgroup of its base, a share of the step's
peak, and 16 MiB, without swap; at 100 % there is no cgroup limit. *Peak* is the most that eager's step takes above
base. *Base* is what the process takes, but for tensors, after a first step without the limit; page cache does not
count. SGD with momentum. {steps} steps are measured after five others, by their median.
Eager without a limit is measured before each group of contestants, with the same settings of the C library's heap.

- `cohabit.budget` runs the eager loop. Its context is entered after the first step, with the bytes that the cgroup
  allows as the total of the process. Its peak is that since it last measured a new op's scratch, in the first steps.
  With *size*, tensors get the share in bytes, and kernels' scratch and freed memory come on top.
- `activation_memory_budget` was tried with the share, half of it and 0, on the backend `aot_eager_decomp_partition`.

Budgets store in a file (O_DIRECT); `saved_tensors_hooks` writes to a file through the page cache.
"""
PARTS = """Means of a step. *Swapping* is the time in which the loop's ops could not run. *Overlap* is the copy
thread's time, less what ops waited for it. *Computation* is the rest; eager's step stands beside it. Theirs, on an
RTX 2080Ti, for VGG16: HOME has 57 % overlap and nearly no swapping, vDNN 75 % swapping.
"""
TENSILE = """MSR is the share of eager's measured peak that is saved, EOR the step's time over eager's, CBR their ratio.
Theirs for TENSILE on an RTX A6000: MSR 0.267 to 0.515, EOR 1.17 to 1.65, CBR 0.16 to 0.44 (Table I, five convolutional
networks). All have the same budget here; TENSILE itself saves as much as it can.
"""
RATES = """Memory is the share of the step's peak. Theirs is simulated: images per second by memory, for offloading at
three bandwidths and for optimal rematerialisation.
"""


if __name__ == "__main__":
    sys.exit(main())
