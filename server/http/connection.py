"""One HTTP/1.1 connection: httptools parses what comes, requests are answered one after the other.

aiohttp's server takes several times as long for each request (docs/architecture.md has the figures).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

import httptools

from server.eager import Begun, begin
from server.errors import InvalidRequest
from server.http.body import Body
from server.http.errors import error_response
from server.http.heads import Head, Heads, whole_head
from server.http.message import Request, Response

SCRATCH_BYTES = 256 << 10
IDLE_S = 75.0
"""How long a client may take for a whole head, or read nothing of its answer."""

_MOST_LINE_BYTES = 8190
"""Of a path, and of one header."""
_MOST_HEAD_BYTES = 64 << 10
_MOST_HEADERS = 128
_MOST_WAITING = 32
"""Requests behind the one that is being answered, before reading stops."""
_JOINED_BYTES = 16 << 10
"""An answer's body up to this is copied behind its head, so that both are sent at once."""
_LINGER_S = 10.0
"""How long a client may go on with a body that nobody wants, so that it gets to read why."""
_MOST_ERROR_CHARACTERS = 300

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE, _KEEP_ALIVE = b"Connection: close\r\n", b"Connection: keep-alive\r\n"

_log = logging.getLogger("cohabit.http")

Answer = Callable[[Request], Awaitable[Response]]
"""Answers whatever is asked; raises nothing but cancellation."""


class Owner(Protocol):
    """Knows the connections of a port."""

    def lost(self, connection: "Connection") -> None: ...


class _Refused(Exception):
    """A head that is HTTP, and more than we take."""


