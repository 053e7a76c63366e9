"""A client that costs next to nothing: requests as whole bytes on kept connections; of an answer, status and length."""

import asyncio
import time
from collections.abc import Mapping
from typing import cast

NO_ANSWER = 0
"""In place of a status, where the connection failed or patience ended."""

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"
_LOOK_S = 1.0


def post(host: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Write a request."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", *(f"{key}: {value}" for key, value in headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


class Connections:
    """As many connections to one server as there are requests under way. Belongs to its event loop."""

    def __init__(self, host: str, port: int, patience_s: float) -> None:
        self._host, self._port = host, port
        self._patience_s = patience_s
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._watch = asyncio.create_task(self._abandon())

    async def ask(self, request: bytes) -> int:
        """Send a request and wait for the end of its answer; returns the status, or NO_ANSWER.

        A server may end a kept connection just when a request is sent on it. Such a request is sent again, as clients
        do (RFC 9112, section 9.3.1).
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.lost:
                continue
            status = await self._ask(connection, request)
            if status != NO_ANSWER or connection.is_abandoned:
                return status
        try:
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        except OSError:
            return NO_ANSWER
        self._all.add(connection)
        return await self._ask(connection, request)

    async def _ask(self, connection: "_Connection", request: bytes) -> int:
        status = await connection.ask(request)
        if connection.lost:
            self._all.discard(connection)
        else:
            self._idle.append(connection)
        return status

    def close(self) -> None:
        self._watch.cancel()
        for connection in self._all:
            connection.close()

    async def _abandon(self) -> None:
        """Close connections whose answers take too long: one look at all is cheaper than a timer for each."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for connection in self._all:
                if connection.waits_s() > self._patience_s:
                    connection.is_abandoned = True
                    connection.close()


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.lost = False
        self.is_abandoned = False
        """Whether its answer took too long."""
        self._received = bytearray()
        self._answer_bytes: int | None = None
        self._answer: asyncio.Future[int] | None = None
        self._asked_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def ask(self, request: bytes) -> asyncio.Future[int]:
        self._answer = asyncio.get_running_loop().create_future()
        self._asked_s = time.perf_counter()
        self._transport.write(request)
        return self._answer

    def waits_s(self) -> float:
        """How long it has been waiting for an answer."""
        return 0.0 if self._answer is None else time.perf_counter() - self._asked_s

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._answer_bytes is None:
            end = self._received.find(_HEAD_END)
            if end < 0:
                return
            head = bytes(self._received[:end]).lower()
            length = int(head.partition(_LENGTH)[2].split(b"\r\n", 1)[0])
            self._answer_bytes = end + len(_HEAD_END) + length
        if len(self._received) >= self._answer_bytes:
            status = int(self._received[9:12])
            self._received.clear()
            self._answer_bytes = None
            self._settle(status)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._settle(NO_ANSWER)

    def _settle(self, status: int) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(status)
