"""Worker processes for lowering, measuring and planning, which hold the interpreter lock and may crash."""

import asyncio
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, ParamSpec, TypeVar

from cohabit.planner.errors import CohabitError
from cohabit.runtime.lowering.archive_file import noted_fingerprint, notes_of
from cohabit.server.config.config import LogFormat, ServeConfig, cache_of
from cohabit.server.config.machine import available_cpus
from cohabit.server.errors import load_reason
from cohabit.server.log import configure_logging, log_internal_error
from cohabit.server.repository.sources import ModelSource
from cohabit.server.rights import no_new_privileges, raise_oom_score

_log = logging.getLogger("cohabit.models")

_P = ParamSpec("_P")
_T = TypeVar("_T")

PREPARING_S = 600.0
"""Time limit for preparing or planning one model."""
MOST_PREPARING = 4
"""Maximum number of models prepared at a time: one that hangs does not delay the others."""
MOST_AT_START = min(2, available_cpus())
"""The same limit at the start, when nothing is served: each takes a core, and memory for its weights."""
MOST_PLANNING = 2
"""Maximum number of high-priority planning calls at a time."""
PREPARING = ("cohabit.runtime.lowering.archive", "cohabit.server.deploy.prepare")
PLANNING = ("cohabit.planner.sizing.division", "cohabit.planner.sizing.fitting", "cohabit.server.deploy.divide")
"""Modules for preparing and for planning, which take seconds to import. The last has the functions to call."""
_INTERPRETED = {"COHABIT_INTERPRET": "1"}
"""Disables the planner's JIT."""
_KILLED_S = 1.0
"""A killed process exits within this time, unless its device hangs."""
_DEVICE_RELEASED_S = 10.0
"""The same for a process with a CUDA device, whose driver releases memory first."""
_POLL_S = 1.0
_NICENESS = 10
"""The kernel schedules the engine's threads first."""


class WorkerFailed(CohabitError):
    """A call failed in the worker process; the message is the reason."""


class _WorkerTraceback(Exception):
    """The traceback of an error in a worker process, for the log."""


class _Failure(NamedTuple):
    """An error as sent over the pipe: not every exception can be pickled."""

    reason: str
    """The message of an expected error, else the stage that failed."""
    traceback: str | None = None


QUIET_S = 0.005
"""Low-priority calls continue once no request has been waiting for this long."""
_waiting: Any = None
"""In a low-priority process: shared bytes, one per lane, that are set while the lane has requests."""


def wait_for_requests() -> None:
    """Wait until the server has answered its requests. Returns at once in other processes."""
    if _waiting is None or not any(_waiting):
        return
    quiet_since_s = time.monotonic()
    while time.monotonic() - quiet_since_s < QUIET_S:
        time.sleep(QUIET_S / 2)
        if any(_waiting):
            quiet_since_s = time.monotonic()


EXPECTED = CohabitError, OSError, MemoryError
"""Errors whose message suffices, without a traceback."""


@contextmanager
def stage(doing: str) -> Iterator[None]:
    """Add this stage, such as "lowering model 'x'", to an unexpected error as a note."""
    try:
        yield
    except EXPECTED:
        raise
    except Exception as error:
        if "DefaultCPUAllocator" in str(error):  # torch has no class for this
            raise MemoryError(str(error)) from error
        error.add_note(doing)
        raise


def failed_stage(error: Exception) -> str:
    """Return, as text, the stage in which an unexpected error was raised."""
    notes: list[str] = getattr(error, "__notes__", [])
    return f"{notes[0] if notes else 'preparing models'} failed unexpectedly"


def failure_reason(model: str, error: Exception) -> str:
    """Return why a model cannot be loaded. Logs an unexpected error; call it while handling the error."""
    if isinstance(error, CohabitError | OSError):
        return load_reason(model, error)
    return f"{failed_stage(error)}: {log_internal_error(_log, model=model)}"


