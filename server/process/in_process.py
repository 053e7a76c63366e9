"""An engine in the front end's process: less memory, but no isolation from crashes."""

import asyncio
from typing import TYPE_CHECKING

from cohabit.server.frontend.memory import Lease
from cohabit.server.ipc.catalog import Catalog
from cohabit.server.ipc.model import ModelInfo, ModelKey
from cohabit.server.ipc.request import Answer, Request, SequenceId
from cohabit.server.ipc.spans import OnSpans
from cohabit.server.ipc.statistics import EngineReport
from cohabit.server.observe.settings import LogSettings

if TYPE_CHECKING:
    from cohabit.server.process.engine import Engine


class InProcessEngine:
    """An `EngineClient` for an engine in this process."""

    restarts = waiting = 0

    def __init__(self, engine: "Engine", catalog: Catalog) -> None:
        """`catalog` is the one that the engine publishes to."""
        self.catalog = catalog
        self._engine = engine
        self._ending: set[asyncio.Task[None]] = set()
        """One per cancelled request whose execution still uses its memory."""

    @property
    def unavailable(self) -> str | None:
        if (lost := self._engine.lost) is not None:
            return f"the device is lost: {lost}"
        return None if self._engine.started else "the engine is starting"

    async def infer(
        self, request: Request, info: ModelInfo, lease: Lease, on_spans: OnSpans | None = None
    ) -> Answer:
        lease.retain()
        if request.sequence is not None:
            lease.on_end(lambda kept: self._engine.settle(request, kept=kept))
        try:
            return await self._engine.infer(request, on_spans)
        except asyncio.CancelledError:
            lease.retain()
            ending = asyncio.create_task(self._engine.ended(request))
            ending.add_done_callback(lambda _: lease.release())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            raise
        finally:
            lease.release()

    async def load(self, model: str, config: str | None) -> None:
        await self._engine.lifecycle.load(model, config)

    async def unload(self, model: str) -> None:
        await self._engine.lifecycle.unload(model)

    async def report(self, model: ModelKey | None = None) -> EngineReport:
        return self._engine.report(model)

    def count_rejection(self, model: ModelKey, reason: str) -> None:
        self._engine.registry.count_rejection(model, reason)

    def end_sequence(self, model: ModelKey, sequence: SequenceId, *, spare: bool = False) -> None:
        self._engine.end_sequence(model, sequence, spare=spare)

    def change_log(self, settings: LogSettings) -> None:
        """Do nothing: the process has one log."""

    async def close(self) -> bool:
        return await self._engine.stop()
