"""HTTP/1.1 on the wire: requests in pieces and in a row, unfinished, malformed and refused; clients that leave."""

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest

from cohabit.server.errors import ConfigError
from cohabit.server.frontend import dataplane, listening
from cohabit.server.http import body as body_module
from cohabit.server.http.app import make_metrics_app
from cohabit.server.http.server import HttpServer
from tests.support.server.server_http import ask, infer, x
from tests.support.server.transport_fakes import Gate, Ports, identity, running

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
            self.more()
        head, _, self.received = self.received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers.get("content-length", 0))
        while len(self.received) < length:
            self.more()
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

    def until_silent(self, seconds: float) -> None:
        """Raise TimeoutError if nothing comes within this time."""
        self.socket.settimeout(seconds)
        try:
            self.more()
        finally:
            self.socket.settimeout(20)

    def more(self) -> None:
        part = self.socket.recv(64 * KIB)
        assert part, f"closed after {self.received!r}"
        self.received += part


@pytest.fixture(scope="module")
def own() -> Iterator[Ports]:
    with running(identity("one"), identity("wide", shape=(100_000,))) as ports:
        yield ports


@pytest.fixture
def wire(own: Ports) -> Iterator[Wire]:
    made = Wire(own.port)
    yield made
    made.socket.close()
    assert infer(own, "one", {"inputs": [x()]}).status == 200


def post(body: bytes, *headers: str, path: str = "/v2/models/one/infer") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + end


def test_requests_are_the_same_however_they_are_cut(own: Ports, wire: Wire) -> None:
    get = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nX-Empty:\r\nX-Next: 1\r\n\r\n"
    stream = b"".join([post(INFER), get, post(b"{"), chunked(INFER[:7], INFER[7:])])
    wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(stream), 7):
        wire.send(stream[start : start + 7])
    assert [wire.answer()[0] for _ in range(4)] == [200, 200, 400, 200]


def test_a_long_body_in_small_pieces(wire: Wire) -> None:
    body = json.dumps({"inputs": [x([0.5] * 100_000, shape=[1, 100_000])]}).encode()
    stream = post(body, path="/v2/models/wide/infer") + post(INFER)
    for start in range(0, len(stream), 9973):
        wire.send(stream[start : start + 9973])
    assert json.loads(wire.answer()[2])["outputs"][0]["data"] == [0.5] * 100_000
    assert wire.answer()[0] == 200


def test_trailers_are_not_headers_of_the_next_request(wire: Wire) -> None:
    wire.send(chunked(INFER, end=b"0\r\nX-Sum: 1\r\nContent-Encoding: gzip\r\n\r\n"), post(INFER))
    status, headers, _ = wire.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert wire.is_closed()


def test_a_body_in_chunks_is_bounded(wire: Wire) -> None:
    status, _, body = wire.send(chunked(*[b" " * 100_000] * 12)).answer()
    assert (status, b"1.0 MiB" in body) == (413, True)


@pytest.mark.parametrize("length", [MIB + 1, 9 * 10**18])
def test_a_body_over_the_limit_is_refused_before_it_comes(wire: Wire, length: int) -> None:
    head = post(b"").replace(b"Content-Length: 0", b"Content-Length: %d" % length)
    status, _, body = wire.send(head).answer()
    assert (status, b"request body of %d bytes" % length in body) == (413, True)
    if length < 2 * MIB:
        assert wire.send(bytes(length), post(INFER)).answer()[0] == 200  # the connection serves on


def test_a_refusal_does_not_wait_for_the_body(wire: Wire) -> None:
    head = post(b"", path="/v2/models/nope/infer").replace(b"Content-Length: 0", b"Content-Length: 500000")
    assert wire.send(head, bytes(1000)).answer()[0] == 404
    assert wire.send(bytes(499_000), post(INFER)).answer()[0] == 200


def test_a_client_that_asks_whether_to_go_on(wire: Wire) -> None:
    head, body = post(INFER, "Expect: 100-continue").split(b"\r\n\r\n", 1)
    assert wire.send(head + b"\r\n\r\n").answer() == (100, {}, b"")
    assert wire.send(body).answer()[0] == 200


def test_a_client_is_told_not_to_go_on(wire: Wire) -> None:
    head = post(INFER, "Expect: 100-continue", path="/v2/models/nope/infer").split(b"\r\n\r\n")[0]
    status, headers, _ = wire.send(head + b"\r\n\r\n").answer()
    assert (status, headers["connection"]) == (404, "close")


