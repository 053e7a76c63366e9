"""One engine of a scaled-out server: the server of `cohabit serve`, and the ingress's connections to it."""

import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp
from yarl import URL

from cohabit.planner.sizing.assignment import ModelTraffic
from cohabit.server.config.config import ServeConfig
from cohabit.server.errors import EngineUnavailable
from cohabit.server.frontend.memory import RequestMemory
from cohabit.server.http.server import KEEP_ALIVE_S
from cohabit.server.scale.routing import ForwardedAnswer, ForwardedRequest
from cohabit.server.serve import Server

_OF_CONNECTION = {"authorization", "connection", "content-length", "date", "expect", "host", "server"}
_OF_CONNECTION |= {"transfer-encoding"}
"""Headers that belong to one connection."""
_CONNECT_S = 5.0


class ServedEngine:
    """A server with its models. Its engine is a separate process, which is restarted if it dies."""

    def __init__(self, config: ServeConfig, address: str) -> None:
        """Listens on any port of this address, for clients with its token."""
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="cohabit-scale-")
        self._address = address
        self._server: Server | None = None
        self.token = secrets.token_hex()

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.http_url

    async def start(self, models: Sequence[ModelTraffic]) -> None:
        """Load the models; returns once they are served. Raises the errors of loading."""
        tokens = Path(self._folder.name) / "token"
        tokens.write_text(self.token)
        self._server = Server(
            replace(
                self._config,
                load_models=tuple(sorted(model.name for model in models)),
                model_rates={model.name: model.rate_per_s for model in models},
                hosts=(self._address,),
                token_files=(tokens,),
                control_token_files=(tokens,),
            )
        )
        await self._server.start()
        await self._server.load()

    def check(self) -> None:
        """Raises EngineUnavailable if the engine's process is no longer supervised."""
        supervisor = None if self._server is None else self._server.supervisor
        if supervisor is not None and supervisor.failed.is_set():
            raise EngineUnavailable("the engine is no longer supervised")

    async def stop(self) -> bool:
        """Answer the requests under way, and end; False if any was abandoned."""
        stopped = self._server is None or await self._server.stop()
        self._folder.cleanup()
        return stopped


class EngineAddress:
    """An engine, reached over HTTP. Headers and bodies are passed on unchanged."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str, memory: RequestMemory) -> None:
        """Answers being received count as request memory."""
        self._session = session
        self._url = URL(url)
        self._authorization = f"Bearer {token}"
        self._memory = memory

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        """Raises EngineUnavailable if the connection ends, and Overloaded if there is no memory for the answer."""
        headers = {name: value for name, value in request.headers.items() if name not in _OF_CONNECTION}
        try:
            async with self._session.request(
                request.method,
                self._url.join(URL(request.target, encoded=True)),
                headers=headers | {"authorization": self._authorization},
                data=request.body or None,
                skip_auto_headers=("Accept-Encoding", "Content-Type", "User-Agent"),
            ) as response:
                with self._memory.lease() as lease:
                    lease.reserve(response.content_length or 0)
                    body = await response.read()
                kept = {k.lower(): v for k, v in response.headers.items() if k.lower() not in _OF_CONNECTION}
                return ForwardedAnswer(response.status, kept, body)
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"its connection is lost: {type(error).__name__}") from error


def engine_session() -> aiohttp.ClientSession:
    """Return connections to engines. Event loop's thread only."""
    # Engines also close idle connections; they must not do so while a request is on its way.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S / 2)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=timeout)
