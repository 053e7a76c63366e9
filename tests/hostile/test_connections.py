"""Connections and calls that no library would make: one client's faults are its own."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import grpc
import numpy as np
import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest

from cohabit.server.frontend import listening
from cohabit.server.grpc import handlers
from cohabit.server.http.app import make_metrics_app
from cohabit.server.http.server import HttpServer
from cohabit.server.ipc.model import ModelInfo
from tests.support.server.server_fakes import eventually
from tests.support.server.server_http import ask
from tests.support.server.transport_fakes import FakeModel, Gate, Ports, identity, running, tensors

SERVICE = "/inference.GRPCInferenceService"
HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture
def server() -> Iterator[Ports]:
    with running(identity("one")) as ports:
        yield ports


def is_live(server: Ports) -> bool:
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(f"{SERVICE}/ServerLive")
        with suppress(grpc.RpcError):  # calls may be cancelled while the port is opened again
            return bool(call(b"", timeout=20, wait_for_ready=True) == b"\x08\x01")
        return False


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def opened(server: Ports) -> socket.socket:
    """A connection with HTTP/2 begun, which never asks for more than the first 65,535 bytes of answers."""
    host, port = server.grpc.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
    return connection


def call_frames(stream: int, path: bytes, message: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")]
    fields += [(b"te", b"trailers"), (b"content-type", b"application/grpc"), *headers]
    block = b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in fields)
    body = b"\0" + len(message).to_bytes(4, "big") + message
    return frame(1, 4, stream, block) + frame(0, 1, stream, body)


def grpc_call(server: Ports, path: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    """Make a call without a library, and return the server's bytes up to the end of the call or the connection."""
    with opened(server) as connection:
        connection.sendall(call_frames(1, path, b"", headers))
        received = b""
        while b"grpc-status" not in received and (part := connection.recv(65536)):
            received += part
        return received


@pytest.mark.parametrize(
    "header",
    [(b"authorization", b"Bearer \xff\xfe"), (b"traceparent", b"\xff"), (b"x\xff", b"a"), (b"a-bin", b"!")],
)
def test_header_bytes_that_are_no_text_fail_their_call_alone(server: Ports, header: tuple[bytes, bytes]) -> None:
    assert b"grpc-status" in grpc_call(server, f"{SERVICE}/ServerLive".encode(), [header])
    assert is_live(server)


class Turns:
    """Counts the event loop's turns, and notes the turn in which each readiness check is answered."""

    def __init__(self, server: Ports) -> None:
        self._loop, self._now, self._stopped = server.loop, 0, False
        self.noted: list[int] = []
        server.plane.not_ready = self._note  # type: ignore[method-assign]

    def _note(self) -> None:
        self.noted.append(self._now)

    def _count(self) -> None:
        self._now += 1
        if not self._stopped:
            self._loop.call_soon(self._count)

    def __enter__(self) -> "Turns":
        self._loop.call_soon_threadsafe(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True


def test_pipelined_requests_take_turns_with_other_connections(server: Ports) -> None:
    many, received = 500, b""
    with Turns(server) as turns, socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n" * many)
        while received.count(b"HTTP/1.1 200") < many:
            received += connection.recv(1 << 16)
    assert len(turns.noted) == len(set(turns.noted)) == many


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_path_that_is_no_text_does_not_end_the_port(server: Ports) -> None:
    for _ in range(3):
        grpc_call(server, b"/inference.\xff\xfe/ServerLive")
        eventually(lambda: is_live(server))
    assert is_live(server)


def test_calls_of_others_do_not_take_the_slots_of_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "MOST_CALLS", 2)
    gate = Gate()
    message = ModelInferRequest(model_name="one", raw_input_contents=[bytes(16)])
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    with running(identity("one", gate=gate)) as server, grpc.insecure_channel(server.grpc) as channel:
        infer = channel.unary_unary(f"{SERVICE}/ModelInfer")
        held = [infer.future(message.SerializeToString(), timeout=60) for _ in range(2)]
        for _ in held:
            assert gate.entered.acquire(timeout=20)
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"{SERVICE}/ServerMetadata")(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "2 calls are under way already"
        assert channel.unary_unary(HEALTH)(b"", timeout=20)
        assert is_live(server)
        gate.open()
        assert all(call.result(20) for call in held)


def test_the_metrics_port_answers_health_when_http_has_no_connection_left() -> None:
    gate = Gate()
    body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}'
    head = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with (
        running(identity("one", gate=gate), max_connections=1) as server,
        metrics_port(server) as beside,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as busy,
    ):
        busy.sendall(head + body)
        assert gate.entered.acquire(timeout=20)
        refused = ask(server, "GET", "/v2/health/live")
        assert refused.status == 503
        assert ask(beside, "GET", "/v2/health/live").json == {"live": True}
        assert ask(beside, "GET", "/v2/health/ready").json == {"ready": True}
        assert ask(beside, "GET", "/v2/models/one").status == 404
        gate.open()
        assert busy.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /v2/health/live HTTP/1.1\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
    ],
    ids=["silent", "half a head", "half a body"],
)
def test_a_probe_of_the_metrics_port_is_answered_whoever_holds_its_connections(server: Ports, sent: bytes) -> None:
    with metrics_port(server, max_connections=2) as beside, ExitStack() as held:
        for _ in range(5):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", beside.port), timeout=20))
            connection.sendall(sent)
            if sent.endswith(b"\r\n\r\n"):
                assert connection.recv(12) == b"HTTP/1.1 200"
        assert ask(beside, "GET", "/v2/health/live").json == {"live": True}


