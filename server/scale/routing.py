"""The ingress without Ray: routes requests to engines by model and load, and tries those of a lost engine once more."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
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
    statuses_of,
)
from cohabit.server.http.answers import JSON, parse_json
from cohabit.server.http.codec import parse_header_length
from cohabit.server.ipc.request import Parameters
from cohabit.server.protocol.matching import unsigned

TRIES = 2
_LENGTH, _ENCODING = "inference-header-content-length", "content-encoding"
_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request as it came; tensors are in one buffer, the body. Names of headers are in lower case."""

    method: str
    target: str
    """Path and query, percent-encoded."""
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class ForwardedAnswer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class EngineReplicas(Protocol):
    """The replicas of one engine. There may be none for a while: a request waits for the next one."""

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        """Raises EngineUnavailable if the replica that has the request dies."""


class _Timed(msgspec.Struct):
    parameters: Parameters = {}


class Router:
    """Routes requests to engines. Event loop's thread only."""

    def __init__(self, engines: Mapping[str, EngineReplicas], models: Mapping[str, Sequence[str]]) -> None:
        """`models` are those of each engine."""
        self._engines = engines
        self._holders: dict[str, list[str]] = {}
        for engine, names in models.items():
            for name in names:
                self._holders.setdefault(name, []).append(engine)
        self._under_way: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._returning: dict[str, asyncio.Task[None]] = {}
        """Engines that are lost, each with a task that ends once it answers again."""

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        """Answer a request, or say as JSON why it has no answer."""
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
                return await self._of_all(request, list(self._engines))
            case ["v2", "models", model, "stats"] | ["v2", "models", model, "versions", _, "stats"]:
                return await self._of_all(request, self._holders_of(unquote(model)))
            case ["v2", "repository", *_]:
                raise Refused(
                    "Unsupported", "models are assigned to engines when `cohabit scale` starts; start it again"
                )
            case ["v2", "models", _, "trace", *_] | ["v2", "trace" | "logging", *_]:
                raise Refused("Unsupported", "these settings are one engine's; set them when the engines start")
            case ["v2", "systemsharedmemory" | "cudasharedmemory", *_]:
                raise Refused("Unsupported", "clients and engines share no memory; send tensors as binary data")
            case ["v2", "models", model, *_]:
                return await self._retried(request, unquote(model), self._holders_of(unquote(model)))
            case ["v2"] | ["v2", "openapi.json"]:
                return await self._retried(request, "", list(self._engines))
            case _:
                return _json(404, {"error": "Not Found"})

    def _holders_of(self, model: str) -> Sequence[str]:
        """Any engine knows how to refuse a model that none has."""
        return self._holders.get(model) or list(self._engines)

    async def _retried(self, request: ForwardedRequest, model: str, holders: Sequence[str]) -> ForwardedAnswer:
        """Ask the engine of least load; if it is lost, ask once more, another one or its successor.

        Raises Refused if that is lost as well, and RequestTimedOut.
        """
        timeout_s = _timeout_s(request)
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(TRIES):
                    engine = min(holders, key=lambda e: (e in self._returning, self._under_way[e], self._sent[e]))
                    if (returning := self._returning.get(engine)) is not None:
                        await asyncio.shield(returning)
                    try:
                        return await self._ask(engine, request)
                    except EngineUnavailable as error:
                        lost = error
                text = (
                    f"model '{model}': the engine's process died twice while it executed this request ({lost});"
                    " it is not tried again"
                )
                raise Refused("EngineFailed", text)
        except TimeoutError as error:
            raise RequestTimedOut(model, timeout_s or 0.0) from error

    async def _ask(self, engine: str, request: ForwardedRequest) -> ForwardedAnswer:
        """Raises EngineUnavailable, and has the engine's return noticed."""
        self._under_way[engine] += 1
        self._sent[engine] += 1
        try:
            return await self._engines[engine].answer(request)
        except EngineUnavailable:
            if engine not in self._returning:
                self._returning[engine] = asyncio.create_task(self._return_of(engine))
            raise
        finally:
            self._under_way[engine] -= 1

    async def _return_of(self, engine: str) -> None:
        """Return once the engine's successor has loaded its models."""
        ready = ForwardedRequest("GET", "/v2/health/live", {}, b"")
        while True:
            try:
                await self._engines[engine].answer(ready)
            except EngineUnavailable:
                await asyncio.sleep(_AGAIN_S)
            else:
                del self._returning[engine]
                return

    async def _ready(self, request: ForwardedRequest) -> ForwardedAnswer:
        """Ready while every engine is; a lost one is not waited for."""
        if self._returning:
            return _json(400, {"error": f"{', '.join(sorted(self._returning))} is being started again"})
        answers = await self._asked(request, list(self._engines))
        return next((answer for answer in answers if answer.status != 200), answers[0])

    async def _of_all(self, request: ForwardedRequest, engines: Sequence[str]) -> ForwardedAnswer:
        """Put the answers of several engines together; a lost engine's part is left out.

        Statistics have an entry per engine. The index has one per version: the state where it is served.
        """
        answers = await self._asked(request, [e for e in engines if e not in self._returning])
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

    async def _asked(self, request: ForwardedRequest, engines: Sequence[str]) -> list[ForwardedAnswer]:
        """Ask several engines, without those that are lost meanwhile."""
        answers = await asyncio.gather(*(self._ask(e, request) for e in engines), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineUnavailable):
                raise answer
        return [answer for answer in answers if isinstance(answer, ForwardedAnswer)]


def refusal(error: RequestError) -> ForwardedAnswer:
    return _json(statuses_of(error).http, {"error": str(error)})


def _timeout_s(request: ForwardedRequest) -> float | None:
    """Return the request's own timeout; None if it has none that can be read here, or no valid JSON."""
    try:
        length = parse_header_length(request.headers.get(_LENGTH))
        end = len(request.body) if length is None else length
        if _ENCODING in request.headers or request.body.find(b'"timeout"', 0, end) < 0:
            return None
        timed = parse_json(memoryview(request.body)[:end], _Timed)
        timeout_us = unsigned(timed.parameters, "timeout", "the request")
    except InvalidRequest:
        return None  # the engine says what is wrong
    return timeout_us / 1e6 if timeout_us else None


def _json(status: int, content: object) -> ForwardedAnswer:
    return ForwardedAnswer(status, {"content-type": JSON}, msgspec.json.encode(content))
