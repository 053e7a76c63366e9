"""Reassigns models to engines whenever engines come or go, and loads them before requests are routed there."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import quote

import msgspec

from cohabit.planner.sizing.assignment import Assignment, ModelTraffic
from cohabit.server.errors import EngineUnavailable
from cohabit.server.scale.routing import ForwardedAnswer, ForwardedRequest, RoutedEngine, Router

_log = logging.getLogger("cohabit.scale")
_POLL_S = 0.3
_STARTING_S = 30.0
"""Maximum wait in seconds for starting engines, before models are assigned to the others."""


class Assigner:
    """Tracks the engines and their loaded models, and moves models. Event loop's thread only."""

    def __init__(
        self,
        models: Sequence[str],
        assign: Callable[[int], Assignment],
        count_engines: Callable[[], Awaitable[int]],
    ) -> None:
        """`assign` divides models among engines. `count_engines` counts running and starting engines."""
        self.router = Router(models, self._lost)
        self._assign = assign
        self._count_engines = count_engines
        self._loaded: dict[str, set[str]] = {}
        self._wanted: dict[str, Sequence[ModelTraffic]] = {}
        self._failures: dict[str, str] = {}
        self._joining: dict[str, asyncio.Future[Sequence[ModelTraffic]]] = {}
        self._leaving: set[str] = set()
        self._change = asyncio.Event()
        self._moved = asyncio.Event()

    async def join(self, engine: str) -> Sequence[ModelTraffic]:
        """Return the models that an engine loads when it starts."""
        part = self._joining.setdefault(engine, asyncio.get_running_loop().create_future())
        self._change.set()
        return await asyncio.shield(part)

    async def joined(self, engine: str, address: RoutedEngine) -> None:
        """Route requests to an engine, which serves its models. Does nothing for a known engine."""
        if engine in self.router.engines or engine in self._leaving:
            return
        self.router.engines[engine] = address
        self._loaded[engine] = set()
        answer = await self._ask(engine, "/v2/repository/index", b'{"ready": true}')
        if answer is not None:
            self._loaded[engine] = {entry["name"] for entry in msgspec.json.decode(answer.body)}
        self._joining.pop(engine, None)
        self._route()
        self._change.set()

    async def leave(self, engine: str) -> None:
        """Return once a stopping engine gets no more requests: others serve its models, or there are no others."""
        self._leaving.add(engine)
        self._change.set()
        self._notify()
        while self._is_needed(engine):
            await self._moved.wait()
        self.router.engines.pop(engine, None)
        self._lost(engine)
        await self.router.idle(engine)

    async def wait_until_loaded(self) -> None:
        """Return once every engine has loaded its models."""
        while not self._wanted or any(set(self._names(e)) - self._loaded.get(e, set()) for e in self._wanted):
            await self._moved.wait()

    async def run(self) -> None:
        """Assign models, until cancelled."""
        while True:
            await self._change.wait()
            self._change.clear()
            engines = await self._engines_to_assign()
            self._wanted = self._matched(engines, self._assign(len(engines)))
            for engine, part in self._joining.items():
                if engine in self._wanted and not part.done():
                    part.set_result(self._wanted[engine])
            self._failures.clear()
            while await self._move():
                pass  # unloading makes room for models that could not be loaded

    async def _engines_to_assign(self) -> list[str]:
        """Return the engines among which models are divided: all that Ray keeps, or those started in time."""
        deadline_s = asyncio.get_running_loop().time() + _STARTING_S
        while True:
            await self.router.drop_lost()
            count = await self._count_engines()
            there = [engine for engine in self._loaded if engine not in self._leaving]
            loading = [engine for engine, part in self._joining.items() if part.done()]
            for engine in loading[: max(0, len(there) + len(self._joining) - count)]:
                del self._joining[engine]  # it died meanwhile, and its successor has joined
            engines = [*there, *(engine for engine in self._joining if engine not in there)]
            if engines and len(engines) == count:
                return engines
            if there and asyncio.get_running_loop().time() > deadline_s:
                self._change.set()  # to check again
                return engines
            await asyncio.sleep(_POLL_S)

    def _matched(self, engines: Sequence[str], parts: Assignment) -> dict[str, Sequence[ModelTraffic]]:
        """Give each engine the part that overlaps most, in bytes, with its loaded models, so that little moves."""
        left, matched = list(parts), dict[str, Sequence[ModelTraffic]]()
        held = {e: self._loaded.get(e) or {m.name for m in self._wanted.get(e, ())} for e in sorted(engines)}
        for engine in sorted(held, key=lambda e: -len(held[e])):
            part = max(left, key=lambda part: sum(m.weight_bytes for m in part if m.name in held[engine]))
            left.remove(part)
            matched[engine] = part
        return matched

    async def _move(self) -> bool:
        """Load missing models, route to them, and unload moved ones. Returns whether to do so again."""
        missing = {e: [m for m in self._names(e) if m not in held] for e, held in self._loaded.items()}
        await asyncio.gather(*(self._load(engine, models) for engine, models in missing.items()))
        self._route()
        surplus = [(e, m) for e, held in self._loaded.items() for m in held if self._has_moved(e, m)]
        for engine, model in surplus:
            self._loaded[engine].discard(model)
        self._route()
        await asyncio.gather(*(self._unload(engine, model) for engine, model in surplus))
        return bool(surplus) and bool(self._failures)

    async def _load(self, engine: str, models: Sequence[str]) -> None:
        for model in models:
            answer = await self._ask(engine, f"/v2/repository/models/{quote(model, safe='')}/load")
            if answer is not None and answer.status == 200 and engine in self._loaded:
                self._loaded[engine].add(model)
                self._failures.pop(model, None)
            elif answer is not None:
                self._failures[model] = msgspec.json.decode(answer.body)["error"]
                fields = {"model": model, "engine": engine, "reason": self._failures[model]}
                _log.error("a model could not be moved", extra={"fields": fields})

    async def _unload(self, engine: str, model: str) -> None:
        await self.router.idle(engine, model)
        await self._ask(engine, f"/v2/repository/models/{quote(model, safe='')}/unload")

    async def _ask(self, engine: str, path: str, body: bytes = b"{}") -> ForwardedAnswer | None:
        """Return an engine's answer, or None if it is lost."""
        try:
            return await self.router.ask(engine, ForwardedRequest("POST", path, {}, body))
        except EngineUnavailable:
            return None

    def _names(self, engine: str) -> Sequence[str]:
        return [model.name for model in self._wanted.get(engine, ())]

    def _has_moved(self, engine: str, model: str) -> bool:
        """Whether all assigned engines have loaded a model, and this engine is not one of them."""
        holders = [e for e in self._wanted if model in self._names(e)]
        return engine not in holders and bool(holders) and all(model in self._loaded.get(e, ()) for e in holders)

    def _is_needed(self, engine: str) -> bool:
        others = [held for e, held in self._loaded.items() if e not in self._leaving]
        return bool(others) and not self._loaded.get(engine, set()) - self._failures.keys() <= set().union(*others)

    def _route(self) -> None:
        """Route each model to its assigned engines that have loaded it, or else to any that have."""
        holders = {}
        for model in self.router.models:
            having = [engine for engine, held in self._loaded.items() if model in held]
            holders[model] = [engine for engine in having if model in self._names(engine)] or having
        self.router.route(holders, self._failures)
        self._notify()

    def _lost(self, engine: str) -> None:
        self._loaded.pop(engine, None)
        self._change.set()
        self._notify()

    def _notify(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
