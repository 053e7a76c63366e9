"""`cohabit fit`: says which models fit into how much memory at which rate, without a server."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.text import Text

from cohabit.planner.errors import format_bytes
from cohabit.server.capacity.report import fit_page, missed, sentence
from cohabit.server.commands.planning.files import write_file
from cohabit.server.commands.planning.flags import MEASURING, add_measuring, budget
from cohabit.server.config.config import BY_KEY
from cohabit.server.config.sources import add_flag, config_of, given, typed
from cohabit.server.config.values import rate, seconds_or_zero
from cohabit.server.errors import ConfigError
from cohabit.server.format import gap, make_table, milliseconds, percent
from cohabit.server.repository.scan import scan

if TYPE_CHECKING:
    from cohabit.server.capacity.fit import Candidate, Fit, HighestRate
    from cohabit.server.config.config import ServeConfig

EXIT_MISSED = 1
_RATES = "requests per second of a model, or a file of lines NAME=RATE"
REQUEST_MS, IDLE_MS, EXECUTION_MS = 0.7, 1.5, 0.15
"""Assumed overheads in milliseconds; `benchmarks.capacity` measures them on a machine."""

_EXAMPLES = """examples:
  cohabit fit models --rate 300 --slo-ms 50                      # the least memory, and p99 over memory
  cohabit fit models --rate 300 --slo-ms 50 --memory 12GiB       # p50 and p99 of every model, and the highest rate
  cohabit fit models --rates rates.txt --memory 25% --html fit.html

Models without a rate in --rates share what is left of --rate, which may be left out if there are none. Models are
lowered and measured as `cohabit serve` does it, then served by the server's own scheduler with a simulated clock, in
the times of first plans, or of those that a server has left in the cache. Exit status: 1 if the SLO is missed.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say which models fit into how much device memory, how long clients would wait, and what would meet an SLO."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument("repository", type=Path, metavar="REPOSITORY", help="a model repository")
    parser.add_argument("--rate", type=typed(rate), metavar="R", help="requests per second, of all models together")
    add_flag(parser, replace(BY_KEY["rates"], help=_RATES))
    parser.add_argument("--slo-ms", type=typed(rate), metavar="MS", help="the p99 that is wanted")
    parser.add_argument(
        "--memory", type=typed(budget), metavar="SIZE", help="device memory: 12GiB, or 25%% of all weights"
    )
    parser.add_argument(
        "--layout",
        choices=("partitioned", "resident", "time_shared"),
        default="partitioned",
        help="how models share the memory (default: %(default)s)",
    )
    for flag, default, what in (
        ("--request-ms", REQUEST_MS, "per request outside of executions: sockets, parsing, the client"),
        ("--idle-ms", IDLE_MS, "more per request to an idle server, whose processes wake up"),
        ("--execution-ms", EXECUTION_MS, "per execution besides its ops"),
    ):
        parser.add_argument(
            flag,
            type=typed(seconds_or_zero),
            default=default,
            metavar="MS",
            help=f"milliseconds {what} (default: %(default)s)",
        )
    parser.add_argument(
        "--execution-factor",
        type=typed(rate),
        default=1.0,
        metavar="F",
        help="measured over predicted seconds of executions, as cohabit_measured_over_predicted has it (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with p99 over memory")
    add_measuring(parser, "batch_sizes")


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Fit a repository. Returns 1 if the SLO is missed. Raises ConfigError, RepositoryError and InfeasibleBudget."""
    settings = given(options, (*MEASURING, "batch_sizes", "rates"))
    config = config_of({"repository": str(options.repository), "memory": "1B", **settings})
    given_rates = config.model_rates
    if options.rate is None and not given_rates:
        raise ConfigError("fit: give --rate R, the requests per second of all models, or --rates FILE")
    scan(config.repository)  # raises if there is none
    with errors.status(Text(f"{options.repository}: starting torch")) as status:
        from cohabit.planner.library import Library
        from cohabit.server.capacity.fit import Capacity, shared_out
        from cohabit.server.capacity.simulation import Overheads
        from cohabit.server.config.config import cache_of

        def progress(text: str) -> None:
            status.update(Text(f"{options.repository}: {text}"))

        found, left_out = candidates(config, progress)
        names = [candidate.demand.name for candidate in found]
        for name in sorted(set(given_rates) - set(names)):
            raise ConfigError(f"--rates: {options.repository} has no model '{name}' that can be served")
        # Models without a given rate share the rest of --rate.
        rates = shared_out(options.rate or sum(given_rates.values()), names, given_rates)
        capacity = Capacity(
            found,
            options.layout,
            overheads=Overheads(
                request_s=options.request_ms / 1e3,
                idle_s=options.idle_ms / 1e3,
                execution_s=options.execution_ms / 1e3,
                execution_factor=options.execution_factor,
            ),
            library=Library(cache_of(config)),
            on_progress=progress,
        )
        slo_s = None if options.slo_ms is None else options.slo_ms / 1e3
        # With a memory size: its fit, and the highest rate within the SLO. Without: the least memory within the SLO
        # or, if there is none, the highest rate in the largest memory.
        curve = capacity.curve(rates) if options.memory is None or options.html else []
        fit, highest = None, None
        if options.memory is not None:
            memory_bytes = options.memory.size.of(sum(candidate.weight_bytes for candidate in found))
            fit = capacity.fit(memory_bytes, rates)
            if slo_s is not None:
                highest = capacity.highest_rate(memory_bytes, rates, slo_s)
        elif slo_s is not None:
            fit = capacity.least_memory(curve, slo_s)
            if fit is None:
                highest = capacity.highest_rate(curve[-1].memory_bytes, rates, slo_s)
    if options.html is not None:
        write_file(options.html, fit_page(options.repository.resolve().name, curve, fit, slo_s, highest).encode())
    if options.json:
        document = {"fit": fit, "curve": curve, "highest_rate": highest, "left_out": left_out}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        for name, reason in left_out.items():
            out.print(f"{name} is left out: {reason}", soft_wrap=True)
        _show(out, fit, curve, slo_s, highest)
    return EXIT_MISSED if slo_s is not None and (fit is None or not fit.meets(slo_s)) else 0


def candidates(config: "ServeConfig", progress: Callable[[str], None]) -> "tuple[list[Candidate], dict[str, str]]":
    """Lower and measure every model's highest version. Returns them, and why others are left out."""
    from cohabit.planner.errors import CohabitError
    from cohabit.server.capacity.fit import Candidate
    from cohabit.server.deploy.prepare import lowered_and_measured
    from cohabit.server.engine.servable import describe
    from cohabit.server.errors import load_reason
    from cohabit.server.repository.scan import scan
    from cohabit.server.repository.sources import EnsembleSource, Unloadable, by_name

    found, left_out = [], {}
    for name, versions in by_name(scan(config.repository)).items():
        source = versions[-1]
        if isinstance(source, Unloadable):
            left_out[name] = source.reason
            continue
        if isinstance(source, EnsembleSource):
            left_out[name] = (
                "it is an ensemble, which takes no memory; the rates of its steps are those of their models"
            )
            continue
        try:
            model = lowered_and_measured(source, config, lambda name, stage: progress(f"{name}: {stage}"))
        except CohabitError as error:
            left_out[name] = load_reason(name, error)
            continue
        info = describe(model.lowered, source.version, max(model.lowered.batches))
        rows = 0 if info.only_batches else info.max_batch_size
        found.append(Candidate(model.demand, model.weight_bytes, rows, source.policy))
    if not found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(f"{config.repository}: no model can be served: {reasons}")
    return found, left_out


