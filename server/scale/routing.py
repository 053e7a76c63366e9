"""The ingress without Ray: routes requests to engines by model and load, and retries requests of a lost engine once."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote

import msgspec

from cohabit.server.errors import (
    EngineUnavailable,
    InvalidRequest,
    Refused,
    RequestError,
    RequestTimedOut,
    model_not_ready,
)
from cohabit.server.http.answers import JSON
from cohabit.server.http.codec import parse_header_length
from cohabit.server.http.errors import response_of
from cohabit.server.ipc.request import Parameters
from cohabit.server.protocol.json_body import parse_json
from cohabit.server.protocol.matching import unsigned

TRIES = 2
_ALIVE_S = 10.0
_LENGTH, _ENCODING = "inference-header-content-length", "content-encoding"


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request as received, its body with all tensors in one buffer. Header names are in lower case."""

    method: str
    target: str
    """Path and query, percent-encoded."""
    headers: Mapping[str, str]
    body: bytes | memoryview


@dataclass(frozen=True, slots=True)
class ForwardedAnswer:
    status: int
    headers: Mapping[str, str]
    body: bytes


_LIVE = ForwardedRequest("GET", "/v2/health/live", {}, b"")


class RoutedEngine(Protocol):
    """An engine that takes requests."""

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        """Raises EngineUnavailable if the engine dies, or does not answer."""


class _Timed(msgspec.Struct):
    parameters: Parameters = {}


