"""Coroutines that begin at once: most answers are ready before anything has to be waited for, and need no task.

Nor do those that wait for one `Reply` after the other: whoever gives it lets the coroutine go on then and there.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, TypeVar

_T = TypeVar("_T")


class Begun(Protocol):
    """What has begun, and waits for something."""

    def cancel(self) -> object:
        """Raise CancelledError where it waits, soon."""
        ...


class Reply(Generic[_T]):
    """What a coroutine that `begin` began may wait for instead of a future, once. Event loop's thread."""

    __slots__ = ("_error", "_go_on", "_is_done", "_result")

    def __init__(self) -> None:
        self._go_on: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._is_done = False

    def __await__(self) -> Generator[Any, Any, _T]:
        try:
            yield self
        except BaseException:
            self._is_done = True
            raise
        if self._error is not None:
            raise self._error
        return self._result

    def awaited_by(self, go_on: Callable[[], None]) -> None:
        """Call this when the reply is there."""
        self._go_on = go_on

    def done(self) -> bool:
        """Whether it was given, or nobody waits for it any more."""
        return self._is_done

    def set_result(self, result: _T) -> None:
        self._result = result
        self._give()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._give()

    def _give(self) -> None:
        assert self._go_on is not None
        assert not self._is_done
        self._is_done = True
        self._go_on()


def reply() -> "Reply[Any] | asyncio.Future[Any]":
    """Something to wait for: a future, unless who asks is no task, but what `begin` began."""
    return Reply() if asyncio.current_task() is None else asyncio.get_running_loop().create_future()


def begin(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None]) -> Begun | None:
    """Run a coroutine up to where it first waits; returns what does the rest, or None if it has ended.

    Raises what it raises before that. It is no task before it has waited for something else than a `Reply`:
    `asyncio.timeout` must stand behind that. (Python 3.12's eager tasks do the same, and cost as much as others.)
    """
    context = contextvars.copy_context()
    try:
        awaited = context.run(coroutine.send, None)
    except StopIteration:
        return None
    if type(awaited) is Reply:
        return _Waiting(loop, coroutine, context, awaited)
    return loop.create_task(_Rest(coroutine, awaited), context=context)


class _Waiting:
    """A coroutine that waits for a reply. What it does behind that is done by whoever gives the reply."""

    __slots__ = ("_context", "_coroutine", "_is_cancelled", "_loop", "_task")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, None],
        context: contextvars.Context,
        awaited: Reply[Any],
    ) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._context = context
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None
        """Does what is left, once it has waited for anything else."""
        awaited.awaited_by(self._go_on)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._is_cancelled:
            self._is_cancelled = True
            self._loop.call_soon(self._raise)

    def _go_on(self) -> None:
        if not self._is_cancelled:  # else it hears of that, whatever the reply
            self._step(self._coroutine.send, None)

    def _raise(self) -> None:
        self._is_cancelled = False
        self._step(self._coroutine.throw, asyncio.CancelledError())

    def _step(self, step: Callable[[Any], Any], argument: object) -> None:
        try:
            awaited = self._context.run(step, argument)
        except (StopIteration, asyncio.CancelledError):
            return
        except Exception as error:
            self._loop.call_exception_handler({"message": "an answer has failed", "exception": error})
            return
        if type(awaited) is Reply:
            awaited.awaited_by(self._go_on)
        else:
            self._task = self._loop.create_task(_Rest(self._coroutine, awaited), context=self._context)


class _Rest(Coroutine[Any, Any, None]):
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
