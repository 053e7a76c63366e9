"""The examples with several models in little memory, beside everything resident, an LRU, and a container each.

Each way has its own servers, from the example's `run.sh`, and gets the same requests in turns: for each entry an open
loop of Poisson arrivals over HTTP. Memory is that of whole process trees. A container is a server of its own, with
everything resident.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.edge.cgroup import MIB, cohabit
from benchmarks.record import markdown_table, parser_of, publish, results_folder
from benchmarks.scrape import Running, by_model, serving
from benchmarks.turns import DRAWS, LIKELY, Ratio, turns
from cohabit.loadgen.load import Load
from cohabit.loadgen.openloop import Outcome
from cohabit.loadgen.run import send_load
from examples.workflows.models import WORKFLOWS

EXAMPLES = Path(__file__).parent.parent / "examples"
RESIDENT, OURS, LRU, CONTAINERS = "all resident", "Cohabit", "LRU of whole models", "a container each"
PORTS = ("--http-port", "0", "--grpc-port", "off", "--no-quick-start")
COPIED, PARAMETERS = "cohabit_swapped_bytes_total", "cohabit_parameter_bytes"
TEXT = (64, 8)
"""Tokens of a prompt, and tokens that continue it."""
CHUNK = 64
"""Tokens of a request to a text encoder."""

Turns = Sequence[NDArray[np.float64]]
"""Seconds of the requests of each turn."""


@dataclass(frozen=True, slots=True)
class Example:
    """An example, its load, and what must hold."""

    folder: str
    title: str
    about: str
    rates: Mapping[str, float]
    """Requests per second of each entry."""
    containers: Sequence[Sequence[str]]
    """The entries of each container."""
    resident: Sequence[str]
    """Flags that give memory for everything."""
    lru: Sequence[str] = ()
    """Flags that give the LRU more memory, if it cannot serve in the example's."""
    judged: str = ""
    """The entry whose latencies are compared; all if empty."""
    most_mib: int = 0
    """To hold: memory of the process tree; 0 for no limit."""
    most_p50: float = 1.3
    """To hold: p50 over that of all resident."""
    most_p99: float = 1.3


PHOTOS = {
    "clip_image": 0.2,
    "clip_text": 0.2,
    "face_detector": 0.2,
    "face_embedder": 0.3,
    "ocr_detector": 0.2,
    "ocr_recognizer": 0.4,
}
SETS = {
    "photo-library": Example(
        "photo_library",
        "A photo library's models in 512 MiB",
        "CLIP ViT-B/32 (image, text), a face detector and embedder of `buffalo_l`'s sizes, PP-OCR's mobile detector and"
        " recognizer; random weights.",
        PHOTOS,
        [(entry,) for entry in PHOTOS],
        ("--process-memory", "3GiB"),
        ("--process-memory", "1GiB"),
        most_mib=512,
        most_p50=1.1,
    ),
    "workflows": Example(
        "workflows",
        "Six workflows of twelve models in 40 % of the weights' memory",
        "Twelve vision models with random weights; six ensembles run three to five of them each. A container has a"
        " workflow and its models.",
        dict.fromkeys(WORKFLOWS, 0.5),
        [(name, *models) for name, models in WORKFLOWS.items()],
        ("--memory", "150%"),
    ),
    "agent": Example(
        "agent",
        "An agent's models in 600 MiB",
        f"all-MiniLM-L6-v2 with its real weights embeds 20 chunks of {CHUNK} tokens per second, a cross-encoder of its"
        f" sizes ranks, and a Llama of SmolLM2-135M's sizes continues prompts of {TEXT[0]} tokens by {TEXT[1]}. Its"
        " latency is the time to the first token.",
        {"embedder": 20.0, "reranker": 1.0, "chat": 0.4},
        [("embedder",), ("reranker",), ("chat",)],
        ("--process-memory", "3GiB"),
        ("--process-memory", "1GiB"),
        judged="chat",
        most_mib=600,
    ),
}


