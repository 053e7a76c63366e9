"""HTTP/1.1 as it travels: requests in pieces, behind one another, unfinished, malformed, and answers nobody reads."""

import asyncio
import contextlib
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.http.connection import Connection
from server.http.message import Request, Response
from server.http.port import HttpServer
from server.http.routes import Routes
from server_fakes import FakeServable, Gate, Running, identity, running, serving
from server_http import ask, infer, x

from server.errors import PayloadTooLarge
from server.http import connection as connection_module
from server.http import port as port_module
from server.http.body import READ_AHEAD_BYTES, Body
from server.protocol.body_memory import BodyMemory

KIB, MIB = 1 << 10, 1 << 20
INFER = json.dumps({"inputs": [x()]}).encode()


class Wire:
    """A connection by hand."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.received = b""

    def send(self, *parts: bytes) -> "Wire":
        for part in parts:
            self.socket.sendall(part)
        return self

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read one answer off the connection."""
        while b"\r\n\r\n" not in self.received:
            self._more()
        head, _, self.received = self.received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers.get("content-length", 0))
        while len(self.received) < length:
            self._more()
        body, self.received = self.received[:length], self.received[length:]
        return int(status.split()[1]), headers, body

    def is_closed(self) -> bool:
        """Whether nothing more comes, waiting for it."""
        try:
            return self.received == b"" and self.socket.recv(KIB) == b""
        except ConnectionError:
            return True
        finally:
            self.socket.close()

    def _more(self) -> None:
        part = self.socket.recv(64 * KIB)
        assert part, f"closed behind {self.received!r}"
        self.received += part


@pytest.fixture(scope="module")
def own() -> Iterator[Running]:
    with running(serving(identity("one", "FP32"), identity("wide", "FP32", (100_000,))), max_body_bytes=MIB) as h:
        yield h


@pytest.fixture
def wire(own: Running) -> Iterator[Wire]:
    made = Wire(own.port)
    yield made
    made.socket.close()
    assert infer(own, "one", {"inputs": [x()]}).status == 200


def post(body: bytes, *headers: str, path: str = "/v2/models/one/infer", version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 700), max_size=8), seed=st.integers(0, 3))
def test_requests_are_the_same_however_they_are_cut(own: Running, cuts: list[int], seed: int) -> None:
    good = [
        post(INFER),
        chunked(INFER[:7], INFER[7:]),
        b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nX-Empty:\r\nX-Next: 1\r\n\r\n",
        post(INFER, "Content-Type: application/json"),
    ][seed:]
    stream = b"".join([*good, post(b"{")])
    wire = Wire(own.port)
    wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    for start, end in pairwise(edges):
        wire.send(stream[start:end])
        time.sleep(0.001)
    statuses = [wire.answer()[0] for _ in range(5 - seed)]
    assert statuses == [*[200] * (4 - seed), 400]
    wire.socket.close()


def test_requests_behind_one_another_are_answered_in_order(wire: Wire) -> None:
    for number in range(200):
        body = json.dumps({"id": f"r{number}", "inputs": [x([number] * 4)]}).encode()
        wire.send(post(body))
    for number in range(200):
        answer = json.loads(wire.answer()[2])
        assert (answer["id"], answer["outputs"][0]["data"]) == (f"r{number}", [number] * 4)


def test_a_long_body_in_small_pieces(own: Running, wire: Wire) -> None:
    body = json.dumps({"inputs": [x([0.5] * 100_000, shape=[1, 100_000])]}).encode()
    stream = post(body, path="/v2/models/wide/infer") + post(INFER)
    for start in range(0, len(stream), 9973):
        wire.send(stream[start : start + 9973])
    assert json.loads(wire.answer()[2])["outputs"][0]["data"] == [0.5] * 100_000
    assert wire.answer()[0] == 200


