"""Starts the engine's process, and restarts it when it dies or hangs."""

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from cohabit.planner.errors import CohabitError
from cohabit.server.frontend.engine_connection import EngineConnection

_log = logging.getLogger("cohabit.supervisor")

_POLL_S = 0.25
_STALLED_S = 1.0
"""If this process was stalled for longer, it cannot judge whether the engine hangs."""
_STOP_S = 5.0
_LAST_ANSWERS_S = 0.5
_LONGEST_PAUSE_S = 30.0
_GIVE_UP_AFTER = 3
"""After this many failed starts in a row, requests are refused instead of waiting."""

COMMAND = (sys.executable, "-m", "cohabit.server.engine_process")


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
        self._folder = Path(tempfile.mkdtemp(prefix="cohabit-"))
        self.path = self._folder / "engine.sock"
        """The engine's socket, which stays the same after restarts."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._process: asyncio.subprocess.Process | None = None
        self._killed_for: str | None = None
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        """The engine's process id; None before the first start."""
        return None if self._process is None else self._process.pid

    async def start(self, on_progress: Callable[[str, str], None]) -> str:
        """Start the engine and load its models; returns the memory map. Raises the loading error."""
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._tasks.append(asyncio.create_task(self._watch_hangs()))
        started, died = await self._launch(on_progress)
        if not started.done():
            self._client.died(died.result())
        memory_map = await started
        self._tasks.append(asyncio.create_task(self._restart_for_ever(died)))
        return memory_map

    async def close(self) -> bool:
        """End the engine's process; False if it was killed."""
        self._stopping = True
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
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return clean

    async def _launch(self, on_progress: Callable[[str, str], None]) -> tuple[asyncio.Task[str], asyncio.Task[str]]:
        """Start a process; returns the tasks of its loading and its end, one of which is done."""
        descriptor = self._listener.fileno()
        self._killed_for = None
        process = await asyncio.create_subprocess_exec(
            *self._command, str(descriptor), pass_fds=(descriptor,), stdin=asyncio.subprocess.DEVNULL
        )
        self._process = process
        await self._client.connect(self.path)
        loaded = asyncio.create_task(self._client.start(self._config, on_progress))
        died = asyncio.create_task(self._died(process))
        await asyncio.wait({loaded, died}, return_when=asyncio.FIRST_COMPLETED)
        return loaded, died

    async def _died(self, process: asyncio.subprocess.Process) -> str:
        """Wait until a process has ended and its last messages were read; returns the reason."""
        code = await process.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ANSWERS_S):
                await self._client.wait_closed()
        if self._killed_for is not None:
            return self._killed_for
        return f"it ended with status {code}" if code >= 0 else f"it was ended by {signal.Signals(-code).name}"

    async def _restart_for_ever(self, died: asyncio.Task[str]) -> None:
        failed_starts = 0
        while True:
            reason = await died
            self._client.restarts += 1
            self._client.died(reason)
            _log.error("the engine's process has died", extra={"fields": {"reason": reason}})
            if failed_starts:
                if failed_starts >= _GIVE_UP_AFTER:
                    self._client.give_up(f"the engine cannot be started again: {reason}")
                await asyncio.sleep(min(2.0 ** (failed_starts - 2), _LONGEST_PAUSE_S))
            began_s = time.monotonic()
            loaded, died = await self._launch(lambda model, stage: None)
            if not loaded.done():
                loaded.cancel()
                failed_starts += 1
            elif (error := loaded.exception()) is None:
                failed_starts = 0
                fields = {"seconds": round(time.monotonic() - began_s, 3), "pid": self.pid}
                _log.warning("the engine was started again", extra={"fields": fields})
            elif isinstance(error, CohabitError):
                failed_starts += 1
                _log.error("the engine could not be started again", extra={"fields": {"reason": str(error)}})
                self._kill()
            else:
                raise error

    async def _watch_hangs(self) -> None:
        """Kill an engine that makes no progress, and refuse requests that are too late while there is none."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(_POLL_S)
            self._client.shed()
            if time.monotonic() - before_s > _STALLED_S or not self._watchdog_s:
                continue
            reason = self._client.stuck(self._watchdog_s)
            if reason is not None and self._process is not None and self._process.returncode is None:
                self._killed_for = f"it was killed, because {reason}"
                self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
