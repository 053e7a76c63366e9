"""How a run looks on a terminal: a line while it goes on, tables afterwards."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich import box
from rich.console import Console
from rich.table import Table

from loadgen.openloop import Tally
from loadgen.report import Report, Spread

_PERCENTILES = ("p50", "p90", "p99", "p99.9", "max", "mean")


@asynccontextmanager
async def live_line(tally: Tally, total: int, seconds: float) -> AsyncIterator[None]:
    """Keep one line on a terminal's stderr up to date; elsewhere do nothing.

    Plain text: rendering with rich takes milliseconds, during which this process would send nothing.
    """
    if not sys.stderr.isatty():
        yield
        return
    painter = asyncio.create_task(_paint(tally, total, seconds))
    try:
        yield
    finally:
        painter.cancel()
        with suppress(asyncio.CancelledError):
            await painter
        sys.stderr.write("\r\x1b[K")


async def _paint(tally: Tally, total: int, seconds: float) -> None:
    start_s = time.perf_counter()
    while True:
        elapsed_s = time.perf_counter() - start_s
        sys.stderr.write(
            f"\r\x1b[K{elapsed_s:5.1f} of {seconds:g} s   sent {tally.sent}/{total}   answered {tally.answered}"
            f"   in flight {tally.in_flight}   failed {tally.failed.total()}"
        )
        sys.stderr.flush()
        await asyncio.sleep(0.25)


def print_report(report: Report, console: Console) -> None:
    """Print a report's tables, and what is wrong with the run if something is."""
    console.print(_models_table(report))
    console.print(
        f"offered {report.rate_per_s:g}/s, sent {report.sent}, answered {report.completed}"
        f" ({report.achieved_per_s:.1f}/s); within {report.slo_s * 1e3:g} ms: {report.goodput_per_s:.1f}/s"
    )
    if report.send_lag is not None:
        console.print(f"send lag: p50 {_ms(report.send_lag.p50_s)} ms, p99 {_ms(report.send_lag.p99_s)} ms")
    for kind, count in report.errors.items():
        console.print(f"[red]{count} x {kind}[/red]: {report.error_examples[kind]}", highlight=False)
    if report.generator_was_late:
        console.print(
            "[yellow]warning:[/yellow] the generator itself was late, and the latencies include that;"
            " it needs more CPU or a lower rate"
        )


def _models_table(report: Report) -> Table:
    table = Table(
        title="Latency from the intended send time (ms)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    table.add_column("model", no_wrap=True)
    for heading in ("sent", "answered", "errors", *_PERCENTILES):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.models:
        errors = sum(row.errors.values())
        table.add_row(row.model, str(row.sent), str(row.completed), str(errors), *_cells(row.latency))
    table.add_section()
    errors = sum(report.errors.values())
    table.add_row(
        "all", str(report.sent), str(report.completed), str(errors), *_cells(report.latency), style="bold"
    )
    return table


def _cells(latency: Spread | None) -> list[str]:
    if latency is None:
        return ["-"] * len(_PERCENTILES)
    s = latency
    return [_ms(value) for value in (s.p50_s, s.p90_s, s.p99_s, s.p999_s, s.max_s, s.mean_s)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
