"""A worker process for lowering, measuring and planning, which hold the interpreter lock and may crash."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, ParamSpec, TypeVar

from planner.errors import CohabitError

_P = ParamSpec("_P")
_T = TypeVar("_T")

_NICENESS = 10
"""The kernel schedules the engine's threads first."""


class WorkerFailed(CohabitError):
    """A call failed in the worker process; the message is the reason."""


class WorkerProcess:
    """One process, started at the first call. Any thread may call; calls are serialized."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False

    def call(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a module-level function in the process, and wait. Raises WorkerFailed, also if the process dies."""
        pool = self._running()
        try:
            result, failure = pool.submit(_guarded, function, args, kwargs).result()
        except BrokenProcessPool as error:
            with self._lock:
                if self._pool is pool:
                    self._pool = None
            raise WorkerFailed("the process that prepares models has died; perhaps memory has run out") from error
        if failure is not None:
            raise WorkerFailed(failure)
        answer: _T = result
        return answer

    def close(self) -> None:
        """End the process, even during a call."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            processes = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()

    def _running(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._closed:
                raise WorkerFailed("the server is stopping")
            if self._pool is None:
                self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)
            return self._pool


def call_here(function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Stands in for `WorkerProcess.call` where everything is to be one process."""
    return function(*args, **kwargs)


def _begin() -> None:
    """Set up the worker: low priority, no interrupts from the terminal, and an end with the server."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _guarded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str | None]:
    """Return the result, or the error as text, because not every exception can be pickled."""
    try:
        return function(*args, **kwargs), None
    except CohabitError as error:
        return None, str(error)
    except Exception as error:
        return None, f"unexpected {type(error).__name__}: {error}"
