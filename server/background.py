"""Background tasks that run as long as their owner. A failure is logged, and the task is retried."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from cohabit.planner.errors import CohabitError

_log = logging.getLogger("cohabit.background")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses between a failure and the retry. The pause is doubled each time, and reset once a task runs for longer."""

Work = Callable[[], Coroutine[Any, Any, None]]


class Background:
    """Belongs to the event loop's thread."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._sleep = sleep
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def keep(self, name: str, work: Work) -> None:
        """Run `work` until it returns; retry it after every failure. `name` describes it in the log."""
        task = asyncio.create_task(self._keep(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all tasks, and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, name: str, work: Work) -> None:
        loop, pause_s = asyncio.get_running_loop(), FIRST_PAUSE_S
        while True:
            begun_s = loop.time()
            try:
                await work()
                return
            except Exception as error:
                if loop.time() - begun_s > pause_s:
                    pause_s = FIRST_PAUSE_S
                fields = {"task": name, "reason": str(error) or type(error).__name__, "again_in_s": pause_s}
                unexpected = None if isinstance(error, CohabitError | OSError) else error
                _log.error("a background task has failed", extra={"fields": fields}, exc_info=unexpected)
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