class Connection(asyncio.BufferedProtocol):
    """Receives into `scratch`, which all connections share, or a long body where it is to stay."""

    def __init__(
        self, owner: Owner, answer: Answer, most_body_bytes: int, scratch: memoryview, heads: Heads
    ) -> None:
        self._owner = owner
        self._answer = answer
        self._most_body_bytes = most_body_bytes
        self._scratch = scratch
        self._heads = heads
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._header_count = self._head_bytes = self._unfinished_bytes = 0
        self._in_head = self._is_between = True
        """Whether a head is being read; whether the next byte is the first of a request."""
        self._resumes = False
        """Whether the head that is being read only repeats how long the body is."""
        self._incoming: Request | None = None
        """The request whose body is not complete."""
        self._in_place = False
        """Whether that body is received without the parser."""
        self._awaits_continue = False
        self._requests: deque[Request] = deque()
        """Those that wait for their turn."""
        self._answering: Begun | None = None
        self._fault: Response | None = None
        """The answer to what was no request; nothing is read behind it."""
        self._is_last = False
        """Whether the connection ends with the answers that are due."""
        self._reads = True
        self._writable: asyncio.Future[None] | None = None
        """Set while the client does not take its answers."""
        self._unsent_bytes = 0
        self._waits_since_s = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._requests.clear()
        if self._answering is not None:
            self._answering.cancel()
        self._owner.lost(self)

    def close(self) -> None:
        """End the connection when what was asked is answered."""
        self._is_last = True
        if self._answering is None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection now."""
        self._transport.abort()

    def close_if_overdue(self, now_s: float) -> None:
        """End it if it has been the client's turn for too long."""
        if self._writable is not None:
            unsent_bytes = self._transport.get_write_buffer_size()
            if unsent_bytes < self._unsent_bytes:
                self._waits_since_s = now_s
            self._unsent_bytes = unsent_bytes
        elif self._answering is not None:
            return
        if now_s - self._waits_since_s > IDLE_S:
            self._transport.abort()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._waits_since_s = self._loop.time()

    def resume_writing(self) -> None:
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None

    def get_buffer(self, sizehint: int) -> memoryview:
        if not self._in_place:
            return self._scratch
        body = self._body
        return self._scratch[: (body.length or 0) - body.nbytes] if body.unwanted else body.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._fault is not None:
            return
        if self._in_place:
            self._body.received(nbytes)
            if self._body.nbytes == self._body.length:
                self.on_message_complete()
                self._in_place, self._parser = False, httptools.HttpRequestParser(self)
        else:
            self._parse(self._scratch[:nbytes])
        if self._answering is None and (self._requests or self._fault is not None):
            self._answering = begin(self._loop, self._answer_all())
        self._regulate()

    def on_message_begin(self) -> None:
        if self._resumes:
            return
        self._target, self._headers = b"", {}
        self._header_count = self._head_bytes = 0
        self._unfinished_bytes = -1
        self._in_head, self._is_between = True, False

    def on_url(self, part: bytes) -> None:
        self._target += part
        if len(self._target) > _MOST_LINE_BYTES:
            raise _Refused(f"the request's path has over {_MOST_LINE_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        nbytes = len(name) + len(value)
        self._header_count += 1
        self._head_bytes += nbytes
        if nbytes > _MOST_LINE_BYTES:
            raise _Refused(f"the header '{name[:40].decode('latin-1')}' has over {_MOST_LINE_BYTES} bytes")
        if self._header_count > _MOST_HEADERS or self._head_bytes > _MOST_HEAD_BYTES:
            raise _Refused(f"the request has over {_MOST_HEADERS} headers, or {_MOST_HEAD_BYTES} bytes of them")
        if self._in_head:  # what comes behind a body in chunks is not looked at
            key = name.lower()
            self._headers[key] = self._headers[key] + b", " + value if key in self._headers else value

    def on_headers_complete(self) -> None:
        if self._resumes:
            self._resumes = False
            return
        self._in_head = False
        headers = self._headers
        length: int | None = 0
        if b"transfer-encoding" in headers:
            if headers[b"transfer-encoding"].lower() != b"chunked":
                raise _Refused("a Transfer-Encoding other than chunked is not supported")
            length = None
        elif b"content-length" in headers:
            length = int(headers[b"content-length"])
        self._awaits_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        body = Body(length, self._most_body_bytes, self._on_body_wanted)
        parser = self._parser
        self._incoming = Request(parser.get_method(), self._target, headers, body, parser.should_keep_alive())
        self._requests.append(self._incoming)

    def on_body(self, data: bytes) -> None:
        self._body.add(data)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade() and self._body.length != 0:
            return  # the parser takes the body for another protocol's
        self._body.end()
        self._incoming, self._is_between = None, True

    @property
    def _body(self) -> Body:
        assert self._incoming is not None
        return self._incoming.body

    def _parse(self, data: memoryview) -> None:
        """Read heads and short bodies; a long one comes in place from now on."""
        text = whole_head(data) if self._is_between else b""
        known = self._heads.find(text)
        if known is not None and len(data) <= len(text) + known.length:
            self._begin(known, bytes(data[len(text) :]))
            return
        waiting = len(self._requests)
        try:
            while (end := self._feed(data)) < len(data):
                data = data[end:]
        except httptools.HttpParserError as error:
            self._refuse(error)
            return
        if text and len(self._requests) == waiting + 1:
            self._remember(text, self._requests[-1])
        if self._incoming is not None:
            self._in_place = self._incoming.body.length is not None
        elif self._in_head:
            self._count_unfinished(len(data))

    def _begin(self, head: Head, data: bytes) -> None:
        """Begin a request whose head is known with what has come of its body, behind which there is nothing."""
        body = Body(head.length, self._most_body_bytes, self._on_body_wanted)
        request = Request(head.method, head.target, head.headers, body, head.keep_alive)
        self._requests.append(request)
        self._awaits_continue = False
        if data:
            body.add(data)
        if body.nbytes == body.length:
            body.end()
        else:
            self._incoming, self._in_place, self._is_between = request, True, False

    def _remember(self, text: bytes, request: Request) -> None:
        if request.body.length is not None:
            head = Head(request.method, request.target, request.headers, request.body.length, request.keep_alive)
            self._heads.remember(text, head)

    def _feed(self, data: memoryview) -> int:
        """Have the parser read; returns how far it came: all, unless it takes the rest for another protocol's."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            end: int = upgrade.args[0]
            return end
        return len(data)

    def _ignore_upgrade(self) -> None:
        """Go on with HTTP/1.1, as a server may; a body that is still to come gets a head that tells the parser so."""
        self._parser = httptools.HttpRequestParser(self)
        if self._incoming is not None:
            self._resumes, length = True, self._body.length
            framing = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)

    def _count_unfinished(self, nbytes: int) -> None:
        """Bound what the parser keeps of a header that does not end; its first part counts nothing."""
        self._unfinished_bytes = 0 if self._unfinished_bytes < 0 else self._unfinished_bytes + nbytes
        if self._unfinished_bytes > _MOST_HEAD_BYTES:
            self._refuse(_Refused(f"the request's head has over {_MOST_HEAD_BYTES} bytes"))

    def _refuse(self, error: Exception) -> None:
        """Answer 400 to what cannot be read, behind the answers that are due."""
        cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
        if not isinstance(cause, _Refused | httptools.HttpParserError):
            _log.error("internal error", exc_info=cause)
            cause = _Refused("internal error")
        text = " ".join(str(cause).split())[:_MOST_ERROR_CHARACTERS]
        self._fault = error_response(400, text)
        if self._incoming is not None:  # its answer says so
            self._incoming.body.fail(InvalidRequest(f"the request body could not be read: {text}"))
            self._incoming.body.end()
            self._incoming, self._is_last = None, True

    def _on_body_wanted(self) -> None:
        if self._awaits_continue and self._incoming is not None and not self._incoming.body.unwanted:
            self._awaits_continue = False
            self._transport.write(_CONTINUE)
        self._regulate()

    def _regulate(self) -> None:
        """Let the client wait if it sends more than is wanted."""
        if self._reads and self._incoming is None and not self._requests:
            return
        wanted = len(self._requests) < _MOST_WAITING and (self._incoming is None or self._body.wants_more)
        if wanted != self._reads and not self._transport.is_closing():
            self._reads = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    async def _answer_all(self) -> None:
        """Answer what has come, one after the other."""
        try:
            while self._requests and not self._transport.is_closing():
                request = self._requests.popleft()
                await self._send(request, await self._answer(request))
                if self._is_last:
                    break
            if self._fault is not None and not self._is_last:
                self._is_last = True
                self._write(self._fault, _CLOSE)
            if self._is_last:
                self._transport.close()
        except Exception:
            _log.exception("a connection has failed")
            self._transport.abort()
        finally:
            self._answering = None
            self._waits_since_s = self._loop.time()
        self._regulate()

    async def _send(self, request: Request, response: Response) -> None:
        body = request.body
        unread = not body.complete
        if unread:
            self._is_last |= self._awaits_continue  # whether its body comes now, only the client knows
            body.discard()
        self._is_last |= not request.keep_alive
        self._write(response, _CLOSE if self._is_last else _KEEP_ALIVE if b"connection" in request.headers else b"")
        if unread:
            await body.wait_for_end(_LINGER_S)
            self._is_last |= not body.complete
        if self._writable is not None:
            await self._writable

    def _write(self, response: Response, connection: bytes) -> None:
        head = response.head(connection)
        if len(response.body) <= _JOINED_BYTES:
            self._transport.write(head + response.body)
        else:
            self._transport.writelines((head, response.body))
