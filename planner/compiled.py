"""numba's decorator, typed: inner loops compile on their first call and are cached on disk.

numba trusts a cached function until its own file changes. But a function holds the code and the array layouts of the
functions that it calls: a cache from before they changed makes it crash. So each state of the planner's sources has
its own cache folder, in `NUMBA_CACHE_DIR` or the user's cache.

Compiling takes half a minute, which is long for a few plans. With `COHABIT_INTERPRET` in the environment, loops that
were not compiled before are interpreted; they give the same plans."""

import hashlib
import os
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

_F = TypeVar("_F", bound=Callable[..., Any])

INTERPRET = "COHABIT_INTERPRET"


def compiled(function: _F) -> _F:
    """Compile `function` to machine code when it is first called, without the GIL."""
    if _is_interpreted():
        return cast(_F, wraps(function)(lambda *args: _plain(function(*args))))
    import numba  # an installed one may refuse its numpy; then loops are interpreted without it

    others = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_folder())
    try:
        return cast(_F, numba.njit(cache=True, nogil=True)(function))
    finally:
        numba.config.CACHE_DIR = others


def _plain(result: Any) -> Any:
    """Return numpy's numbers as Python's, as compiled functions do."""
    if isinstance(result, np.generic):
        return result.item()
    if isinstance(result, tuple):
        plain = map(_plain, result)
        return type(result)(*plain) if hasattr(result, "_fields") else tuple(plain)
    return result


@cache
def _is_interpreted() -> bool:
    return INTERPRET in os.environ and not any(cache_folder().rglob("*.nbi"))


@cache
def cache_folder() -> Path:
    """Return the cache folder of the current sources. Where it cannot be written, numba chooses another place."""
    state = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source = path.read_bytes()
        if b"@compiled" in source or b"NamedTuple" in source:
            state.update(source)
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cohabit" / "compiled"
    return Path(os.environ.get("NUMBA_CACHE_DIR") or user) / state.hexdigest()[:16]