def test_head_is_answered_without_a_body(wire: Wire) -> None:
    wire.send(b"HEAD /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
    while b"\r\n\r\n" not in wire.received:
        wire.more()
    assert wire.received.startswith(b"HTTP/1.1 200 ")
    assert wire.received.endswith(b"\r\n\r\n")
    wire.received = b""
    assert wire.send(post(INFER)).answer()[0] == 200  # nothing of a body was left on the connection


@pytest.mark.parametrize(
    "stream",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v2 HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost : x\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nX: \x00\r\n\r\n",
        post(INFER, "Content-Length: 3"),
        post(INFER, "Transfer-Encoding: chunked"),
        post(INFER, "Content-Length: +3").replace(b"Content-Length: %d\r\n" % len(INFER), b""),
        chunked(INFER).replace(b"\r\n0\r\n", b"\r\nzz\r\n"),
        b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nX-Long: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\n" + b"X: y\r\n" * 300 + b"\r\n",
        b"GET /v2 HTTP/1.1\r\nX-Endless: " + b"x" * 100_000,
    ],
    ids=lambda stream: repr(stream[:60]),
)
def test_what_is_not_http_is_answered_as_json_and_ends_the_connection(wire: Wire, stream: bytes) -> None:
    assert wire.send(post(INFER)).answer()[0] == 200
    status, _, body = wire.send(stream).answer()
    assert (status, list(json.loads(body))) == (400, ["error"])
    assert wire.is_closed()


def test_a_client_that_leaves_cancels_its_request() -> None:
    gate = Gate()
    with running(identity("slow", gate=gate)) as server:
        first, second = Wire(server.port), Wire(server.port)
        for wire in (first, second):
            wire.send(post(INFER, path="/v2/models/slow/infer"))
            assert gate.entered.acquire(timeout=20)
        second.socket.close()
        assert gate.cancelled.acquire(timeout=20)
        gate.open()
        assert first.answer()[0] == 200
        first.socket.close()


@pytest.mark.parametrize("announced", [True, False], ids=["close", "keep-alive"])
def test_a_client_that_closes_its_side_gets_its_answer_if_it_said_so(announced: bool) -> None:
    """TCP does not tell it from one that has gone, so without the header its request is cancelled."""
    gate = Gate()
    with running(identity("slow", gate=gate)) as server:
        wire = Wire(server.port).send(post(INFER, *["Connection: close"] * announced, path="/v2/models/slow/infer"))
        assert gate.entered.acquire(timeout=20)
        wire.socket.shutdown(socket.SHUT_WR)
        if announced:
            assert ask(server, "GET", "/v2/health/live").status == 200  # by now the server has seen it, too
            gate.open()
            assert wire.answer()[0] == 200
        else:
            assert gate.cancelled.acquire(timeout=20)
            gate.open()
        assert wire.is_closed()


def test_all_pipelined_requests_are_answered_to_a_client_that_closes_its_side(wire: Wire) -> None:
    wire.send(post(INFER) * 9 + post(INFER, "Connection: close"))
    wire.socket.shutdown(socket.SHUT_WR)
    assert [wire.answer()[0] for _ in range(10)] == [200] * 10


def test_half_a_body_is_not_waited_for_when_the_client_closes_its_side(wire: Wire) -> None:
    wire.send(post(INFER, "Connection: close")[:-5])
    wire.socket.shutdown(socket.SHUT_WR)
    assert wire.is_closed()


def test_a_body_that_goes_on_with_something_else_ends_its_request_at_once(wire: Wire) -> None:
    head = chunked().removesuffix(b"0\r\n\r\n")
    assert wire.send(post(INFER), head).answer()[0] == 200
    # Our answer, or aiohttp's if it finds the error before the request has begun.
    assert wire.send(b"zz\r\n").answer()[0] == 400
    assert wire.is_closed()


@pytest.mark.parametrize("in_one_piece", [False, True])
def test_what_is_not_http_drops_the_requests_that_came_in_one_piece_with_it(in_one_piece: bool) -> None:
    """aiohttp's parser returns what it has read of a piece only if all of the piece can be parsed."""
    gate = Gate()
    with running(identity("slow", gate=gate)) as server:
        wire, first = Wire(server.port), post(INFER, path="/v2/models/slow/infer")
        broken = chunked(INFER).replace(b"\r\n0\r\n", b"\r\nzz\r\n")
        if in_one_piece:
            wire.send(first + broken)
        else:
            wire.send(first)
            assert gate.entered.acquire(timeout=20)
            wire.send(broken)
        gate.open()
        expected = [400] if in_one_piece else [200, 400]
        assert [wire.answer()[0] for _ in expected] == expected
        assert wire.is_closed()


