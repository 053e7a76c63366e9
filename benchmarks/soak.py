"""Valid requests on both ports, in alternating turns without and with hostile clients: bits, p99, and memory over time.

Every valid request must be answered with the bits of its first answer, or refused with a reason. Its p99 should at most
double while hostile clients attack, and neither process should grow.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import grpc
import numpy as np
import psutil
from rich.console import Console
from tritonclient.grpc.service_pb2 import ModelInferResponse

from benchmarks.faults import REQUEST_MEMORY, RESTARTS, Question, engine_of, questions
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.scrape import free_port, front_end, serve_command, serving
from cohabit.loadgen.client import address_of
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

MODELS, MEMORY = 4, "50%"
TURN_S, WARM_UP_S = 15.0, 2.0
MOST_SLOWER = 2.0
MOST_GROWTH = 0.05
"""Of a process's memory, from the second quarter of the run to the last."""
PATIENCE_S = 60.0
HTTP, GRPC = "HTTP", "gRPC"
RIGHT, WRONG, NO_ANSWER = "right bits", "other bits", "no answer"
_METHOD = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(slots=True)
class Outcome:
    """What became of the valid requests, without (False) and with (True) hostile ones, and the processes' memory."""

    outcomes: Counter[tuple[bool, str]] = field(default_factory=Counter)
    latencies_s: dict[tuple[bool, str], list[float]] = field(default_factory=dict)
    attacks: Counter[str] = field(default_factory=Counter)
    memory: dict[str, list[float]] = field(default_factory=lambda: {"front end": [], "engine": []})
    """In MiB, after each turn."""
    restarts: float = 0.0
    left_bytes: float = 0.0


