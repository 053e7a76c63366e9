"""Background tasks go on after every failure, and each failure is in the log."""

import asyncio
import logging
from typing import Any

import pytest

from cohabit.server.background import FIRST_PAUSE_S, LONGEST_PAUSE_S, Background


class Pauses:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)


@pytest.mark.parametrize("error", [OSError(12, "no memory"), RuntimeError("a bug"), MemoryError()], ids=repr)
async def test_a_task_that_fails_is_logged_and_started_again_until_it_returns(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    pauses, tries, ended = Pauses(), 0, asyncio.Event()

    async def work() -> None:
        nonlocal tries
        tries += 1
        if tries <= 9:
            raise error
        ended.set()

    background = Background(pauses)
    background.keep("the work", work)
    async with asyncio.timeout(60):
        await ended.wait()
    assert tries == 10
    assert pauses.seconds == [min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) for n in range(9)]
    records = [record for record in caplog.records if record.name == "cohabit.background"]
    assert len(records) == 9
    fields: dict[str, Any] = vars(records[0])["fields"]
    assert (records[0].levelno, fields["task"]) == (logging.ERROR, "the work")
    assert fields["reason"]
    assert bool(records[0].exc_info) == (not isinstance(error, OSError)), "a traceback of what is unexpected"


async def test_closing_ends_tasks_and_pauses() -> None:
    async def fail() -> None:
        raise OSError

    background = Background()
    background.keep("waiting", asyncio.Event().wait)  # type: ignore[arg-type]
    background.keep("failing", fail)
    await asyncio.sleep(0)
    await asyncio.wait_for(background.close(), 60)
    assert not background.is_busy
