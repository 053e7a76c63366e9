"""Op times predicted from other nets' profiles (TENSILE, section IV-A), against measured ones: five training steps.

Each step is predicted from the measured profiles of the other four. Nothing here is a time of a whole step.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec
import torch

import cohabit.planner.graph
import cohabit.planner.profile
from benchmarks.captured.trainer import Trainer
from benchmarks.record import parser_of, publish, table_of
from benchmarks.training_nets import NETS, loss
from cohabit.planner.graph import Graph
from cohabit.planner.lifetimes import resident_bytes
from cohabit.planner.memory import single_budget
from cohabit.planner.papers.tensile.latency import predicted
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.driver import search

Measured = Mapping[str, tuple[Graph, Profile]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.predicted", __doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each search (default: %(default)s)")
    parser.add_argument("--measure-only", action="store_true", help="keep the profiles, and plan nothing")
    arguments = parser.parse_args(argv)
    measured = {net: measured_profile(net, arguments.folder) for net in NETS}
    if not arguments.measure_only:
        sections = list(report(measured, arguments))
        publish(arguments, "Op times predicted from profiles of other models", sections)
    return 0


def measured_profile(net: str, folder: Path) -> tuple[Graph, Profile]:
    """Return a net's step and its profile, measured by a trainer with one thread, or read from the folder."""
    paths = folder / f"{net}.graph.json", folder / f"{net}.profile.json"
    if not paths[1].exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model, batch = NETS[net].model(), NETS[net].batch()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        trainer = Trainer(model, optimizer, loss, batch, "100%", searcher="on_demand", store="file")
        trainer.close(sync=False)
        paths[0].write_bytes(cohabit.planner.graph.encode(trainer.graph))
        paths[1].write_bytes(cohabit.planner.profile.encode(trainer.profile))
    return (
        cohabit.planner.graph.decode(paths[0].read_bytes()),
        cohabit.planner.profile.decode(paths[1].read_bytes()),
    )


def report(measured: Measured, arguments: argparse.Namespace) -> Iterator[str]:
    yield ABOUT.format(seconds=arguments.seconds)
    rows, kinds = [], defaultdict[str, list[tuple[float, float]]](list)
    for net, (graph, profile) in measured.items():
        others = [pair for other, pair in measured.items() if other != net]
        found = predicted(graph, others)
        pairs = list(zip(found.op_seconds, profile.op_seconds, strict=True))
        for op, pair in zip(graph.ops, pairs, strict=True):
            kinds[op.target].append(pair)
        known = {op.target for other, _ in others for op in other.ops}
        new_s = sum(s for op, s in zip(graph.ops, profile.op_seconds, strict=True) if op.target not in known)
        periods = [planned_s(graph, by, profile, arguments.seconds) for by in (found, profile)]
        rows.append(
            {
                "net": net,
                "ops": str(len(graph.ops)),
                "measured, s": f"{profile.compute_s:.3f}",
                "predicted, s": f"{found.compute_s:.3f}",
                "ratio": f"{found.compute_s / profile.compute_s:.2f}",
                "error of the op at half of the time": f"{100 * error_of_half_the_time(pairs):.0f} %",
                "time of unknown kinds": f"{100 * new_s / profile.compute_s:.0f} %",
                "plan at 60 %, simulated": f"{periods[0] / periods[1]:.3f}",
            }
        )
    yield table_of(rows)
    errors = [abs(float(row["ratio"]) - 1) for row in rows]
    yield f"The sum of a step's op times is off by {100 * statistics.median(errors):.0f} % in the median.\n"
    yield "## The kinds of ops that take longest\n"
    longest = sorted(kinds.items(), key=lambda item: -sum(s for _, s in item[1]))[:10]
    yield table_of(
        [
            {
                "kind": kind,
                "ops": str(len(pairs)),
                "measured, s": f"{sum(s for _, s in pairs):.3f}",
                "predicted, s": f"{sum(s for s, _ in pairs):.3f}",
                "error of the op at half of the time": f"{100 * error_of_half_the_time(pairs):.0f} %",
            }
            for kind, pairs in longest
        ]
    )


def error_of_half_the_time(pairs: Sequence[tuple[float, float]]) -> float:
    """The relative error that ops with half of the measured time do not exceed."""
    errors = sorted((abs(guess / max(real, 1e-9) - 1), real) for guess, real in pairs)
    half_s = sum(real for _, real in pairs) / 2
    return next(
        error for (error, _), s in zip(errors, accumulate(s for _, s in errors), strict=True) if s >= half_s
    )


def planned_s(graph: Graph, by: Profile, real: Profile, seconds: float) -> float:
    """The period of a plan for 60 % of the memory that is made by one profile, simulated by another."""
    memory = single_budget(int(0.6 * resident_bytes(graph)))
    plan = search(Problem(graph, by, memory, objective="period"), limit=Limit(seconds=seconds))
    period_s = simulate(graph, msgspec.structs.replace(plan, profile=real.fingerprint), real).period_s
    assert period_s is not None
    return period_s


ABOUT = """Measured: op times of five training steps (SGD with momentum), each op by itself, with one thread.
Predicted: by `cohabit plan --predicted`'s regression, from the measured profiles of the other four nets. *Error of the
op at half of the time*: ops with half of the measured time are off by no more. Kinds that no other net has take
as long per byte as ops of all kinds together. The last column is **simulated**: a plan for 60 % of the step's memory,
searched for {seconds:g} s with predicted times, over one searched with measured times,
both simulated with measured times.
Theirs is a network per operator, with a mean squared error of 4.269 (section IV-A, no unit).
"""


if __name__ == "__main__":
    sys.exit(main())
