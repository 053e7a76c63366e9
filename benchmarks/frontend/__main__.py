"""Requests per second and latency of a trivial model: Cohabit, tritonserver and bare handlers, in one run.

tritonserver is that of the wheel `nvidia-pytriton` (0.7.0 has 2.51), with Python-backend twins of the models.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.frontend.client import Measured
from benchmarks.frontend.models import MODELS, TINY, Trivial, export, write_twins
from benchmarks.frontend.servers import BARE, ComparedServer, bare, cohabit, find_tritonserver, tritonserver
from benchmarks.record import parser_of, publish, table_of
from benchmarks.scrape import cpu_s
from benchmarks.turns import in_turns

_PROTOCOLS = ("http", "grpc")
_CLIENTS = (1, 16)
_EXPLAINED = """Closed-loop clients run in one process, servers in others, all on the same CPUs and started at once.
Each figure is the median of several rounds, in which the servers take turns. "p50 - compute" is what the server adds to
an inference: the median latency without the mean of `compute_infer` in the server's own statistics. "p50 - bare" is
what it adds to its library: the bare handlers of aiohttp and grpc.aio read the request and answer constants.
"""
_NOT_FOUND = "tritonserver not found: pass --tritonserver PATH (the wheel nvidia-pytriton has one)"


@dataclass(frozen=True, slots=True)
class Cell:
    protocol: str
    model: Trivial
    clients: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One server's measurement of one cell. `compute_s` is what its statistics say of one execution."""

    per_s: float
    p50_s: float
    p99_s: float
    cpu_s: float
    compute_s: float | None


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.frontend", __doc__, has_folder=False)
    parser.add_argument("--tritonserver", type=Path, metavar="PATH", help="its binary; otherwise that of pytriton")
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of which medians are taken (default: %(default)s)")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    cells = [Cell(p, model, clients) for p in _PROTOCOLS for model in MODELS for clients in _CLIENTS]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = _start(Path(folder), options.tritonserver, stack, console)
        tables = list[str]()
        for cell in cells:
            console.print(f"{cell.protocol}, {cell.model.name}, clients: {cell.clients}")
            ways = {server.name: partial(_measure, server, cell, options.seconds) for server in servers}
            found = in_turns(ways, options.rounds)
            tables += _sections(cell, {name: _median(rounds) for name, rounds in found.items()})
    publish(options, "The front end beside tritonserver's", [_EXPLAINED, *tables])
    return 0


def _start(
    folder: Path, binary: Path | None, stack: contextlib.ExitStack, console: Console
) -> list[ComparedServer]:
    console.print("exporting the models, starting the servers")
    export(folder / "models")
    servers = [stack.enter_context(cohabit(folder / "models", folder / "cache"))]
    found = find_tritonserver(binary)
    if found is None:
        console.print(_NOT_FOUND)
    else:
        write_twins(folder / "twins")
        servers.append(stack.enter_context(tritonserver(found, folder / "twins", folder)))
    return [*servers, stack.enter_context(bare())]


def _measure(server: ComparedServer, cell: Cell, seconds: float) -> Figure:
    command = [sys.executable, "-m", "benchmarks.frontend.client", cell.protocol, server.addresses[cell.protocol]]
    command += [cell.model.name, str(cell.clients), str(seconds)]
    before_s, compute = cpu_s([server.process]), server.computed(cell.model.name)
    measured = Measured(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    compute_s = None
    if compute is not None and (after := server.computed(cell.model.name)) is not None:
        compute_s = (after.seconds - compute.seconds) / (after.requests - compute.requests)
    used_s = cpu_s([server.process]) - before_s
    return Figure(measured.per_s, measured.p50_s, measured.p99_s, used_s / measured.served, compute_s)


def _median(figures: Sequence[Figure]) -> Figure:
    computed = [figure.compute_s for figure in figures if figure.compute_s is not None]
    return Figure(
        median(figure.per_s for figure in figures),
        median(figure.p50_s for figure in figures),
        median(figure.p99_s for figure in figures),
        median(figure.cpu_s for figure in figures),
        median(computed) if computed else None,
    )


def _sections(cell: Cell, figures: Mapping[str, Figure]) -> list[str]:
    reference, bare_s = figures.get("tritonserver"), figures[BARE].p50_s
    rows = [
        {
            "server": name,
            "requests/s": f"{figure.per_s:.0f}",
            "over tritonserver's": "" if reference is None else f"{figure.per_s / reference.per_s:.2f}",
            "p50 ms": f"{figure.p50_s * 1e3:.2f}",
            "p99 ms": f"{figure.p99_s * 1e3:.2f}",
            "p50 - compute ms": ""
            if figure.compute_s is None
            else f"{(figure.p50_s - figure.compute_s) * 1e3:.2f}",
            "p50 - bare ms": f"{(figure.p50_s - bare_s) * 1e3:.2f}",
            "CPU us/request": f"{figure.cpu_s * 1e6:.0f}",
        }
        for name, figure in figures.items()
    ]
    clients = "one client" if cell.clients == 1 else f"{cell.clients} clients"
    return [f"## {cell.protocol}, {cell.model.nbytes} bytes, {clients}\n", table_of(rows, shown=cell.model is TINY)]


if __name__ == "__main__":
    sys.exit(main())
