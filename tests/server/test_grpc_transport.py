"""The gRPC port on the wire: what clients other than grpcio's may send, leave out, or never read."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import grpc
import ngh2
import numpy as np
import pytest
from server.grpc.call import Call
from server.grpc.headers import ending, timeout_s
from server.grpc.methods import Reception
from server_fakes import FakeServable, Gate, Running, identity, running, serving
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from server.errors import InvalidRequest
from server.grpc import connection as connection_module
from server.grpc import port as port_module
from server.grpc.errors import Refusal, Status
from server.observe.access import OPEN
from server.protocol import patience
from server.protocol.body_memory import BodyMemory

SERVICE = "/inference.GRPCInferenceService"
INFER = f"{SERVICE}/ModelInfer"
STREAM = f"{SERVICE}/ModelStreamInfer"
UNLIMITED = "grpc.max_receive_message_length"
GRPC = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]


def request(model: str = "one", rows: int = 1, columns: int = 4) -> pb.ModelInferRequest:
    x = np.ones((rows, columns), np.float32)
    made = pb.ModelInferRequest(model_name=model, raw_input_contents=[x.tobytes()])
    made.inputs.add(name="x", datatype="FP32", shape=x.shape)
    return made


def framed(message: Any) -> bytes:
    written: bytes = message.SerializeToString()
    return b"\0" + len(written).to_bytes(4, "big") + written


class Peer:
    """A client that does just what a test says. Its protocol is libnghttp2's, its window 64 KiB."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.http2 = ngh2.Connection(ngh2.Role.CLIENT, ngh2.Configuration(auto_window_update=False))
        self.http2.initiate_connection()
        self.seen: list[ngh2.Event] = []
        self.acknowledges = True
        """Whether the server may send more when something has come."""
        self.owed: dict[int, int] = {}

    def open(self, path: str = INFER, more: Sequence[tuple[bytes, bytes]] = GRPC, method: bytes = b"POST") -> int:
        head = [(b":method", method), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x")]
        return self.http2.send_request([*head, *more])

    def send(self, stream: int, data: bytes, end: bool = False) -> None:
        self.http2.send_data(stream, data, end_stream=end)
        self.flush()

    def flush(self) -> None:
        events = self.http2.events()
        for event in events:
            if isinstance(event, ngh2.DataReceived):
                self.owed[event.stream_id] = self.owed.get(event.stream_id, 0) + len(event.data)
        self.seen += events
        while self.acknowledges and self.owed:
            stream, nbytes = self.owed.popitem()
            with contextlib.suppress(ngh2.ConnectionStateError):  # the server has ended the connection
                self.http2.acknowledge_received_data(nbytes, stream)
        self.socket.sendall(self.http2.data_to_send())
        self.seen += self.http2.events()

    def read(self) -> bool:
        """Take what has come, or wait for something; False at the end of the connection."""
        data = self.socket.recv(1 << 16)
        if data:
            self.http2.receive_data(data)
            self.flush()
        return bool(data)

    def read_until_silent(self) -> None:
        """Take what comes, until nothing has come for a while."""
        self.flush()
        self.socket.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            while self.read():
                pass
        self.socket.settimeout(20)

    def until_closed(self, stream: int) -> dict[str, str]:
        """Wait for a stream's end; returns what its last headers said."""
        while not any(isinstance(e, ngh2.StreamClosed) and e.stream_id == stream for e in self.seen):
            assert self.read(), "the server has closed the connection"
        kinds = (ngh2.ResponseReceived, ngh2.TrailersReceived)
        heads = [e.headers for e in self.seen if isinstance(e, kinds) and e.stream_id == stream]
        return {name.decode(): value.decode() for name, value in heads[-1]}

    def received(self, stream: int) -> bytes:
        return b"".join(e.data for e in self.seen if isinstance(e, ngh2.DataReceived) and e.stream_id == stream)


@contextmanager
def peer(server: Running) -> Iterator[Peer]:
    made = Peer(server.grpc)
    try:
        yield made
    finally:
        made.socket.close()


@pytest.fixture(scope="module")
def own() -> Iterator[Running]:
    with running(serving(identity("one", "FP32")), max_body_bytes=1 << 20) as made:
        yield made


def infers(server: Running) -> bool:
    with peer(server) as client:
        stream = client.open()
        client.send(stream, framed(request()), end=True)
        return client.until_closed(stream)["grpc-status"] == "0"


def calls_under_way(server: Running) -> int:
    grpc_server = server.server._grpc
    assert grpc_server is not None
    return grpc_server._reception._calls


def eventually(condition: Any) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_an_answer_is_one_message_between_headers_and_trailers(own: Running) -> None:
    with peer(own) as client:
        stream = client.open()
        client.send(stream, framed(request()), end=True)
        assert client.until_closed(stream) == {"grpc-status": "0"}
        (head,) = [dict(e.headers) for e in client.seen if isinstance(e, ngh2.ResponseReceived)]
        assert (head[b":status"], head[b"content-type"]) == (b"200", b"application/grpc")
        answer = client.received(stream)
        response = pb.ModelInferResponse.FromString(answer[5:])
        assert answer[:5] == b"\0" + (len(answer) - 5).to_bytes(4, "big")
        assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_request_that_comes_in_crumbs(own: Running, size: int) -> None:
    data = framed(request())
    with peer(own) as client:
        stream = client.open()
        for start in range(0, len(data), size):
            client.send(stream, data[start : start + size])
        client.send(stream, b"", end=True)
        assert client.until_closed(stream)["grpc-status"] == "0"


def test_many_calls_on_one_connection_are_under_way_together(own: Running) -> None:
    with peer(own) as client:
        streams = [client.open() for _ in range(90)]
        for stream in reversed(streams):
            client.send(stream, framed(request()), end=True)
        assert {client.until_closed(stream)["grpc-status"] for stream in streams} == {"0"}


def test_a_request_that_ends_with_trailers(own: Running) -> None:
    with peer(own) as client:
        stream = client.open()
        client.http2.send_data(stream, framed(request()))
        client.http2.send_trailers(stream, [(b"x-checksum", b"1")])
        client.flush()
        assert client.until_closed(stream)["grpc-status"] == "0"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "came without one"),
        (framed(request()) * 2, "came with more"),
        (framed(request())[:-1], "in the middle of a message"),
        (b"GET / HTTP/1.1", "a message begins with 71"),
        (b"\1" + framed(request())[1:], "marked as compressed"),
    ],
)
def test_what_is_no_message_gets_a_status(own: Running, data: bytes, message: str) -> None:
    with peer(own) as client:
        stream = client.open()
        client.send(stream, data, end=True)
        ended = client.until_closed(stream)
        assert ended["grpc-status"] in ("3", "13")
        assert message in ended["grpc-message"]
        again = client.open()
        client.send(again, framed(request()), end=True)
        assert client.until_closed(again)["grpc-status"] == "0"  # the connection has not suffered


