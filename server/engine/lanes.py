"""The compute lanes: an engine each, with a device thread and a scheduler of its own, and each model on one of them."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from server.engine.engine import Engine
from server.engine.statistics import ModelStatistics
from server.protocol.model import Execution, Servable, lane_name
from server.protocol.request import InferRequest
from server.scheduling.policy import Policy
from server.scheduling.scheduler import Scheduler


class Lanes:
    """Every method belongs to the event loop's thread. What a lane does for its models is `Engine`'s to say."""

    def __init__(
        self,
        count: int,
        queue_limit: int,
        queue_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        prefetch: bool = True,
        receives: Callable[[], bool] = lambda: False,
    ) -> None:
        """Bytes that wait are limited for all lanes together. `receives`: see `Engine`."""
        schedulers = [Scheduler(queue_limit, queue_bytes) for _ in range(count)]
        for scheduler in schedulers:
            scheduler.neighbours = tuple(other for other in schedulers if other is not scheduler)
        self._engines = [
            Engine(scheduler, clock, prefetch, receives, lane=lane, on_lost=self._all_lost)
            for lane, scheduler in enumerate(schedulers)
        ]
        self._engine_of: dict[str, Engine] = {}

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, lane: int) -> Engine:
        return self._engines[lane]

    @property
    def draining(self) -> bool:
        return self._engines[0].draining

    @property
    def lost(self) -> str | None:
        """Why nothing can be executed any more, or None while the device is well."""
        return self._engines[0].lost

    @property
    def computed_s(self) -> dict[str, float]:
        """Seconds that each compute lane has worked since the start."""
        count = len(self._engines)
        return {lane_name("compute", lane, count): engine.computed_s for lane, engine in enumerate(self._engines)}

    def pending(self, model: str) -> int:
        """How many requests wait in this model's queue."""
        return self._of(model).pending(model)

    def correction(self, model: str) -> float:
        """Measured over predicted time of this model's executions; 1 if it is not there."""
        return self._of(model).correction(model)

    def add(
        self, servable: Servable, statistics: ModelStatistics, policy: Policy | None = None, lane: int = 0
    ) -> None:
        """Execute requests for a model on a lane, or those that come from now on by another servable on its lane."""
        engine = self._engines[lane]
        assert self._engine_of.setdefault(servable.info.name, engine) is engine
        engine.add(servable, statistics, policy)

    def replan(self, servable: Servable) -> None:
        """Hear that a servable has other plans now."""
        self._of(servable.info.name).replan(servable)

    def remove(self, model: str) -> None:
        """Forget a model; what still waits for it is refused."""
        self._of(model).remove(model)
        self._engine_of.pop(model, None)

    def prefetch(self, on: bool) -> None:
        """Let the next model's copies begin beside the execution before theirs, or not, from now on."""
        for engine in self._engines:
            engine.prefetch(on)

    def hold(self, model: str, held: bool) -> None:
        """Keep a model's requests waiting while its memory is being changed, or let them go on."""
        self._of(model).hold(model, held)

    def start(self) -> None:
        for engine in self._engines:
            engine.start()

    def require_room(self, model: str) -> None:
        """Refuse a request before its body is read, if its queue is full. Raises QueueFull."""
        self._of(model).require_room(model)

    def infer(self, request: InferRequest) -> Coroutine[Any, Any, Execution]:
        """Execute a request on its model's lane. See `Engine.infer`."""
        return self._of(request.model).infer(request)

    def finish(self, model: str, timeout_s: float, older_only: bool = False) -> Coroutine[Any, Any, bool]:
        """Wait until a model's requests are answered. See `Engine.finish`."""
        return self._of(model).finish(model, timeout_s, older_only)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others to be answered; False if that took too long."""
        for engine in self._engines:
            engine.refuse()
        return all(await asyncio.gather(*(engine.drain(timeout_s) for engine in self._engines)))

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """Refuse whatever is not answered yet and end the threads; False if one is still busy after `timeout_s`."""
        return all(await asyncio.gather(*(engine.stop(timeout_s) for engine in self._engines)))

    def _of(self, model: str) -> Engine:
        """The engine of a model's lane; of one that nobody knows the first, which says so."""
        return self._engine_of.get(model, self._engines[0])

    def _all_lost(self, reason: str) -> None:
        """They have one device."""
        for engine in self._engines:
            engine.device_lost(reason)
