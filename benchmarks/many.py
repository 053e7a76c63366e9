"""A thousand models in one server: what each further one costs, in a family and without anything in common.

A *family* has one trunk and a head per member. The models of the other case share nothing but their architecture. The
first model is exported, lowered and measured. The cache's entries of the others are written as lowering writes them,
with other weights: a repository of a thousand archives would have a thousand trunks.
"""

import argparse
import asyncio
import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil
import torch
import tritonclient.http
from rich.console import Console
from rich.progress import track

from benchmarks.record import parser_of, publish, table_of
from benchmarks.scrape import StartingServer, cpu_s, get, serve_command, starting
from cohabit.loadgen.client import address_of
from cohabit.loadgen.load import Load
from cohabit.loadgen.run import run_load
from cohabit.loadgen.zoo.exporting import export_model, save_model
from cohabit.planner import cache_file
from cohabit.runtime.lowering import weights
from cohabit.runtime.lowering.archive_file import fingerprint
from cohabit.runtime.lowering.lower import folders_of
from cohabit.runtime.stores.host import open_store

CASES = {"a family": (512, 8), "nothing in common": (128, 4)}
"""Width and number of the layers below the head, by case."""
CLASSES = 16
FLAGS = ("--threads", "1", "--batch-sizes", "1,4")
WORKSPACE_BYTES = 1 << 20
RATE_PER_S, LOAD_S, ZIPF = 100.0, 10.0, 1.0
RATES_PER_S = (100.0, 200.0, 300.0)
"""At which servers are compared."""
ROUNDS = 5


class Classifier(torch.nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(depth)]
        self.trunk = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


class Repository:
    """Models of a case, and a cache that has all of them. It grows."""

    def __init__(self, folder: Path, case: str) -> None:
        """Export, lower and measure the first model."""
        shutil.rmtree(folder, ignore_errors=True)
        self.case, self.folder = case, folder
        self.models, self.cache, self.names = folder / "models", folder / "cache", list[str]()
        width, depth = CASES[case]
        torch.manual_seed(0)
        first = folder / "archives" / "first" / "1" / "model.pt2"
        save_model(export_model(Classifier(width, depth).eval(), {"x": torch.zeros(2, width)}), first, {})
        command = serve_command(first.parents[2], "1GiB", None, self.cache, *FLAGS)
        with starting(command, folder / "log") as server:
            _wait(server)
        (self._lowered,) = folders_of(self.cache / "weights")
        self._archive, self._rng = fingerprint(first), np.random.default_rng(0)
        (described,) = self._lowered.glob("weights-*.json")
        self.weight_bytes = weights.manifest_of(described.with_suffix(".bin")).file_bytes
        """Of one model."""

    @property
    def device_bytes(self) -> int:
        """Size of the weights of all models; of a family, of one of them."""
        return self.weight_bytes * (1 if self.case == "a family" else len(self.names))

    def grow(self, count: int, console: Console) -> None:
        """Write the cache's entries of more models, up to `count`."""
        more = [f"m{n:04}" for n in range(len(self.names), count)]
        for name in track(more, f"{self.case}, {count} models", console=console):
            copied = hashlib.sha256(name.encode()).hexdigest()
            _copy(self._lowered, self._archive, copied, self._rng, share=self.case == "a family")
            stand_in = self.models / name / "1" / "model.lowered"
            stand_in.parent.mkdir(parents=True)
            stand_in.write_text(f"{copied}\n")
        self.names += more


def _copy(folder: Path, archive: str, copied: str, rng: np.random.Generator, *, share: bool) -> None:
    """Write the cache entry of a model with other weights; with `share`, only its head's differ."""
    (program,) = folder.glob("program-*.json")
    (described,) = folder.glob("weights-*.json")
    path = described.with_suffix(".bin")
    manifest = weights.manifest_of(path)
    store = open_store("ram", path, manifest)
    own: dict[str, torch.Tensor] = {}
    for index, segment in enumerate(manifest.segments):
        content = np.empty(segment.nbytes, np.uint8)
        store.copy(index, content)()
        for piece in segment.pieces:
            values = content[piece.offset : piece.offset + piece.nbytes].view(np.float32)
            if not share or "head" in piece.name:
                values[:] = rng.standard_normal(len(values), np.float32) / 30
            own[piece.name] = torch.from_numpy(values.view(np.uint8))
    store.close()
    other = folder.with_name(folder.name.replace(archive[:32], copied[:32]))
    renamed = msgspec.structs.replace(manifest, archive=manifest.archive.replace(archive, copied))
    weights.write(other / f"weights-{renamed.fingerprint[:16]}.bin", renamed, own, {})
    raw = cache_file.read(program).decode().replace(archive, copied)
    raw = raw.replace(manifest.fingerprint, renamed.fingerprint)
    stamp = msgspec.json.decode(raw)["lowering"]
    cache_file.write(other / f"program-{hashlib.sha256(stamp.encode()).hexdigest()[:16]}.json", raw.encode())