def test_a_body_in_chunks_with_trailers(wire: Wire) -> None:
    assert (
        wire.send(chunked(INFER, end=b"0\r\nX-Sum: 1\r\nContent-Encoding: gzip\r\n\r\n"), post(INFER)).answer()[0]
        == 200
    )
    assert wire.answer()[0] == 200


def test_a_body_in_chunks_is_bounded(wire: Wire) -> None:
    status, _, body = wire.send(chunked(*[b" " * 100_000] * 12)).answer()
    assert (status, b"1.0 MiB" in body) == (413, True)


def test_a_body_over_the_limit_is_refused_before_it_comes(wire: Wire) -> None:
    head = post(b"").replace(b"Content-Length: 0", b"Content-Length: 1048577")
    status, _, body = wire.send(head).answer()
    assert (status, b"request body of 1048577 bytes" in body) == (413, True)
    wire.send(bytes(1_048_577), post(INFER))  # who sends it all the same may go on
    assert wire.answer()[0] == 200


def test_a_claim_of_a_huge_body_takes_no_memory(wire: Wire) -> None:
    head = post(b"").replace(b"Content-Length: 0", b"Content-Length: 9000000000000000000")
    assert wire.send(head, bytes(MIB)).answer()[0] == 413


def test_a_refusal_does_not_wait_for_the_body(wire: Wire) -> None:
    head = post(b"", path="/v2/models/nobody/infer").replace(b"Content-Length: 0", b"Content-Length: 500000")
    assert wire.send(head, bytes(1000)).answer()[0] == 404
    assert wire.send(bytes(499_000), post(INFER)).answer()[0] == 200


def test_a_client_that_asks_whether_to_go_on(wire: Wire) -> None:
    head, body = post(INFER, "Expect: 100-continue").split(b"\r\n\r\n", 1)
    assert wire.send(head + b"\r\n\r\n").answer() == (100, {}, b"")
    assert wire.send(body).answer()[0] == 200


def test_a_client_is_told_not_to_go_on(wire: Wire) -> None:
    head = post(INFER, "Expect: 100-continue", path="/v2/models/nobody/infer").split(b"\r\n\r\n")[0]
    status, headers, _ = wire.send(head + b"\r\n\r\n").answer()
    assert (status, headers["connection"]) == (404, "close")


def test_connections_end_when_the_client_says_so(own: Running, wire: Wire) -> None:
    assert wire.send(post(INFER, "Connection: close"), post(INFER)).answer()[1]["connection"] == "close"
    assert wire.is_closed()
    old = Wire(own.port)
    assert old.send(post(INFER, version="1.0")).answer()[1]["connection"] == "close"
    assert old.is_closed()
    kept = Wire(own.port)
    for _ in range(2):
        asked = kept.send(post(INFER, "Connection: keep-alive", version="1.0"))
        assert asked.answer()[1]["connection"] == "keep-alive"
    kept.socket.close()


def test_an_upgrade_is_ignored(wire: Wire) -> None:
    upgrade = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    wire.send(upgrade + upgrade + post(INFER, "Connection: Upgrade", "Upgrade: h2c") + post(INFER))
    assert [wire.answer()[0] for _ in range(4)] == [200] * 4
    in_chunks = chunked(INFER[:9], INFER[9:]).replace(b"\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n", 1)
    wire.send(in_chunks, in_chunks[:200])
    assert wire.answer()[0] == 200
    wire.send(in_chunks[200:])
    assert wire.answer()[0] == 200


def test_many_upgrades_at_once_are_ignored(wire: Wire) -> None:
    upgrade = b"GET /v2/health/live HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    wire.send(upgrade * 3000)
    assert [wire.answer()[0] for _ in range(3000)] == [200] * 3000


def test_headers_that_stand_twice_are_one(wire: Wire) -> None:
    body = gzip.compress(INFER)
    status, _, answer = wire.send(post(body, "Content-Encoding: gzip", "Content-Encoding: gzip")).answer()
    assert (status, b"gzip, gzip" in answer) == (501, True)


