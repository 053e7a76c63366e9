"""One engine of a scaled-out server: the server of `cohabit serve`, reached over a Unix socket."""

import tempfile
from dataclasses import replace
from pathlib import Path

import aiohttp
from yarl import URL

from cohabit.server.config.config import ServeConfig
from cohabit.server.errors import EngineUnavailable
from cohabit.server.scale.routing import ForwardedAnswer, ForwardedRequest
from cohabit.server.serve import Server

_OF_CONNECTION = {"connection", "content-length", "date", "expect", "host", "server", "transfer-encoding"}
"""Headers that belong to one connection."""
_URL = URL("http://engine")


class ServedEngine:
    """A server with its models. Its engine is a process of its own, which is restarted if it dies."""

    def __init__(self, config: ServeConfig) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cohabit-scale-")
        self._server = Server(replace(config, hosts=(f"unix:{self._folder.name}",)))
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Load the models; returns once they are served. Raises what loading raises."""
        await self._server.start()
        await self._server.load()
        connector = aiohttp.UnixConnector(str(Path(self._folder.name) / "http.sock"), limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        )

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name not in _OF_CONNECTION}
        async with self._session.request(
            request.method,
            _URL.join(URL(request.target, encoded=True)),
            headers=headers,
            data=request.body or None,
            skip_auto_headers=("Accept-Encoding", "Content-Type", "User-Agent"),
        ) as response:
            body = await response.read()
            kept = {k.lower(): v for k, v in response.headers.items() if k.lower() not in _OF_CONNECTION}
            return ForwardedAnswer(response.status, kept, body)

    def check(self) -> None:
        """Raises EngineUnavailable if the engine's process is no longer supervised."""
        supervisor = self._server.supervisor
        if supervisor is not None and supervisor.failed.is_set():
            raise EngineUnavailable("the engine is no longer supervised")
