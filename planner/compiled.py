"""numba's decorator, typed: the planner's inner loops compile on first call and are cached beside the source."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile `function` to machine code when it is first called, without the GIL."""
    return cast(_F, numba.njit(cache=True, nogil=True)(function))
