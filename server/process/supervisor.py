"""Starts the engine's process, and restarts it when it dies or hangs."""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from cohabit.planner.errors import CohabitError, format_bytes
from cohabit.server.config.machine import available_memory, memory_kills
from cohabit.server.errors import EngineUnavailable
from cohabit.server.process.engine_connection import EngineConnection

_log = logging.getLogger("cohabit.supervisor")

_POLL_S = 0.25
_STALLED_S = 1.0
"""If this process itself was stalled for longer, the engine's hangs are not judged until the next poll."""
_STOP_S = 5.0
_LAST_ANSWERS_S = 0.5
_LONGEST_PAUSE_S = 30.0
_GIVE_UP_AFTER = 3
"""After this many failed starts in a row, requests are refused instead of waiting; a first start fails."""

COMMAND = (sys.executable, "-m", "cohabit.server.process.engine_process")
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""Has glibc keep one heap for all threads (`runtime.heap`). Heaps that exist when a process asks for one would stay."""


class Supervisor:
    """Owns the engine's process. All methods belong to the event loop's thread."""

    def __init__(
        self, client: EngineConnection, config: bytes, watchdog_s: float, command: Sequence[str] = COMMAND
    ) -> None:
        """`config` is an encoded `ServeConfig`; a `watchdog_s` of 0 switches the watchdog off."""
        self._client = client
        self._config = config
        self._watchdog_s = watchdog_s
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._death: asyncio.Task[str] | None = None
        self._killed_for: str | None = None
        self._kills = memory_kills()
        """Last value of the kernel's count of processes killed for lack of memory."""
        self._tasks: list[asyncio.Task[None]] = []
        self.failed = asyncio.Event()
        """Set when supervision itself has failed: a dead engine would not be restarted."""

    @property
    def pid(self) -> int | None:
        """The engine's process id; None before the first start."""
        return None if self._process is None else self._process.pid

    async def start(self, on_progress: Callable[[str, str], None]) -> str:
        """Start the engine and load its models; returns the memory map.

        A crashed start is retried. Raises the loading error, or EngineUnavailable after several crashes.
        """
        first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        for work in (self._supervise(first, on_progress), self._watch_hangs()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._supervision_ended)
            self._tasks.append(task)
        return await first

    async def close(self) -> bool:
        """End the engine's process; False if it was killed."""
        for task in self._tasks:
            task.cancel()
        await self._client.close()
        clean = True
        if self._process is not None and self._process.returncode is None:
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
            except TimeoutError:
                clean = False
                self._kill()
                await self._process.wait()
        return clean

    async def _supervise(self, first: asyncio.Future[str], on_progress: Callable[[str, str], None]) -> None:
        """Start the engine, and restart it when it ends. `first` receives the first start's memory map or error."""
        failed_starts = 0
        while True:
            began_s = time.monotonic()
            try:
                memory_map = await self._launch(on_progress)
            except Exception as error:
                failed_starts += 1
                is_refusal = isinstance(error, CohabitError) and not isinstance(error, EngineUnavailable)
                # A first start that is refused, for example for a setting, would be refused again.
                if not first.done() and (is_refusal or failed_starts >= _GIVE_UP_AFTER):
                    first.set_exception(error)
                    return
                self._kill()
                death = None if self._death is None else await self._death
                is_crash = isinstance(error, EngineUnavailable)
                reason = death if is_crash and death is not None else str(error) or type(error).__name__
                unexpected = None if isinstance(error, CohabitError | OSError) else error
                _log.error(
                    "the engine could not be started", extra={"fields": {"reason": reason}}, exc_info=unexpected
                )
                self._client.died(reason)
                if first.done() and failed_starts >= _GIVE_UP_AFTER:
                    self._client.give_up(f"the engine cannot be started again: {reason}")
                await asyncio.sleep(min(2.0 ** (failed_starts - 2), _LONGEST_PAUSE_S))
            else:
                failed_starts = 0
                if first.done():
                    fields = {"seconds": round(time.monotonic() - began_s, 3), "pid": self.pid}
                    _log.warning("the engine was started again", extra={"fields": fields})
                else:
                    first.set_result(memory_map)
                assert self._death is not None
                reason = await self._death
                self._client.died(reason)
                _log.error("the engine's process has died", extra={"fields": {"reason": reason}})
            if first.done():
                self._client.restarts += 1

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("the engine is no longer supervised; the server ends", exc_info=error)
            self.failed.set()

    async def _launch(self, on_progress: Callable[[str, str], None]) -> str:
        """Start a process and wait until it has loaded its models; returns the memory map.

        Raises the loading error, EngineUnavailable if the process ends first, and OSError if it cannot be created.
        """
        self._killed_for = self._death = None
        # A new pair of sockets per process, so that no message of an earlier process is left in it.
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                inherited = theirs.fileno()
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    str(inherited),
                    pass_fds=(inherited,),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**ONE_HEAP, **os.environ},
                )
            except OSError:
                ours.close()
                raise
        self._process = process
        self._death = asyncio.create_task(self._died(process))
        await self._client.connect(ours)
        started = asyncio.create_task(self._client.start(self._config, on_progress))
        await asyncio.wait({started, self._death}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            raise EngineUnavailable(f"the engine's process ended while it loaded: {await self._death}")
        return await started

    async def _died(self, process: asyncio.subprocess.Process) -> str:
        """Wait until a process has ended and its last messages have been read; returns the reason."""
        code = await process.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ANSWERS_S):
                await self._client.wait_closed()
        if self._killed_for is not None:
            return self._killed_for
        if code >= 0:
            return f"it ended with status {code}"
        return f"it was ended by {signal.Signals(-code).name}{self._out_of_memory(code)}"

    def _out_of_memory(self, code: int) -> str:
        """Describe the memory limit as the reason of a SIGKILL, if the kernel's count of such kills has increased."""
        kills, self._kills = self._kills, memory_kills()
        if code != -signal.SIGKILL or self._kills <= kills:
            return ""
        nbytes, where = available_memory()
        return (
            f", because memory had run out: {where} has {format_bytes(nbytes)}; give it more, or lower --memory or"
            " --process-memory"
        )

    async def _watch_hangs(self) -> None:
        """Kill an engine that makes no progress. Refuse requests whose deadlines pass while none runs."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(_POLL_S)
            self._client.shed()
            if time.monotonic() - before_s > _STALLED_S or not self._watchdog_s:
                continue
            reason = self._client.hang_reason(self._watchdog_s)
            if reason is not None and self._process is not None and self._process.returncode is None:
                self._killed_for = f"it was killed, because {reason}"
                self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