@pytest.mark.parametrize(
    "stream",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v2 HTTP/9.9\r\nHost: x\r\n\r\n",
        b"BREW /v2 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\n folded: x\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nX: \x00\r\n\r\n",
        post(INFER, "Content-Length: 3"),
        post(INFER, "Transfer-Encoding: chunked"),
        post(INFER, "Content-Length: +3").replace(b"Content-Length: %d\r\n" % len(INFER), b""),
        post(INFER).replace(b"Content-Length: %d" % len(INFER), b"Transfer-Encoding: gzip, chunked"),
        post(INFER).replace(b"Content-Length: %d" % len(INFER), b"Transfer-Encoding: chunked, gzip"),
        chunked(INFER).replace(b"\r\n0\r\n", b"\r\nzz\r\n"),
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\n" + b"X: y\r\n" * 300 + b"\r\n",
        b"GET /v2 HTTP/1.1\r\nX-Endless: " + b"x" * 600_000,
    ],
    ids=lambda stream: repr(stream[:60]),
)
def test_what_cannot_be_read_is_answered_and_ends_the_connection(wire: Wire, stream: bytes) -> None:
    wire.send(post(INFER))
    assert wire.answer()[0] == 200
    status, headers, body = wire.send(stream).answer()
    assert (status, headers["connection"], list(json.loads(body))) == (400, "close", ["error"])
    assert wire.is_closed()


def test_what_cannot_be_read_is_answered_behind_what_could(wire: Wire) -> None:
    wire.send(post(INFER) + post(INFER) + b"\x00\x00\x00")
    assert [wire.answer()[0] for _ in range(3)] == [200, 200, 400]
    assert wire.is_closed()


def test_a_client_that_leaves_takes_its_request_with_it() -> None:
    gate = Gate()
    with running(serving(FakeServable(identity("slow", "FP32").info, gate))) as server:
        first, second = Wire(server.port), Wire(server.port)
        first.send(post(INFER, path="/v2/models/slow/infer"))
        assert gate.entered.wait(20)
        second.send(post(INFER, path="/v2/models/slow/infer"))
        deadline = time.monotonic() + 20
        while server.server.plane._lanes.pending("slow") != 1:
            assert time.monotonic() < deadline
        second.socket.close()
        while server.server.plane._lanes.pending("slow") != 0:
            assert time.monotonic() < deadline
        gate.open.set()
        assert first.answer()[0] == 200
        first.socket.close()


async def _echo(request: Request) -> Response:
    with BodyMemory(MIB).share() as share:
        return Response(bytes(await request.read(MIB, share)))


async def _long(request: Request) -> Response:
    return Response(bytes(8 * MIB))


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@contextlib.asynccontextmanager
async def listening(answer: connection_module.Answer) -> AsyncIterator[tuple[HttpServer, Connect]]:
    """A port, and how to connect to it."""
    server = HttpServer(answer, 10, MIB)
    url = await server.start("127.0.0.1", 0, "--http-port")
    writers = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=KIB)
        writers.append(writer)
        return reader, writer

    async with asyncio.timeout(20):
        try:
            yield server, connect
        finally:
            for writer in writers:
                writer.close()
            await server.stop()
            for writer in writers:
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "IDLE_S", 0.2)
    monkeypatch.setattr(port_module, "_LOOK_EVERY_S", 0.05)


@pytest.mark.usefixtures("hasty")
async def test_idle_clients_are_sent_away() -> None:
    async with listening(_echo) as (_, connect):
        silent, _ = await connect()
        dripping, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\n")
        assert await silent.read() == b""
        with contextlib.suppress(ConnectionError):
            writer.write(b"X: y\r\n")
            assert await dripping.read() == b""


@pytest.mark.usefixtures("hasty")
async def test_who_does_not_read_the_answer_is_sent_away() -> None:
    async with listening(_long) as (_, connect):
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.5)
        with contextlib.suppress(ConnectionError):
            assert len(await reader.read(-1)) < 8 * MIB


