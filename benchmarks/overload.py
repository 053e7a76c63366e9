"""Too much to do: overload, deadlines, and models that come and go, each measured in one run.

The server is a process of its own; requests are sent at times drawn beforehand. What has to hold is checked.
"""

import argparse
import asyncio
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from rich.console import Console

from benchmarks.record import markdown_table, parser_of, publish, work_of_two
from benchmarks.scrape import Running, front_end, serve_command, serving
from benchmarks.traffic import OK, Client, Traffic, client_of
from cohabit.loadgen.zoo.repository import PreparedModel, prepare_visibly, recipes

MODELS, ENTRY = 4, "bert_small"
MEMORY_MIB = 20
"""For models of 13.2 MiB each beside their embedding tables, which stay in the host's memory, and one workspace."""
QUEUE_LIMIT = 64
OVERLOAD, DEADLINE_OVERLOAD, BUSY = 5.0, 2.0, 0.25
"""Arrival rates, over the rate at saturation."""
OVERLOADED = 3.0
"""For how long, over the duration that is asked for."""
TIMEOUT_S = 0.05
ROUNDS_BEFORE, SEARCH_S = 3, 120.0
"""How often a model comes before that is measured, and how long its plans may be searched for at most."""
AT_ONCE = 32
"""Requests under way where saturation is measured."""
TURNS = 8
"""Of what is compared, in alternation: the machine's speed changes, and the p99 of one turn is a matter of chance."""
REFUSALS = {429, 503}


@dataclass(frozen=True, slots=True)
class Section:
    """One measurement: its table, and whether what it is about held."""

    title: str
    table: str
    holds: bool


