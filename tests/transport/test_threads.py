"""Work on threads whose callers are cancelled."""

import asyncio
import threading

import pytest

from cohabit.server.frontend.threads import LibraryPanic, call


async def test_a_cancelled_caller_waits_for_its_thread() -> None:
    entered, proceed, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        assert proceed.wait(20)
        ended.set()

    calling = asyncio.create_task(call(True, work))
    assert await asyncio.to_thread(entered.wait, 20)
    calling.cancel()
    await asyncio.sleep(0)
    assert not calling.done()
    proceed.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended.is_set()


@pytest.mark.parametrize("on_thread", [False, True])
async def test_a_call_returns_and_raises_what_its_function_does(on_thread: bool) -> None:
    assert await call(on_thread, int, "7", base=8) == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await call(on_thread, int, "x")


class Panic(BaseException):
    """As pyo3's, which a panic of Rust code becomes."""


def panic() -> None:
    raise Panic("index out of bounds")


@pytest.mark.parametrize("on_thread", [False, True])
async def test_a_library_s_panic_is_an_error_like_others(on_thread: bool) -> None:
    with pytest.raises(LibraryPanic, match="Panic: index out of bounds"):
        await call(on_thread, panic)
