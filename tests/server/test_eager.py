"""What begins at once goes on as any task does."""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

import pytest

from server.eager import begin

NOTED: ContextVar[str] = ContextVar("noted", default="nothing")


def begun(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    return begin(asyncio.get_running_loop(), coroutine)


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
