"""This runtime against ONNX Runtime, frozen Inductor and eager PyTorch, on the CPU.

Each model has a process of its own, in which all engines run in turns, so that ratios hold on a machine whose speed
drifts. Engines that are not installed are left out: ONNX Runtime comes with `pip install
'cohabit[bench]'`, and Inductor needs a C++ compiler.
"""

import argparse
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec
import torch
from rich.console import Console

from benchmarks.programs import loaded, onnxruntime_call
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.turns import Quartiles, in_turns, seconds_of
from benchmarks.unseen_models import UNSEEN
from cohabit.loadgen.zoo import ZOO, Inputs
from cohabit.loadgen.zoo.exporting import export_model, save_model
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import split_budget
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.lower import lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import StoreKind
from cohabit.runtime.options import Options
from cohabit.runtime.stores.host import open_store

MODELS = ("resnet152", "resnet50", "mobilenet_v2", "vit_small", "bert_base", "bert_small", "lstm", "ranker")
SHARE = 0.25
WAYS = ("resident", "streamed", "from file", "bfloat16", "bfloat16 streamed", "inductor", "eager")
ROUND_S, MOST_REPEATS = 0.01, 20
"""Quick models are run again and again, for so long and at most so often per round."""

Way = Callable[[], object]
Times = dict[str, list[float]]
"""Seconds per inference of each engine, round by round."""


