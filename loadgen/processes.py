"""Sends one run's arrivals from several processes, if one is too slow for the rate."""

import asyncio
import contextlib
import multiprocessing
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from cohabit.loadgen.arrivals import RequestArrival
from cohabit.loadgen.client import Credentials, connected, prepare_requests, sender
from cohabit.loadgen.errors import LoadgenError
from cohabit.loadgen.load import Load
from cohabit.loadgen.openloop import Outcome, Tally, run_open_loop

_HEAD_START_S = 0.1
"""Seconds between the start message and the start, so that the message reaches every process."""


async def run_in_processes(
    url: str,
    load: Load,
    models: Sequence[str],
    credentials: Credentials,
    arrivals: Sequence[RequestArrival],
    tally: Tally,
) -> float:
    """Send the arrivals from `load.processes` processes, each every n-th, with a common start. Fills `tally`.

    Returns the start on the clock of `time.perf_counter`. Raises LoadgenError if a process fails.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for n in range(load.processes):
            ours, theirs = context.Pipe()
            share = arrivals[n :: load.processes]
            process = context.Process(
                target=_work, args=(theirs, url, load, list(models), credentials, share), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        await asyncio.gather(*(_received(pipe) for pipe in pipes))  # all requests are prepared
        start_s = time.perf_counter() + _HEAD_START_S
        for pipe in pipes:
            pipe.send(start_s)
        answers = asyncio.gather(*(_received(pipe) for pipe in pipes))
        try:
            shares = await asyncio.shield(answers)
        except asyncio.CancelledError:  # keep the outcomes so far: a report may be made of them
            for pipe in pipes:
                pipe.send("stop")
            _join(tally, await answers)
            raise
        _join(tally, shares)
        return start_s
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _join(tally: Tally, shares: Sequence[list[Outcome]]) -> None:
    for share in shares:
        tally.outcomes += share


async def _received(pipe: Connection) -> list[Outcome]:
    try:
        answer: list[Outcome] | LoadgenError = await asyncio.to_thread(pipe.recv)
    except EOFError as error:
        raise LoadgenError("a sender process ended before the run did") from error
    if isinstance(answer, LoadgenError):
        raise answer
    return answer


def _work(
    pipe: Connection,
    url: str,
    load: Load,
    models: Sequence[str],
    credentials: Credentials,
    share: Sequence[RequestArrival],
) -> None:
    """Run in a sender process. Tells the parent when it is ready, then sends it the outcomes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops this process
    import uvloop

    async def send_share() -> list[Outcome]:
        tally = Tally()
        most = max(1, load.max_in_flight // load.processes)
        async with connected(url, most, load.timeout_s, credentials) as client:
            send = sender(client, await prepare_requests(client, models, load), load)
            pipe.send([])
            start_s = pipe.recv()
            run = asyncio.create_task(run_open_loop(share, send, most, tally, start_s))
            asyncio.get_running_loop().add_reader(pipe.fileno(), run.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await run
        return tally.outcomes

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(EOFError):
        try:
            pipe.send(runner.run(send_share()))
        except LoadgenError as error:
            pipe.send(error)
