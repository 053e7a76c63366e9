"""Two engines that Ray Serve places, Ray's model multiplexing beside them, and engines killed under load.

Needs the extra `scale`. Every answer is compared, bit by bit, with that of one `cohabit serve` with all models.
"""

import argparse
import asyncio
import io
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import torch
from rich.console import Console

from benchmarks.faults import ANSWERED, Outcome, Question, ask, load, questions
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.scrape import PATIENCE_S, free_port, serve_command
from benchmarks.turns import turns
from cohabit.loadgen.arrivals import RequestArrival, draw_arrivals
from cohabit.loadgen.openloop import Outcome as Arrived
from cohabit.loadgen.openloop import RequestFailed, Send, run_open_loop
from cohabit.loadgen.server_process import running_server
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

TURNS, ENGINES = 4, 2
KILL_RATE_PER_S = 5.0
"""Requests per second while engines are killed."""
ENGINE_FLAGS = ("--threads", "1", "--batch-sizes", "1")
"""The bits of a row may depend on its batch and on the number of threads."""


def scale_command(options: argparse.Namespace, url: str) -> list[str]:
    command = [sys.executable, "-m", "cohabit.server.cli", "scale", str(options.folder / "scale")]
    command += ["--replicas", str(ENGINES), "--memory", options.memory, "--http-port", url.rpartition(":")[2]]
    return [*command, "--cache", str(options.folder / "scale-cache"), *ENGINE_FLAGS]


def one_server_command(options: argparse.Namespace) -> list[str]:
    return serve_command(
        options.folder / "scale", options.memory, None, options.folder / "scale-cache", *ENGINE_FLAGS
    )


def asked_at(url: str, asked: Sequence[Question]) -> list[Question]:
    """The same questions for another server."""
    return [Question(url + q.path[q.path.index("/v2/") :], q.body, q.headers, q.message, q.answer) for q in asked]


def sender(session: aiohttp.ClientSession, asked: Sequence[Question]) -> Send:
    by_model = {question.path.split("/")[-2]: question for question in asked}

    async def send(arrival: RequestArrival) -> None:
        found = Outcome()
        await ask(session, by_model[arrival.model], found)
        if not found.outcomes[ANSWERED]:
            raise RequestFailed(next(iter(found.outcomes)), "")

    return send


async def measured(
    sends: Mapping[str, Send], models: Sequence[str], options: argparse.Namespace
) -> list[list[str]]:
    """Send the same arrivals to each server in turns, so that what else the machine does falls on all of them.

    Returns a row of each: answers per second, p50, p99, and requests without an answer.
    """
    popularity = dict.fromkeys(models, 1.0)
    found: dict[str, list[Arrived]] = {name: [] for name in sends}
    ends_s = dict.fromkeys(sends, 0.0)
    for send in sends.values():
        await run_open_loop(draw_arrivals(options.rate / 2, 5.0, popularity, TURNS), send, 10_000)
    for turn, name in turns(sends, TURNS):
        arrivals = draw_arrivals(options.rate, options.seconds / TURNS, popularity, turn)
        outcomes: list[Arrived] = await run_open_loop(arrivals, sends[name], 10_000)
        found[name] += outcomes
        ends_s[name] += max(outcome.arrival.at_s + outcome.latency_s for outcome in outcomes)
    rows = []
    for name, outcomes in found.items():
        seconds = np.array([outcome.latency_s for outcome in outcomes if outcome.failure is None])
        if not len(seconds):
            raise RuntimeError(f"{name}: no request was answered: {outcomes[0].failure}")
        p50, p99 = (1e3 * np.percentile(seconds, q) for q in (50, 99))
        unanswered = len(outcomes) - len(seconds)
        rows.append([name, f"{len(seconds) / ends_s[name]:.1f}", f"{p50:.1f}", f"{p99:.1f}", str(unanswered)])
    return rows


def engines_of(command: int) -> list[psutil.Process]:
    """The actors of the engines, the oldest first."""
    found = []
    for child in psutil.Process(command).children(recursive=True):
        try:
            if any("cohabit:Engine" in part for part in child.cmdline()):
                found.append((child.create_time(), child))
        except psutil.NoSuchProcess:
            continue
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


