"""Runs work of over a millisecond outside the event loop's thread."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def call(on_thread: bool, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function, on a worker thread if `on_thread`.

    A cancelled caller waits for the thread, which may use memory that the caller is about to release.
    """
    if not on_thread:
        return function(*args, **kwargs)
    running = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.gather(running, return_exceptions=True)
        raise
