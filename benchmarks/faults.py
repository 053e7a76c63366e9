"""The engine's process is killed, crashed, stopped and hung at random moments under load: what becomes of the requests.

Every request must be answered: with the very bits that were answered before the first fault, or with an error that says
why. The front end must stay up, and keep neither memory, nor file descriptors, nor processes of engines that are gone.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import torch
import tritonclient.http
from rich.console import Console
from rich.progress import track
from tritonclient.grpc.service_pb2 import ModelInferRequest
from tritonclient.http import InferenceServerClient

from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.scrape import Running, front_end, serve_command, serving
from cohabit.loadgen.client import address_of
from cohabit.loadgen.inputs import random_inputs
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

MODELS, ENTRIES, MEMORY = 4, ("ranker", "minilm"), "74MiB"
HANGING = "hanging"
"""A model that computes for hours if its input is large."""
HANGING_VALUE = 1e12
REQUESTS_PER_MODEL = 4
"""Different inputs, whose answers are known."""
WATCHDOG_S = 2.0
KINDS = ("SIGKILL", "SIGSEGV", "SIGSTOP", "hang")
PATIENCE_S = 300.0
ANSWERED, DIFFERENT, NO_ANSWER = "answered", "different bits", "no answer"
RESTARTS, REQUEST_MEMORY = "cohabit_engine_restarts_total", "cohabit_request_memory_bytes"
AFTER_S = 5.0
"""Requests that are sent within this time after a fault count as its."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request, as HTTP's body and as gRPC's message, whose answer is known."""

    path: str
    body: bytes
    headers: dict[str, str]
    message: bytes
    answer: bytes


@dataclass(slots=True)
class Usage:
    """What the front end's process holds."""

    descriptors: int
    threads: int
    rss_mib: float
    processes: int
    """Itself, the engine, and whatever was left of other engines."""

    @classmethod
    def of(cls, process: psutil.Process) -> "Usage":
        return cls(
            process.num_fds(),
            process.num_threads(),
            process.memory_info().rss / 2**20,
            1 + len(process.children(recursive=True)),
        )


@dataclass(slots=True)
class Outcome:
    """What became of the requests and of the engine."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    restart_s: list[float] = field(default_factory=list)
    fault_times: list[float] = field(default_factory=list)
    answer_times: list[tuple[float, float]] = field(default_factory=list)
    """When answered requests of the load were sent, and how long their answers took, in seconds."""

    def latencies_ms(self) -> tuple[list[float], list[float]]:
        """Return the latencies of requests that were sent soon after a fault, and those of all others."""
        soon: list[float] = []
        others: list[float] = []
        for sent, seconds in self.answer_times:
            is_soon = any(0 <= sent - fault < AFTER_S for fault in self.fault_times)
            (soon if is_soon else others).append(1e3 * seconds)
        return soon, others


class Hanging(torch.nn.Module):
    """A Legendre polynomial of the degree that the input says: its kernel takes one step per degree."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.legendre_polynomial_p(torch.full_like(x, 0.5), x)


def write_hanging(repository: Path) -> None:
    path = repository / HANGING / "1" / "model.pt2"
    if not path.exists():
        path.parent.mkdir(parents=True)
        program = torch.export.export(Hanging().eval(), (), kwargs={"x": torch.zeros(1, 64)})
        torch.export.save(program, path)


def questions(url: str, models: Sequence[str]) -> list[Question]:
    """Draw requests, and ask for their answers."""
    rng, asked = np.random.default_rng(0), []
    with tritonclient.http.InferenceServerClient(address_of(url), network_timeout=PATIENCE_S) as client:
        for model in models:
            metadata = client.get_model_metadata(model)
            for _ in range(REQUESTS_PER_MODEL):
                inputs = random_inputs(metadata, 1, rng)
                body, length = InferenceServerClient.generate_request_body(inputs)
                answer = client.infer(model, inputs)
                arrays = [answer.as_numpy(output["name"]) for output in metadata["outputs"]]
                headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
                known = b"".join(array.tobytes() for array in arrays)
                message = ModelInferRequest(model_name=model)
                for tensor in inputs:
                    message.inputs.add(name=tensor.name(), datatype=tensor.datatype(), shape=tensor.shape())
                    message.raw_input_contents.append(tensor._get_binary_data())
                path = f"{url}/v2/models/{model}/infer"
                asked.append(Question(path, body, headers, message.SerializeToString(), known))
    return asked


async def ask(session: aiohttp.ClientSession, question: Question, found: Outcome) -> None:
    sent = time.monotonic()
    try:
        async with session.post(question.path, data=question.body, headers=question.headers) as response:
            body = await response.read()
            if response.status == 200:
                length = int(response.headers.get("Inference-Header-Content-Length", len(body)))
                found.outcomes[ANSWERED if body[length:] == question.answer else DIFFERENT] += 1
                found.answer_times.append((sent, time.monotonic() - sent))
            else:
                found.outcomes[f"error {response.status}"] += 1
                found.errors[body.decode()[:320]] += 1
    except (aiohttp.ClientError, TimeoutError) as error:
        found.outcomes[NO_ANSWER] += 1
        found.errors[type(error).__name__] += 1


async def load(
    session: aiohttp.ClientSession, asked: Sequence[Question], rate: float, found: Outcome, stop: asyncio.Event
) -> None:
    """Send requests at random times, whatever becomes of those before, until `stop`; wait for all answers."""
    rng, tasks = random.Random(1), set[asyncio.Task[None]]()
    while not stop.is_set():
        await asyncio.sleep(rng.expovariate(rate))
        task = asyncio.create_task(ask(session, rng.choice(asked), found))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