def test_a_client_that_sends_its_body_too_slowly_is_given_up(own: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "PATIENCE_S", 0.05)
    wire = Wire(own.port)
    status, _, body = wire.send(post(INFER).removesuffix(INFER) + INFER[:9]).answer()
    assert (status, b"came too slowly: 9 bytes in 0." in body) == (408, True)
    wire.socket.close()


def test_a_body_that_goes_on_coming_is_waited_for(own: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(body_module, "LEAST_BYTES_PER_S", 1)
    wire = Wire(own.port)
    wire.send(post(INFER)[:-9])  # good for as many seconds as there are bytes
    with pytest.raises(TimeoutError):
        wire.until_silent(0.2)
    assert wire.send(INFER[-9:]).answer()[0] == 200
    wire.socket.close()


@pytest.mark.parametrize("beginning", [b"", b"GET /v2 HTTP/1.1\r\n"], ids=["silent", "half a head"])
def test_idle_clients_are_disconnected(beginning: bytes) -> None:
    with running(identity("one"), keep_alive_s=0.2) as server:
        wire = Wire(server.port).send(beginning)
        assert wire.is_closed()


def test_a_client_that_does_not_read_its_answers_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "UNREAD_S", 0.5)
    body = json.dumps({"inputs": [x([0.5] * 100_000, shape=[1, 100_000])]}).encode()
    with running(identity("wide", shape=(100_000,))) as server:
        wire = Wire(server.port)
        with pytest.raises(ConnectionError):
            wire.send(*[post(body, path="/v2/models/wide/infer")] * 1000)
        wire.socket.close()


def test_stopping_waits_for_answers_and_not_for_idle_clients() -> None:
    gate = Gate()
    with running(identity("slow", gate=gate)) as server:
        idle, wire = Wire(server.port), Wire(server.port)
        wire.send(post(INFER, path="/v2/models/slow/infer"))
        assert gate.entered.acquire(timeout=20)
        stopping = asyncio.run_coroutine_threadsafe(server.http.stop(20), server.loop)
        assert idle.is_closed()
        gate.open()
        assert wire.answer()[0] == 200
        stopping.result(20)
        assert wire.is_closed()


def test_a_port_in_use_is_named(own: Ports) -> None:
    async def start() -> None:
        metrics = HttpServer(make_metrics_app(own.plane), max_connections=3)
        try:
            await metrics.start(["127.0.0.1"], own.port, None, "--metrics-port")
        finally:
            await metrics.stop(0)

    with pytest.raises(ConfigError, match=r"--metrics-port: cannot listen on 127\.0\.0\.1 port"):
        own.run(start())


def test_the_metrics_port_has_the_metrics_alone(own: Ports) -> None:
    async def start() -> tuple[HttpServer, str]:
        metrics = HttpServer(make_metrics_app(own.plane), max_connections=3)
        return metrics, await metrics.start(["127.0.0.1"], 0, None, "--metrics-port")

    metrics, url = own.run(start())
    wire = Wire(int(url.rpartition(":")[2]))
    status, headers, body = wire.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").answer()
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert b'nv_inference_count{model="one",version="1"}' in body
    status, _, body = wire.send(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n").answer()
    assert (status, json.loads(body)) == (404, {"error": "Not Found"})
    wire.socket.close()
    own.run(metrics.stop(1))


def test_scrapes_within_a_second_get_the_same_text() -> None:
    now_s = 100.0
    with running(identity("one"), clock=lambda: now_s) as server:

        def answered() -> bytes:
            text = ask(server, "GET", "/metrics").body
            (line,) = (line for line in text.splitlines() if line.startswith(b"nv_inference_request_success{"))
            return line.rpartition(b" ")[2]

        assert answered() == b"0"
        assert infer(server, "one", {"inputs": [x()]}).status == 200
        now_s += 0.9
        assert answered() == b"0"
        now_s += 0.1
        assert answered() == b"1"


def test_a_scraper_in_a_loop_is_answered_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond a number are not: each would keep a connection."""
    monkeypatch.setattr(dataplane, "_REPEATED_READING_S", 20.0)
    monkeypatch.setattr(dataplane, "_MOST_DELAYED_READERS", 1)
    with running(identity("one"), clock=lambda: 100.0) as server:
        scrape = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        wire = Wire(server.port)
        assert wire.send(scrape).answer()[0] == 200
        wire.send(scrape)
        assert ask(server, "GET", "/metrics").status == 200
        wire.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            wire.more()
        wire.socket.close()
