"""A large model in a small memory cgroup: ResNet-152 over HTTP from a bundle, beside programs that hold or map it.

A cgroup counts all memory of a process, and the page cache that it fills. *Base* is what an idle server with one small
model has there: anonymous memory and mapped pages. Pages of libraries that other processes have read before are
charged to those, for every way alike; those of the models' files are dropped before each run. Needs root and cgroups
of version 1.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import tritonclient.http
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.edge_peer import IMAGE, network
from benchmarks.record import markdown_table, record
from loadgen.client import address_of
from loadgen.inputs import random_inputs
from loadgen.repository import prepare_visibly, recipes

SMALL, MODEL = "ranker", "resnet152"
CASES: tuple[tuple[int, str], ...] = ((64, "36MiB"), (32, "20MiB"))
"""Limits of the cgroup in MiB above the base, and the memory of the models in them."""
GOAL_S = 5.0
"""For the first answer of a server in the larger cgroup."""
PATIENCE_S = 300.0
EXIT_UNAVAILABLE = 77
_CGROUPS = Path("/sys/fs/cgroup/memory")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds to the first answer and the median of the others; None and the reason where there was none."""

    first_s: float | None = None
    median_s: float | None = None
    reason: str = ""
    outputs: tuple[NDArray[np.float32], ...] = ()
    charged_bytes: int = 0
    """In the cgroup."""
    rss_bytes: int = 0
    """The same with pages that other processes have read."""

    @property
    def cells(self) -> list[str]:
        if self.first_s is None:
            return [self.reason, "-"]
        return [f"{self.first_s:.2f}", f"{self.median_s * 1e3:.1f}" if self.median_s is not None else self.reason]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    if not os.access(_CGROUPS / "cgroup.procs", os.W_OK):
        console.print(f"{_CGROUPS} cannot be written: this needs root, and cgroups of version 1")
        return EXIT_UNAVAILABLE
    folder = options.folder / "edge"
    small, large = folder / "small", folder / "large"
    prepare_visibly(small, recipes(1, [SMALL]), force=False, console=console)
    prepare_visibly(large, recipes(1, [MODEL]), force=False, console=console)
    base = _served(_bundle(small, "100%", folder, console), options.requests, None, "--process-memory", "1GiB")
    console.print(f"base: {base.charged_bytes / _MIB:.1f} MiB, {base.rss_bytes / _MIB:.1f} MiB with shared pages")
    resident = _served(_bundle(large, "120%", folder, console), options.requests, None)
    console.print(f"resident: {resident.cells}, {resident.charged_bytes / _MIB:.1f} MiB")
    rows = [["Cohabit, resident", "none", *resident.cells, "-"]]
    held = resident.first_s is not None
    for extra, memory in CASES:
        limit_bytes, label = base.charged_bytes + extra * _MIB, f"base + {extra} MiB"
        bundle = _bundle(large, memory, folder, console)
        flags = ("--process-memory", str(base.rss_bytes + extra * _MIB), "--queue-memory", "2MiB")
        served = [_served(bundle, options.requests, limit_bytes, *flags) for _ in range(options.rounds)]
        equal = all(map(_equal, served, [resident] * len(served)))
        middle = _middle(served)
        held &= equal and (extra != CASES[0][0] or (middle.first_s is not None and middle.first_s <= GOAL_S))
        rows.append([f"Cohabit, models in {memory}", label, *middle.cells, "equal" if equal else "no"])
        console.print(rows[-1])
        for way, path in _peers(folder).items():
            ran = _middle([_peer(way, path, options.requests, limit_bytes) for _ in range(options.rounds)])
            rows.append([way, label, *ran.cells, "-"])
            console.print(rows[-1])
    table = markdown_table(["way", "cgroup", "first answer s", "median ms", "bits of resident"], rows)
    console.print(table, markup=False)
    if options.record:
        record(
            "edge",
            "ResNet-152 in small memory cgroups",
            "benchmarks.edge",
            [
                f"Base: {base.charged_bytes / _MIB:.1f} MiB, an idle server with one small model. First answer: from"
                f" the command; median of {options.requests} requests that follow one another, batch 1, of"
                f" {options.rounds} runs. Servers answer over HTTP, with `--engine in-process` and, in a cgroup,"
                " `--process-memory`; the other ways are programs without a server.\n",
                table,
                f"To hold: equal bits, and the first answer within {GOAL_S:g} s in base + {CASES[0][0]} MiB.\n",
            ],
        )
    return 0 if held else 1


def _bundle(repository: Path, memory: str, folder: Path, console: Console) -> Path:
    """Export a bundle, unless an earlier run has."""
    bundle = folder / "bundles" / f"{repository.name}-{memory.rstrip('%')}"
    if not (bundle / "bundle.json").exists():
        console.print(f"exporting {repository.name} for {memory}")
        command = [*_cohabit(), "export-bundle", str(repository), "--memory", memory, "-o", str(bundle)]
        subprocess.run([*command, "--cache", str(folder / "cache"), "--batch-sizes", "1"], check=True)
    return bundle


