"""The tables of `cohabit models` and `cohabit stats`."""

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cohabit.planner.errors import format_bytes
from cohabit.planner.profile import NOISY
from cohabit.server.commands.remote.client import VersionSamples
from cohabit.server.format import make_table

_NOTHING = "-"
_PERIOD_S = 2.0
_STATES = {"READY": "green", "LOADING": "yellow", "UNLOADING": "yellow", "UNAVAILABLE": "red"}


def add_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch", action="store_true", help="refresh the table every two seconds, until interrupted"
    )


def watch(out: Console, shown: Callable[[], RenderableType]) -> NoReturn:
    """Show a table, and what `shown` returns every two seconds, until an interrupt or an error of the server."""
    with Live(shown(), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(_PERIOD_S)
            live.update(shown(), refresh=True)


def models(
    index: Iterable[Mapping[str, str]],
    metrics: VersionSamples,
    plans: Mapping[tuple[str, str], tuple[str, int]] = MappingProxyType({}),
) -> Table:
    """List a repository index, with the models' memory, and the search and number of candidates of their plans."""
    text = ("model", "state", "plan", "reason")
    table = make_table("model", "version", "state", "partition", "resident", "plan", "reason", left=text)
    for entry in index:
        state = entry.get("state", "")
        own = entry["name"], entry.get("version", "")
        table.add_row(
            Text(entry["name"]),
            entry.get("version", _NOTHING),
            Text(state or "not loaded", style=_STATES.get(state, "dim")),
            _bytes(metrics.get(("cohabit_partition_bytes", *own))),
            _share(metrics.get(("cohabit_resident_share", *own))),
            Text("{}, {} candidates".format(*plans[own]) if own in plans else _NOTHING),
            Text(entry.get("reason", "")),
        )
    return table


def provisional(metrics: VersionSamples, planned: Iterable[tuple[str, str]]) -> list[Text]:
    """Name the models, of those that are `planned`, whose plans are for provisional times, and say why."""
    noise = {own: metrics.get(("cohabit_profile_noise", *own)) for own in planned}
    unmeasured = sorted(model for (model, _), share in noise.items() if share is None)
    disturbed = sorted(model for (model, _), share in noise.items() if share is not None and share > NOISY)
    said = []
    if unmeasured:
        said.append(f"not measured yet, so on quick plans: {', '.join(unmeasured)}")
    if disturbed:
        said.append(
            f"times provisional, measured beside other work: {', '.join(disturbed)}; they are measured again once the"
            " server is quiet"
        )
    return [Text(line) for line in said]


def statistics(models: Iterable[Mapping[str, Any]]) -> Table:
    """List each model's counts and mean times since it was loaded."""
    counts = ("answered", "failed", "executions", "rows/exec")
    table = make_table("model", "version", *counts, "queue", "compute", "batches", left=("model", "batches"))
    for model in models:
        stats = model["inference_stats"]
        executions = model["execution_count"]
        table.add_row(
            Text(model["name"]),
            model["version"],
            str(stats["success"]["count"]),
            str(stats["fail"]["count"]),
            str(executions),
            f"{model['inference_count'] / executions:.2f}" if executions else _NOTHING,
            _mean(stats["queue"]),
            _mean(stats["compute_infer"]),
            " ".join(f"{b['batch_size']}:{b['compute_infer']['count']}" for b in model["batch_stats"]),
        )
    return table


def _bytes(nbytes: float | None) -> str:
    return _NOTHING if nbytes is None else format_bytes(round(nbytes))


def _share(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.1%}"


def _mean(total: Mapping[str, int]) -> str:
    return f"{total['ns'] / total['count'] / 1e6:.1f} ms" if total["count"] else _NOTHING
