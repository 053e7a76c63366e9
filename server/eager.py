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
    return loop.create_task(_Begun(coroutine, awaited), context=context)


class _Begun(Coroutine[Any, Any, None]):
    """A coroutine that waits for something already, which the first to run it gets to wait for."""

    __slots__ = ("_awaited", "_coroutine", "_is_told")

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited
        self._is_told = False

    def send(self, value: Any) -> Any:
        if self._is_told:
            return self._coroutine.send(value)
        self._is_told = True
        return self._awaited

    def throw(self, *error: Any) -> Any:
        self._is_told = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("only a task runs this")