@pytest.mark.usefixtures("hasty")
async def test_a_long_answer_to_a_slow_reader_arrives() -> None:
    async with listening(_long) as (_, connect):
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        received = bytearray()
        while part := await reader.read(MIB):
            received += part
            if len(received) % 50 == 0:
                await asyncio.sleep(0.01)
        assert received.count(b"HTTP/1.1 200 OK") == 2
        assert len(received) > 16 * MIB


async def test_stopping_waits_for_answers_and_for_nobody_else() -> None:
    proceed = asyncio.Event()

    async def slow(request: Request) -> Response:
        await proceed.wait()
        return Response(b"done")

    async with listening(slow) as (server, connect):
        await connect()
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0.05)
        proceed.set()
        answer = await reader.read()
        assert answer.endswith(b"done")
        assert b"Connection: close" in answer
        await stopping


async def test_a_body_that_nobody_wants_yet_makes_its_client_wait() -> None:
    wanted = asyncio.Event()

    async def late(request: Request) -> Response:
        await wanted.wait()
        return await _echo(request)

    async with listening(late) as (server, connect):
        reader, writer = await connect()
        writer.write(post(bytes(MIB - KIB)))
        await asyncio.sleep(0.3)
        (one,) = server._connections
        assert READ_AHEAD_BYTES <= held(one) <= 2 * READ_AHEAD_BYTES
        wanted.set()
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(MIB - KIB) == bytes(MIB - KIB)


def held(connection: Connection) -> int:
    assert connection._incoming is not None
    return connection._incoming.body.nbytes


async def test_a_body_is_counted_as_it_comes() -> None:
    memory = BodyMemory(300)
    body = Body(400, MIB, lambda: None)
    body.add(bytes(100))
    with memory.share() as share:
        reading = asyncio.create_task(body.read(MIB, share))
        await asyncio.sleep(0)
        assert share.nbytes == 100
        body.room()[:150] = bytes(150)
        body.received(150)
        assert share.nbytes == 250
        body.received(100)
        with pytest.raises(Exception, match="being received take 250 B of 300 B"):
            await reading
    memory.take(300)
    with pytest.raises(PayloadTooLarge, match="the request body of 400 bytes"):
        await Body(400, MIB, lambda: None).read(399, share)


async def test_routes_say_what_the_path_names() -> None:
    async def handler(request: Request) -> Response:
        return Response()

    routes = Routes([("GET", "/v2/{a}/{b:[0-9]+}.x", handler), ("POST", "/v2/{a}/{b:[0-9]+}.x", handler)])
    assert routes.find(b"GET", b"/v2/a%20b/12.x?q=/v2").parameters == {"a": "a b", "b": "12"}
    assert routes.find(b"GET", b"http://host/v2/a/1.x").parameters == {"a": "a", "b": "1"}
    request = Request(b"PUT", b"", {}, Body(0, 0, lambda: None), True)
    refused = await routes.find(b"PUT", b"/v2/a/1.x").handler(request)
    assert (refused.status, refused.headers) == (405, {"Allow": "GET, POST"})
    assert (await routes.find(b"GET", b"/v2/a/1yx").handler(request)).status == 404
    assert (await routes.find(b"OPTIONS", b"*").handler(request)).status in (400, 404)


def test_paths_that_are_asked_for_once_are_not_kept_for_ever(own: Running) -> None:
    async def handler(request: Request) -> Response:
        return Response()

    routes = Routes([("GET", "/{a}", handler)])
    for number in range(10_000):
        assert routes.find(b"GET", b"/%d" % number).parameters == {"a": str(number)}
    assert len(routes._found) <= 4096


def test_answers_have_a_date_and_a_length(own: Running) -> None:
    answer = ask(own, "GET", "/v2")
    assert answer.headers["date"].endswith(" GMT")
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert list(answer.headers) == ["date", "content-type", "content-length"]
