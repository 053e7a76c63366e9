"""Bundles served in memory cgroups: the parts that the benchmarks of small devices share.

A cgroup counts all memory of a process, and the page cache that it fills. *Base* is what an idle server with one small
model has there: anonymous memory and mapped pages. Whoever reads a page first is charged for it. With *libraries
counted*, the page cache is dropped before each run, so that the cgroup is charged for torch's libraries, as a board is;
what processes outside still map, such as the C library, is taken off the cgroup's limit. Otherwise another process
reads torch's libraries before each run. Pages of the models' files are dropped either way. Needs root and cgroups of
version 1.
"""

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

from cohabit.loadgen.client import address_of
from cohabit.loadgen.inputs import random_inputs
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

PATIENCE_S = 120.0
EXIT_UNAVAILABLE = 77
SMALL = "ranker"
MIB = 1 << 20
_CGROUPS = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds to the first answer, median and p90 of the others; None and the reason where there was none."""

    first_s: float | None = None
    median_s: float | None = None
    p90_s: float | None = None
    reason: str = ""
    outputs: tuple[NDArray[np.float32], ...] = ()
    charged_bytes: int = 0
    """In the cgroup."""
    rss_bytes: int = 0
    """The same with pages that other processes have read: the whole memory of the process."""

    @property
    def cells(self) -> dict[str, str]:
        """Cells by heading. The reason stands where the first figure is missing."""
        cells = {"first answer s": self.reason, "median ms": "-", "p90 ms": "-"}
        if self.first_s is not None:
            cells |= {"first answer s": f"{self.first_s:.2f}", "median ms": self.reason}
        if self.median_s is not None and self.p90_s is not None:
            cells |= {"median ms": f"{self.median_s * 1e3:.1f}", "p90 ms": f"{self.p90_s * 1e3:.1f}"}
        return cells


def is_possible(console: Console) -> bool:
    """Say whether cgroups can be made here, and why not."""
    possible = os.access(_CGROUPS / "cgroup.procs", os.W_OK)
    if not possible:
        console.print(f"{_CGROUPS} cannot be written: this needs root, and cgroups of version 1")
    return possible


def base(folder: Path, requests: int, console: Console, *, libraries_counted: bool = False) -> Outcome:
    """Serve one small model without a limit."""
    small = folder / "small"
    prepare_visibly(small, recipes(1, [SMALL]), force=False, console=console)
    bundle, flags = bundle_of(small, "100%", folder, console), ("--process-memory", "1GiB")
    found = served(bundle, requests, None, *flags, libraries_counted=libraries_counted)
    console.print(f"base: {found.charged_bytes / MIB:.1f} MiB, {found.rss_bytes / MIB:.1f} MiB with shared pages")
    return found


def served_above(
    base: Outcome, extra_mib: int, bundle: Path, requests: int, rounds: int, *, libraries_counted: bool = False
) -> list[Outcome]:
    """Serve a bundle several times, each in a cgroup of so much more than the base."""
    limit_bytes, process_bytes = base.charged_bytes + extra_mib * MIB, base.rss_bytes + extra_mib * MIB
    flags = ("--process-memory", str(process_bytes), "--queue-memory", "2MiB")
    return [
        served(bundle, requests, limit_bytes, *flags, libraries_counted=libraries_counted) for _ in range(rounds)
    ]


def bundle_of(repository: Path, memory: str, folder: Path, console: Console) -> Path:
    """Export a bundle, unless an earlier run has."""
    bundle = folder / "bundles" / f"{repository.name}-{memory.rstrip('%')}"
    if not (bundle / "bundle.json").exists():
        console.print(f"exporting {repository.name} for {memory}")
        command = [*cohabit(), "export-bundle", str(repository), "--memory", memory, "-o", str(bundle)]
        subprocess.run([*command, "--cache", str(folder / "cache"), "--batch-sizes", "1"], check=True)
    return bundle


def served(
    bundle: Path, requests: int, limit_bytes: int | None, *flags: str, libraries_counted: bool = False
) -> Outcome:
    """Serve a bundle in a cgroup, and ask its one model."""
    drop_pages(bundle)
    command = serve_bundle_command(bundle, *flags)
    with running(command, limit_bytes, libraries_counted=libraries_counted) as (process, cgroup, log):
        start_s = time.monotonic()
        assert process.stdout is not None
        url = process.stdout.readline().partition(": ")[2].strip()
        try:
            with tritonclient.http.InferenceServerClient(address_of(url), network_timeout=PATIENCE_S) as client:
                while not client.is_server_ready():
                    if process.poll() is not None or time.monotonic() - start_s > PATIENCE_S:
                        return Outcome(reason=end_of(process, log))
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
                used = charged_bytes(cgroup), psutil.Process(process.pid).memory_info().rss
                return Outcome(first_s, statistics.median(times_s), p90(times_s), "", outputs, *used)
        except (OSError, ValueError, HTTPException, tritonclient.utils.InferenceServerException):
            process.wait(PATIENCE_S)
            return Outcome(reason=end_of(process, log))


@contextmanager
def running(
    command: Sequence[str], limit_bytes: int | None, *, libraries_counted: bool = False
) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """Start a process in a new cgroup; yields it, the cgroup, and the file of its messages."""
    if libraries_counted:
        os.sync()  # dirty pages are not dropped
        Path("/proc/sys/vm/drop_caches").write_text("3")
    else:
        _read_libraries()
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


def _read_libraries() -> None:
    """Have torch's libraries in the page cache, charged to this process: whoever reads a page first is charged."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    libraries = Path(torch.origin).parent.glob("lib/*.so*")
    subprocess.run(["cat", *libraries], stdout=subprocess.DEVNULL, check=True)


def drop_pages(folder: Path) -> None:
    """Remove files from the page cache, so that those who read them are charged for them."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def charged_bytes(cgroup: Path) -> int:
    """Return the anonymous memory and the mapped pages of a cgroup."""
    lines = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    stat = {name: int(value) for name, value in lines}
    return stat["total_rss"] + stat["total_mapped_file"]


def end_of(process: subprocess.Popen[str], log: Path) -> str:
    """Say how a process ended."""
    status = process.poll()
    if status is None:
        return f"not within {PATIENCE_S:g} s"
    last = log.read_text().strip().splitlines()[-1:] or [f"status {status}"]
    return "killed: out of memory" if status == -signal.SIGKILL else last[0][:80]


def p90(times_s: Sequence[float]) -> float:
    return float(np.quantile(times_s, 0.9))


def read_ahead() -> str:
    """Return the read-ahead of the disk with torch's libraries: a page fault in them reads so much."""
    torch = find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    device = Path(torch.origin).stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    setting = disk / "queue" / "read_ahead_kb"
    return f"{setting.read_text().strip()} KiB" if setting.exists() else "unknown"


def middle(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the first that failed, or else the one with the middle median."""
    failed = [outcome for outcome in outcomes if outcome.median_s is None]
    return failed[0] if failed else sorted(outcomes, key=lambda o: o.median_s or 0.0)[len(outcomes) // 2]


def equal(one: Outcome, other: Outcome) -> bool:
    return bool(one.outputs) and all(map(np.array_equal, one.outputs, other.outputs))


def cohabit() -> list[str]:
    return [sys.executable, "-m", "cohabit.server.cli"]


def serve_bundle_command(bundle: Path, *flags: str) -> list[str]:
    """Return a command that serves a bundle in one process, over HTTP alone."""
    ports = ("--http-port", "0", "--grpc-port", "off", "--metrics-port", "off")
    return [*cohabit(), "serve", str(bundle), "--engine", "in-process", *ports, *flags]