async def until_ok(session: aiohttp.ClientSession, method: str, url: str) -> None:
    """Repeat a request until its status is 200. Raises TimeoutError."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        async with session.request(method, url) as response:
            if response.status == 200:
                return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"{url} was not answered 200 again")


def engine_of(server: psutil.Process) -> int | None:
    for child in server.children():
        if "cohabit.server.process.engine_process" in child.cmdline():
            return child.pid
    return None


async def inject(session: aiohttp.ClientSession, server: Running, kind: str, found: Outcome) -> None:
    """Do one thing to the engine, and wait until it serves again."""
    before, engine = server.total(RESTARTS), engine_of(front_end())
    start_s = time.monotonic()
    if kind == "hang":
        x = np.full((1, 64), HANGING_VALUE, np.float32)
        tensor = tritonclient.http.InferInput("x", [1, 64], "FP32")
        tensor.set_data_from_numpy(x)
        body, length = InferenceServerClient.generate_request_body([tensor])
        headers = {"Inference-Header-Content-Length": str(length)}
        await ask(session, Question(f"{server.url}/v2/models/{HANGING}/infer", body, headers, b"", b""), found)
    elif engine is not None:
        os.kill(engine, getattr(signal, kind))
    while server.total(RESTARTS) == before:  # noqa: ASYNC110 - the other process says when
        await asyncio.sleep(0.05)
    if kind == "hang":  # a model that has hung twice is served again once it is loaded
        await until_ok(session, "POST", f"{server.url}/v2/repository/models/{HANGING}/load")
    await until_ok(session, "GET", f"{server.url}/v2/health/ready")
    found.faults[kind] += 1
    found.fault_times.append(start_s)
    found.restart_s.append(time.monotonic() - start_s)


async def measured(options: argparse.Namespace, console: Console, models: Sequence[str]) -> list[str]:
    rng, found = random.Random(options.seed), Outcome()
    flags = ["--model-control", "explicit", "--load-model", "*"]
    flags += ["--watchdog", str(WATCHDOG_S), "--batch-sizes", "1"]  # the bits of a row may depend on its batch
    command = serve_command(options.folder / "faults", MEMORY, None, options.folder / "faults-cache", *flags)
    async with serving(command) as server:
        asked = await asyncio.to_thread(questions, server.url, models)
        async with aiohttp.ClientSession() as session:
            await inject(session, server, "SIGKILL", found)
        await asyncio.sleep(1.0)
        before = Usage.of(front_end())
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            stop = asyncio.Event()
            sender = asyncio.create_task(load(session, asked, options.rate, found, stop))
            kinds = [KINDS[number % len(KINDS)] for number in range(options.faults)]
            rng.shuffle(kinds)
            for kind in track(kinds, "faults", console=console):
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                await inject(session, server, kind, found)
            stop.set()
            await sender
        await asyncio.sleep(1.0)
        after, left_bytes = Usage.of(front_end()), server.total(REQUEST_MEMORY)
    return _sections(found, before, after, left_bytes)


def _sections(found: Outcome, before: Usage, after: Usage, left_bytes: float) -> list[str]:
    seconds = np.array(found.restart_s)
    rows = [[kind, str(count)] for kind, count in sorted(found.faults.items())]
    outcomes = [[name, str(count)] for name, count in found.outcomes.most_common()]
    errors = [[f"`{text}`", str(count)] for text, count in found.errors.most_common(8)]
    groups = zip((f"within {AFTER_S:g} s after a fault", "at other times"), found.latencies_ms(), strict=True)
    latencies = [
        [sent, str(len(ms)), *(f"{np.percentile(ms, q):.1f} ms" for q in (50, 99)), f"{max(ms):.1f} ms"]
        for sent, ms in groups
        if ms
    ]
    names = (("file descriptors", "descriptors"), ("threads", "threads"), ("processes", "processes"))
    usage = [[name, str(getattr(before, key)), str(getattr(after, key))] for name, key in names]
    usage.append(["resident memory, MiB", f"{before.rss_mib:.1f}", f"{after.rss_mib:.1f}"])
    usage.append(["request memory in use, bytes", "", f"{left_bytes:.0f}"])
    holds = not (found.outcomes[DIFFERENT] or found.outcomes[NO_ANSWER] or left_bytes)
    return [
        markdown_table(["fault", "times"], rows),
        f"From a fault until the server was ready again: median {np.median(seconds):.2f} s, longest"
        f" {seconds.max():.2f} s (a hang takes two restarts and {2 * WATCHDOG_S:g} s of watchdog).\n",
        markdown_table(["outcome of a request", "times"], outcomes),
        markdown_table(["request sent", "answers", "p50", "p99", "longest"], latencies),
        markdown_table(["error", "times"], errors) if errors else "No request got an error.\n",
        markdown_table(["front end", "after one fault, idle", "at the end, idle"], usage, shown=False),
        f"Every request was answered, with equal bits or an error: {'yes' if holds else 'NO'}.\n",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    repository = options.folder / "faults"
    prepared = prepare_visibly(repository, recipes(MODELS, ENTRIES), force=False, console=console)
    write_hanging(repository)
    sections = asyncio.run(measured(options, console, [one.recipe.name for one in prepared]))
    intro = (
        f"{MODELS} models ({' and '.join(ENTRIES)}) in {MEMORY}, and one that can be made to hang;"
        f" {options.rate:g} requests/s arrive at random, over HTTP. Faults hit the engine's process"
        f" at random moments, `--watchdog {WATCHDOG_S:g}`. Answers are compared with those before the first fault,"
        " bit by bit. Server and clients share the CPUs.\n"
    )
    publish(options, "The engine dies under load", [intro, *sections])
    return 0 if sections[-1].endswith("yes.\n") else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.faults", __doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults' order and moments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
