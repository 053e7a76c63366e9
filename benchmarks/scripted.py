"""Single calls through Python against script segments, alone and alongside a busy Python thread.

Every parameter is resident, so that a model is one segment. Both ways take turns in one process; the busy thread does
what a server's event loop does under load: it takes the interpreter, and releases it for a moment now and then.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.record import markdown_table, record
from loadgen.repository import prepare_visibly, recipes
from runtime.binding.program import Bases, Program
from runtime.cpu.arena import CpuArena
from runtime.cpu.backend import CpuBackend
from runtime.cpu.executor import CpuExecutor
from runtime.cpu.segments import compiled, segment_ranges
from runtime.host.store import open_store
from runtime.lowering.lower import Lowered, lower
from runtime.profiling.profile import resident_plan
from runtime.profiling.stopwatch import repeating

MODELS = ("bert_small", "minilm", "ranker", "mobilenet_v2")
_WORK_BETWEEN_TURNS = 2000


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one model; of each pair the first is through Python."""

    model: str
    calls: int
    segments: int
    compile_s: float
    alone_s: tuple[float, float]
    beside_s: tuple[float, float]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    torch.set_num_threads(options.threads)
    chosen = recipes(len(options.models), options.models)
    prepare_visibly(options.folder / "zoo", chosen, force=False, console=console)
    rows = []
    for recipe in chosen:
        console.print(recipe.name)
        archive = options.folder / "zoo" / recipe.name / "1" / "model.pt2"
        rows.append(_measure(lower(archive, recipe.name, [1], options.folder / "lowered"), options.rounds))
    text = _table(rows)
    if options.record:
        sections = [_explained(options), text]
        text = record("scripted", "Single calls and script segments", "benchmarks.scripted", sections).read_text()
    print(text)
    return 0


def _measure(lowered: Lowered, rounds: int) -> Row:
    plan = resident_plan(lowered.graphs[1])
    store = open_store("ram", lowered.weights_path, lowered.manifest)
    with CpuArena(plan.partition_bytes + plan.workspace_bytes) as arena, CpuExecutor() as executor:
        program, single = (
            CpuBackend(scripted=way).build(lowered, plan, None, arena, Bases(plan.workspace_bytes, 0), store)
            for way in (True, False)
        )
        executor.load(program)
        alone_s = _in_turns(executor, (single, program), lowered, rounds)
        with repeating(_busy_python, "busy-python"):
            beside_s = _in_turns(executor, (single, program), lowered, rounds)
    store.close()
    start = time.perf_counter()
    compiled(program.draft, segment_ranges(program.draft))
    compile_s = time.perf_counter() - start
    calls = sum(len(step.calls) for step in program.draft.computes)
    segments = sum(step.length > 1 for step in program.segments)
    return Row(lowered.name, calls, segments, compile_s, alone_s, beside_s)


def _in_turns(
    executor: CpuExecutor, programs: tuple[Program, Program], lowered: Lowered, rounds: int
) -> tuple[float, float]:
    """Median latencies; the first tenth of the rounds warms up."""
    times: tuple[list[float], list[float]] = ([], [])
    for n in range(rounds + rounds // 10):
        for program, own in zip(programs, times, strict=True):
            latency_s = executor.run(program, lowered.examples(1)).latency_s
            if n >= rounds // 10:
                own.append(latency_s)
    return statistics.median(times[0]), statistics.median(times[1])


def _busy_python() -> None:
    """Hold the interpreter for a moment, and release it."""
    for _ in range(_WORK_BETWEEN_TURNS):
        pass
    time.sleep(0)


def _table(rows: Sequence[Row]) -> str:
    header = ("model", "calls", "segments", "compiling ms", "alone ms", "scripted", "beside ms", "scripted beside")
    return markdown_table(
        header,
        [
            (
                row.model,
                str(row.calls),
                str(row.segments),
                f"{row.compile_s * 1e3:.0f}",
                f"{row.alone_s[0] * 1e3:.2f}",
                f"{row.alone_s[1] * 1e3:.2f} ({row.alone_s[1] / row.alone_s[0]:.2f}x)",
                f"{row.beside_s[0] * 1e3:.2f}",
                f"{row.beside_s[1] * 1e3:.2f} ({row.beside_s[1] / row.beside_s[0]:.2f}x)",
            )
            for row in rows
        ],
    )


def _explained(options: argparse.Namespace) -> str:
    return (
        f"Medians of {options.rounds} inferences of batch 1, every parameter resident, {options.threads} compute"
        " thread. In turns: each op by Python, and the same calls as one of TorchScript's, with equal bits (tests hold"
        ' that). "Beside": another thread of the process wants Python all the time, as an event loop does under load.'
        " Compiling is done once, when a model is loaded.\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripted", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where archives are kept")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--record", action="store_true", help="write docs/results/scripted.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
