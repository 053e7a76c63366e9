"""What each rewrite gains: a model's time without it over its time with all of them, resident, one thread.

A rewrite is listed where it changes a model. Both programs run in turns, so that ratios hold on a machine whose speed
drifts. Those that change what can be swapped, and no time, show about 1.
"""

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console

from benchmarks.peers import MODELS
from benchmarks.programs import loaded
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.turns import Quartiles, in_turns, seconds_of
from benchmarks.unseen_models import UNSEEN
from cohabit.loadgen.zoo.exporting import export_model, save_model
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering import lower as lowering
from cohabit.runtime.lowering.rewrite import rewrite
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from cohabit.runtime.stores.host import open_store

REQUIRED = ("inline_grad_regions", "drop_assertions", "apply_options", "drop_unused", "leave_tables_on_host")
"""Without these a program is not served, or is another one."""
OPERANDS_ONLY = ("drop_casts", "fold_rows")
"""They may give ops other operands, and replace none."""
ROUND_S = 0.02
"""Quick models are run again and again in a round, for so long."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.rewrites", __doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS, *UNSEEN], metavar="NAME", help="(default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console(stderr=True)
    known = [name for name in options.models if name not in UNSEEN]
    prepare_visibly(options.folder / "zoo", recipes(len(known), known), force=False, console=console)
    gains: dict[str, dict[str, Quartiles]] = {}
    for name in options.models:
        archive = options.folder / "zoo" / name / "1" / "model.pt2"
        if name in UNSEEN:
            save_model(export_model(*UNSEEN[name]()), archive, {})
        for step, gain in _gains(name, archive, options).items():
            gains.setdefault(step, {})[name] = gain
            console.print(f"{name}, without {step}: {gain.middle:.3f}")
    rows = [
        [
            f"`{step}`",
            f"{max(gain.middle for gain in of_step.values()):.2f}",
            "; ".join(f"{model} {gain}" for model, gain in of_step.items()),
        ]
        for step, of_step in sorted(gains.items())
    ]
    about = f"Medians of {options.rounds} rounds, with quartiles, batch 1. Above 1: a model is slower without it.\n"
    table = markdown_table(["rewrite", "most", "time without it over time with all"], rows)
    publish(options, "What each rewrite gains", [about, table])
    return 0


def _gains(name: str, archive: Path, options: argparse.Namespace) -> dict[str, Quartiles]:
    """Return the time without a rewrite over that with all, by rewrite that changes this model."""
    applied: dict[str, Any] = {}

    def lowered(left_out: Collection[str]) -> lowering.Lowered:
        def some(model: Any, given: Options, symbols: Any, others: Collection[str] = ()) -> Mapping[str, Any]:
            done = rewrite(model, given, symbols, {*left_out, *others})
            applied.update({} if left_out else done)
            return done

        cache = options.folder / "rewrites" / "-".join(["cache", *left_out])
        with patch.object(lowering, "rewrite", some):
            return lowering.lower(archive, name, [1], cache, options=Options(packed=True))

    with ExitStack() as stack, torch.inference_mode():
        usual = lowered(())
        whole = _run(usual, stack)
        found = {}
        tried = [step for step, replaced in applied.items() if replaced or step in OPERANDS_ONLY]
        for step in [step for step in tried if step not in REQUIRED]:
            other = lowered((step,))
            if _calls(other) != _calls(usual):
                found[step] = _ratios(_run(other, stack), whole, options.rounds)
        return found


def _calls(lowered: lowering.Lowered) -> list[str]:
    return [f"{call.target} {call.args} {call.kwargs}" for call in lowered.traces[Bucket(1)].instructions]


def _run(lowered: lowering.Lowered, stack: ExitStack) -> Callable[[], object]:
    """Load a program with everything resident, and return a run of it."""
    plan = resident_plan(lowered.graphs[Bucket(1)])
    store = open_store("ram", lowered.weights_path, lowered.manifest)
    stack.callback(store.close)
    program = stack.enter_context(loaded(lowered, Bucket(1), plan, None, store))
    return partial(program.run, lowered.examples(Bucket(1)))


def _ratios(without: Callable[[], object], whole: Callable[[], object], rounds: int) -> Quartiles:
    for way in (without, whole):
        way()
    repeats = max(1, min(50, int(ROUND_S / seconds_of(whole))))
    ways = {"without": partial(seconds_of, without, repeats), "whole": partial(seconds_of, whole, repeats)}
    found = in_turns(ways, rounds)
    return Quartiles.of_ratios(found["without"], found["whole"])


if __name__ == "__main__":
    sys.exit(main())
