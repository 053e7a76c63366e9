"""What `/metrics` answers: the models, the device, the machine."""

import asyncio
from collections.abc import Callable, Iterable

from server.engine.lanes import Lanes
from server.models.registry import Registry, State
from server.observe.model_metrics import View, families_of
from server.observe.prometheus import Family, written


class Metrics:
    """Belongs to the event loop's thread, which only notes what there is to be read."""

    def __init__(self, registry: Registry, lanes: Lanes, machine: Callable[[], Iterable[Family]]) -> None:
        self._registry = registry
        self._lanes = lanes
        self._machine = machine

    async def text(self) -> bytes:
        """Read and write everything, beside the event loop."""
        ready = [entry for entry in self._registry if entry.state is State.READY]
        views = [View(e, self._lanes.pending(e.name), self._lanes.correction(e.name)) for e in ready]
        states = {entry.name: entry.state is State.READY for entry in self._registry if entry.wanted}
        return await asyncio.to_thread(lambda: written((*families_of(views, states), *self._machine())))
