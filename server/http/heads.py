"""Heads of requests that were parsed before: a client's next request begins with the same bytes as its last one."""

from collections.abc import Mapping

import msgspec

LONGEST_BYTES = 2 << 10
_MOST = 1024
"""When there are more, all are forgotten."""

_END = b"\r\n\r\n"
_OF_THE_MOMENT = frozenset({b"expect", b"transfer-encoding", b"upgrade", b"authorization"})
"""Requests with these are always parsed: they change how the connection goes on, or are not to be kept."""


class Head(msgspec.Struct, frozen=True, eq=False):
    """What a head says."""

    method: bytes
    target: bytes
    headers: Mapping[bytes, bytes]
    length: int
    """Of the body, in bytes."""
    keep_alive: bool


class Heads:
    """Of all connections of a port. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}

    def find(self, head: bytes) -> Head | None:
        return self._known.get(head)

    def remember(self, text: bytes, head: Head) -> None:
        """Remember what these bytes said, if there is no doubt that they were all of it and nothing else."""
        if not _OF_THE_MOMENT.isdisjoint(head.headers) or text.count(b"\n") != text.count(b"\r\n"):
            return
        if text.startswith(b"%b %b HTTP/" % (head.method, head.target)):
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[text] = head


def whole_head(data: memoryview) -> bytes:
    """The head with which data begins; empty if it has no end there, or is long."""
    start = bytes(data[:LONGEST_BYTES])
    end = start.find(_END)
    return start[: end + len(_END)] if end >= 0 else b""
