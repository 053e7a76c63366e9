"""gRPC's messages as a stream of HTTP/2 carries them: cut out of its data, and inflated."""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from server.errors import InvalidRequest, PayloadTooLarge, Unsupported
from server.protocol.body_memory import BodyMemory

Content = bytes | memoryview

IDENTITY = "identity"
_WINDOW_BITS = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}
ENCODINGS = (IDENTITY, *_WINDOW_BITS)

_PREFIX_BYTES = 5
"""A flag, which says whether the message is compressed, and the message's length."""


class Message(NamedTuple):
    content: Content
    compressed: bool


class Assembly:
    """One stream's messages, whatever pieces they come in; what they take is taken from the memory for all bodies.

    A message of one piece is cut out of it; what comes in several is copied once, to where all of it has room.
    """

    def __init__(self, most_bytes: int, bodies: BodyMemory) -> None:
        self._most_bytes = most_bytes
        self._bodies = bodies
        self._held_bytes = 0
        """Of messages that have not been handed on, as far as they have come."""
        self._prefix = b""
        self._body: memoryview | None = None
        """What there will be of a message whose prefix has come; None before that."""
        self._filled = 0
        self.messages = 0
        """How many have come as a whole."""

    @property
    def received_bytes(self) -> int:
        """Of a message that has not come as a whole."""
        return len(self._prefix) + self._filled

    @property
    def is_between_messages(self) -> bool:
        return self._body is None and not self._prefix

    def feed(self, data: bytes) -> Sequence[Message]:
        """Take a piece; returns the messages that end in it. Raises PayloadTooLarge, Overloaded or InvalidRequest."""
        if self._body is not None:
            if self._filled + len(data) < len(self._body):
                self._fill(self._body, data)
                return ()
        elif not self._prefix and len(data) >= _PREFIX_BYTES:
            nbytes = self._length(data)
            if len(data) == _PREFIX_BYTES + nbytes:
                self._hold(nbytes)
                self.messages += 1
                return (Message(data[_PREFIX_BYTES:], bool(data[0])),)
        return self._feed_piecewise(memoryview(data))

    def handed_on(self, message: Message) -> None:
        """Somebody else counts this message's bytes from now on."""
        self._hold(-len(message.content))

    def give_up(self) -> None:
        """Nothing that is here will be handed on, and nothing more be taken."""
        if self._held_bytes:
            self._hold(-self._held_bytes)
        self._no_more()

    def _feed_piecewise(self, data: memoryview) -> list[Message]:
        complete = []
        while data:
            if self._body is None:
                taken = _PREFIX_BYTES - len(self._prefix)
                self._prefix += data[:taken]
                data = data[taken:]
                if len(self._prefix) < _PREFIX_BYTES:
                    break
                self._body, self._filled = np.empty(self._length(self._prefix), np.uint8).data, 0
                self._bodies.expect(1)
            piece = data[: len(self._body) - self._filled]
            self._fill(self._body, piece)
            data = data[len(piece) :]
            if self._filled == len(self._body):
                complete.append(Message(self._body, bool(self._prefix[0])))
                self._prefix, self._filled = b"", 0
                self._no_more()
                self.messages += 1
        return complete

    def _no_more(self) -> None:
        """Expect nothing of a message that was coming."""
        if self._body is not None:
            self._body = None
            self._bodies.expect(-1)

    def _fill(self, body: memoryview, piece: bytes | memoryview) -> None:
        nbytes = len(piece)
        self._hold(nbytes)
        end = self._filled + nbytes
        body[self._filled : end] = piece
        self._filled = end

    def _hold(self, nbytes: int) -> None:
        if nbytes > 0:
            self._bodies.take(nbytes)
        else:
            self._bodies.give_back(-nbytes)
        self._held_bytes += nbytes

    def _length(self, prefix: bytes) -> int:
        nbytes = int.from_bytes(prefix[1:_PREFIX_BYTES], "big")
        if prefix[0] > 1:
            raise InvalidRequest(f"a message begins with {prefix[0]}: 0 is an uncompressed one, 1 a compressed one")
        if nbytes > self._most_bytes:
            raise PayloadTooLarge(
                f"received message larger than max ({nbytes} vs. {self._most_bytes}): it", self._most_bytes
            )
        return nbytes


def prefix_of(content: bytes) -> bytes:
    """What goes in front of an uncompressed message."""
    return b"\0" + len(content).to_bytes(_PREFIX_BYTES - 1, "big")


def require_known(encoding: str) -> None:
    """Raises Unsupported for an encoding that messages cannot be read in."""
    if encoding not in ENCODINGS:
        raise Unsupported(f"grpc-encoding '{encoding[:40]}' is not known: there are {', '.join(ENCODINGS)}")


def inflate(content: Content, encoding: str, most_bytes: int) -> bytes:
    """Undo a message's compression. Any thread. Raises InvalidRequest, or PayloadTooLarge when it grows too large."""
    if encoding not in _WINDOW_BITS:
        raise InvalidRequest("a message is marked as compressed, but the call has no grpc-encoding")
    inflater = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        inflated = inflater.decompress(content, most_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the message is no {encoding}: {error}") from error
    if len(inflated) > most_bytes:
        raise PayloadTooLarge("what the message inflates to, larger than max,", most_bytes)
    if not inflater.eof:
        raise InvalidRequest(f"the message ends in the middle of its {encoding}")
    return inflated