def _served(bundle: Path, requests: int, limit_bytes: int | None, *flags: str) -> Outcome:
    """Serve a bundle in a cgroup, and ask its one model."""
    ports = ("--http-port", "0", "--grpc-port", "off", "--metrics-port", "off")
    command = [*_cohabit(), "serve", str(bundle), "--engine", "in-process", *ports, *flags]
    _drop_pages(bundle)
    with _running(command, limit_bytes) as (process, cgroup, log):
        start_s = time.monotonic()
        assert process.stdout is not None
        url = process.stdout.readline().partition(": ")[2].strip()
        try:
            with tritonclient.http.InferenceServerClient(address_of(url), network_timeout=PATIENCE_S) as client:
                while not client.is_server_ready():
                    if process.poll() is not None or time.monotonic() - start_s > PATIENCE_S:
                        return Outcome(reason=_end_of(process, log))
                    time.sleep(0.01)
                (model,) = (entry["name"] for entry in client.get_model_repository_index())
                metadata = client.get_model_metadata(model)
                inputs = random_inputs(metadata, batch=1, rng=np.random.default_rng(0))
                answer = client.infer(model, inputs)
                first_s, times_s = time.monotonic() - start_s, []
                for _ in range(requests):
                    began_s = time.perf_counter()
                    client.infer(model, inputs)
                    times_s.append(time.perf_counter() - began_s)
                outputs = tuple(answer.as_numpy(output["name"]) for output in metadata["outputs"])
                used = _charged_bytes(cgroup), psutil.Process(process.pid).memory_info().rss
                return Outcome(first_s, statistics.median(times_s), "", outputs, *used)
        except (OSError, ValueError, HTTPException, tritonclient.utils.InferenceServerException):
            process.wait(PATIENCE_S)
            return Outcome(reason=_end_of(process, log))


def _peer(way: str, path: Path, requests: int, limit_bytes: int) -> Outcome:
    command = [sys.executable, "-m", "benchmarks.edge_peer", way, str(path), str(requests)]
    _drop_pages(path.parent)
    with _running(command, limit_bytes) as (process, _, log):
        try:
            shown, _ = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return Outcome(reason=f"not within {PATIENCE_S:g} s")
        times_s = [float(line) for line in shown.split()]
        first_s, median_s, *_ = *times_s, None, None
        return Outcome(first_s, median_s, _end_of(process, log))


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


@contextmanager
def _running(command: Sequence[str], limit_bytes: int | None) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """Start a process in a new cgroup; yields it, the cgroup, and the file of its messages."""
    cgroup = _CGROUPS / f"cohabit-edge-{os.getpid()}"
    cgroup.mkdir()
    if limit_bytes is not None:
        (cgroup / "memory.limit_in_bytes").write_text(str(limit_bytes))
    entering = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh"]
    with (
        tempfile.NamedTemporaryFile("w") as messages,
        subprocess.Popen([*entering, *command], stdout=subprocess.PIPE, stderr=messages, text=True) as process,
    ):
        try:
            yield process, cgroup, Path(messages.name)
        finally:
            process.kill()
            process.wait()
            while (cgroup / "cgroup.procs").read_text():
                time.sleep(0.05)
            cgroup.rmdir()


def _drop_pages(folder: Path) -> None:
    """Remove files from the page cache, so that those who read them are charged for them."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _charged_bytes(cgroup: Path) -> int:
    """Return the anonymous memory and the mapped pages of a cgroup."""
    lines = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    stat = {name: int(value) for name, value in lines}
    return stat["total_rss"] + stat["total_mapped_file"]


def _end_of(process: subprocess.Popen[str], log: Path) -> str:
    """Say how a process ended."""
    status = process.poll()
    if status is None:
        return f"not within {PATIENCE_S:g} s"
    last = log.read_text().strip().splitlines()[-1:] or [f"status {status}"]
    return "killed: out of memory" if status == -signal.SIGKILL else last[0][:80]


def _middle(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the first that failed, or else the one with the middle median."""
    failed = [outcome for outcome in outcomes if outcome.median_s is None]
    return failed[0] if failed else sorted(outcomes, key=lambda o: o.median_s or 0.0)[len(outcomes) // 2]


def _equal(one: Outcome, other: Outcome) -> bool:
    return bool(one.outputs) and all(map(np.array_equal, one.outputs, other.outputs))


def _cohabit() -> list[str]:
    return [sys.executable, "-m", "server.cli"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.edge", description=__doc__)
    parser.add_argument("--requests", type=int, default=50, help="requests of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write docs/results/edge.md too")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="working folder (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
