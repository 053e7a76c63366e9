"""A whole run: find the models, draw the arrivals, send the requests, report."""

import asyncio
import contextlib
import datetime
import gc
import os
import platform
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import msgspec

from cohabit.loadgen.arrivals import draw_arrivals, zipf_weights
from cohabit.loadgen.client import connected, prepare_requests, ready_models, sender
from cohabit.loadgen.errors import UsageError
from cohabit.loadgen.load import Load
from cohabit.loadgen.openloop import Outcome, Tally, run_open_loop
from cohabit.loadgen.report import Report, RunDescription, make_report


@dataclass(frozen=True, slots=True)
class SentLoad:
    """The outcomes of a load's requests."""

    run: RunDescription
    outcomes: Sequence[Outcome]
    models: Sequence[str]

    @property
    def report(self) -> Report:
        return make_report(self.run, self.outcomes, self.models)


async def run_load(url: str, load: Load) -> Report:
    """Send the load to the server at `url` and return the measurements."""
    return (await send_load(url, load)).report


async def send_load(url: str, load: Load) -> SentLoad:
    """Send the load to the server at `url`."""
    async with connected(url, load.max_in_flight, load.timeout_s) as client:
        weights = load.weights
        if not weights:
            weights = zipf_weights(_chosen(await ready_models(client, url), load.model_count, url), load.zipf)
        models = list(weights)
        requests = await prepare_requests(client, url, models, load.batch, load.seed)
        total_s = load.warmup_s + load.duration_s
        arrivals = draw_arrivals(load.rate_per_s, total_s, weights, load.seed)
        run = _describe(url, load)
        tally = Tally()
        gc.collect()
        with _frozen_heap():
            async with _progress_line(tally, len(arrivals), total_s):
                outcomes = await run_open_loop(arrivals, sender(client, requests), load.max_in_flight, tally)
    return SentLoad(run, outcomes, models)


def _chosen(ready: Sequence[str], count: int | None, url: str) -> Sequence[str]:
    """Return the first `count` of the ready models, or all; raises UsageError if there are fewer."""
    if not ready:
        raise UsageError(f"{url} has no model ready")
    if count is not None and count > len(ready):
        raise UsageError(f"{url} has {len(ready)} models ready, fewer than --models {count}: {', '.join(ready)}")
    return ready[:count]


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """Exclude existing objects from garbage collection, so that its pauses stay short."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.asynccontextmanager
async def _progress_line(tally: Tally, total: int, seconds: float) -> AsyncIterator[None]:
    """Show the run's progress in one line of a terminal's stderr; elsewhere do nothing.

    Plain text: rendering with rich takes milliseconds, during which this process would send nothing.
    """
    if not sys.stderr.isatty():
        yield
        return

    async def paint() -> None:
        start_s = time.perf_counter()
        while True:
            elapsed_s = time.perf_counter() - start_s
            sys.stderr.write(
                f"\r\x1b[K{elapsed_s:5.1f} of {seconds:g} s   sent {tally.sent}/{total}   answered {tally.answered}"
                f"   in flight {tally.in_flight}   failed {tally.failed.total()}"
            )
            sys.stderr.flush()
            await asyncio.sleep(0.25)

    painter = asyncio.create_task(paint())
    try:
        yield
    finally:
        painter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await painter
        sys.stderr.write("\r\x1b[K")


def _describe(url: str, load: Load) -> RunDescription:
    packages = " ".join(f"{name} {version(name)}" for name in ("tritonclient", "aiohttp", "uvloop"))
    return RunDescription(
        **msgspec.structs.asdict(load),
        url=url,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=tuple(sys.argv),
        host=f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()} {packages}",
    )
