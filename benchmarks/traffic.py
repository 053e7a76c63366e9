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

from cohabit.loadgen.arrivals import RequestArrival, draw_arrivals
from cohabit.loadgen.client import address_of
from cohabit.loadgen.inputs import random_inputs
from cohabit.loadgen.openloop import RequestFailed, run_open_loop

MOST_IN_FLIGHT = 20_000
UNANSWERED_S = 30.0
"""A request without any answer for so long has none."""

OK, NO_ANSWER = 200, 0


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
    answered: int
    """With OK, before the time was up: what was still queued then is not the rate's."""

    @property
    def goodput_per_s(self) -> float:
        return self.answered / self.duration_s

    def percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.ok_latencies_s, percent)) if self.ok_latencies_s else float("nan")


@dataclass(frozen=True, slots=True)
class Request:
    """What is posted to one model."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Client:
    """A server, and a request ready to be sent to each of its models."""

    session: aiohttp.ClientSession
    requests: Mapping[str, Request]

    async def send(self, model: str) -> int:
        """Send one request and read its answer. Returns the status, or NO_ANSWER."""
        return await self._post(self.requests[model])

    async def control(self, model: str, order: str) -> int:
        """Load or unload a model. Returns the status, or NO_ANSWER."""
        return await self._post(Request(f"/v2/repository/models/{model}/{order}", {}, b"{}"))

    async def _post(self, request: Request) -> int:
        try:
            async with self.session.post(request.path, headers=request.headers, data=request.body) as answer:
                await answer.read()
                return answer.status
        except (aiohttp.ClientError, TimeoutError):
            return NO_ANSWER

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
        return Traffic(duration_s, statuses, latencies, latencies, [], [], statuses[OK])

    async def open_loop(
        self, models: Sequence[str], rate_per_s: float, duration_s: float, seed: int = 0
    ) -> Traffic:
        """Send at times drawn beforehand, whatever the server does."""

        async def send(arrival: RequestArrival) -> None:
            status = await self.send(arrival.model)
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
            sum(o.failure is None and o.arrival.at_s + o.latency_s <= duration_s for o in outcomes),
        )


def _status(kind: str) -> int:
    return int(kind) if kind.isdigit() else NO_ANSWER


@asynccontextmanager
async def client_of(url: str, models: Sequence[str], timeout_s: float | None = None) -> AsyncIterator[Client]:
    """Connect to a server; every request asks to be answered within `timeout_s`."""
    requests = await asyncio.to_thread(_requests, url, models, timeout_s)
    timeout, connector = aiohttp.ClientTimeout(total=UNANSWERED_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        yield Client(session, requests)


def _requests(url: str, models: Sequence[str], timeout_s: float | None) -> dict[str, Request]:
    rng = np.random.default_rng(0)
    timeout_us = None if timeout_s is None else round(timeout_s * 1e6)
    requests = {}
    with tritonclient.http.InferenceServerClient(address_of(url), network_timeout=UNANSWERED_S) as client:
        for model in models:
            inputs = random_inputs(client.get_model_metadata(model), 1, rng)
            raw, header_length = InferenceServerClient.generate_request_body(inputs, timeout=timeout_us)
            headers = {"Content-Type": "application/octet-stream"}
            if header_length is not None:
                headers["Inference-Header-Content-Length"] = str(header_length)
            requests[model] = Request(f"/v2/models/{model}/infer", headers, raw)
    return requests
