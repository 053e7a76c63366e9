"""What gRPC says in HTTP/2's headers: deadlines before a call's messages, its status behind them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from server.errors import InvalidRequest
from server.grpc.errors import Status
from server.grpc.framing import ENCODINGS

Header = tuple[bytes, bytes]
Metadata = Sequence[tuple[str, str]]

BEGINNING: tuple[Header, ...] = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", ",".join(ENCODINGS).encode()),
)
WENT_WELL: tuple[Header, ...] = ((b"grpc-status", b"0"),)
NO_GRPC: tuple[Header, ...] = ((b":status", b"415"), (b"content-length", b"0"))
"""For a caller who speaks HTTP/2 and wants something else."""

_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S: Mapping[bytes, float] = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_PLAIN = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""What stands for itself in a message besides letters and digits; all else is written %XX."""


def beginning(metadata: Metadata) -> Sequence[Header]:
    return (*BEGINNING, *_written(metadata)) if metadata else BEGINNING


def ending(status: Status) -> list[Header]:
    return [
        (b"grpc-status", b"%d" % status.code.value[0]),
        (b"grpc-message", quote(status.message, safe=_PLAIN).encode()),
        *_written(status.metadata),
    ]


def is_grpc(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b":method") == b"POST" and headers.get(b"content-type", b"").startswith(b"application/grpc")


def timeout_s(value: bytes) -> float:
    """Read a grpc-timeout. Raises InvalidRequest."""
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise InvalidRequest(f"grpc-timeout is up to eight digits and one of HMSmun, not '{text(value)[:40]}'")
    return int(match[1]) * _UNIT_S[match[2]]


def text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


def _written(metadata: Iterable[tuple[str, str]]) -> list[Header]:
    return [(name.encode(), value.encode()) for name, value in metadata]
