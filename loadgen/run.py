"""A whole run: find the models, draw the arrivals, send, report."""

import contextlib
import datetime
import gc
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import msgspec

from loadgen.arrivals import draw_arrivals, zipf_weights
from loadgen.client import connected, prepare_requests, ready_models, sender
from loadgen.display import live_line
from loadgen.errors import UsageError
from loadgen.openloop import Outcome, Tally, run_open_loop
from loadgen.report import Report, Run, make_report


@dataclass(frozen=True, slots=True)
class Load:
    """What to send, and how long to wait for it."""

    rate_per_s: float
    duration_s: float
    models: int | None
    """Take the first so many ready models; None for all."""
    weights: Mapping[str, float]
    """Models by name, each with its weight; empty to take what the server has ready."""
    zipf: float
    seed: int
    batch: int
    slo_s: float
    timeout_s: float
    warmup_s: float
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a load's requests."""

    run: Run
    outcomes: Sequence[Outcome]
    models: Sequence[str]

    @property
    def report(self) -> Report:
        return make_report(self.run, self.outcomes, self.models)


async def run_load(url: str, load: Load) -> Report:
    """Send the load to the server at `url` and return what was measured."""
    return (await send_load(url, load)).report


async def send_load(url: str, load: Load) -> Sent:
    """Send the load to the server at `url`."""
    async with connected(url, load.max_in_flight, load.timeout_s) as client:
        weights = load.weights
        if not weights:
            weights = zipf_weights(choose_models(await ready_models(client, url), load.models, url), load.zipf)
        models = list(weights)
        requests = await prepare_requests(client, url, models, load.batch, load.seed)
        total_s = load.warmup_s + load.duration_s
        arrivals = draw_arrivals(load.rate_per_s, total_s, weights, load.seed)
        run = _describe(url, load)
        tally = Tally()
        gc.collect()
        with _frozen_heap():
            async with live_line(tally, len(arrivals), total_s):
                outcomes = await run_open_loop(arrivals, sender(client, requests), load.max_in_flight, tally)
    return Sent(run, outcomes, models)


def in_turns(turns: Sequence[Sent]) -> Sent:
    """Several loads of one server, put behind one another without their warm-ups."""
    outcomes, at_s = [], 0.0
    for turn in turns:
        for outcome in turn.outcomes:
            if outcome.arrival.at_s >= turn.run.warmup_s:
                arrival = replace(outcome.arrival, at_s=outcome.arrival.at_s - turn.run.warmup_s + at_s)
                outcomes.append(replace(outcome, arrival=arrival))
        at_s += turn.run.duration_s
    run = msgspec.structs.replace(turns[0].run, duration_s=at_s, warmup_s=0.0)
    return Sent(run, outcomes, turns[0].models)


def choose_models(ready: Sequence[str], count: int | None, url: str) -> Sequence[str]:
    """Return the first `count` of the ready models, or all; raises UsageError if there are fewer."""
    if not ready:
        raise UsageError(f"{url} has no model ready")
    if count is not None and count > len(ready):
        raise UsageError(f"{url} has {len(ready)} models ready, fewer than --models {count}: {', '.join(ready)}")
    return ready[:count]


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the garbage collector away from what exists already, so that its pauses stay short."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _describe(url: str, load: Load) -> Run:
    packages = " ".join(f"{name} {version(name)}" for name in ("tritonclient", "aiohttp", "uvloop"))
    return Run(
        url=url,
        seed=load.seed,
        batch=load.batch,
        rate_per_s=load.rate_per_s,
        duration_s=load.duration_s,
        warmup_s=load.warmup_s,
        slo_s=load.slo_s,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=tuple(sys.argv),
        host=f"{platform.platform()}, {os.cpu_count()} CPUs, Python {platform.python_version()} {packages}",
    )
