"""Moving work that takes over a millisecond off the event loop."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def call(on_thread: bool, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function, on a worker thread where `on_thread` says so."""
    if on_thread:
        return await asyncio.to_thread(function, *args, **kwargs)
    return function(*args, **kwargs)
