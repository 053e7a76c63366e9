"""Too much to do: overload, deadlines, models that come and go, and the next model's prefix, each measured in one run.

The server is a process of its own; requests are sent at times drawn beforehand. What has to hold is checked.
"""

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console

from benchmarks.record import markdown_table, record, work_of_two
from benchmarks.traffic import OK, Client, Traffic, client_of
from loadgen.preparation import prepare_visibly
from loadgen.prepare import Prepared, recipes
from loadgen.serve import running_server, server_command

MODELS, ENTRY = 4, "bert_small"
SHARE_OF_WEIGHTS = 0.5
QUEUE_LIMIT = 64
OVERLOAD, DEADLINE_OVERLOAD, BEFORE_SATURATION, BUSY = 5.0, 2.0, 0.7, 0.25
"""Arrival rates, over the rate at saturation."""
TIMEOUT_S = 0.05
ROUNDS_BEFORE, SEARCH_S = 2, 8.0
"""How often a model comes before that is measured, and how long its plans may be searched for."""
AT_ONCE = 32
"""Requests under way where saturation is measured."""
TURNS = 8
"""Of each server without and with prefetch: the p99 of one is a matter of chance, and they gain some percent."""
REFUSALS = {429, 503}


@dataclass(frozen=True, slots=True)
class Section:
    """One measurement: its table, and whether what it is about held."""

    title: str
    text: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements have in common."""

    prepared: Sequence[Prepared]
    folder: Path
    duration_s: float
    console: Console

    @property
    def models(self) -> list[str]:
        return [one.recipe.name for one in self.prepared]

    @property
    def memory_bytes(self) -> int:
        return int(SHARE_OF_WEIGHTS * sum(one.weight_bytes for one in self.prepared))

    @asynccontextmanager
    async def server(self, *flags: str) -> AsyncIterator[str]:
        """A server on the models, with its cache warm from a start before."""
        command = server_command("cohabit", self.folder / "overload", str(self.memory_bytes), None)
        command += ["--cache", str(self.folder / "overload-cache"), "--queue-limit", str(QUEUE_LIMIT), *flags]
        async with running_server(command, patience_s=900) as url:
            yield url

    async def saturation(self, client: Client, models: Sequence[str]) -> Traffic:
        """Answers per second with always enough to do, after a warm-up."""
        await client.closed_loop(models, AT_ONCE, 1.0)
        return await client.closed_loop(models, AT_ONCE, max(self.duration_s / 4, 2.0))


async def overload(bench: Bench) -> Section:
    """Five times what the server can do: everything is answered, memory is flat, and the device is kept busy."""
    async with bench.server() as url, client_of(url, bench.models) as client:
        peak = await bench.saturation(client, bench.models)
        rss: list[int] = []
        sampler = asyncio.create_task(_sample(lambda: rss.append(_rss_bytes(_only_child()))))
        traffic = await client.open_loop(bench.models, OVERLOAD * peak.goodput_per_s, bench.duration_s)
        sampler.cancel()
        again = await bench.saturation(client, bench.models)
    answered = {OK} | REFUSALS
    share = 2 * traffic.goodput_per_s / (peak.goodput_per_s + again.goodput_per_s)
    settled, end = rss[len(rss) // 5], rss[-1]
    rows = [
        ["saturation before / after, answers/s", f"{peak.goodput_per_s:.0f} / {again.goodput_per_s:.0f}"],
        ["offered, requests/s", f"{OVERLOAD * peak.goodput_per_s:.0f}"],
        ["answered 200, 1/s", f"{traffic.goodput_per_s:.0f}"],
        ["of saturation", f"{share:.1%}"],
        *[
            [f"status {status}" if status else "no answer", f"{n}"]
            for status, n in sorted(traffic.statuses.items())
        ],
        ["p99 of the refusals, ms", _ms(_percentile(traffic.refusal_latencies_s))],
        ["the sender's lag, p99, ms", _ms(_percentile(traffic.lags_s))],
        ["process memory after a fifth, MiB", f"{settled / 2**20:.1f}"],
        ["process memory at the end, MiB", f"{end / 2**20:.1f}"],
    ]
    holds = set(traffic.statuses) <= answered and share >= 0.9 and end <= 1.05 * settled
    return Section(f"{OVERLOAD:g} times saturation", markdown_table(["", "value"], rows), holds)


async def deadlines(bench: Bench) -> Section:
    """Twice what the server can do, with a timeout: what is answered is in time."""
    spans = bench.folder / "overload-spans.json"
    async with bench.server("--trace-file", str(spans), "--trace-rate", "1") as url:
        async with client_of(url, bench.models) as client:
            peak = await bench.saturation(client, bench.models)
        async with client_of(url, bench.models, TIMEOUT_S) as client:
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
    async with bench.server(*flags) as url, client_of(url, bench.models) as client:
        peak = await bench.saturation(client, others)
        longest_s = (await client.closed_loop(others, 1, 2.0)).percentile_s(99)
        rate = BUSY * peak.goodput_per_s
        for _ in range(ROUNDS_BEFORE):  # so that it is lowered, measured and planned
            await _control(client, guest, "unload")
            await _control(client, guest, "load")
            await asyncio.sleep(SEARCH_S)
        await _control(client, guest, "unload")
        alone = await client.open_loop(others, rate, bench.duration_s)
        rounds = 0

        async def come_and_go() -> None:
            nonlocal rounds
            while True:
                await _control(client, guest, "load")
                await _control(client, guest, "unload")
                rounds += 1

        loop = asyncio.create_task(come_and_go())
        beside = await client.open_loop(others, rate, bench.duration_s)
        loop.cancel()
    rise_s = beside.percentile_s(99) - alone.percentile_s(99)
    rows = [
        ["requests/s to the others", f"{rate:.0f}"],
        ["loaded and unloaded again", f"{rounds} times"],
        ["one inference, ms (p99 of one request at a time)", _ms(longest_s)],
        ["p50 / p99 before, ms", _spread(alone)],
        ["p50 / p99 meanwhile, ms", _spread(beside)],
        ["p99 rises by, inferences", f"{rise_s / longest_s:.2f}"],
    ]
    holds = rise_s <= longest_s and rounds > 0 and set(beside.statuses) == {OK}
    return Section("A model that comes and goes", markdown_table(["", "value"], rows), holds)


async def prefetch(bench: Bench) -> Section:
    """The next model's prefix is copied beside the inference before it, or it is not: two servers, in turns."""
    latencies_s: dict[str, list[float]] = {"--no-prefetch": [], "--prefetch": []}
    async with AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for flag in latencies_s:
            url = await stack.enter_async_context(bench.server(flag))
            clients[flag] = await stack.enter_async_context(client_of(url, bench.models))
        rate = BEFORE_SATURATION * min(
            [(await bench.saturation(c, bench.models)).goodput_per_s for c in clients.values()]
        )
        for turn, (first, second) in enumerate(
            [("--no-prefetch", "--prefetch"), ("--prefetch", "--no-prefetch")] * (TURNS // 2)
        ):
            for flag in (first, second):
                traffic = await clients[flag].open_loop(bench.models, rate, bench.duration_s / 2, seed=turn)
                latencies_s[flag] += traffic.ok_latencies_s
    rows = [
        [flag, f"{rate:.0f}", *(_ms(float(np.percentile(found, percent))) for percent in (50, 90, 99))]
        for flag, found in latencies_s.items()
    ]
    table = markdown_table(["", "requests/s", "p50, ms", "p90, ms", "p99, ms"], rows)
    without_s, with_s = (float(np.percentile(found, 99)) for found in latencies_s.values())
    return Section(f"The next model's prefix, {TURNS} turns each", table, with_s <= without_s)


MEASUREMENTS: dict[str, Callable[[Bench], Awaitable[Section]]] = {
    "overload": overload,
    "deadlines": deadlines,
    "control": coming_and_going,
    "prefetch": prefetch,
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    prepared = prepare_visibly(options.folder / "overload", recipes(MODELS, [ENTRY]), force=False, console=console)
    bench = Bench(prepared, options.folder, options.duration, console)
    sections = []
    for name in options.only or MEASUREMENTS:
        section = asyncio.run(MEASUREMENTS[name](bench))
        sections.append(section)
        console.print(
            f"## {section.title}: {'holds' if section.holds else 'DOES NOT HOLD'}\n\n{section.text}", markup=False
        )
    if options.record:
        texts = [f"## {s.title}\n\n{s.text}\n{'Holds.' if s.holds else '**Does not hold.**'}\n" for s in sections]
        intro = (
            f"{MODELS} x {ENTRY} in {SHARE_OF_WEIGHTS:.0%} of their weights; {bench.duration_s:.0f} s each. Server and"
            f" load generator share the CPUs: what one does, the other lacks. Two processes that multiply matrices"
            f" at once do {work_of_two():.2f} times the work of one here.\n"
        )
        console.print(f"wrote {record('overload', 'Under overload', 'benchmarks.overload', [intro, *texts])}")
    return 0 if all(section.holds for section in sections) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overload", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="working folder (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of each load (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=MEASUREMENTS, help="one of the measurements; repeatable")
    parser.add_argument("--record", action="store_true", help="write docs/results/overload.md")
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


async def _sample(take: Callable[[], None]) -> None:
    while True:
        take()
        await asyncio.sleep(0.2)


def _only_child() -> int:
    """The server's process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return int(children[-1])


def _rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _percentile(samples: Sequence[float]) -> float:
    return float(np.percentile(samples, 99)) if samples else math.nan


def _spread(traffic: Traffic) -> str:
    return f"{_ms(traffic.percentile_s(50))} / {_ms(traffic.percentile_s(99))}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


if __name__ == "__main__":
    sys.exit(main())