async def killed(url: str, asked: Sequence[Question], options: argparse.Namespace) -> list[str]:
    """Kill the engines' actors in turn, each once the one before is served again."""
    found = Outcome()
    (command,) = (p.pid for p in psutil.Process().children() if url.rpartition(":")[2] in p.cmdline())
    timeout, connector = aiohttp.ClientTimeout(total=PATIENCE_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        stop = asyncio.Event()
        sending = asyncio.create_task(load(session, asked, KILL_RATE_PER_S, found, stop))
        for _ in range(options.kills):
            await asyncio.sleep(1.0)
            actor = engines_of(command)[0]
            start_s = time.monotonic()
            os.kill(actor.pid, signal.SIGKILL)
            found.faults["SIGKILL"] += 1
            ready = False
            while not ready:
                await asyncio.sleep(0.2)
                alive = engines_of(command)
                async with session.get(f"{url}/v2/health/ready") as response:
                    ready = response.status == 200 and len(alive) == ENGINES and actor not in alive
            found.restart_s.append(time.monotonic() - start_s)
        stop.set()
        await sending
    seconds = np.array(found.restart_s)
    rows = [[name, str(count)] for name, count in found.outcomes.most_common()]
    errors = [[f"`{text}`", str(count)] for text, count in found.errors.most_common(8)]
    holds = found.outcomes.total() == found.outcomes[ANSWERED]
    return [
        f"{options.kills} replicas killed, {KILL_RATE_PER_S:g} requests/s. From a kill until all were ready again:"
        f" median {np.median(seconds):.1f} s, longest {seconds.max():.1f} s.\n",
        markdown_table(["outcome of a request", "times"], rows),
        *([markdown_table(["error", "times"], errors)] if errors else []),
        f"Every request was answered with equal bits: {'yes' if holds else 'NO'}.\n",
    ]


class Multiplexed:
    """Ray Serve's model multiplexing with plain PyTorch: whole models, the least recently used one leaves.

    All models are in RAM, as with `--store ram`; loading one copies its weights, as `.to(device)` would.
    """

    def __init__(self, repository: str, resident_models: int) -> None:
        from ray import serve

        torch.set_num_threads(1)
        folders = [folder for folder in Path(repository).iterdir() if folder.is_dir() and folder.name[0] != "."]
        self._modules = {f.name: torch.export.load(f / "1" / "model.pt2").module() for f in folders}

        async def load(name: str) -> dict[str, torch.Tensor]:
            return {key: tensor.clone() for key, tensor in self._modules[name].state_dict().items()}

        self._weights_of = serve.multiplexed(max_num_models_per_replica=resident_models)(load)

    async def __call__(self, request: Any) -> bytes:
        from ray import serve

        name = serve.get_multiplexed_model_id()
        weights = await self._weights_of(name)
        with np.load(io.BytesIO(await request.body())) as arrays, torch.no_grad():
            inputs = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
            outputs = torch.func.functional_call(self._modules[name], weights, (), inputs)
        return b"".join(outputs[key].numpy().tobytes() for key in outputs)


@asynccontextmanager
async def multiplexed(url: str, options: argparse.Namespace) -> AsyncIterator[None]:
    import ray
    from ray import serve

    ray.init("local", include_dashboard=False, log_to_driver=False)  # not the engines' cluster
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": int(url.rpartition(":")[2])})
        deployment = serve.deployment(Multiplexed, num_replicas=ENGINES)
        serve.run(deployment.bind(str((options.folder / "scale").resolve()), options.resident_models))
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def multiplexed_sender(session: aiohttp.ClientSession, url: str, asked: Sequence[Question]) -> Send:
    bodies: dict[str, bytes] = {}
    for question in asked:
        bodies[question.path.split("/")[-2]] = _as_arrays(question)

    async def send(arrival: RequestArrival) -> None:
        headers = {"serve_multiplexed_model_id": arrival.model}
        async with session.post(url, data=bodies[arrival.model], headers=headers) as response:
            await response.read()
            if response.status != 200:
                raise RequestFailed(f"HTTP {response.status}", (await response.text())[:200])

    return send


def _as_arrays(question: Question) -> bytes:
    from tritonclient.grpc.service_pb2 import ModelInferRequest
    from tritonclient.utils import triton_to_np_dtype

    message = ModelInferRequest.FromString(question.message)
    file = io.BytesIO()
    arrays: dict[str, Any] = {
        tensor.name: np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).reshape(tensor.shape)
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }
    np.savez(file, **arrays)
    return file.getvalue()


async def sections_of(options: argparse.Namespace, models: Sequence[str]) -> list[str]:
    async with running_server(one_server_command(options), PATIENCE_S) as url:
        asked = await asyncio.to_thread(questions, url, models)
    sections: list[str] = []
    timeout, connector = aiohttp.ClientTimeout(total=PATIENCE_S), aiohttp.TCPConnector(limit=0)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        url, other = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        await stack.enter_async_context(running_server(scale_command(options, url), PATIENCE_S))
        await stack.enter_async_context(multiplexed(other, options))
        own = asked_at(url, asked)
        sends = {
            f"cohabit, engines: {ENGINES}": sender(session, own),
            f"Ray's multiplexing, replicas: {ENGINES}": multiplexed_sender(session, other, asked),
        }
        rows = await measured(sends, models, options)
        ratio = float(rows[1][3]) / float(rows[0][3])
        sections.append(f"p99 of Ray's multiplexing over ours with two engines: {ratio:.2f}.\n")
        if options.kills:
            sections += await killed(url, own, options)
    return [markdown_table(["", "answers/s", "p50 ms", "p99 ms", "no answer"], rows), *sections]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.scale", __doc__)
    parser.add_argument("--record-as", metavar="NAME", help="name of the result file (default: %(default)s)")
    parser.add_argument("--entry", default="ranker", help="of the zoo (default: %(default)s)")
    parser.add_argument("--models", type=int, default=8, help="how many (default: %(default)s)")
    parser.add_argument("--memory", default="16MiB", help="of each engine (default: %(default)s)")
    parser.add_argument(
        "--resident-models", type=int, default=2, help="whole models that fit into that, for Ray's multiplexing"
    )
    parser.add_argument("--rate", type=float, default=40.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a measurement (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="how many (default: %(default)s)")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    chosen = recipes(options.models, (options.entry,))
    prepared = prepare_visibly(options.folder / "scale", chosen, force=False, console=console)
    sections = asyncio.run(sections_of(options, [one.recipe.name for one in prepared]))
    intro = (
        f"{options.models} models ({options.entry}), {options.memory} and a thread for each engine;"
        f" {options.rate:g} requests/s arrive at random for {options.seconds:g} s, over HTTP, in {TURNS} turns."
        " A replica of the multiplexed deployment holds"
        f" {options.resident_models} models and copies others from RAM as a whole. All processes share the"
        " CPUs.\n"
    )
    publish(options, "Engines that Ray Serve places", [intro, *sections])
    return 1 if any("NO." in section for section in sections) else 0


if __name__ == "__main__":
    sys.exit(main())
