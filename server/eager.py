"""Coroutines that begin at once: most answers are ready before anything has to be waited for, and need no task."""

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from typing import Any


def begin(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Run a coroutine up to where it first waits; returns the task that does the rest, or None if it has ended.

    Raises what it raises before that. It is no task by then: `asyncio.timeout` must stand behind the first wait.
    (Python 3.12's eager tasks do the same, and cost as much as others.)
    """
    context = contextvars.copy_context()
    try:
        awaited = context.run(coroutine.send, None)
    except StopIteration:
        return None
    return loop.create_task(_finish(coroutine, awaited), context=context)


async def _finish(coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
    await _Rest(coroutine, awaited)


class _Rest:
    """A coroutine that waits for something, which whoever awaits this gets to wait for."""

    __slots__ = ("_awaited", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._awaited
        except BaseException as error:  # a cancellation, mostly, which is the coroutine's to hear
            try:
                awaited = self._coroutine.throw(error)
            except StopIteration:
                return
            yield from _Rest(self._coroutine, awaited).__await__()
        else:
            yield from self._coroutine.__await__()
