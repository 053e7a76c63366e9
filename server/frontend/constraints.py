"""Texts that follow a grammar: each asks the grammar process which tokens may come next."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from cohabit.server.errors import InvalidRequest, Overloaded, Refused
from cohabit.server.frontend.grammar_process import (
    COMPLETE,
    INVALID,
    LENGTH,
    MOST_BYTES,
    MOST_CPU_S,
    REPLY,
    TOKEN,
    UNSUPPORTED,
    Vocabulary,
)
from cohabit.server.frontend.threads import call
from cohabit.server.ipc.model import Array

_MOST_TEXTS = 32
"""Maximum number of texts that follow grammars at a time; others wait."""
_MOST_GRAMMAR_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in the syntax of llguidance, for texts of a vocabulary."""

    text: bytes
    vocabulary: Vocabulary

    def __post_init__(self) -> None:
        if len(self.text) > _MOST_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"the schema has {len(self.text)} bytes as a grammar, the limit is {_MOST_GRAMMAR_BYTES}; send a"
                " smaller one, or fewer tools"
            )


class Constraint:
    """The place of one text in its grammar. Belongs to the event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int) -> None:
        self._reader = reader
        self._writer = writer
        self._size = size
        self.is_complete = False
        """Whether nothing can follow."""
        self.allowed: Array = np.empty(0, np.bool_)
        """Which tokens may follow [vocabulary], bool."""

    async def begin(self, grammar: bytes) -> None:
        """Read the grammar. Raises RequestError if it is not supported."""
        self._writer.write(LENGTH.pack(len(grammar)) + grammar)
        await self._receive()

    async def push(self, token: int) -> None:
        """Add an allowed token. Raises RequestError if the grammar needs too much memory or time."""
        self._writer.write(TOKEN.pack(token))
        await self._receive()

    async def _receive(self) -> None:
        try:
            kind, length = REPLY.unpack(await self._reader.readexactly(REPLY.size))
            content = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise InvalidRequest(
                f"the schema takes over {MOST_CPU_S} s of CPU time or {MOST_BYTES >> 20} MiB of memory, or is nested"
                " too deeply; send a simpler one"
            ) from error
        if kind == UNSUPPORTED:
            raise Refused("Unsupported", content.decode())
        if kind == INVALID:
            raise InvalidRequest(f"the schema is not supported: {content.decode()}")
        self.is_complete = kind == COMPLETE
        if not self.is_complete:
            bits = np.unpackbits(np.frombuffer(content, np.uint8), count=self._size, bitorder="little")
            self.allowed = bits.view(np.bool_)


class Constraints:
    """Starts the grammar process with the first grammar. Event loop's thread only."""

    def __init__(self) -> None:
        self._starting = asyncio.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._places = asyncio.Semaphore(_MOST_TEXTS)

    @asynccontextmanager
    async def following(self, grammar: Grammar) -> AsyncIterator[Constraint]:
        """Make a text follow a grammar within this block. Raises RequestError."""
        async with self._places:
            own, other = socket.socketpair()
            with own, other:
                await self._send(grammar.vocabulary, other)
                other.close()
                reader, writer = await asyncio.open_unix_connection(sock=own)
                try:
                    constraint = Constraint(reader, writer, grammar.vocabulary.size)
                    await constraint.begin(grammar.text)
                    yield constraint
                finally:
                    writer.close()

    async def close(self) -> None:
        """End the grammar process."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.terminate()
            await call(True, self._process.wait)

    async def _send(self, vocabulary: Vocabulary, connection: socket.socket) -> None:
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                await self.close()
                self._control, self._process = await call(True, _started)
            control = self._control
            assert control is not None
            try:
                socket.send_fds(control, [msgspec.msgpack.encode(vocabulary)], [connection.fileno()])
            except BlockingIOError as error:
                raise Overloaded("too many texts with schemas begin; send it again", retry_after_s=1.0) from error
            except ConnectionError as error:
                raise Refused("EngineFailed", "the grammar process has ended; send it again") from error


def _started() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    own, other = socket.socketpair(type=socket.SOCK_SEQPACKET)
    own.setblocking(False)
    with other:
        command = [sys.executable, "-P", "-m", "cohabit.server.frontend.grammar_process", str(other.fileno())]
        return own, subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(other.fileno(),))
