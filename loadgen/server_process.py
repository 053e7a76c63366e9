"""Runs a Cohabit server as a subprocess."""

import asyncio
import shlex
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import aiohttp
from tritonclient.http.aio import InferenceServerClient

from cohabit.loadgen.client import address_of
from cohabit.loadgen.errors import ServerFailed

ANNOUNCEMENT = "http: "
"""Prefix of the line on the server's stdout that has its address."""

_DRAIN_S = 40.0
_LOG_LINES = 20


def server_command(program: str, repository: Path, memory: str, layout: str | None) -> list[str]:
    """Return a command line that serves `repository` on ports chosen by the system, after full planning."""
    return [
        *_locate(program),
        *("serve", str(repository), "--memory", memory),
        *(("--layout", layout) if layout else ()),
        *("--http-port", "0", "--grpc-port", "off", "--metrics-port", "0", "--no-quick-start"),
    ]


@asynccontextmanager
async def running_server(
    command: Sequence[str],
    patience_s: float,
    progress: Callable[[str], None] = lambda _: None,
    *,
    show_log: bool = False,
) -> AsyncIterator[str]:
    """Start a server, wait until it is ready, yield its address, and always stop it.

    With `show_log` its log goes to this process's stderr, otherwise to a temporary file. Raises ServerFailed, with the
    end of that file, if the server exits or is not ready after `patience_s`.
    """
    with tempfile.TemporaryFile() as log:
        # A new session, so that Ctrl-C reaches only this process, which then stops the server.
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=None if show_log else log, start_new_session=True
        )
        try:
            url = await _ready_url(process, command, log, patience_s, progress)
            drain = asyncio.create_task(_drain(process))
            try:
                yield url
            finally:
                drain.cancel()
        finally:
            await _stop(process)


async def _ready_url(
    process: Process, command: Sequence[str], log: IO[bytes], patience_s: float, progress: Callable[[str], None]
) -> str:
    try:
        async with asyncio.timeout(patience_s):
            progress("starting the server")
            if (url := await _announced_url(process)) is not None:
                progress(f"loading models at {url}")
                if await _becomes_ready(process, url):
                    return url
            problem = f"the server exited with status {await process.wait()} before it was ready"
    except TimeoutError:
        problem = f"the server was not ready after {patience_s:g} s"
    raise ServerFailed(f"{problem}: {shlex.join(command)}\n{_end_of(log)}")


async def _announced_url(process: Process) -> str | None:
    """Return the address that the server prints, or None if it exits."""
    assert process.stdout is not None
    async for line in process.stdout:
        text = line.decode(errors="replace").strip()
        if text.startswith(ANNOUNCEMENT):
            return text.removeprefix(ANNOUNCEMENT).strip()
    return None


async def _becomes_ready(process: Process, url: str) -> bool:
    """Wait until the server is ready; False if it exits."""
    async with InferenceServerClient(address_of(url)) as client:
        while process.returncode is None:
            try:
                if await client.is_server_ready():
                    return True
            except (aiohttp.ClientError, OSError):
                pass  # it may announce its address before it listens
            await asyncio.sleep(0.1)
    return False


async def _drain(process: Process) -> None:
    """Read the server's output, so that a full pipe never blocks it."""
    assert process.stdout is not None
    while await process.stdout.read(1 << 16):
        pass


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), _DRAIN_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _locate(program: str) -> list[str]:
    name, *rest = shlex.split(program)
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if beside_python.exists() else shutil.which(name)
    if found is None:
        raise ServerFailed(
            f"the command {name!r} is not installed; give the address of a running server with --url"
        )
    return [found, *rest]


def _end_of(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_LOG_LINES:])