@dataclass(slots=True)
class Way:
    """A way of serving an example, and what it did."""

    name: str
    commands: Sequence[tuple[Sequence[str], Sequence[str]]]
    """Of each server: its command, and the entries that it is asked for."""
    servers: list[Running] = field(default_factory=list)
    processes: list[psutil.Process] = field(default_factory=list)
    outcomes: list[list[Outcome]] = field(default_factory=list)
    """Of each turn."""
    memory: list[tuple[int, int]] = field(default_factory=list)
    """After each turn: bytes of the process trees, and those of them that are pages of files."""
    copied: list[tuple[float, float]] = field(default_factory=list)
    """In each turn: bytes copied for inferences, and these as loads of whole models."""

    @property
    def sent(self) -> list[Outcome]:
        return [outcome for turn in self.outcomes for outcome in turn]

    def latencies_s(self, entry: str = "") -> Turns:
        """Return the latencies of one entry, or of all. A text's is the time to its first token."""
        return [
            np.array([_latency_s(one) for one in turn if not one.failure and entry in ("", one.arrival.model)])
            for turn in self.outcomes
        ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.adoption", __doc__)
    parser.add_argument("example", choices=SETS)
    names = (RESIDENT, OURS, LRU, CONTAINERS)
    parser.add_argument("--ways", nargs="+", choices=names, default=names, help="(default: all)")
    parser.add_argument("--turns", type=int, default=6, help="turns of each way (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each turn (default: %(default)s)")
    options = parser.parse_args(argv)
    options.record_as = options.example
    example = SETS[options.example]
    ways = asyncio.run(_measured(example, options))
    sections, holds = _sections(example, ways, options.turns * options.seconds)
    picture = (results_folder() if options.record else options.folder) / f"{options.example}.png"
    draw(ways, example, picture)
    publish(options, example.title, [*sections, f"![Memory and latency]({picture.name})"])
    return 0 if holds else 1


async def _measured(example: Example, options: argparse.Namespace) -> dict[str, Way]:
    console = Console(stderr=True)
    ways = {way.name: way for way in _ways(example, options.folder.resolve()) if way.name in options.ways}
    inputs = _requests(options.folder / "chunks")
    async with AsyncExitStack() as stack:
        for way in ways.values():
            console.print(f"starting: {way.name}")
            for command, _ in way.commands:
                before = set(psutil.Process().children())
                way.servers.append(await stack.enter_async_context(serving(command)))
                way.processes += set(psutil.Process().children()) - before
            await _ask(way, example, inputs, 5.0, 0)  # warm up
        for number, name in turns(ways, options.turns):
            way = ways[name]
            before_bytes, before_loads = _copied(way)
            way.outcomes.append(await _ask(way, example, inputs, options.seconds, number + 1))
            after_bytes, after_loads = _copied(way)
            way.copied.append((after_bytes - before_bytes, after_loads - before_loads))
            way.memory.append(tree_bytes(way.processes))
            console.print(f"turn {number + 1}, {name}: {way.memory[-1][0] / MIB:.0f} MiB")
    return ways


def _ways(example: Example, folder: Path) -> list[Way]:
    """Make the models, and return the ways of serving them."""
    models = folder / f"{example.folder}-models"
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    ours = ["env", path, f"MODELS={models}", "sh", str(EXAMPLES / example.folder / "run.sh"), *PORTS]
    subprocess.run([*ours, "--print-config"], stdout=subprocess.DEVNULL, check=True)
    containers = []
    for entries in example.containers:
        repository = folder / f"{example.folder}-containers" / entries[0]
        for entry in entries:
            if not (repository / entry).exists():
                shutil.copytree(models / entry, repository / entry, copy_function=os.link)
        command = [*cohabit(), "serve", str(repository), *PORTS, "--engine", "in-process", "--batch-sizes", "1"]
        command += ["--store", "file", "--layout", "resident", "--memory", "2GiB"]
        containers.append((command, [entry for entry in entries if entry in example.rates]))
    entries = list(example.rates)
    return [
        Way(RESIDENT, [([*ours, "--layout", "resident", *example.resident], entries)]),
        Way(OURS, [(ours, entries)]),
        Way(LRU, [([*ours, "--layout", "lru", *example.lru], entries)]),
        Way(CONTAINERS, containers),
    ]


async def _ask(way: Way, example: Example, inputs: Path, seconds: float, seed: int) -> list[Outcome]:
    """Send each entry its requests. They are the same for all ways."""

    def load(entry: str) -> Load:
        return Load(
            rate_per_s=example.rates[entry],
            duration_s=seconds,
            warmup_s=0.0,
            weights={entry: 1.0},
            seed=100 * seed + list(example.rates).index(entry),
            texts=TEXT if entry == "chat" else None,
            inputs=str(inputs) if (inputs / f"{entry}.npz").exists() else None,
            timeout_s=60.0,
        )

    asked = zip(way.servers, way.commands, strict=True)
    sent = await asyncio.gather(
        *(send_load(server.url, load(entry)) for server, (_, entries) in asked for entry in entries)
    )
    return [outcome for one in sent for outcome in one.outcomes]


def _requests(folder: Path) -> Path:
    """Write requests of `CHUNK` tokens for the text encoders, whose length is open."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).integers(1_000, 30_000, (16, CHUNK))
    for entry in ("embedder", "reranker"):
        np.savez(
            folder / f"{entry}.npz",
            input_ids=ids,
            attention_mask=np.ones_like(ids),
            token_type_ids=np.zeros_like(ids),
        )
    return folder


def _copied(way: Way) -> tuple[float, float]:
    """Return the bytes copied for inferences so far, and these as loads of whole models."""
    nbytes = loads = 0.0
    for server in way.servers:
        sizes = by_model(server.metrics_url, PARAMETERS)
        for model, copied in by_model(server.metrics_url, COPIED).items():
            nbytes += copied
            loads += copied / sizes[model] if sizes.get(model) else 0.0
    return nbytes, loads


def tree_bytes(roots: Sequence[psutil.Process]) -> tuple[int, int]:
    """Return the memory of process trees, and the part of it that is pages of files.

    Pages of a file count once, also if processes outside of the trees map them: torch's libraries count as a whole.
    """
    private, files = 0, dict[str, int]()
    for process in (member for root in roots for member in (root, *root.children(recursive=True))):
        for region in process.memory_maps(grouped=True):
            if region.path.startswith("/"):
                private += region.private_dirty
                files[region.path] = max(files.get(region.path, 0), region.rss - region.private_dirty)
            else:
                private += region.pss
    return private + sum(files.values()), sum(files.values())


def _sections(example: Example, ways: Mapping[str, Way], seconds: float) -> tuple[list[str], bool]:
    """Return the tables, and whether everything holds."""
    rows, holds = [], True
    for way in ways.values():
        own, most_bytes = way.latencies_s(example.judged), max(nbytes for nbytes, _ in way.memory)
        answered = sum(not outcome.failure for outcome in way.sent)
        ratios = [_over(own, ways[RESIDENT].latencies_s(example.judged), p) for p in (50, 99) if RESIDENT in ways]
        copied_bytes, loads = (sum(column) for column in zip(*way.copied, strict=True))
        memory = [way.memory[0][0], most_bytes, max(nbytes for _, nbytes in way.memory)]
        rows.append(
            [
                way.name,
                *(f"{nbytes / MIB:.0f}" for nbytes in memory),
                f"{answered} of {len(way.sent)}",
                *(f"{_percentile_ms(own, percent):.0f}" for percent in (50, 99)),
                *(["", ""] if way.name == RESIDENT or not ratios else map(str, ratios)),
                f"{copied_bytes / MIB / max(1, answered):.0f}",
                f"{loads * 3600 / seconds:.0f}" if way.name == LRU else "0",
            ]
        )
        if way.name == OURS:
            holds = answered == len(way.sent) and most_bytes <= (example.most_mib or sys.maxsize) * MIB
            limits = example.most_p50, example.most_p99
            holds &= all(ratio.mean <= limit for ratio, limit in zip(ratios, limits, strict=False))
    header = ["way", "MiB after the first turn", "most MiB", "of files", "answered", "p50 ms", "p99 ms"]
    header += ["p50 / resident", "p99 / resident", "MiB copied per request", "loads per hour"]
    entries = []
    for entry, rate in example.rates.items():
        each = [_percentile_ms(way.latencies_s(entry), percent) for way in ways.values() for percent in (50, 99)]
        entries.append([entry, f"{rate:g}", *(f"{ms:.0f}" for ms in each)])
    limit = f"{example.most_mib} MiB, " if example.most_mib else ""
    about = (
        f"{example.about} {seconds:g} s of each way, in turns. *MiB*: all processes of all servers; pages of files,"
        " such as torch's libraries, count once. *Loads*: copied bytes over those of whole models. Ratios: of all"
        f" requests, with the {LIKELY:.0%} interval of a bootstrap over turns. To hold: {limit}p50 at most"
        f" {example.most_p50:g} and p99 at most {example.most_p99:g} times that of all resident.\n"
    )
    by_entry = ["entry", "per second", *(f"{way} {p} ms" for way in ways for p in ("p50", "p99"))]
    return [about, markdown_table(header, rows), "By entry:\n", markdown_table(by_entry, entries)], holds


def _latency_s(outcome: Outcome) -> float:
    return outcome.latency_s if outcome.tokens is None else outcome.lag_s + outcome.tokens.first_s


def _percentile_ms(latencies_s: Turns, percent: float) -> float:
    return float(np.percentile(np.concatenate(latencies_s), percent)) * 1e3


def _over(ones: Turns, others: Turns, percent: float) -> Ratio:
    """Return the ratio of percentiles, and where it would be if turns were drawn again."""

    def ratio(chosen: Sequence[int]) -> float:
        return _percentile_ms([ones[n] for n in chosen], percent) / _percentile_ms(
            [others[n] for n in chosen], percent
        )

    drawn = np.random.default_rng(0).integers(len(ones), size=(DRAWS // 10, len(ones)))
    low, high = np.quantile([ratio(chosen) for chosen in drawn], [(1 - LIKELY) / 2, (1 + LIKELY) / 2])
    return Ratio(ratio(range(len(ones))), float(low), float(high))


def draw(ways: Mapping[str, Way], example: Example, path: Path) -> None:
    """Draw the memory of each way, and p50 and p99."""
    figure, (memory, latency) = plt.subplots(1, 2, figsize=(9, 2.4), layout="constrained", sharey=True)
    for name, way in ways.items():
        memory.barh(
            name, max(nbytes for nbytes, _ in way.memory) / MIB, color="#1f6f9f" if name == OURS else "#9ec3dd"
        )
        p50, p99 = (_percentile_ms(way.latencies_s(example.judged), percent) for percent in (50, 99))
        latency.barh(name, p99, color="#1f6f9f" if name == OURS else "#9ec3dd")
        latency.plot([p50], [name], "k|", markersize=14)
    memory.invert_yaxis()
    memory.set(xlabel="memory of all processes, MiB")
    latency.set(xlabel=f"{example.judged or 'latency'}: p99, ms (line: p50)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