@contextmanager
def metrics_port(server: Ports, max_connections: int = 16) -> Iterator["Beside"]:
    metrics = HttpServer(make_metrics_app(server.plane), max_connections=max_connections)
    url = server.run(metrics.start(["127.0.0.1"], 0, None, "--metrics-port"))
    try:
        yield Beside(int(url.rpartition(":")[2]))
    finally:
        server.run(metrics.stop(1))


class Beside:
    """The address of a port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"127.0.0.1:{port}"
        self.grpc = ""


def http(server: Ports, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(data)
        received = b""
        while part := connection.recv(65536):
            received += part
        return received


def test_an_answer_that_nobody_reads_is_sent_from_request_memory_and_counts_as_it() -> None:
    """The bytes of all unread answers are bounded by --queue-memory, and a connection copies a part only."""
    with running(wide_answers(), queue_bytes=64 << 20) as wide:
        body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}],' + BINARY_OUT
        with socket.create_connection(("127.0.0.1", wide.port), timeout=20) as deaf:
            deaf.sendall(
                b"POST /v2/models/wide/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            deaf.sendall(body)
            assert deaf.recv(12) == b"HTTP/1.1 200"
            (connection,) = wide.http._connections
            assert connection._opened is not None
            assert connection._opened.get_write_buffer_size() <= 1 << 20
            assert wide.plane.memory.used_bytes >= 16 << 20
        eventually(lambda: wide.plane.memory.used_bytes == 0)


@pytest.mark.parametrize("path", ["infer", "generate"])
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_what_an_answer_takes_besides_its_tensors_counts_as_request_memory(path: str, encoding: str) -> None:
    values = np.random.default_rng(0).standard_normal((1, 1 << 20)).astype(np.float32)
    info = ModelInfo("wide", 1, tensors(("x", "FP32", (1,))), tensors(("y", "FP32", (1 << 20,))), 1)
    bodies = {
        "infer": b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}',
        "generate": b'{"x": 1}',
    }
    body = bodies[path]
    head = b"POST /v2/models/wide/%b HTTP/1.1\r\nHost: x\r\nAccept-Encoding: %b\r\nContent-Length: %d\r\n\r\n"
    with running(FakeModel(info, lambda x: {"y": values}), queue_bytes=64 << 20) as wide:
        with socket.create_connection(("127.0.0.1", wide.port), timeout=20) as deaf:
            deaf.sendall(head % (path.encode(), encoding.encode(), len(body)) + body)
            received = b""
            while b"\r\n\r\n" not in received:
                received += deaf.recv(256)
            (length,) = (
                int(line.split()[1]) for line in received.lower().split(b"\r\n") if b"content-length" in line
            )
            assert length > values.nbytes
            assert wide.plane.memory.used_bytes >= values.nbytes + length
        eventually(lambda: wide.plane.memory.used_bytes == 0)


BINARY_OUT = b'"parameters": {"binary_data_output": true}}'
WIDE = ModelInfo("wide", 1, tensors(("x", "FP32", (1,))), tensors(("y", "FP32", (4 << 20,))), 1)


def wide_answers() -> FakeModel:
    """A model of which a request has 4 bytes and an answer 16 MiB."""
    return FakeModel(WIDE, lambda x: {"y": np.zeros((1, 4 << 20), np.float32)})


def asking_wide() -> bytes:
    request = ModelInferRequest(model_name="wide", raw_input_contents=[bytes(4)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    return bytes(request.SerializeToString())


def begun(stream: int) -> bytes:
    """The header of the frame with which an answer begins."""
    return b"\x01\x04" + stream.to_bytes(4, "big")


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_grpc_answers_that_nobody_reads_count_as_request_memory(method: str) -> None:
    """A connection may hold a quarter of it, whether in one call or in many; other connections are served."""
    answer_bytes = 16 << 20
    with running(wide_answers(), queue_bytes=9 * answer_bytes) as server:
        used = server.plane.memory
        with opened(server) as deaf:
            received = b""
            # A stream's refusal is a message, which waits as the answers do; a call's is its status.
            refused = begun(7) if method == "ModelStreamInfer" else b"not received yet take"
            for stream, mark in ((1, begun(1)), (3, begun(3)), (5, begun(5)), (7, refused)):
                deaf.sendall(call_frames(stream, f"{SERVICE}/{method}".encode(), asking_wide()))
                while mark not in received:
                    received += deaf.recv(1 << 16)
            assert 3 * answer_bytes <= used.used_bytes < 4 * answer_bytes
            options = [("grpc.max_receive_message_length", -1)]
            with grpc.insecure_channel(server.grpc, options) as other:
                assert len(other.unary_unary(f"{SERVICE}/ModelInfer")(asking_wide(), timeout=20)) > answer_bytes
        eventually(lambda: used.used_bytes == 0)


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_grpc_answer_that_is_not_read_is_given_up(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "UNREAD_S", 0.5)
    with running(wide_answers(), queue_bytes=64 << 20) as server, opened(server) as deaf:
        deaf.sendall(call_frames(1, f"{SERVICE}/{method}".encode(), asking_wide()))
        eventually(lambda: server.plane.memory.used_bytes > 0)
        eventually(lambda: server.plane.memory.used_bytes == 0)
        assert is_live(server)


@pytest.mark.parametrize(
    ("head", "error"),
    [(b"", "Missing 'Host'"), (b"Host: a\r\nHost: b\r\n", "Duplicate 'Host'")],
    ids=["none", "two"],
)
def test_a_request_has_one_host(server: Ports, head: bytes, error: str) -> None:
    answer = http(server, b"GET /v2/health/live HTTP/1.1\r\n" + head + b"\r\n")
    assert answer.startswith(b"HTTP/1.0 400 ")
    assert error.encode() in answer
