"""gRPC's messages out of a stream's data: cut anywhere, too large, compressed, broken."""

import gzip
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import InvalidRequest, Overloaded, PayloadTooLarge, Unsupported
from server.grpc.framing import Assembly, inflate, prefix_of, require_known
from server.protocol.body_memory import BodyMemory

MOST_BYTES = 1000
MESSAGES = st.lists(st.tuples(st.binary(max_size=200), st.booleans()), max_size=6)


def framed(messages: list[tuple[bytes, bool]]) -> bytes:
    return b"".join(bytes([compressed]) + prefix_of(content)[1:] + content for content, compressed in messages)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


@given(messages=MESSAGES, cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_messages_come_out_whole_however_they_were_cut(messages: list[tuple[bytes, bool]], cuts: list[int]) -> None:
    memory = BodyMemory(sum(len(content) for content, _ in messages))
    assembly = Assembly(MOST_BYTES, memory)
    found = [message for piece in pieces(framed(messages), cuts) for message in assembly.feed(piece)]
    assert [(bytes(message.content), message.compressed) for message in found] == messages
    if any(content for content, _ in messages):
        with pytest.raises(Overloaded):
            memory.take(1)
    for message in found[1:]:
        assembly.handed_on(message)
    assembly.give_up()
    memory.take(sum(len(content) for content, _ in messages))
    assert assembly.is_between_messages


@given(content=st.binary(min_size=1, max_size=200), missing=st.integers(1, 200))
def test_an_unfinished_message_is_known_as_such(content: bytes, missing: int) -> None:
    data = framed([(content, False)])
    data = data[: max(1, len(data) - missing)]
    assembly = Assembly(MOST_BYTES, BodyMemory(1 << 20))
    assert assembly.feed(data) == []
    assert not assembly.is_between_messages


@pytest.mark.parametrize("size", [1, 5, 2000])
def test_a_message_over_the_limit_is_refused_by_its_prefix(size: int) -> None:
    data = prefix_of(bytes(MOST_BYTES + 1)) + bytes(MOST_BYTES + 1)
    assembly = Assembly(MOST_BYTES, BodyMemory(1 << 20))

    def feed() -> None:
        for start in range(0, 10, size):
            assembly.feed(data[start : start + size])

    with pytest.raises(PayloadTooLarge, match=r"larger than max \(1001 vs. 1000\)"):
        feed()


def test_a_prefix_that_is_none() -> None:
    with pytest.raises(InvalidRequest, match="a message begins with 80"):
        Assembly(MOST_BYTES, BodyMemory(1 << 20)).feed(b"PRI * HTTP/2.0")


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_messages(encoding: str, compress: object) -> None:
    assert callable(compress)
    content = bytes(range(250)) * 4
    assert inflate(compress(content), encoding, MOST_BYTES) == content
    with pytest.raises(PayloadTooLarge, match="inflates to, larger than max"):
        inflate(compress(bytes(MOST_BYTES + 1)), encoding, MOST_BYTES)
    with pytest.raises(InvalidRequest, match=f"ends in the middle of its {encoding}"):
        inflate(compress(content)[:-1], encoding, MOST_BYTES)
    with pytest.raises(InvalidRequest, match=f"is no {encoding}"):
        inflate(b"something else", encoding, MOST_BYTES)


def test_encodings_that_are_not_known() -> None:
    for known in ("identity", "gzip", "deflate"):
        require_known(known)
    with pytest.raises(Unsupported, match="grpc-encoding 'snappy' is not known: there are identity, deflate, gzip"):
        require_known("snappy")
    with pytest.raises(InvalidRequest, match="marked as compressed"):
        inflate(b"", "identity", MOST_BYTES)