def test_a_message_over_the_limit_is_refused_before_it_comes(own: Running) -> None:
    with peer(own) as client:
        stream = client.open()
        client.send(stream, b"\0" + (30 << 20).to_bytes(4, "big"))
        ended = client.until_closed(stream)
        assert (ended["grpc-status"], "larger than max" in ended["grpc-message"]) == ("8", True)


def test_an_encoding_that_is_not_known_is_refused_with_those_that_are(own: Running) -> None:
    with peer(own) as client:
        stream = client.open(more=[*GRPC, (b"grpc-encoding", b"snappy")])
        client.flush()
        ended = client.until_closed(stream)
        assert (ended["grpc-status"], ended["grpc-accept-encoding"]) == ("12", "identity,deflate,gzip")


def test_what_is_not_grpc_is_answered_in_http(own: Running) -> None:
    with peer(own) as client:
        page = client.open(more=[], method=b"GET")
        client.flush()
        assert client.until_closed(page)[":status"] == "415"
        form = client.open(more=[(b"content-type", b"text/plain")])
        client.send(form, b"x=1", end=True)
        assert client.until_closed(form)[":status"] == "415"


@pytest.mark.parametrize("path", ["/", "/inference.GRPCInferenceService/Nothing", "/other.Service/ModelInfer"])
def test_calls_that_there_are_not(own: Running, path: str) -> None:
    with peer(own) as client:
        stream = client.open(path)
        client.send(stream, framed(request()), end=True)
        assert client.until_closed(stream)["grpc-status"] == "12"


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100]
)
def test_what_is_not_http2_is_cut_off(own: Running, data: bytes) -> None:
    host, _, port = own.grpc.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(data)
        while raw.recv(1 << 16):
            pass
    assert infers(own)


def test_headers_over_the_limit_end_the_connection_and_no_other(own: Running) -> None:
    with peer(own) as client:
        client.open(more=[*GRPC, *((b"x-%d" % n, b"y" * 2000) for n in range(30))])
        client.flush()
        with pytest.raises((AssertionError, ConnectionError)):
            client.until_closed(1)
    assert infers(own)


