"""What begins at once goes on as any task does."""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from server.eager import Begun, Reply, begin, reply

NOTED: ContextVar[str] = ContextVar("noted", default="nothing")


def begun(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    task = begin(asyncio.get_running_loop(), coroutine)
    assert task is None or isinstance(task, asyncio.Task)
    return task


async def outside(coroutine: Coroutine[Any, Any, None]) -> Begun:
    """Begin it where ports do: in a callback, which belongs to no task."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Begun | None] = loop.create_future()
    loop.call_soon(lambda: made.set_result(begin(loop, coroutine)))
    waiting = await made
    assert waiting is not None
    return waiting


async def test_what_waits_for_nothing_has_ended_before_anybody_goes_on() -> None:
    ended = []

    async def quick() -> None:
        ended.append(True)

    assert begun(quick()) is None
    assert ended == [True]


async def test_what_waits_goes_on_when_it_may() -> None:
    first, second = asyncio.get_running_loop().create_future(), asyncio.Event()
    steps = []

    async def slow() -> None:
        steps.append(0)
        steps.append(await first)
        await asyncio.sleep(0)
        steps.append(2)
        await second.wait()
        steps.append(3)

    task = begun(slow())
    assert task is not None
    assert steps == [0]
    for _ in range(3):
        await asyncio.sleep(0)
    assert steps == [0]
    first.set_result(1)
    second.set()
    await task
    assert steps == [0, 1, 2, 3]


async def test_what_it_waits_for_may_be_there_before_its_task_has_begun() -> None:
    awaited = asyncio.get_running_loop().create_future()
    got = []

    async def slow() -> None:
        got.append(await awaited)

    task = begun(slow())
    awaited.set_result("early")
    assert task is not None
    await task
    assert got == ["early"]


async def test_what_fails_at_once_fails_for_whoever_began_it_and_later_for_its_task() -> None:
    async def fails(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        raise KeyError(turns)

    with pytest.raises(KeyError, match="0"):
        begun(fails(0))
    for turns in (1, 2):
        task = begun(fails(turns))
        assert task is not None
        with pytest.raises(KeyError, match=str(turns)):
            await task


async def test_an_error_that_it_waits_for_is_raised_where_it_waits() -> None:
    awaited = asyncio.get_running_loop().create_future()
    heard = []

    async def careful() -> None:
        try:
            await awaited
        except OSError as error:
            heard.append(str(error))

    task = begun(careful())
    awaited.set_exception(OSError("gone"))
    assert task is not None
    await task
    assert heard == ["gone"]


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_cancellation_reaches_it_wherever_it_waits(turns: int) -> None:
    """And it may still wait for something on its way out."""
    ended = []

    async def endless() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            for _ in range(turns):
                await asyncio.sleep(0)
            ended.append(True)

    task = begun(endless())
    assert task is not None
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]
    assert task.cancelled()


async def test_who_hears_a_cancellation_and_goes_on_is_not_cancelled() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return

    task = begun(stubborn())
    assert task is not None
    await asyncio.sleep(0)
    task.cancel()
    await task
    assert not task.cancelled()


async def test_its_context_is_one_from_its_beginning_to_its_end_and_nobody_else_s() -> None:
    seen = []

    async def noting() -> None:
        token = NOTED.set("mine")
        await asyncio.sleep(0)
        seen.append(NOTED.get())
        NOTED.reset(token)
        seen.append(NOTED.get())

    task = begun(noting())
    assert NOTED.get() == "nothing"
    assert task is not None
    await task
    assert seen == ["mine", "nothing"]


async def test_a_timeout_behind_the_first_wait_works_as_in_any_task() -> None:
    async def patient() -> None:
        await asyncio.sleep(0)
        async with asyncio.timeout(0.01):
            await asyncio.get_running_loop().create_future()

    task = begun(patient())
    assert task is not None
    with pytest.raises(TimeoutError):
        await task


class Asked:
    """A coroutine that waits for replies, and what it has heard so far."""

    def __init__(self, count: int = 1) -> None:
        self.replies: list[Reply[int]] = []
        self.heard: list[object] = []
        self._count = count

    async def run(self) -> None:
        token = NOTED.set("mine")
        for _ in range(self._count):
            asked = reply()
            assert isinstance(asked, Reply)
            self.replies.append(asked)
            try:
                self.heard.append(await asked)
            except (ValueError, asyncio.CancelledError) as error:
                self.heard.append(type(error))
        self.heard.append(NOTED.get())
        NOTED.reset(token)


async def test_a_reply_lets_it_go_on_before_whoever_gives_it() -> None:
    asked = Asked(3)
    await outside(asked.run())
    for n in range(3):
        given: list[int] = []

        def give(n: int = n, given: list[int] = given) -> None:
            asked.replies[n].set_result(n)
            given += asked.heard[: n + 1]

        asyncio.get_running_loop().call_soon(give)
        await asyncio.sleep(0)
        assert given == list(range(n + 1))
    assert asked.heard == [0, 1, 2, "mine"], "in its own context all the time"
    assert NOTED.get() == "nothing"


async def test_a_reply_may_be_an_error() -> None:
    asked = Asked()
    await outside(asked.run())
    asked.replies[0].set_exception(ValueError("no"))
    assert asked.heard == [ValueError, "mine"]


async def test_a_task_gets_a_future_to_wait_for() -> None:
    future = reply()
    assert isinstance(future, asyncio.Future)
    future.set_result(1)
    assert await future == 1


async def test_what_waits_for_a_reply_hears_of_a_cancellation_once_and_not_of_the_reply() -> None:
    asked = Asked()
    waiting = await outside(asked.run())
    waiting.cancel()
    waiting.cancel()
    assert asked.heard == [], "soon, not at once"
    asked.replies[0].set_result(1)
    for _ in range(3):
        await asyncio.sleep(0)
    assert asked.heard == [asyncio.CancelledError, "mine"]


async def test_a_cancellation_that_is_heard_is_over() -> None:
    asked = Asked(2)
    waiting = await outside(asked.run())
    waiting.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert asked.replies[0].done(), "nobody waits for it"
    assert not asked.replies[1].done()
    asked.replies[1].set_result(2)
    assert asked.replies[1].done()
    assert asked.heard == [asyncio.CancelledError, 2, "mine"]


async def test_a_cancellation_that_nobody_hears_ends_it_quietly() -> None:
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    ended, asked = [], Reply[int]()

    async def waiting_on() -> None:
        try:
            await asked
        finally:
            ended.append(True)

    (await outside(waiting_on())).cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert (ended, problems) == ([True], [])
    assert asked.done()


async def test_behind_a_reply_it_may_wait_for_anything_and_is_a_task_then() -> None:
    first, future, steps = Reply[int](), asyncio.get_running_loop().create_future(), []

    async def mixed() -> None:
        steps.append(await first)
        steps.append(await future)
        async with asyncio.timeout(10):
            await asyncio.sleep(0)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            steps.append(3)

    waiting = await outside(mixed())
    first.set_result(1)
    assert steps == [1]
    future.set_result(2)
    for _ in range(5):
        await asyncio.sleep(0)
    assert steps == [1, 2]
    waiting.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert steps == [1, 2, 3]


async def test_what_fails_behind_a_reply_does_not_fail_for_who_gives_it() -> None:
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context["exception"]))
    asked: Reply[int] = Reply()

    async def failing() -> None:
        raise KeyError(await asked)

    await outside(failing())
    asked.set_result(1)
    assert [type(problem) for problem in problems] == [KeyError]
