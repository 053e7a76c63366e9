"""numba's decorator, typed: inner loops compile on their first call and are cached on disk.

numba trusts a cached function until its own file changes. But a function holds the code and the array layouts of the
functions that it calls: a cache from before they changed makes it crash. So each state of the planner's sources has
its own cache folder, in `NUMBA_CACHE_DIR` or the user's cache."""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """Compile `function` to machine code when it is first called, without the GIL."""
    others = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_folder())
    try:
        return cast(_F, numba.njit(cache=True, nogil=True)(function))
    finally:
        numba.config.CACHE_DIR = others


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