async def in_thread(function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a slow function on a daemon thread. Unlike a pool's thread, it does not keep the process alive."""
    future: Future[_T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="deploy", daemon=True).start()
    return await asyncio.wrap_future(future)


class WorkerProcesses:
    """Processes started on demand, each running one call at a time. Any thread may call.

    Calls have two priorities. High-priority calls run at once, in processes with the JIT disabled: compiling takes
    longer than planning a few models. Low-priority calls run one at a time, in processes that compile; searches in them
    pause while requests wait.
    """

    def __init__(
        self,
        timeout_s: float | None = None,
        most: int = 1,
        log_format: LogFormat = "text",
        *,
        inline: bool = False,
        lanes: int = 1,
    ) -> None:
        """Kill processes whose call exceeds `timeout_s`, and run at most `most` high-priority calls at a time.

        The processes log to stderr. With `inline`, calls run in the caller's process and thread.
        """
        self.inline = inline
        """The caller may set it to False, once its process has other work."""
        self._waiting = multiprocessing.get_context("spawn").RawArray("b", lanes)
        self._timeout_s = timeout_s
        self._log_format = log_format
        self._slots = {False: threading.Semaphore(most), True: threading.Semaphore(1)}
        self._lock = threading.Lock()
        self._idle: list[_WorkerProcess] = []
        self._busy: set[_WorkerProcess] = set()
        self._closed = False

    def set_waiting(self, lane: int, waiting: bool) -> None:
        """Tell low-priority processes whether a lane has requests; their searches pause while any lane has."""
        self._waiting[lane] = waiting

    def call(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a module-level function in a process, and wait. Raises WorkerFailed if it fails or its process dies."""
        return self._call(False, function, args, kwargs)

    def call_low_priority(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function as `call` does, after other low-priority calls."""
        return self._call(True, function, args, kwargs)

    def _call(
        self, low_priority: bool, function: Callable[..., _T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _T:
        if self.inline:
            return function(*args, **kwargs)
        with self._slots[low_priority]:
            process = self._take(function.__module__, low_priority)
            try:
                result, failure = process.call(function, args, kwargs, self._timeout_s)
            except (EOFError, ConnectionError) as error:
                self._end(process)
                raise WorkerFailed(
                    "the process that prepares models has died; perhaps memory has run out"
                ) from error
            except TimeoutError as error:
                self._end(process)
                raise WorkerFailed(f"it was not prepared within {self._timeout_s:g} s") from error
            self._recycle(process, function.__module__)
        if failure is not None:
            raise WorkerFailed(_client_reason(failure))
        answer: _T = result
        return answer

    def start(self, modules: Sequence[str], count: int = 1) -> None:
        """Start processes ahead of time, and have them import these modules. Does not wait."""
        with self._lock:
            self._idle += [self._new_process(False, modules) for _ in range(count)]

    def release(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def close(self) -> None:
        """End the processes, even during a call."""
        with self._lock:
            self._closed = True
            processes = list(self._busy)
        for process in processes:
            self._end(process)
        self.release()

    def _take(self, module: str, low_priority: bool) -> "_WorkerProcess":
        """Take an idle process of this priority, preferably one that has imported the module, or start one."""
        with self._lock:
            if self._closed:
                raise WorkerFailed("the server is stopping")
            idle = [process for process in self._idle if process.low_priority is low_priority]
            if idle:
                process = max(idle, key=lambda process: module in process.modules)
                self._idle.remove(process)
            else:
                process = self._new_process(low_priority)
            self._busy.add(process)
            return process

    def _new_process(self, low_priority: bool, modules: Sequence[str] = ()) -> "_WorkerProcess":
        waiting = self._waiting if low_priority else None
        return _WorkerProcess(self._log_format, low_priority, modules, waiting)

    def _recycle(self, process: "_WorkerProcess", module: str) -> None:
        """Keep one idle process per priority and module, because starting one takes seconds.

        A process that has opened a CUDA device keeps half a GB of its memory until it ends, so a new one replaces it.
        """
        process.modules.add(module)
        if process.holds_device:
            process.end()
        with self._lock:
            self._busy.discard(process)
            others = [
                other
                for other in self._idle
                if other.low_priority is process.low_priority and module in other.modules
            ]
            if not others and not self._closed:
                modules = sorted(process.modules)
                self._idle.append(
                    self._new_process(process.low_priority, modules) if process.holds_device else process
                )
                return
        process.end()

    def _end(self, process: "_WorkerProcess") -> None:
        with self._lock:
            self._busy.discard(process)
        process.end()


class _WorkerProcess:
    """A process that answers calls over a pipe, one at a time."""

    def __init__(self, log_format: LogFormat, low_priority: bool, modules: Sequence[str], waiting: Any) -> None:
        self.low_priority = low_priority
        self._waiting = waiting
        self.modules = set(modules)
        """Imported modules."""
        self.holds_device = False
        """Whether a call has opened a CUDA device, as of the last answer."""
        context = multiprocessing.get_context("spawn")
        self._pipe, others = context.Pipe()
        arguments = others, log_format, {} if low_priority else _INTERPRETED, modules, waiting
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        others.close()  # so that the pipe ends with the process

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None
    ) -> tuple[Any, _Failure | None]:
        """Return the result, or the failure. Raises EOFError or ConnectionError if it dies, or TimeoutError.

        The time limit does not count time in which the call may pause for requests.
        """
        self._pipe.send((function, args, kwargs))
        left_s = math.inf if timeout_s is None else timeout_s
        while not self._pipe.poll(min(left_s, _POLL_S) if self._waiting is not None else timeout_s):
            left_s -= 0.0 if self._waiting is not None and any(self._waiting) else _POLL_S
            if self._waiting is None or left_s <= 0:
                raise TimeoutError
        result, failure, self.holds_device = self._pipe.recv()
        return result, failure

    def end(self) -> None:
        self._process.kill()
        self._process.join(_DEVICE_RELEASED_S if self.holds_device else _KILLED_S)


def worker_processes(config: ServeConfig) -> WorkerProcesses:
    """Return the processes that prepare and plan. With the engine in process, calls run inline until it serves."""
    return WorkerProcesses(
        PREPARING_S,
        MOST_PREPARING + MOST_PLANNING,
        config.log_format,
        inline=not config.prepares_in_workers,
        lanes=config.compute_lanes,
    )


def count_uncached(sources: Sequence[ModelSource], config: ServeConfig) -> int:
    """Return the number of models that the cache lacks, because it has no note of their archives."""
    notes, count = notes_of(cache_of(config) / "weights"), 0
    for source in sources:
        with suppress(CohabitError, OSError):  # it cannot be prepared
            count += noted_fingerprint(source.path, notes) is None
    return count


def _serve(
    pipe: Connection,
    log_format: LogFormat,
    environment: Mapping[str, str],
    modules: Sequence[str],
    waiting: Any,
) -> None:
    """Answer calls until the pipe ends, with low priority, few rights, and no interrupts from the terminal."""
    global _waiting
    _waiting = waiting
    os.nice(_NICENESS)
    configure_logging(log_format)
    no_new_privileges()
    raise_oom_score()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment)
    for module in modules:
        import_module(module)
    with suppress(EOFError, ConnectionError):
        while True:
            pipe.send((*_guarded(*pipe.recv()), _holds_device()))


def _holds_device() -> bool:
    """Whether this process has a CUDA context."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _guarded(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, _Failure | None]:
    """Return the result, or the failure."""
    try:
        return function(*args, **kwargs), None
    except CohabitError as error:
        return None, _Failure(str(error))
    except OSError as error:
        return None, _Failure(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
    except MemoryError:
        return None, _Failure("memory has run out while it was prepared")
    except Exception as error:
        return None, _Failure(failed_stage(error), traceback.format_exc())


def _client_reason(failure: _Failure) -> str:
    """Return the reason for clients, after logging the traceback of an unexpected error."""
    if failure.traceback is None:
        return failure.reason
    try:
        raise _WorkerTraceback(f"in a worker process\n{failure.traceback}")
    except _WorkerTraceback:
        return f"{failure.reason}: {log_internal_error(_log, what=failure.reason)}"
