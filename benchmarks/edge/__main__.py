"""A large model in a small memory cgroup: ResNet-152 over HTTP from a bundle, beside programs that hold or map it.

What a cgroup counts, and what the base is, says `benchmarks.edge.cgroup`. Needs root and cgroups of version 1.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from benchmarks.edge import cgroup
from benchmarks.edge.cgroup import EXIT_UNAVAILABLE, MIB, PATIENCE_S, Outcome
from benchmarks.edge.peer import IMAGE, network
from benchmarks.record import parser_of, publish, table_of
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

MODEL = "resnet152"
CASES: tuple[tuple[int, str], ...] = ((72, "36MiB"), (48, "12MiB"))
"""Limits of the cgroup in MiB above the base, and the memory of the models in them."""
GOAL_S = 5.0
"""For the first answer of a server in the larger cgroup."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    if not cgroup.is_possible(console):
        return EXIT_UNAVAILABLE
    folder = options.folder / "edge"
    large = folder / "large"
    prepare_visibly(large, recipes(1, [MODEL]), force=False, console=console)
    whole = cgroup.bundle_of(large, "120%", folder, console)
    resident = cgroup.served(whole, options.requests, None)
    console.print(f"resident: {resident.cells}, {resident.charged_bytes / MIB:.1f} MiB")
    residents = [resident]
    peers = _peers(folder)
    rows = list[dict[str, str]]()
    bases, held = list[str](), resident.first_s is not None
    for libraries_counted in (True, False):
        counted = "yes" if libraries_counted else "no"
        base = cgroup.base(folder, options.requests, console, libraries_counted=libraries_counted)
        bases.append(
            f"{base.charged_bytes / MIB:.1f} MiB"
            + (
                f" and {(base.rss_bytes - base.charged_bytes) / MIB:.1f} MiB that others map"
                if counted == "yes"
                else ""
            )
        )
        for extra, memory in CASES:
            limit_bytes, whole_bytes = base.charged_bytes + extra * MIB, base.rss_bytes + extra * MIB
            label = f"base + {extra} MiB" + (f" = {whole_bytes / MIB:.0f} MiB whole" if libraries_counted else "")
            bundle = cgroup.bundle_of(large, memory, folder, console)
            served = cgroup.served_above(
                base, extra, bundle, options.requests, options.rounds, libraries_counted=libraries_counted
            )
            equal = all(cgroup.equal(one, resident) for one in served)
            middle = cgroup.middle(served)
            residents.append(cgroup.served(whole, options.requests, None))  # in turn: the machine's speed changes
            held &= equal and (extra != CASES[0][0] or (middle.first_s is not None and middle.first_s <= GOAL_S))
            rows.append(_row(f"Cohabit, models in {memory}", counted, label, middle, "equal" if equal else "no"))
            console.print(rows[-1])
            for way, path in peers.items():
                ran = [
                    _peer(way, path, options.requests, limit_bytes, libraries_counted)
                    for _ in range(options.rounds)
                ]
                rows.append(_row(way, counted, label, cgroup.middle(ran)))
                console.print(rows[-1])
    rows.insert(0, _row("Cohabit, resident", "no", "none", cgroup.middle(residents)))
    sections = [
        f"Base: an idle server with one small model, {bases[0]} with libraries counted, {bases[1]} without."
        " Libraries counted: the page cache is dropped before the start, as on a board; otherwise torch's"
        " libraries are in it, and charged elsewhere. The disk's read-ahead:"
        f" {cgroup.read_ahead()}. First answer: from"
        f" the command; median and p90 of {options.requests} requests that follow one another, batch 1, of"
        f" {options.rounds} runs. Servers answer over HTTP, with `--engine in-process` and, in a cgroup,"
        " `--process-memory`; the other ways are programs without a server.\n",
        table_of(rows),
        f"To hold: equal bits, and the first answer within {GOAL_S:g} s in base + {CASES[0][0]} MiB.\n",
    ]
    publish(options, "ResNet-152 in small memory cgroups", sections)
    return 0 if held else 1


def _row(way: str, libraries_counted: str, limit: str, outcome: Outcome, bits: str = "-") -> dict[str, str]:
    return {
        "way": way,
        "libraries counted": libraries_counted,
        "cgroup": limit,
        **outcome.cells,
        "bits of resident": bits,
    }


def _peer(way: str, path: Path, requests: int, limit_bytes: int, libraries_counted: bool) -> Outcome:
    command = [sys.executable, "-m", "benchmarks.edge.peer", way, str(path), str(requests)]
    cgroup.drop_pages(path.parent)
    with cgroup.running(command, limit_bytes, libraries_counted=libraries_counted) as (process, _, log):
        try:
            shown, _ = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return Outcome(reason=f"not within {PATIENCE_S:g} s")
        times_s = [float(line) for line in shown.split()]
        first_s, median_s, p90_s, *_ = *times_s, None, None, None
        return Outcome(first_s, median_s, p90_s, cgroup.end_of(process, log))


def _peers(folder: Path) -> dict[str, Path]:
    """Write the model as the other ways load it; those whose library is missing are left out."""
    state, graph = folder / "state.pt", folder / "onnx" / "model.onnx"
    ways = {"pytorch": state, "pytorch-mmap": state}
    with_onnx = find_spec("onnxruntime") is not None
    if not state.exists() or (with_onnx and not graph.exists()):
        import torch

        model = network()
        torch.save(model.state_dict(), state)
        if with_onnx:
            graph.parent.mkdir(exist_ok=True)
            exported = torch.onnx.export(model, (torch.zeros(IMAGE),), dynamo=True, verbose=False)
            assert exported is not None
            exported.save(graph, external_data=True)
    return ways | ({"onnxruntime": graph} if with_onnx else {})


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.edge", __doc__)
    parser.add_argument("--requests", type=int, default=50, help="requests of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
