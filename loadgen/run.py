"""Runs a load: finds the models, draws the arrivals, sends the requests, and reports."""

import asyncio
import contextlib
import datetime
import gc
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec.structs import replace

from cohabit.loadgen.arrivals import RequestArrival, choose_models, draw_arrivals, read_trace, zipf_weights
from cohabit.loadgen.client import Client, Credentials, connected, prepare_requests, sender
from cohabit.loadgen.errors import UsageError
from cohabit.loadgen.load import Load
from cohabit.loadgen.openloop import Outcome, Tally, run_closed_loop, run_open_loop
from cohabit.loadgen.processes import run_in_processes
from cohabit.loadgen.report import Report, RunDescription, make_report
from cohabit.loadgen.server_times import Counters, ServerTimes, lane_share_between, read_counters, times_between

_LEAD_S = 1.0


@dataclass(frozen=True, slots=True)
class SentLoad:
    """Outcomes of a load's requests."""

    run: RunDescription
    outcomes: Sequence[Outcome]
    models: Sequence[str]
    server: Mapping[str, ServerTimes] = field(default_factory=dict)

    @property
    def report(self) -> Report:
        return make_report(self.run, self.outcomes, self.models, self.server)


async def run_load(
    url: str, load: Load, credentials: Credentials | None = None, keep_interrupted: bool = False
) -> Report:
    """Send the load to the server at `url`. Returns the report; see `send_load`."""
    return (await send_load(url, load, credentials, keep_interrupted)).report


async def send_load(
    url: str, load: Load, credentials: Credentials | None = None, keep_interrupted: bool = False
) -> SentLoad:
    """Send the load to the server at `url`.

    With `keep_interrupted`, a run cancelled after its warm-up returns its measurements so far.
    """
    credentials = credentials or Credentials()
    async with connected(url, load.max_in_flight, load.timeout_s, credentials) as client:
        trace = None if load.trace is None else read_trace(Path(load.trace))
        load = await _completed(client, load, trace)
        total_s = load.warmup_s + load.duration_s
        requests = await prepare_requests(client, list(load.weights), load)
        # An open loop's arrivals are known before the run. A closed loop draws a model for each request as it goes.
        arrivals: Sequence[RequestArrival] = ()
        if trace is not None:
            arrivals = trace
        elif load.concurrency is None:
            arrivals = draw_arrivals(load.rate_per_s, total_s, load.weights, load.seed, load.cv, load.bursts_s)
        run, tally = _describe(url, load), Tally()
        gc.collect()
        start_s = time.perf_counter()
        with _frozen_heap():
            async with _progress_line(tally, len(arrivals), total_s), _counters_at(load.warmup_s, client) as before:
                try:
                    if load.concurrency is not None:
                        send, chosen = sender(client, requests, load), choose_models(load.weights, load.seed)
                        await run_closed_loop(chosen, send, load.concurrency, total_s, tally)
                    elif load.processes > 1:
                        models = list(load.weights)
                        start_s = await run_in_processes(url, load, models, credentials, arrivals, tally)
                    else:
                        send = sender(client, requests, load)
                        await run_open_loop(arrivals, send, load.max_in_flight, tally)
                except asyncio.CancelledError:  # keep the measurements, if there are any
                    measured_s = time.perf_counter() - start_s - load.warmup_s
                    if not keep_interrupted or not tally.outcomes or measured_s <= 0:
                        raise
                    task = asyncio.current_task()
                    assert task is not None
                    task.uncancel()
                    run = replace(run, duration_s=min(measured_s, load.duration_s), interrupted=True)
            if load.concurrency is not None:  # the rate of a closed loop is a result
                measured = sum(o.arrival.at_s >= load.warmup_s for o in tally.outcomes)
                run = replace(run, rate_per_s=measured / run.duration_s)
            server: dict[str, ServerTimes] = {}
            if before:
                after = await read_counters(client)
                server, lane_share = times_between(before[0], after), lane_share_between(before[0], after)
                run = replace(run, lane_share=lane_share)
    return SentLoad(run, tally.outcomes, list(load.weights), server)


async def _completed(client: Client, load: Load, trace: Sequence[RequestArrival] | None) -> Load:
    """Return the load with its models filled in and, for a trace, also the rate and duration."""
    if trace is not None:
        end_s = trace[-1].at_s + (trace[-1].at_s / (len(trace) - 1) if len(trace) > 1 else 1.0)
        if end_s <= load.warmup_s:
            raise UsageError(
                f"--trace {load.trace}: it lasts {end_s:g} s, which is not longer than --warmup {load.warmup_s:g}"
            )
        early = sum(arrival.at_s < load.warmup_s for arrival in trace)
        if early > len(trace) / 2:
            raise UsageError(
                f"--trace {load.trace}: {early} of its {len(trace)} requests lie in the first {load.warmup_s:g} s, the"
                " warm-up, which is not measured; give --warmup 0"
            )
        counts = {model: float(count) for model, count in sorted(Counter(a.model for a in trace).items())}
        rate_per_s = len(trace) / end_s if end_s else 1.0
        sizes = [(a.text.prompt_tokens, a.text.output_tokens) for a in trace if a.text is not None]
        texts = load.texts or next(iter(sizes), None)
        return replace(load, weights=counts, rate_per_s=rate_per_s, duration_s=end_s - load.warmup_s, texts=texts)
    if load.weights:
        return load
    models = _first_ready(await client.ready_models(), load.model_count, client.url)
    return replace(load, weights=zipf_weights(models, load.zipf))


@contextlib.asynccontextmanager
async def _counters_at(after_s: float, client: Client) -> AsyncIterator[list[Counters]]:
    """Read the server's counters up to a second before the end of the warm-up; until then the list is empty.

    Reading those of a thousand models delays requests for half a second.
    """
    found: list[Counters] = []

    async def read() -> None:
        await asyncio.sleep(after_s - min(_LEAD_S, after_s / 2))
        found.append(await read_counters(client))

    if after_s == 0:
        await read()
    reading = asyncio.create_task(asyncio.sleep(0) if found else read())
    try:
        yield found
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _first_ready(ready: Sequence[str], count: int | None, url: str) -> Sequence[str]:
    """Return the first `count` ready models, or all. Raises UsageError if there are fewer."""
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
    """Show the run's progress in one line of stderr; do nothing if stderr is not a terminal.

    Plain text: rendering with rich takes milliseconds, during which this process would not send.
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
    packages = " ".join(f"{name} {version(name)}" for name in ("tritonclient", "aiohttp", "grpcio", "uvloop"))
    return RunDescription(
        **msgspec.structs.asdict(load),
        url=url,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=tuple(sys.argv),
        host=f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()} {packages}",
    )