def _show(
    out: Console, fit: "Fit | None", curve: "list[Fit]", slo_s: float | None, highest: "HighestRate | None"
) -> None:
    if curve:
        table = make_table("memory", "p50", "p99", "mean", "busy", *(() if slo_s is None else ("meets the SLO",)))
        for point in curve:
            row = [format_bytes(point.memory_bytes), *map(milliseconds, (point.p50_s, point.p99_s, point.mean_s))]
            table.add_row(
                *row, percent(point.busy), *(() if slo_s is None else (("yes" if point.meets(slo_s) else "no"),))
            )
        out.print(table)
    if fit is None:
        if slo_s is not None:
            out.print(missed(slo_s, highest), soft_wrap=True)
        return
    models = make_table(
        "model", "rate", "partition", "resident", "planned", "over resident", "p50", "p99", left=("model",)
    )
    for model in fit.models:
        models.add_row(
            model.name,
            f"{model.rate_per_s:.3g}/s",
            format_bytes(model.partition_bytes),
            milliseconds(model.resident_s),
            milliseconds(model.latency_s),
            gap(model.latency_s, model.resident_s),
            milliseconds(model.p50_s),
            milliseconds(model.p99_s),
        )
    out.print(models)
    out.print(sentence(fit, slo_s), soft_wrap=True)
    if highest is not None and slo_s is not None:
        out.print(
            f"highest rate with p99 within {milliseconds(slo_s)}: {highest.rate_per_s:.3g} requests/s (simulated)"
        )