Found = dict[tuple[str, int, int], Times]
"""By model, batch size and number of threads."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.model is not None:
        print(msgspec.json.encode(_measure(options)).decode())
        return 0
    console = Console(highlight=False)
    known = [name for name in options.models if name not in UNSEEN]
    if known:
        prepare_visibly(options.folder / "zoo", recipes(len(known), known), force=False, console=console)
    for name in set(options.models) - set(known):
        save_model(export_model(*UNSEEN[name]()), _archive(options.folder, name), {})
    found: Found = {}
    for threads in options.threads:
        for batch in options.batches:
            for name in options.models:
                measured = found[name, batch, threads] = _in_process(name, batch, threads, options)
                console.print(f"{name}, batch {batch}, {threads} threads: {_sentence(measured)}")
    publish(options, "Against ONNX Runtime, frozen Inductor and eager PyTorch", _sections(found, options))
    return 0


def _in_process(model: str, batch: int, threads: int, options: argparse.Namespace) -> Times:
    command = [sys.executable, "-m", "benchmarks.peers", "--model", model, "--folder", str(options.folder)]
    command += ["--batches", str(batch), "--threads", str(threads), "--rounds", str(options.rounds)]
    command += ["--without", *options.without] if options.without else []

    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Times)


def _measure(options: argparse.Namespace) -> Times:
    """Return seconds per inference of each engine, round by round."""
    (batch,), (threads,) = options.batches, options.threads
    torch.set_num_threads(threads)
    with ExitStack() as stack, torch.inference_mode():
        ways = _ours(options.model, batch, options.folder, stack, resident_only=options.model in UNSEEN)
        ways |= _peers(options.model, batch, threads, options)
        quickest = math.inf
        for way in ways.values():
            way()
            quickest = min(quickest, seconds_of(way))
        repeats = max(1, min(MOST_REPEATS, int(ROUND_S / quickest)))
        return in_turns({name: partial(seconds_of, way, repeats) for name, way in ways.items()}, options.rounds)


def _archive(folder: Path, name: str) -> Path:
    return folder / "zoo" / name / "1" / "model.pt2"


def _built(name: str) -> tuple[torch.nn.Module, Inputs]:
    return UNSEEN[name]() if name in UNSEEN else ZOO[name].build(0)


def _ours(name: str, batch: int, folder: Path, stack: ExitStack, *, resident_only: bool) -> dict[str, Way]:
    archive, cache = _archive(folder, name), folder / "peers"
    bucket = Bucket(batch)
    ways: dict[str, Way] = {}
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32",) if resident_only else ("float32", "bfloat16")
    for dtype in dtypes:
        if packing.unavailable() is not None or not packing.supports(getattr(torch, dtype)):
            continue
        lowered = lower(archive, f"{name}-{dtype}", [1, 8], cache, options=Options(dtype, packed=True))
        resident, streamed = ("resident", "streamed") if dtype == "float32" else ("bfloat16", "bfloat16 streamed")
        graph = lowered.graphs[bucket]
        weights = lowered.manifest.segment_bytes + lowered.manifest.table_bytes
        stores: dict[StoreKind, str] = {"ram": streamed}
        if dtype == "float32" and not resident_only:
            stores["file"] = "from file"
        for kind, swapped in stores.items():
            store = open_store(kind, lowered.weights_path, lowered.manifest)
            stack.callback(store.close)
            plans: dict[str, tuple[Plan, Profile | None]] = {}
            if kind == "ram":
                plans[resident] = resident_plan(graph), None
            if not resident_only:
                profile = CpuBackend().measure(lowered, store, cache / "profiles", lambda _: None)[1][bucket]
                with suppress(InfeasibleBudget):  # the activations alone need more
                    budget = int(weights * SHARE) // 4096 * 4096
                    memory = split_budget({bucket: graph}, {bucket: profile}, budget)
                    plans[swapped] = search(Problem(graph, profile, memory)), profile
            for way, (plan, judged) in plans.items():
                program = stack.enter_context(loaded(lowered, bucket, plan, judged, store))
                ways[way] = partial(program.run, lowered.examples(bucket))
    return ways


def _peers(name: str, batch: int, threads: int, options: argparse.Namespace) -> dict[str, Way]:
    model, examples = _built(name)
    inputs = {key: _at_batch(value, batch) for key, value in examples.items()}
    ways: dict[str, Way] = {"eager": partial(model, **inputs)}
    if "inductor" not in options.without and shutil.which("c++") is not None:
        torch._inductor.config.freezing = True
        compiled = torch.compile(model)
        ways["inductor"] = lambda: compiled(**inputs)
    if "onnxruntime" not in options.without and find_spec("onnxruntime") is not None:
        ways["onnxruntime"] = onnxruntime_call(model, inputs, threads)
    return ways


def _at_batch(example: torch.Tensor, batch: int) -> torch.Tensor:
    return example[:1].repeat(batch, *[1] * (example.dim() - 1))


def _sections(found: Found, options: argparse.Namespace) -> list[str]:
    sections = [_ABOUT.format(rounds=options.rounds)]
    tables = dict.fromkeys((batch, threads, _list_of(name)) for name, batch, threads in found)
    for batch, threads, which in tables:
        rows: list[list[str]] = []
        means: dict[str, list[float]] = {}
        ways = ("resident", "eager") if which else WAYS
        for (name, b, t), times in found.items():
            if (b, t, _list_of(name)) != (batch, threads, which):
                continue
            base = _base(times)
            row = [name, f"{statistics.median(times[base]) * 1e3:.2f}"]
            for way in ways:
                row.append(_shown(times, way, base))
                if way in times:
                    means.setdefault(way, []).append(Quartiles.of_ratios(times[way], times[base]).middle)
            rows.append(row)
        count = {way: len(ratios) for way, ratios in means.items()}
        last = [f"{statistics.geometric_mean(means[w]):.2f} of {count[w]}" if w in means else "" for w in ways]
        rows.append(["geometric mean", "", *last])
        sections += [f"## Batch {batch}, {threads} thread{'s' * (threads > 1)}{which}\n"]
        sections.append(markdown_table(["model", "ONNX Runtime ms", *ways], rows))
    return sections


def _list_of(name: str) -> str:
    """Return what a table's heading says of this model's list."""
    return ", models that were first run here" if name in UNSEEN else ""


def _base(times: Times) -> str:
    """What times are divided by: ONNX Runtime, or eager PyTorch where that is not installed."""
    return "onnxruntime" if "onnxruntime" in times else "eager"


def _shown(times: Times, way: str, to: str) -> str:
    """Return the ratios of all rounds, or a dash where the engine is missing."""
    return str(Quartiles.of_ratios(times[way], times[to])) if way in times else "-"


def _sentence(times: Times) -> str:
    return ", ".join(f"{way} {statistics.median(seconds) * 1e3:.2f} ms" for way, seconds in times.items())


_ABOUT = """Time per inference over that of ONNX Runtime with all of its memory, in the same round: median of {rounds}
rounds, and quartiles. Quick models run several times a round, of which the fastest counts. *resident* is this runtime
with every parameter in memory; *streamed* and *from file* with 25 % of the weights in memory and the others in RAM, or
in a file that is read with O_DIRECT. A dash says that the activations alone need more, that the processor lacks the
instructions, or that the engine was not installed or cannot run the model.
"""


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.peers", __doc__)
    parser.add_argument("--record-as", metavar="NAME", help="name of the result file (default: %(default)s)")
    parser.add_argument("--models", nargs="+", default=[*MODELS, *UNSEEN], metavar="NAME")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", choices=(1, 8), default=[1, 8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--without", nargs="+", choices=("inductor", "onnxruntime"), default=[])
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
