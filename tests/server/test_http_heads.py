"""Heads that are known are not parsed again: nobody can tell the difference by what is answered."""

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.http import heads as heads_module
from server.http.connection import Connection
from server.http.heads import LONGEST_BYTES, Head, Heads, whole_head
from server.http.message import Request, Response
from server.protocol.body_memory import BodyMemory

HOST = b"Host: x\r\n"
LIMIT_BYTES = 4096


def post(body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(line + b"\r\n" for line in headers)
    return b"POST /v2/a HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n%b" % (HOST, lines, len(body), body)


MESSAGES = [
    b"GET /v2/health/live HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /v2/health/live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"\r\n\r\nGET /behind/lines HTTP/1.1\r\n" + HOST + b"\r\n",
    post(b"abc"),
    post(b"xyz"),
    post(b"abcd"),
    post(b""),
    post(b"longer " * 40, b"X-A: 1", b"X-A: 2"),
    post(b"GET /within HTTP/1.1\r\n\r\n"),
    post(b"asked", b"Expect: 100-continue"),
    post(b"other", b"Connection: Upgrade", b"Upgrade: websocket"),
    post(b"secret", b"Authorization: Bearer s"),
    post(b"too long " * 500),
    b"POST /v2/a HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"POST /v2/a HTTP/1.1\nContent-Length: 7\n\nab\r\n\r\nc",
    b"POST /v2/a HTTP/1.1\nContent-Length: 7\n\nxy\r\n\r\nz",
    b"GET /v2/a b HTTP/1.1\r\n\r\n",
]


class Transport:
    """What a connection writes to."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.sent += b"".join(parts)

    def close(self) -> None:
        self.closed = True

    abort = close
    pause_reading = resume_reading = lambda self: None

    def is_closing(self) -> bool:
        return self.closed


class Nobody:
    def lost(self, connection: Connection) -> None: ...


class NeverKnown(Heads):
    def find(self, head: bytes) -> Head | None:
        return None


async def echo(request: Request) -> Response:
    """Answers with everything that it was asked."""
    try:
        with BodyMemory(1 << 20).share() as share:
            body = bytes(await request.read(LIMIT_BYTES, share))
    except Exception as error:
        body = f"{type(error).__name__}: {error}".encode()
    headers = {name.decode(): value.decode() for name, value in request.headers.items()}
    told = (request.method.decode(), request.target.decode(), headers, body.decode(), request.keep_alive)
    return Response(msgspec.json.encode(told))


async def answers(heads: Heads, stream: bytes, cuts: list[int]) -> bytes:
    """What a connection answers to a stream that comes in pieces."""
    scratch = memoryview(bytearray(64 << 10))
    connection, transport = Connection(Nobody(), echo, LIMIT_BYTES, scratch, heads), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    edges = [0, *sorted({cut % len(stream) for cut in cuts} - {0}), len(stream)]
    for start, end in pairwise(edges):
        piece = stream[start:end]
        while piece and not transport.closed:
            room = connection.get_buffer(-1)
            taken = min(len(room), len(piece))
            room[:taken] = piece[:taken]
            connection.buffer_updated(taken)
            piece = piece[taken:]
        for _ in range(20):
            await asyncio.sleep(0)
    connection.connection_lost(None)
    return transport.sent


def without_dates(sent: bytes) -> list[bytes]:
    return [line for line in sent.split(b"\r\n") if not line.startswith(b"Date: ")]


KNOWN = Heads()
"""What all examples have asked so far."""


@settings(max_examples=300, deadline=None)
@given(
    chosen=st.lists(st.sampled_from(MESSAGES), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    by_message=st.booleans(),
)
def test_known_heads_make_no_difference(chosen: list[bytes], cuts: list[int], by_message: bool) -> None:
    if by_message:
        cuts = [sum(len(message) for message in chosen[:n]) for n in range(len(chosen))]
    stream = b"".join(chosen)

    async def both() -> tuple[bytes, bytes]:
        return await answers(KNOWN, stream, cuts), await answers(NeverKnown(), stream, cuts)

    known, parsed = asyncio.run(both())
    assert without_dates(known) == without_dates(parsed)


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
async def test_a_known_head_makes_no_difference_wherever_its_request_is_cut(message: bytes) -> None:
    heads = Heads()
    await answers(heads, message, [])
    for cut in range(min(len(message), 300)):
        known, parsed = await answers(heads, message, [cut]), await answers(NeverKnown(), message, [cut])
        assert without_dates(known) == without_dates(parsed), cut


async def test_a_repeated_head_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = Heads()
    first = await answers(heads, post(b"abc"), [])

    def parse(self: Any, data: memoryview) -> int:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(Connection, "_feed", parse)
    assert without_dates(await answers(heads, post(b"abc"), [])) == without_dates(first)
    assert b"xyz" in await answers(heads, post(b"xyz") * 1, [len(post(b"xyz")) - 2]), "another body, in two pieces"
    with pytest.raises(AssertionError, match="it was parsed"):
        await answers(heads, post(b"abcd"), [])


def head(method: bytes = b"GET", target: bytes = b"/", headers: Mapping[bytes, bytes] | None = None) -> Head:
    return Head(method, target, headers or {}, 0, True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\r\n\r\n", head()),
        (b"GET / HTTP/1.1\nHost: x\n\nGET /b HTTP/1.1\r\n\r\n", head()),
        (b"GET / HTTP/1.1\r\nExpect: 100-continue\r\n\r\n", head(headers={b"expect": b"100-continue"})),
        (b"GET / HTTP/1.1\r\nAuthorization: t\r\n\r\n", head(headers={b"authorization": b"t"})),
        (b"GET /other HTTP/1.1\r\n\r\n", head()),
        (b"GETS / HTTP/1.1\r\n\r\n", head()),
    ],
    ids=["empty lines", "bare line feeds", "expects", "secret", "another target", "another method"],
)
def test_what_might_be_something_else_is_not_kept(text: bytes, said: Head) -> None:
    heads = Heads()
    heads.remember(text, said)
    assert heads.find(text) is None


def test_heads_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_module, "_MOST", 3)
    heads = Heads()
    texts = [b"GET /%d HTTP/1.1\r\n\r\n" % n for n in range(7)]
    for n, text in enumerate(texts):
        heads.remember(text, head(target=b"/%d" % n))
        assert heads.find(text) is not None
    assert 1 <= sum(heads.find(text) is not None for text in texts) <= 3


def test_long_and_unfinished_heads_are_left_to_the_parser() -> None:
    assert whole_head(memoryview(b"GET / HTTP/1.1\r\nHost: x\r\n")) == b""
    assert whole_head(memoryview(b"GET / HTTP/1.1\r\nX: " + b"a" * LONGEST_BYTES + b"\r\n\r\n")) == b""
    assert whole_head(memoryview(b"GET / HTTP/1.1\r\n\r\nbody")) == b"GET / HTTP/1.1\r\n\r\n"