class Router:
    """Routes requests to engines. Event loop's thread only."""

    def __init__(self, models: Collection[str], on_lost: Callable[[str], None]) -> None:
        """`models` are those of the repository; `on_lost` is called with an engine that has stopped answering."""
        self.models = models
        self.engines: dict[str, RoutedEngine] = {}
        """The engines that are alive."""
        self._on_lost = on_lost
        self._holders: Mapping[str, Sequence[str]] = {}
        self._failures: Mapping[str, str] = {}
        self._changed = asyncio.Event()
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._answered = asyncio.Event()
        self._sent: Counter[str] = Counter()

    def route(self, holders: Mapping[str, Sequence[str]], failures: Mapping[str, str]) -> None:
        """Route requests of these models to these engines from now on.

        Requests of other models wait for an engine that has them, or are refused if `failures` has a reason.
        """
        self._holders, self._failures = holders, failures
        self._changed.set()
        self._changed = asyncio.Event()

    def load(self, engine: str, model: str | None = None) -> int:
        """Return the number of requests of an engine, of one model or all."""
        return sum(n for (asked, of), n in self._under_way.items() if asked == engine and model in (None, of))

    async def idle(self, engine: str, model: str | None = None) -> None:
        """Return once an engine has no request, of one model or any."""
        while self.load(engine, model):
            self._answered.clear()
            await self._answered.wait()

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        """Answer a request, or return the error as JSON."""
        try:
            return await self._answer(request)
        except RequestError as error:
            return refusal(error)

    async def _answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        parts = request.target.partition("?")[0].strip("/").split("/")
        match parts:
            case ["v2", "health", "live"]:
                return _json(200, {"live": True})
            case ["v2", "health", "ready"]:
                return await self._ready(request)
            case ["v2", "repository", "index"] | ["v2", "models", "stats"]:
                return await self._of_all(request, list(self.engines))
            case ["v2", "models", model, "stats"] | ["v2", "models", model, "versions", _, "stats"]:
                return await self._of_all(request, self._holders.get(unquote(model)) or list(self.engines))
            case ["v2", "repository", *_]:
                raise Refused(
                    "Unsupported", "models are assigned to engines when `cohabit scale` starts; start it again"
                )
            case ["v2", "models", _, "trace", *_] | ["v2", "trace" | "logging", *_]:
                raise Refused("Unsupported", "these settings are one engine's; set them when the engines start")
            case ["v2", "systemsharedmemory" | "cudasharedmemory", *_]:
                raise Refused("Unsupported", "clients and engines share no memory; send tensors as binary data")
            case ["v2", "models", model, *_]:
                return await self._retried(request, unquote(model))
            case ["v2"] | ["v2", "openapi.json"]:
                return await self._retried(request, "")
            case _:
                return _json(404, {"error": "Not Found"})

    def _alive(self, model: str) -> Sequence[str]:
        return [engine for engine in self._holders.get(model, ()) if engine in self.engines]

    async def _holder_of(self, model: str) -> str:
        """Return the least loaded engine that has a model, once there is one. Raises Refused if it cannot be loaded.

        Any engine can refuse a model that the repository does not have.
        """
        while True:
            holders = self._alive(model) if model in self.models else self.engines
            if holders:
                return min(holders, key=lambda engine: (self.load(engine), self._sent[engine]))
            if (reason := self._failures.get(model)) is not None:
                raise model_not_ready(model, reason)
            await self._changed.wait()

    async def _retried(self, request: ForwardedRequest, model: str) -> ForwardedAnswer:
        """Ask the least loaded engine; if it is lost, retry once, with another engine or its successor.

        Raises Refused if that is lost as well, and RequestTimedOut.
        """
        timeout_s = _timeout_s(request)
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(TRIES):
                    engine = await self._holder_of(model)
                    try:
                        return await self.ask(engine, request, model)
                    except EngineUnavailable as error:
                        lost = error
                text = (
                    f"model '{model}': the engine's process died twice while it executed this request ({lost});"
                    " it is not tried again"
                )
                raise Refused("EngineFailed", text)
        except TimeoutError as error:
            raise RequestTimedOut(model, timeout_s or 0.0) from error

    async def ask(self, engine: str, request: ForwardedRequest, model: str = "") -> ForwardedAnswer:
        """Raises EngineUnavailable; then the engine is no longer used."""
        if (asked := self.engines.get(engine)) is None:
            raise EngineUnavailable("it is lost")
        self._under_way[engine, model] += 1
        self._sent[engine] += 1
        try:
            return await asked.answer(request)
        except EngineUnavailable:
            if self.engines.get(engine) is asked:
                self._drop(engine)
            raise
        finally:
            self._under_way[engine, model] -= 1
            if not self._under_way[engine, model]:
                del self._under_way[engine, model]
            self._answered.set()

    async def drop_lost(self) -> None:
        """Ask every engine whether it is alive; those that do not answer are lost."""
        await asyncio.gather(*(self._drop_if_lost(engine) for engine in list(self.engines)))

    async def _drop_if_lost(self, engine: str) -> None:
        with suppress(EngineUnavailable):
            try:
                async with asyncio.timeout(_ALIVE_S):
                    await self.ask(engine, _LIVE)
            except TimeoutError:  # such as an engine whose machine is lost
                self._drop(engine)

    def _drop(self, engine: str) -> None:
        if self.engines.pop(engine, None) is not None:
            self._on_lost(engine)

    async def _ready(self, request: ForwardedRequest) -> ForwardedAnswer:
        """Answer whether every model has an engine and every engine is ready. Ignores engines lost meanwhile."""
        answers = await self._ask_all(request, list(self.engines))
        if not answers or not all(map(self._alive, self.models)):
            return _json(400, {"error": "engines are being started, or load models"})
        return next((answer for answer in answers if answer.status != 200), answers[0])

    async def _of_all(self, request: ForwardedRequest, engines: Sequence[str]) -> ForwardedAnswer:
        """Combine the answers of several engines, without those of lost engines.

        Statistics have an entry per engine. The index has one per version: the state where it is served.
        """
        answers = await self._ask_all(request, [engine for engine in engines if engine in self.engines])
        refused = next((answer for answer in answers if answer.status != 200), None)
        if refused is not None or not answers:
            return refused or _json(503, {"error": "every engine is being started again"})
        bodies: list[Any] = [msgspec.json.decode(answer.body) for answer in answers]
        if isinstance(bodies[0], dict):
            return _json(200, {key: [entry for body in bodies for entry in body[key]] for key in bodies[0]})
        entries: dict[tuple[str, str | None], dict[str, str]] = {}
        for entry in (entry for body in bodies for entry in body):
            key = entry["name"], entry.get("version")
            if key not in entries or entry.get("state") == "READY":
                entries[key] = entry
        served = {name for (name, _), entry in entries.items() if entry.get("state") == "READY"}
        return _json(
            200, [e for (name, version), e in entries.items() if version is not None or name not in served]
        )

    async def _ask_all(self, request: ForwardedRequest, engines: Sequence[str]) -> list[ForwardedAnswer]:
        """Ask several engines; drops those lost meanwhile."""
        answers = await asyncio.gather(*(self.ask(e, request) for e in engines), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineUnavailable):
                raise answer
        return [answer for answer in answers if isinstance(answer, ForwardedAnswer)]


def refusal(error: RequestError) -> ForwardedAnswer:
    answer = response_of(error)
    assert isinstance(answer.body, bytes)
    headers = {name.lower(): value for name, value in answer.headers.items() if name.lower() != "content-length"}
    return ForwardedAnswer(answer.status, headers, answer.body)


def _timeout_s(request: ForwardedRequest) -> float | None:
    """Return the request's own timeout; None if it has none, cannot be read here, or is not valid JSON."""
    try:
        length = parse_header_length(request.headers.get(_LENGTH))
        end = len(request.body) if length is None else length
        if _ENCODING in request.headers or b'"timeout"' not in (head := bytes(request.body[:end])):
            return None
        timed = parse_json(memoryview(head), _Timed)
        timeout_us = unsigned(timed.parameters, "timeout", "the request")
    except InvalidRequest:
        return None  # the engine reports the error
    return timeout_us / 1e6 if timeout_us else None


def _json(status: int, content: object) -> ForwardedAnswer:
    return ForwardedAnswer(status, {"content-type": JSON}, msgspec.json.encode(content))