def test_a_client_that_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_GREETING_S", 0.05)
    with running(serving(identity("one", "FP32"))) as server:
        host, _, port = server.grpc.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as silent:
            while silent.recv(1 << 16):
                pass
        with peer(server) as client:
            client.flush()
            time.sleep(0.1)  # it has greeted, and may be idle for as long as it likes
            stream = client.open()
            client.send(stream, framed(request()), end=True)
            assert client.until_closed(stream)["grpc-status"] == "0"


def gated() -> tuple[Gate, FakeServable]:
    gate = Gate()
    return gate, FakeServable(identity("one", "FP32", max_batch=1).info, gate)


def test_a_deadline_ends_a_call_that_is_executing() -> None:
    gate, model = gated()
    with running(serving(model)) as server, peer(server) as client:
        stream = client.open(more=[*GRPC, (b"grpc-timeout", b"200m")])
        client.send(stream, framed(request()), end=True)
        assert gate.entered.wait(10)
        ended = client.until_closed(stream)
        gate.open.set()
        assert ended["grpc-status"] == "4"
        eventually(lambda: calls_under_way(server) == 0)


@pytest.mark.parametrize("how", ["reset", "gone"])
def test_a_client_that_gives_up_frees_its_place_in_the_queue(how: str) -> None:
    gate, model = gated()
    with running(serving(model)) as server, peer(server) as client:
        first, second = client.open(), client.open()
        for stream in (first, second):
            client.send(stream, framed(request()), end=True)
        assert gate.entered.wait(10)
        lanes = server.server._lanes
        eventually(lambda: lanes.pending("one") == 1)
        if how == "reset":
            client.http2.reset_stream(second)
            client.flush()
        else:
            client.socket.close()
        eventually(lambda: lanes.pending("one") == 0)
        eventually(lambda: calls_under_way(server) == (1 if how == "reset" else 0))
        gate.open.set()
        if how == "reset":
            assert client.until_closed(first)["grpc-status"] == "0"
        eventually(lambda: calls_under_way(server) == 0)
        assert infers(server)


def test_a_client_that_does_not_read_is_neither_answered_nor_read_on() -> None:
    asked, model = 200, identity("large", "FP32", (1 << 16,))  # 256 KiB each way
    with running(serving(model)) as server, peer(server) as client:
        client.acknowledges = False
        stream = client.open(STREAM)
        for _ in range(asked):
            client.http2.send_data(stream, framed(request("large", columns=1 << 16)))
        client.http2.end_stream(stream)
        client.read_until_silent()
        assert sum(model.calls) < asked / 2
        assert client.http2.queued_body_size(stream) > asked / 4 * (1 << 18)
        assert infers_large(server)  # others are not kept waiting

        client.acknowledges = True
        client.flush()
        assert client.until_closed(stream)["grpc-status"] == "0"
        assert len(client.received(stream)) > asked * (1 << 18)


def infers_large(server: Running) -> bool:
    with grpc.insecure_channel(server.grpc) as channel:
        return bool(channel.unary_unary(INFER)(request("large", columns=1 << 16).SerializeToString(), timeout=10))


def test_a_server_that_stops_answers_what_is_under_way() -> None:
    gate, model = gated()
    with running(serving(model)) as server, peer(server) as client:
        stream = client.open()
        client.send(stream, framed(request()), end=True)
        assert gate.entered.wait(10)
        stopping = asyncio.run_coroutine_threadsafe(server.server.stop(), server.loop)
        eventually(lambda: server.server._lanes.draining)
        late = client.open()
        client.send(late, framed(request()), end=True)
        assert client.until_closed(late)["grpc-status"] == "14"
        gate.open.set()
        assert client.until_closed(stream)["grpc-status"] == "0"
        while client.read():
            pass
        assert any(isinstance(event, ngh2.GoAwayReceived) for event in client.seen)
        assert stopping.result(10)


def test_messages_that_are_coming_share_the_budget_of_all_bodies() -> None:
    with running(serving(identity("one", "FP32")), queue_bytes=1 << 20) as server, peer(server) as client:
        prefix = b"\0" + (900 << 10).to_bytes(4, "big")
        slow, other = client.open(), client.open()
        client.send(slow, prefix + bytes(600 << 10))
        client.send(other, prefix)  # what is only announced takes nothing yet
        client.read_until_silent()
        assert calls_under_way(server) == 2
        assert server.server.plane.bodies.is_receiving
        client.send(other, bytes(600 << 10))
        refused = client.until_closed(other)
        assert refused["grpc-status"] == "14"
        assert int(refused["grpc-retry-pushback-ms"]) > 0
        assert infers(server)  # a small one has room
        client.http2.reset_stream(slow)
        client.flush()
        eventually(lambda: calls_under_way(server) == 0)
        server.server.plane.bodies.take(1 << 20)  # nothing is left behind
        assert not server.server.plane.bodies.is_receiving