class Clients:
    """Send the same request by one protocol or the other."""

    def __init__(self, session: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self._session = session
        self._infer = channel.unary_unary(_METHOD)

    async def ask(self, question: Question, protocol: str) -> str:
        """Return what becomes of it."""
        try:
            if protocol == GRPC:
                raw = await self._infer(question.message, timeout=PATIENCE_S)
                answer = b"".join(ModelInferResponse.FromString(raw).raw_output_contents)
            else:
                async with self._session.post(
                    question.path, data=question.body, headers=question.headers
                ) as response:
                    body = await response.read()
                    if response.status != 200:
                        return f"refused: HTTP {response.status}"
                    answer = body[int(response.headers["Inference-Header-Content-Length"]) :]
        except grpc.aio.AioRpcError as error:
            return f"refused: {error.code().name}"
        except (aiohttp.ClientError, TimeoutError):
            return NO_ANSWER
        return RIGHT if answer == question.answer else WRONG


async def turn(
    clients: Clients,
    asked: Sequence[Question],
    rate: float,
    seconds: float,
    seed: int,
    hostile: bool,
    found: Outcome,
) -> None:
    """Send valid requests at random times, whatever becomes of those before; wait for all answers."""
    rng, tasks, end_s = random.Random(seed), list[asyncio.Task[None]](), time.monotonic() + seconds

    async def one(question: Question, protocol: str) -> None:
        start_s = time.perf_counter()
        outcome = await clients.ask(question, protocol)
        found.outcomes[hostile, outcome] += 1
        if outcome == RIGHT:
            found.latencies_s.setdefault((hostile, protocol), []).append(time.perf_counter() - start_s)

    while time.monotonic() < end_s:
        await asyncio.sleep(rng.expovariate(rate))
        tasks.append(asyncio.create_task(one(rng.choice(asked), rng.choice([HTTP, GRPC]))))
    await asyncio.gather(*tasks)


@asynccontextmanager
async def attackers(http: str, grpc_address: str, model: str, seed: int, found: Outcome) -> AsyncIterator[None]:
    """Hostile clients, in a process of their own."""
    command = ["-m", "benchmarks.attacks", http, grpc_address, model, "--seed", str(seed)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
    await asyncio.sleep(WARM_UP_S)
    try:
        yield
    finally:
        counts, _ = await process.communicate(b"")
    for count in counts.decode().split():
        name, _, times = count.partition("=")
        found.attacks[name] += int(times)


async def measured(options: argparse.Namespace, console: Console, models: Sequence[str]) -> Outcome:
    grpc_port, found = free_port(), Outcome()
    repository, cache = options.folder / "soak", options.folder / "soak-cache"
    command = serve_command(repository, MEMORY, None, cache, "--batch-sizes", "1", "--grpc-port", str(grpc_port))
    grpc_address = f"127.0.0.1:{grpc_port}"
    async with serving(command) as server:
        asked = await asyncio.to_thread(questions, server.url, models)
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session,
            grpc.aio.insecure_channel(grpc_address) as channel,
        ):
            clients = Clients(session, channel)
            await turn(clients, asked, options.rate, WARM_UP_S, 0, False, Outcome())
            for seed in range(max(2, round(options.minutes * 60 / TURN_S / 2))):
                await turn(clients, asked, options.rate, TURN_S, seed, False, found)
                async with attackers(address_of(server.url), grpc_address, models[0], seed, found):
                    await turn(clients, asked, options.rate, TURN_S, seed, True, found)
                for name, pid in (("front end", front_end().pid), ("engine", engine_of(front_end()))):
                    if pid is not None:
                        found.memory[name].append(psutil.Process(pid).memory_info().rss / 2**20)
                p99s = ", ".join(f"{_p99_ms(found, hostile):.1f}" for hostile in (False, True))
                console.print(f"turn {seed}: p99 {p99s} ms, {found.memory['front end'][-1]:.0f} MiB")
        found.restarts = server.total(RESTARTS)
        found.left_bytes = server.total(REQUEST_MEMORY)
    return found


def _p99_ms(found: Outcome, hostile: bool, protocols: Sequence[str] = (HTTP, GRPC)) -> float:
    samples = [s for protocol in protocols for s in found.latencies_s.get((hostile, protocol), [])]
    return float(np.percentile(samples, 99)) * 1e3 if samples else float("nan")


def _growth(samples: Sequence[float]) -> float:
    """Of the last quarter over the second."""
    quarter = max(1, len(samples) // 4)
    return float(np.mean(samples[-quarter:]) / np.mean(samples[quarter : 2 * quarter])) - 1.0


def judged(found: Outcome) -> tuple[list[str], bool]:
    """Return sections for the result file, and whether all goals are met."""
    slower = _p99_ms(found, True) / _p99_ms(found, False)
    growth = {name: _growth(samples) for name, samples in found.memory.items()}
    names = sorted({name for _, name in found.outcomes})
    outcomes = [[name, *(str(found.outcomes[hostile, name]) for hostile in (False, True))] for name in names]
    p99s = [
        [f"p99, {' and '.join(each)}, ms", *(f"{_p99_ms(found, hostile, each):.1f}" for hostile in (False, True))]
        for each in ((HTTP,), (GRPC,), (HTTP, GRPC))
    ]
    goals = {
        "every answer has the bits of the first": not (
            found.outcomes[False, WRONG] + found.outcomes[True, WRONG] + found.outcomes[False, NO_ANSWER]
        ),
        f"p99 at most {MOST_SLOWER:g} times as long ({slower:.2f})": slower <= MOST_SLOWER,
        f"memory grows by at most {MOST_GROWTH:.0%}": all(g <= MOST_GROWTH for g in growth.values()),
        "no restart of the engine, no request memory left": not (found.restarts or found.left_bytes),
    }
    memory = [
        [name, *(f"{v:.0f}" for v in (s[0], min(s), max(s), s[-1])), f"{growth[name]:+.1%}"]
        for name, s in found.memory.items()
    ]
    return [
        markdown_table(["valid requests", "without", "with hostile ones"], outcomes + p99s),
        markdown_table(
            ["attack", "times"], [[n.replace("_", " "), str(c)] for n, c in found.attacks.most_common()]
        ),
        markdown_table(["resident memory, MiB", "first", "least", "most", "last", "growth"], memory),
        markdown_table(["goal", "holds"], [[goal, "yes" if met else "**no**"] for goal, met in goals.items()]),
    ], all(goals.values())


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    prepared = prepare_visibly(options.folder / "soak", recipes(MODELS), force=False, console=console)
    found = asyncio.run(measured(options, console, [one.recipe.name for one in prepared]))
    sections, holds = judged(found)
    intro = (
        f"{MODELS} models in {MEMORY} of their weights; {options.rate:g} valid requests/s arrive at random, over"
        f" HTTP and gRPC, for {options.minutes:g} minutes, in turns of {TURN_S:g} s without and with hostile"
        " clients (`benchmarks/attacks.py`). Server and all clients share the CPUs. Growth is that of the last"
        " quarter of the samples over the second.\n"
    )
    publish(options, "Hostile clients for a while", [intro, *sections])
    return 0 if holds else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.soak", __doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="(default: %(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="valid requests per second (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