@dataclass(slots=True)
class Outcome:
    """What came of one server's turns."""

    statuses: Counter[int] = field(default_factory=Counter)
    goodputs_per_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)

    def add(self, traffic: Traffic) -> None:
        self.statuses.update(traffic.statuses)
        self.goodputs_per_s.append(traffic.goodput_per_s)
        self.refusals_s += traffic.refusal_latencies_s
        self.lags_s += traffic.lags_s
        self.latencies_s += traffic.ok_latencies_s

    def percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.latencies_s, percent))


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements have in common."""

    prepared: Sequence[PreparedModel]
    folder: Path
    duration_s: float

    @property
    def models(self) -> list[str]:
        return [one.recipe.name for one in self.prepared]

    @asynccontextmanager
    async def server(self, *flags: str) -> AsyncIterator[Running]:
        """A server on the models, with its cache warm from a start before."""
        repository, cache = self.folder / "overload", self.folder / "overload-cache"
        async with serving(serve_command(repository, f"{MEMORY_MIB}MiB", None, cache, *flags)) as running:
            running.require_swaps()
            yield running

    async def saturation(self, client: Client, models: Sequence[str]) -> Traffic:
        """Answers per second with always enough to do, after a warm-up."""
        await client.closed_loop(models, AT_ONCE, 1.0)
        return await client.closed_loop(models, AT_ONCE, max(self.duration_s / 4, 2.0))


async def overload(bench: Bench) -> Section:
    """Five times what the server can do: everything is answered, memory is flat, and the device is kept busy.

    Saturation and overload are measured in turns. The sender would have a machine of its own; here it takes CPU from
    the server.
    """
    peak, loaded = Outcome(), Outcome()
    turn_s = OVERLOADED * bench.duration_s / TURNS
    memory: list[int] = []
    async with bench.server() as server, client_of(server.url, bench.models) as client:
        resident = server.resident_share
        offered_per_s = OVERLOAD * (await bench.saturation(client, bench.models)).goodput_per_s
        sampler = asyncio.create_task(_sample(lambda: memory.append(_memory_bytes())))
        for turn in range(TURNS):
            peak.add(await bench.saturation(client, bench.models))
            loaded.add(await client.open_loop(bench.models, offered_per_s, turn_s, seed=turn))
        sampler.cancel()
    answered = {OK} | REFUSALS
    share = sum(loaded.goodputs_per_s) / sum(peak.goodputs_per_s)
    settled, end = memory[len(memory) // 5], memory[-1]
    rows = [
        ["parameters that stay in device memory", f"{resident:.0%}"],
        ["saturation by turns, answers/s", _range(peak.goodputs_per_s)],
        ["offered, requests/s", f"{offered_per_s:.0f}"],
        ["answered 200 by turns, 1/s", _range(loaded.goodputs_per_s)],
        ["of saturation", f"{share:.1%}"],
        *[[f"status {status}" if status else "no answer", f"{n}"] for status, n in sorted(loaded.statuses.items())],
        ["p99 of the refusals, ms", _ms(_percentile(loaded.refusals_s))],
        ["the sender's lag, p99, ms", _ms(_percentile(loaded.lags_s))],
        ["memory of both processes after a fifth, MiB", f"{settled / 2**20:.1f}"],
        ["memory of both processes at the end, MiB", f"{end / 2**20:.1f}"],
    ]
    holds = set(loaded.statuses) <= answered and share >= 0.9 and end <= 1.05 * settled
    title = f"{OVERLOAD:g} times saturation for {OVERLOADED * bench.duration_s:.0f} s, in {TURNS} turns"
    return Section(title, markdown_table(["", "value"], rows), holds)


async def deadlines(bench: Bench) -> Section:
    """Twice what the server can do, with a timeout: what is answered is in time."""
    spans = bench.folder / "overload-spans.json"
    async with bench.server("--trace-config", f"file={spans}", "--trace-config", "rate=1") as server:
        async with client_of(server.url, bench.models) as client:
            peak = await bench.saturation(client, bench.models)
        async with client_of(server.url, bench.models, TIMEOUT_S) as client:
            began_us = time.monotonic() * 1e6
            traffic = await client.open_loop(bench.models, DEADLINE_OVERLOAD * peak.goodput_per_s, bench.duration_s)
    late = sum(wait_s > TIMEOUT_S for wait_s in traffic.ok_waits_s)
    share = late / max(len(traffic.ok_waits_s), 1)
    inside_s = answer_times_s(spans, began_us)
    late_inside = sum(seconds > TIMEOUT_S for seconds in inside_s)
    in_time_per_s = traffic.goodput_per_s - late / bench.duration_s
    rows = [
        ["saturation, answers/s", f"{peak.goodput_per_s:.0f}"],
        ["answered 200", f"{traffic.statuses.get(OK, 0)}"],
        ["of these later than the timeout, as the client sees it", f"{late} ({share:.2%})"],
        ["and from headers to encoded answer", f"{late_inside} ({late_inside / max(len(inside_s), 1):.2%})"],
        ["p99 from headers to encoded answer, ms", _ms(_percentile(inside_s))],
        ["refused", f"{sum(traffic.statuses.get(s, 0) for s in REFUSALS)}"],
        ["other", f"{sum(n for s, n in traffic.statuses.items() if s not in REFUSALS | {OK})}"],
        ["p50 / p99 of the answers, ms", _spread(traffic)],
        ["the sender's lag, p99, ms", _ms(_percentile(traffic.lags_s))],
        ["p99 of the refusals, ms", _ms(_percentile(traffic.refusal_latencies_s))],
        ["answered in time, of saturation", f"{in_time_per_s / peak.goodput_per_s:.1%}"],
    ]
    title = f"A timeout of {TIMEOUT_S * 1e3:.0f} ms at {DEADLINE_OVERLOAD:g} times saturation"
    return Section(title, markdown_table(["", "value"], rows), share < 0.01)


async def coming_and_going(bench: Bench) -> Section:
    """One model is loaded and unloaded all the time; the others hardly notice."""
    *others, guest = bench.models
    flags = ("--model-control", "explicit", *(flag for name in bench.models for flag in ("--load-model", name)))
    async with bench.server(*flags) as server, client_of(server.url, bench.models) as client:
        peak = await bench.saturation(client, others)
        longest_s = (await client.closed_loop(others, 1, 2.0)).percentile_s(99)
        rate = BUSY * peak.goodput_per_s
        for _ in range(ROUNDS_BEFORE):  # so that it is lowered, measured and planned
            await _control(client, guest, "unload")
            await _control(client, guest, "load")
            await _planned()
        await _control(client, guest, "unload")
        alone, beside = Outcome(), Outcome()
        rounds = 0

        async def come_and_go() -> None:
            nonlocal rounds
            while not stop.is_set():
                await _control(client, guest, "load")
                await _control(client, guest, "unload")
                rounds += 1

        for turn in range(TURNS):
            alone.add(await client.open_loop(others, rate, 2 * bench.duration_s / TURNS, seed=turn))
            stop = asyncio.Event()
            loop = asyncio.create_task(come_and_go())
            beside.add(await client.open_loop(others, rate, 2 * bench.duration_s / TURNS, seed=turn))
            stop.set()
            await loop
    rise_s = beside.percentile_s(99) - alone.percentile_s(99)
    rows = [
        ["requests/s to the others", f"{rate:.0f}"],
        ["loaded and unloaded again", f"{rounds} times"],
        ["one inference, ms (p99 of one request at a time)", _ms(longest_s)],
        ["p50 / p99 without, ms", _spread(alone)],
        ["p50 / p99 meanwhile, ms", _spread(beside)],
        ["p99 rises by, inferences", f"{rise_s / longest_s:.2f}"],
    ]
    holds = rise_s <= longest_s and rounds > 0 and set(beside.statuses) == {OK}
    return Section(
        f"A model that comes and goes, {TURNS} turns each without and with it",
        markdown_table(["", "value"], rows),
        holds,
    )


MEASUREMENTS: dict[str, Callable[[Bench], Coroutine[Any, Any, Section]]] = {
    "overload": overload,
    "deadlines": deadlines,
    "control": coming_and_going,
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    prepared = prepare_visibly(options.folder / "overload", recipes(MODELS, [ENTRY]), force=False, console=console)
    for one in prepared:
        policy = f"default_queue_policy {{ max_queue_size: {QUEUE_LIMIT} }}"
        (one.path.parents[1] / "config.pbtxt").write_text(f"dynamic_batching {{ {policy} }}\n")
    bench = Bench(prepared, options.folder, options.duration)
    sections = []
    for name in options.only or MEASUREMENTS:
        section = asyncio.run(MEASUREMENTS[name](bench))
        sections.append(section)
        console.print(f"{section.title}: {'holds' if section.holds else 'DOES NOT HOLD'}", markup=False)
    intro = (
        f"{MODELS} x {ENTRY} in {MEMORY_MIB} MiB, which hold a part of their 13.2 MiB each; their embedding tables"
        f" stay in the host's memory. {bench.duration_s:.0f} s each. Server and"
        f" load generator share the CPUs: what one does, the other lacks. Two processes that multiply matrices"
        f" at once do {work_of_two():.2f} times the work of one here.\n"
    )
    written = [intro]
    for section in sections:
        verdict = "Holds.\n" if section.holds else "**Does not hold.**\n"
        written += [f"## {section.title}\n", section.table, verdict]
    publish(options, "Under overload", written)
    return 0 if all(section.holds for section in sections) else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.overload", __doc__)
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of each load (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=MEASUREMENTS, help="one of the measurements; repeatable")
    return parser


def answer_times_s(spans: Path, since_us: float) -> list[float]:
    """How long the server took for each request it answered: what it says itself, without the way there and back."""
    begins: dict[str, float] = {}
    ends: dict[str, float] = {}
    for event in msgspec.json.decode(spans.read_bytes()):
        if event["ph"] == "b" and "trace_id" in event["args"] and "error" not in event["args"]:
            begins[event["id"]] = event["ts"]
        elif event["ph"] == "e":
            ends[event["id"]] = max(event["ts"], ends.get(event["id"], 0.0))
    return [(ends[name] - begin) / 1e6 for name, begin in begins.items() if begin >= since_us]


async def _control(client: Client, model: str, order: str) -> None:
    status = await client.control(model, order)
    if status != OK:
        raise RuntimeError(f"{order} of {model} was answered {status}")


async def _planned() -> None:
    """Wait until the worker processes in which the server's engine prepares and plans have nothing to do."""
    busy_s, quiet = -1.0, 0
    async with asyncio.timeout(SEARCH_S):
        while quiet < 4:
            await asyncio.sleep(0.5)
            before_s, busy_s = busy_s, sum(sum(p.cpu_times()[:2]) for p in _workers())
            quiet = quiet + 1 if busy_s == before_s else 0


async def _sample(take: Callable[[], None]) -> None:
    while True:
        take()
        await asyncio.sleep(0.2)


def _workers() -> list[psutil.Process]:
    return [worker for engine in front_end().children() for worker in engine.children()]


def _memory_bytes() -> int:
    """Private and shared memory of the front end and the engine; what both map counts in part for each."""
    server = front_end()
    return sum(process.memory_full_info().pss for process in (server, *server.children()))


def _percentile(samples: Sequence[float]) -> float:
    return float(np.percentile(samples, 99)) if samples else math.nan


def _range(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.0f} ({min(values):.0f} - {max(values):.0f})"


def _spread(traffic: Traffic | Outcome) -> str:
    return f"{_ms(traffic.percentile_s(50))} / {_ms(traffic.percentile_s(99))}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


if __name__ == "__main__":
    sys.exit(main())
