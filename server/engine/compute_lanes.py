"""The compute lanes of one device, each with a thread and a scheduler, and the assignment of models to lanes."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.engine.execution import Servable
from cohabit.server.ipc.model import ModelKey, lane_name
from cohabit.server.ipc.request import Answer, Request
from cohabit.server.ipc.spans import OnSpans
from cohabit.server.ipc.statistics import ModelStatistics
from cohabit.server.scheduling.policy import Policy
from cohabit.server.scheduling.scheduler import Scheduler


class ComputeLanes:
    """All methods belong to the event loop's thread."""

    def __init__(
        self,
        count: int,
        queue_limit: int,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`on_lost` is called once, with the reason, when the device is lost."""
        self._lanes = [ComputeLane(Scheduler(queue_limit), lane, self._all_lost) for lane in range(count)]
        self._on_lost = on_lost
        self._lane_of: dict[ModelKey, ComputeLane] = {}

    def __getitem__(self, lane: int) -> ComputeLane:
        return self._lanes[lane]

    @property
    def draining(self) -> bool:
        return self._lanes[0].draining

    @property
    def lost(self) -> str | None:
        """Why nothing can be executed any more, or None while the device works."""
        return self._lanes[0].lost

    @property
    def computed_s(self) -> dict[str, float]:
        """Seconds of computation since the start, by lane name."""
        count = len(self._lanes)
        return {
            lane_name("compute", number, count): lane.device.computed_s for number, lane in enumerate(self._lanes)
        }

    @property
    def executing(self) -> tuple[float, float]:
        """When the oldest execution under way began and its prediction, in seconds; zeros if there is none."""
        executing = (lane.device.executing for lane in self._lanes)
        return min((one for one in executing if one[0]), default=(0.0, 0.0))

    def of(self, model: ModelKey) -> ComputeLane:
        """Return a model's lane; for an unknown model the first lane, which raises ModelNotFound."""
        return self._lane_of.get(model, self._lanes[0])

    def add(
        self, servable: Servable, statistics: ModelStatistics, policy: Policy | None = None, lane: int = 0
    ) -> None:
        """Serve a model on a lane, or replace the servable of its future requests. Its lane is fixed."""
        own = self._lanes[lane]
        assert self._lane_of.setdefault(servable.info.key, own) is own
        own.add(servable, statistics, policy)

    def remove(self, model: ModelKey) -> None:
        """Remove a model and refuse its waiting requests."""
        self.of(model).remove(model)
        self._lane_of.pop(model, None)

    def start(self) -> None:
        for lane in self._lanes:
            lane.start()

    def infer(self, request: Request, on_spans: OnSpans | None = None) -> Coroutine[Any, Any, Answer]:
        """Execute a request on its model's lane. See `ComputeLane.infer`."""
        return self.of(request.model).infer(request, on_spans)

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """Refuse unanswered requests and end the threads; False if one is still busy after `timeout_s`."""
        return all(await asyncio.gather(*(lane.stop(timeout_s) for lane in self._lanes)))

    def _all_lost(self, reason: str) -> None:
        """Mark all lanes as lost, because they share one device."""
        for lane in self._lanes:
            lane.device_lost(reason)
        on_lost, self._on_lost = self._on_lost, lambda reason: None
        on_lost(reason)