def measured(repository: Repository, share: float, log: Path) -> dict[str, str]:
    """Return a row: a second start with these models, then each of the operator's calls."""
    memory = f"{int(share * repository.device_bytes) + WORKSPACE_BYTES}B"
    command = serve_command(
        repository.models,
        memory,
        None,
        repository.cache,
        *FLAGS,
        *("--model-control-mode", "explicit", "--load-model", "*"),
    )
    with starting(command, log) as server:  # divides the memory, and plans
        _wait(server)
    started_s = time.monotonic()
    with starting(command, log) as server:
        _wait(server)
        start_s = time.monotonic() - started_s
        process = psutil.Process(server.process.pid)
        start_cpu_s = cpu_s([process])
        family = [process, *process.children(recursive=True)]
        used = sum(one.memory_full_info().pss for one in family)
        name = repository.names[-1]
        with tritonclient.http.InferenceServerClient(address_of(server.url), network_timeout=600.0) as client:
            turns = [
                (_seconds(client.unload_model, name), _seconds(client.load_model, name)) for _ in range(ROUNDS)
            ]
            unload_s, load_s = np.median(turns, axis=0)
            index_s = np.median([_seconds(client.get_model_repository_index) for _ in range(ROUNDS)])
            statistics_s = np.median([_seconds(client.get_inference_statistics, name) for _ in range(ROUNDS)])
        scrapes = []
        for _ in range(ROUNDS):
            time.sleep(1.1)  # the text is reused for a second
            began_s = time.monotonic()
            nbytes = len(get(server.metrics_url))
            scrapes.append(time.monotonic() - began_s)
        report = asyncio.run(run_load(server.url, _load(RATE_PER_S)))
    disk = {p.stat().st_ino: p.stat().st_blocks * 512 for p in repository.cache.rglob("*") if p.is_file()}
    return {
        "models": repository.case,
        "count": str(len(repository.names)),
        "start, s": f"{start_s:.1f}",
        "start, CPU s": f"{start_cpu_s:.1f}",
        "load one, ms": f"{load_s * 1e3:.0f}",
        "unload one, ms": f"{unload_s * 1e3:.0f}",
        "scrape, ms": f"{np.median(scrapes) * 1e3:.0f}",
        "scrape, KiB": f"{nbytes / 2**10:.0f}",
        "index, ms": f"{index_s * 1e3:.1f}",
        "statistics of one, ms": f"{statistics_s * 1e3:.1f}",
        "p99, ms": "-" if report.latency is None else f"{report.latency.p99_s * 1e3:.1f}",
        "memory, MiB": f"{used / 2**20:.0f}",
        "cache, MiB": f"{sum(disk.values()) / 2**20:.0f}",
    }


def compared(repository: Repository, log: Path) -> list[dict[str, str]]:
    """Return a row per rate: one member, all members in one partition, and all copied as whole models."""
    memory = f"{2 * repository.weight_bytes + WORKSPACE_BYTES}B"
    explicit = ("--model-control-mode", "explicit", "--load-model")
    count = len(repository.names)
    servers = {
        "one member": ("partitioned", (*explicit, repository.names[0])),
        f"{count} members": ("partitioned", (*explicit, "*")),
        f"{count} members, lru": ("lru", ()),
    }
    rows: list[dict[str, str]] = [{"requests/s": f"{rate:g}"} for rate in RATES_PER_S]
    for title, (layout, control) in servers.items():
        command = serve_command(repository.models, memory, layout, repository.cache, *FLAGS, *control)
        with starting(command, log) as server:  # divides the memory, and plans
            _wait(server)
        with starting(command, log) as server:
            _wait(server)
            for row, rate_per_s in zip(rows, RATES_PER_S, strict=True):
                latency = asyncio.run(run_load(server.url, _load(rate_per_s))).latency
                text = "-" if latency is None else f"{latency.p50_s * 1e3:.1f}, {latency.p99_s * 1e3:.1f}"
                row[f"{title}: p50, p99, ms"] = text
    return rows


def _load(rate_per_s: float) -> Load:
    return Load(rate_per_s=rate_per_s, duration_s=LOAD_S, warmup_s=2.0, zipf=ZIPF)


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    began_s = time.monotonic()
    call(*arguments)
    return time.monotonic() - began_s


def _wait(server: StartingServer) -> None:
    with tritonclient.http.InferenceServerClient(address_of(server.url), network_timeout=600.0) as client:
        server.until(client.is_server_ready)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console, rows, comparison = Console(highlight=False), [], list[dict[str, str]]()
    for case in options.cases:
        repository = Repository(options.folder / "many" / case.replace(" ", "-"), case)
        for count in sorted(options.counts):
            repository.grow(count, console)
            rows.append(measured(repository, options.share, repository.folder / "log"))
            console.print(rows[-1])
        if case == "a family":
            comparison = compared(repository, repository.folder / "log")
        shutil.rmtree(repository.folder)
    sections = [
        f"Each model is a classifier of {CLASSES} classes. *A family*: 8 layers of 512 x 512 (8 MiB) that all members"
        " have, and a head (32 KiB) of each. *Nothing in common*: 4 layers of 128 x 128 and a head (264 KiB), all"
        f" random. The server's memory is {options.share:g} of the weights of all (of a family, of one member's), and"
        f" {WORKSPACE_BYTES >> 20} MiB. *Start*: from the command until ready, with a full cache. *Load one*: a model"
        f" that was unloaded. *Memory*: of all processes, shared pages once. *p99*: at {RATE_PER_S:g} requests/s over"
        f" all models, the k-th with a weight of 1/k. Medians of {ROUNDS}.\n",
        table_of(rows),
        "\n## One partition, and whole models\n\n"
        "The family in twice one member's weights, at the same popularity. *lru* copies whole models, and evicts the"
        " least recently used ones. Requests to different models are never in one batch.\n",
        table_of(comparison),
    ]
    publish(options, "A thousand models", sections)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.many", __doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 10, 100, 1000], help="numbers of models")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what models share")
    parser.add_argument("--share", type=float, default=0.25, help="memory over all models' weights (default: 0.25)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
