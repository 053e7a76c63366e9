"""A typed wrapper of numba's decorator: inner loops compile on their first call and are cached on disk.

numba invalidates a cached function only when its own file changes. A compiled function also contains the code and the
array layouts of its callees, so a stale cache can crash. Each state of the planner's sources therefore has its own
cache folder, in `NUMBA_CACHE_DIR` or the user's cache.

numba requires a writable folder. A read-only one, such as in a container's image, is copied once: to the user's
cache, or else to the folder for temporary files.

Compiling takes half a minute, which is long for a few plans. With `COHABIT_INTERPRET` in the environment, loops are
interpreted if none are in the cache; they give the same plans."""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from cohabit.planner.cache_file import user_folder

_F = TypeVar("_F", bound=Callable[..., Any])

INTERPRET = "COHABIT_INTERPRET"
COMPILING = "the planner is compiled before its first plan: once per installation, about half a minute"
"""What commands say if `compiles_first`."""


def compiled(function: _F) -> _F:
    """Compile `function` to machine code on its first call; it then runs without the GIL."""
    if _is_interpreted():
        return cast(_F, wraps(function)(lambda *args: _plain(function(*args))))
    import numba  # imported here: it may refuse the installed numpy, and interpreting does without it

    folder = cache_folder()
    if folder is None:
        return cast(_F, numba.njit(nogil=True)(function))
    others = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        return cast(_F, numba.njit(cache=True, nogil=True)(function))
    finally:
        numba.config.CACHE_DIR = others


def _plain(result: Any) -> Any:
    """Convert numpy numbers to Python's, as compiled functions do."""
    if isinstance(result, np.generic):
        return result.item()
    if isinstance(result, tuple):
        plain = map(_plain, result)
        return type(result)(*plain) if hasattr(result, "_fields") else tuple(plain)
    return result


@contextmanager
def interpreted() -> Iterator[None]:
    """Have a command's process interpret loops that are not cached, for few plans. Call it before they are imported."""
    given = os.environ.get(INTERPRET)
    os.environ[INTERPRET] = given or "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[INTERPRET]


@cache
def _is_interpreted() -> bool:
    return INTERPRET in os.environ and not _is_cached()


def compiles_first() -> bool:
    """Whether the first plan compiles loops, which takes half a minute."""
    return not _is_interpreted() and not _is_cached()


def _is_cached() -> bool:
    folder = cache_folder()
    return folder is not None and any(folder.rglob("*.nbi"))


@cache
def cache_folder() -> Path | None:
    """Return the cache folder of the current sources; None if no folder is writable."""
    name = _state_of_sources()
    user = user_folder() / "compiled"
    given = Path(os.environ.get("NUMBA_CACHE_DIR") or user) / name
    for folder in (given, user / name, _temporary_folder(name)):
        if folder is None:
            continue
        if folder != given and given.is_dir() and not folder.exists():
            _copy(given, folder)
        if _is_writable(folder):
            return folder
    return None


def _state_of_sources() -> str:
    state = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        source = path.read_bytes()
        if b"@compiled" in source or b"NamedTuple" in source:
            state.update(source)
    return state.hexdigest()[:16]


def _is_writable(folder: Path) -> bool:
    """Create the folder, and test as numba does whether it is writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _temporary_folder(name: str) -> Path | None:
    """Return a folder private to this user, since cached code is unpickled and executed; None if there is none."""
    try:
        own = Path(tempfile.gettempdir()) / f"cohabit-{os.geteuid()}"
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
    except OSError:
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return own / name if is_own else None


def _copy(given: Path, folder: Path) -> None:
    """Copy a folder atomically. If another process does the same, one copy stays."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as copy:
            for path in given.rglob("*"):
                target = Path(copy) / "copy" / path.relative_to(given)
                if path.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                else:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
            (Path(copy) / "copy").rename(folder)
    except OSError:
        pass  # loops are recompiled, or another process has copied them
