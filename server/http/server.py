"""An HTTP port: aiohttp's server with bounded connections, TLS and Unix sockets."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.http import RawRequestMessage

from cohabit.server.frontend.listening import TlsFiles, address_of, open_sockets, open_unix_socket
from cohabit.server.http.errors import error_response

KEEP_ALIVE_S = 75.0
_READ_AHEAD_BYTES = 256 << 10
"""Buffered bytes of a body above which its client is paused."""
_HANDSHAKE_S = 20.0
_ACCEPT_AGAIN_S = 0.1
_REFUSED_S, _MOST_REFUSED = 2.0, 128
"""Maximum seconds that a refused connection is kept to send its answer, and number of such connections."""
_MOST_ERROR_CHARACTERS = 300

_log = logging.getLogger("cohabit.http")


class HttpServer:
    """Serves one application on any number of addresses. All methods run on the event loop's thread.

    A connection counts from the moment it is accepted, its TLS handshake included. At the limit, a new connection
    replaces the one that
    has waited longest for a client's request: first among clients that have sent none yet, then among idle ones. So
    silent clients cannot keep others out, and a port with short requests always admits a probe. If every connection has
    a request under way, the new one is refused.
    """

    def __init__(
        self,
        app: web.Application,
        *,
        max_connections: int,
        keep_alive_s: float = KEEP_ALIVE_S,
        tls: TlsFiles | None = None,
    ) -> None:
        """`keep_alive_s` limits the time that a connection may be without a complete request head."""
        self._max_connections = max_connections
        self._tls = tls
        self._options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "keepalive_timeout": keep_alive_s,
            "read_bufsize": _READ_AHEAD_BYTES,
        }
        self._runner = web.AppRunner(app, handler_cancellation=True, **self._options)
        self._listening: list[socket.socket] = []
        self._connections: dict[_Connection, asyncio.Task[None]] = {}
        """Each connection's handshake task. The client heard from least recently comes first."""
        self._refused: dict[socket.socket, asyncio.TimerHandle] = {}
        """Refused connections that may still send, with the end of their time."""
        self._unix: Path | None = None

    async def start(self, hosts: Sequence[str], port: int, unix: Path | None, flag: str) -> str:
        """Listen, and return the URL of the first host.

        Port 0 takes a free port, the same on every host. The Unix socket has no TLS. Raises ConfigError, naming the
        flag, for an address that cannot be bound and for unusable TLS files.
        """
        tls = None if self._tls is None else self._tls.context()
        await self._runner.setup()
        sockets = open_sockets(hosts, port, flag)
        for sock in sockets:
            self._listen(sock, tls)
        if unix is not None:
            self._listen(open_unix_socket(unix, flag), None)
            self._unix = unix
        scheme = "http" if tls is None else "https"
        return f"{scheme}://{address_of(hosts[0], sockets[0].getsockname()[1])}"

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, give requests under way `grace_s` seconds, then cancel them."""
        loop = asyncio.get_running_loop()
        while self._listening:
            sock = self._listening.pop()
            loop.remove_reader(sock)
            sock.close()
        for refused in list(self._refused):
            self._end_refused(refused)
        for handshake in self._connections.values():
            handshake.cancel()
        await asyncio.gather(*self._connections.values(), return_exceptions=True)
        if (server := self._runner.server) is not None:
            server.pre_shutdown()
            await server.shutdown(grace_s)
        await self._runner.cleanup()
        if self._unix is not None:
            self._unix.unlink(missing_ok=True)

    def _listen(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self._listening.append(sock)
        self._start_accepting(sock, tls)

    def _start_accepting(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Start accepting connections, unless the port was closed meanwhile."""
        if sock in self._listening:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock, tls)

    def _accept(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = sock.accept()
        except (BlockingIOError, ConnectionError):  # the client has gone, or another front end was faster
            return
        except OSError as error:  # for example, out of descriptors
            _log.warning("a connection could not be accepted", extra={"fields": {"reason": str(error)}})
            self._end_longest_waiting()
            loop.remove_reader(sock)
            loop.call_later(_ACCEPT_AGAIN_S, self._start_accepting, sock, tls)
            return
        accepted.setblocking(False)
        if len(self._connections) >= self._max_connections and not self._end_longest_waiting():
            self._refuse(accepted, tls)
            return
        server = self._runner.server
        assert server is not None
        connection = _Connection(self, server, loop=loop, **self._options)
        handshake = asyncio.create_task(self._open(connection, accepted, tls))
        handshake.add_done_callback(partial(self._handshake_ended, connection, accepted))
        self._connections[connection] = handshake

    async def _open(self, connection: "_Connection", accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        timeout_s = None if tls is None else _HANDSHAKE_S
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=timeout_s
        )

    def _handshake_ended(
        self, connection: "_Connection", accepted: socket.socket, handshake: asyncio.Task[None]
    ) -> None:
        if not connection.is_open:  # the handshake has failed, or was cancelled
            accepted.close()
            self.lost(connection)
        if not handshake.cancelled() and (error := handshake.exception()) is not None:
            _log.debug("a handshake failed", extra={"fields": {"reason": str(error)}})

    def request_received(self, connection: "_Connection") -> None:
        """Called by a connection whose client has sent a request."""
        if connection in self._connections:
            self._connections[connection] = self._connections.pop(connection)

    def lost(self, connection: "_Connection") -> None:
        """Called by a connection that has ended."""
        self._connections.pop(connection, None)

    def _end_longest_waiting(self) -> bool:
        """Close the connection that has waited longest for a request; False if all have a request under way."""
        waiting = [connection for connection in self._connections if connection.is_waiting]
        if not waiting:
            return False
        # `min` is stable: of several, it returns the one that has waited longest.
        longest = min(waiting, key=lambda connection: connection.has_sent_request)
        self._connections.pop(longest).cancel()  # ends a handshake, and does nothing after it
        longest.abort()
        return True

    def _refuse(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Answer a connection over the limit, and close it.

        What the client sends is discarded until it closes, for `_REFUSED_S` at most: a connection that is closed with
        unread input is reset, and its client may lose the answer. TLS connections get no answer, which would need a
        handshake.
        """
        body = msgspec.json.encode(
            {"error": f"all {self._max_connections} connections have requests under way (see --max-connections)"}
        )
        if tls is not None or len(self._refused) >= _MOST_REFUSED:
            accepted.close()
            return
        try:
            accepted.send(
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Retry-After: 1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            accepted.shutdown(socket.SHUT_WR)
        except OSError:
            accepted.close()
            return
        loop = asyncio.get_running_loop()
        self._refused[accepted] = loop.call_later(_REFUSED_S, self._end_refused, accepted)
        loop.add_reader(accepted, self._discard, accepted)

    def _discard(self, refused: socket.socket) -> None:
        """Read what a refused client sends, until it closes its side."""
        try:
            is_open = bool(refused.recv(_READ_AHEAD_BYTES))
        except BlockingIOError:
            return
        except OSError:
            is_open = False
        if not is_open:
            self._end_refused(refused)

    def _end_refused(self, refused: socket.socket) -> None:
        self._refused.pop(refused).cancel()
        asyncio.get_running_loop().remove_reader(refused)
        refused.close()


class _Connection(web.RequestHandler):
    """A connection. Input that is not HTTP, and oversized heads, are answered with `{"error": ...}`."""

    __slots__ = ("_newest", "_opened", "_port")

    def __init__(self, port: HttpServer, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._port = port
        self._newest: tuple[Any, Any] | None = None
        """The last parsed request with its body."""
        self._opened: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether the connection is established, including any TLS handshake."""
        return self._opened is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the connection has no request under way: it waits for a request head, or for the rest of one."""
        return not (self._request_in_progress or self._messages)

    @property
    def has_sent_request(self) -> bool:
        """Whether the client has ever sent a request head."""
        return self._newest is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._opened = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._port.lost(self)

    def abort(self) -> None:
        """Close at once, without TLS's closing handshake, which a client could delay to keep the connection open."""
        if self._opened is not None:
            self._opened.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for its answers if the client closes its side after a request with `Connection: close`.

        Any other client that closes its side cannot be told from one that is gone, so its requests are cancelled.
        """
        if self._newest is None or self.ssl_context is not None:
            return False
        message, body = self._newest
        return not isinstance(message, RawRequestMessage) or bool(message.should_close and body.is_eof())

    def data_received(self, data: bytes) -> None:
        """Parse input. If a body continues with data that is not HTTP, its request ends at once."""
        before = self._newest
        super().data_received(data)
        if not self._messages:
            return
        self._newest = self._messages[-1]
        self._port.request_received(self)
        if not isinstance(self._newest[0], RawRequestMessage):
            body = self._messages[-2][1] if len(self._messages) > 1 else before and before[1]
            if body is not None and not body.is_eof():
                body.set_exception(web.RequestPayloadError("it is not HTTP"))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("internal error", exc_info=exc)
            message = "internal error"
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        text = " ".join((message or HTTPStatus(status).phrase).split())[:_MOST_ERROR_CHARACTERS]
        answer = error_response(status, text)
        answer.force_close()
        return answer
