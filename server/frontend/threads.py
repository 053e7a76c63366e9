"""Runs work of over a millisecond outside the event loop's thread."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class LibraryPanic(Exception):
    """A library's own code has failed, as Rust's panics do, which are no `Exception` in Python."""


async def call(on_thread: bool, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function, on a worker thread if `on_thread`.

    A cancelled caller waits for the thread, which may use memory that the caller is about to release. Raises
    LibraryPanic for a failure that a library does not report as an `Exception`.
    """
    if not on_thread:
        return _called(function, *args, **kwargs)
    running = asyncio.ensure_future(asyncio.to_thread(lambda: _called(function, *args, **kwargs)))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise


def _called(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    try:
        return function(*args, **kwargs)
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise LibraryPanic(f"{type(error).__name__}: {error}") from error