def test_a_message_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.2)
    monkeypatch.setattr(port_module, "_LOOK_EVERY_S", 0.02)
    with running(serving(identity("one", "FP32"))) as server, peer(server) as client:
        begun, silent, stream, idle = client.open(), client.open(), client.open(STREAM), client.open(STREAM)
        client.send(begun, b"\0" + (1 << 10).to_bytes(4, "big") + b"the beginning")
        client.send(stream, framed(request()) + b"\0")
        for slow, nbytes in ((begun, 5 + 13), (silent, 0), (stream, 1)):
            ended = client.until_closed(slow)
            assert ended["grpc-status"] == "4"
            assert unquote(ended["grpc-message"]).startswith(
                f"the request body came too slowly: {nbytes} bytes in 0."
            )
        assert client.received(stream), "what had come was answered"
        eventually(lambda: calls_under_way(server) == 1)  # between messages a stream may rest
        client.send(idle, framed(request()), end=True)
        assert client.until_closed(idle)["grpc-status"] == "0"


def test_a_message_that_goes_on_coming_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.1)
    monkeypatch.setattr(port_module, "_LOOK_EVERY_S", 0.01)
    message = framed(request(columns=4096, model="wide"))
    with running(serving(identity("wide", "FP32", (4096,)))) as server, peer(server) as client:
        stream = client.open()
        step = 2048  # good for half a second
        for start in range(0, len(message), step):
            client.send(stream, message[start : start + step], end=start + step >= len(message))
            time.sleep(0.05)
        assert client.until_closed(stream)["grpc-status"] == "0"


def test_calls_over_the_limit_are_refused() -> None:
    class Nothing:
        name, takes_stream = "ModelInfer", False

        async def run(self, call: Call) -> None: ...

    reception = Reception({INFER.encode(): Nothing()}, OPEN, BodyMemory(1), most_calls=2, most_bytes=1)
    head = {b":path": INFER.encode()}
    reception.admit(head)
    reception.admit(head)
    with pytest.raises(Refusal, match="Concurrent RPC limit exceeded") as caught:
        reception.admit(head)
    assert caught.value.status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    reception.left()
    reception.admit(head)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(b"90M", 5400.0), (b"2H", 7200.0), (b"3S", 3.0), (b"5m", 5e-3), (b"7u", 7e-6), (b"1n", 1e-9)],
)
def test_deadlines_in_every_unit(written: bytes, seconds: float) -> None:
    assert timeout_s(written) == pytest.approx(seconds)


@pytest.mark.parametrize("written", [b"", b"5", b"m", b"-1S", b"123456789S", b"1.5S", b"1s", b" 1S"])
def test_what_is_no_deadline(written: bytes) -> None:
    with pytest.raises(InvalidRequest, match="grpc-timeout"):
        timeout_s(written)


@pytest.mark.parametrize("message", ["plain", "100 % \u00fcber\nzwei Zeilen \u2192", ""])
def test_messages_survive_the_header(message: str) -> None:
    (_, written), *_ = [
        pair for pair in ending(Status(grpc.StatusCode.INTERNAL, message)) if pair[0] == b"grpc-message"
    ]
    assert all(0x20 <= byte < 0x7F for byte in written)
    assert unquote(written.decode()) == message


@pytest.mark.parametrize("window_times", [0.75, 2.5])
@pytest.mark.parametrize("call", ["ModelInfer", "ModelStreamInfer"])
def test_messages_larger_than_a_stream_s_window_come_whole(call: str, window_times: float) -> None:
    """What is received is acknowledged while the rest is awaited, and several on one stream one after the other."""
    columns = int(window_times * connection_module.STREAM_WINDOW_BYTES / 4)
    wide = identity("wide", "FP32", (columns,))
    x = np.arange(columns, dtype=np.float32).reshape(1, columns)
    message = request("wide", columns=columns)
    message.raw_input_contents[0] = x.tobytes()
    with running(serving(wide)) as server, grpc.insecure_channel(server.grpc, [(UNLIMITED, -1)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        if call == "ModelInfer":
            answers = [stub.ModelInfer(message, timeout=20)]
        else:
            answers = [each.infer_response for each in stub.ModelStreamInfer(iter([message] * 3), timeout=20)]
            assert len(answers) == 3
    assert all(answer.raw_output_contents[0] == x.tobytes() for answer in answers)
