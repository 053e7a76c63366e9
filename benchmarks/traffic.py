"""Requests as bytes, sent as fast as they are answered or at times drawn beforehand, and what became of them."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import numpy as np
import tritonclient.http
from tritonclient.http import InferenceServerClient

from loadgen.arrivals import draw_arrivals
from loadgen.client import address_of
from loadgen.inputs import random_inputs
from loadgen.openloop import RequestFailed, run_open_loop

MOST_IN_FLIGHT = 20_000
UNANSWERED_S = 30.0
"""A request without any answer for so long has none."""

OK = 200


@dataclass(frozen=True, slots=True)
class Body:
    """A request's bytes, and the headers that go with them."""

    raw: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What became of the requests of one run, by HTTP status; 0 stands for no answer at all."""

    duration_s: float
    statuses: Mapping[int, int]
    ok_latencies_s: Sequence[float]
    """From the intended send time."""
    ok_waits_s: Sequence[float]
    """From the actual send time: what a timeout that travels with the request can promise."""
    refusal_latencies_s: Sequence[float]
    lags_s: Sequence[float]

    @property
    def goodput_per_s(self) -> float:
        return self.statuses.get(OK, 0) / self.duration_s

    def percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.ok_latencies_s, percent)) if self.ok_latencies_s else float("nan")


@dataclass(frozen=True, slots=True)
class Client:
    """A server, and a request ready to be sent to each of its models."""

    url: str
    session: aiohttp.ClientSession
    bodies: Mapping[str, Body]

    async def send(self, model: str) -> int:
        """Send one request and read its answer; returns the status."""
        body = self.bodies[model]
        target = f"{self.url}/v2/models/{model}/infer"
        try:
            async with self.session.post(target, data=body.raw, headers=body.headers) as response:
                await response.read()
                return response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0

    async def closed_loop(self, models: Sequence[str], at_once: int, duration_s: float) -> Traffic:
        """Keep so many requests under way, over all models in turn."""
        statuses, latencies, end_s = Counter[int](), list[float](), time.perf_counter() + duration_s

        async def ask_on(first: int) -> None:
            number = first
            while time.perf_counter() < end_s:
                start_s = time.perf_counter()
                status = await self.send(models[number % len(models)])
                statuses[status] += 1
                if status == OK:
                    latencies.append(time.perf_counter() - start_s)
                number += 1

        await asyncio.gather(*(ask_on(first) for first in range(at_once)))
        return Traffic(duration_s, statuses, latencies, latencies, [], [])

    async def open_loop(
        self, models: Sequence[str], rate_per_s: float, duration_s: float, seed: int = 0
    ) -> Traffic:
        """Send at times drawn beforehand, whatever the server does."""

        async def send(model: str) -> None:
            status = await self.send(model)
            if status != OK:
                raise RequestFailed(str(status), "refused")

        arrivals = draw_arrivals(rate_per_s, duration_s, dict.fromkeys(models, 1.0), seed)
        outcomes = await run_open_loop(arrivals, send, MOST_IN_FLIGHT)
        statuses = Counter(OK if o.failure is None else _status(o.failure.kind) for o in outcomes)
        return Traffic(
            duration_s,
            statuses,
            [o.latency_s for o in outcomes if o.failure is None],
            [o.latency_s - o.lag_s for o in outcomes if o.failure is None],
            [o.latency_s for o in outcomes if o.failure is not None],
            [o.lag_s for o in outcomes],
        )


def _status(kind: str) -> int:
    return int(kind) if kind.isdigit() else 0


@asynccontextmanager
async def client_of(url: str, models: Sequence[str], timeout_s: float | None = None) -> AsyncIterator[Client]:
    """Connect to a server; every request asks to be answered within `timeout_s`."""
    bodies = await asyncio.to_thread(_bodies, url, models, timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=UNANSWERED_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield Client(url, session, bodies)


def _bodies(url: str, models: Sequence[str], timeout_s: float | None) -> dict[str, Body]:
    rng = np.random.default_rng(0)
    timeout_us = None if timeout_s is None else round(timeout_s * 1e6)
    bodies = {}
    with tritonclient.http.InferenceServerClient(address_of(url), network_timeout=UNANSWERED_S) as client:
        for model in models:
            inputs = random_inputs(client.get_model_metadata(model), 1, rng)
            raw, header_length = InferenceServerClient.generate_request_body(inputs, timeout=timeout_us)
            headers = {"Content-Type": "application/octet-stream"}
            if header_length is not None:
                headers["Inference-Header-Content-Length"] = str(header_length)
            bodies[model] = Body(raw, headers)
    return bodies
