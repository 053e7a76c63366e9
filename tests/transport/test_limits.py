"""What a client may take of the server: connections, memory, header and message sizes."""

import asyncio
import errno
import gzip
import hashlib
import http.client
import json
import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import grpc
import numpy as np
import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest, ServerLiveResponse

from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.errors import (
    ANSWERS,
    ConfigError,
    LevelFull,
    Overloaded,
    QueueFull,
    RefusalKind,
    RequestError,
    Unauthenticated,
    WireError,
    from_wire,
    to_wire,
)
from cohabit.server.frontend.access import Access
from cohabit.server.grpc.handlers import MOST_CALLS
from cohabit.server.grpc.server import GrpcServer
from cohabit.server.http.codec import decode_request
from cohabit.server.ipc.model import Array
from cohabit.server.protocol.shared_memory import RegionUse
from tests.support.server.server_fakes import eventually
from tests.support.server.server_http import Answer, ask, infer, x
from tests.support.server.transport_fakes import Gate, Ports, identity, running

MIB = 1 << 20
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture(scope="module")
def narrow() -> Iterator[Ports]:
    with running(identity("one"), max_connections=3) as ports:
        yield ports


def infer_request(columns: int = 4) -> bytes:
    values = np.ones(columns, np.float32).tobytes()
    request = ModelInferRequest(model_name="one", raw_input_contents=[values])
    request.inputs.add(name="x", datatype="FP32", shape=[1, columns])
    written: bytes = request.SerializeToString()
    return written


GET = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = json.dumps({"inputs": [x()]}).encode()
POST = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(sent)
    return connection


def answered(connection: socket.socket) -> bool:
    """Whether an answer comes; False if the server has closed the connection."""
    try:
        return connection.recv(4096).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        return False


def test_http_connections_over_the_limit_are_told_so_and_not_reset() -> None:
    """Where every connection has a request under way, none can be ended."""
    gate = Gate()
    with running(identity("one", gate=gate), max_connections=3) as server:
        held = [connect(server.port, POST) for _ in range(3)]
        for _ in held:
            assert gate.entered.acquire(timeout=20)
        with connect(server.port) as late:
            refusal = b""
            while part := late.recv(4096):
                refusal += part
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b'{"error":"all 3 connections have requests under way (see --max-connections)"}' in refusal
        for size in [0, MIB] * 10:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            connection.request("POST", "/v2/models/one/infer", b" " * size)
            assert connection.getresponse().status == 503, "although the client sends a request first"
            connection.close()
        gate.open()
        assert all(answered(connection) for connection in held)
        for connection in held:
            connection.close()


@pytest.mark.parametrize("sent", [b"", GET[:-9]], ids=["silent", "half a head"])
def test_clients_without_a_request_give_way_to_new_ones_and_the_oldest_first(sent: bytes) -> None:
    with running(identity("one"), max_connections=3) as server:
        known = connect(server.port, GET)
        assert answered(known)
        silent = [connect(server.port, sent) for _ in range(2)]
        late = []
        for oldest in silent:
            late.append(connect(server.port, GET))
            assert answered(late[-1])
            assert not answered(oldest)
        known.sendall(GET)
        assert answered(known)  # a client that has asked before keeps its connection
        for connection in (known, *silent, *late):
            connection.close()


def test_the_client_that_is_idle_longest_gives_way_where_all_have_asked_before() -> None:
    with running(identity("one"), max_connections=3) as server:
        held = []
        for _ in range(3):
            held.append(connect(server.port, GET))
            assert answered(held[-1])
        held[0].sendall(GET)
        assert answered(held[0])
        late = connect(server.port, GET)
        assert answered(late)
        assert not answered(held[1])
        for connection in (held[0], held[2]):
            connection.sendall(GET)
            assert answered(connection)
        for connection in (late, *held):
            connection.close()


class Exhausted(socket.socket):
    """A listening socket of a process that may open no more files."""

    def accept(self) -> tuple[socket.socket, Any]:
        raise OSError(errno.EMFILE, "Too many open files")


def test_without_a_free_descriptor_the_longest_waiting_client_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    with running(identity("one")) as server, Exhausted() as listening:
        silent = connect(server.port)
        known = connect(server.port, GET)
        assert answered(known)
        server.loop.call_soon_threadsafe(server.http._accept, listening, None)
        assert not answered(silent)
        known.sendall(GET)
        assert answered(known)
        assert ask(server, "GET", "/v2/health/live").status == 200
        for connection in (silent, known):
            connection.close()
    assert "a connection could not be accepted" in caplog.text


class Delays:
    """Delays of refusals, which last until the test ends them."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._ended = threading.Event()

    async def sleep(self, seconds: float) -> None:
        self.begun.put(seconds)
        await asyncio.to_thread(self._ended.wait, 20)

    def end(self) -> None:
        self._ended.set()


TOKEN = "a-token-of-this-server"


def guarded(delays: Delays, most_delayed: int) -> Access:
    digest = hashlib.sha256(TOKEN.encode()).digest()
    return Access((digest,), open=frozenset(), most_delayed=most_delayed, sleep=delays.sleep)


def described(server: Ports, token: str) -> Answer:
    return ask(server, "GET", "/v2", headers={"Authorization": f"Bearer {token}"})


def test_an_unknown_token_is_refused_late_and_logged_with_its_address(caplog: pytest.LogCaptureFixture) -> None:
    delays = Delays()
    with running(identity("one"), access=guarded(delays, 3)) as server, ThreadPoolExecutor() as clients:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as guesser:
            # More guesses of the same connection wait for the first one's answer.
            guesser.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong-token-0123456\r\n\r\n" * 9)
            assert delays.begun.get(timeout=20) == 0.5
            with grpc.insecure_channel(server.grpc) as channel:
                call = channel.unary_unary("/inference.GRPCInferenceService/ServerMetadata")
                late = clients.submit(call, b"", 20, (("authorization", "Bearer wrong-token-0123456"),))
                assert delays.begun.get(timeout=20) == 0.5
                assert described(server, TOKEN).status == 200
                assert call(b"", 20, (("authorization", f"Bearer {TOKEN}"),))
                assert not late.done()
                assert delays.begun.empty()
                delays.end()
                error = late.exception(20)
        assert isinstance(error, grpc.RpcError)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    refusals = [record.fields for record in caplog.records if "refused for its token" in record.message]  # type: ignore[attr-defined]
    assert {"127.0.0.1", "ipv4"} <= {fields["peer"].partition(":")[0] for fields in refusals}


def test_delayed_refusals_are_bounded_and_the_next_one_ends_its_connection() -> None:
    delays = Delays()
    with running(identity("one"), access=guarded(delays, 1)) as server, ThreadPoolExecutor() as clients:
        first = clients.submit(described, server, "wrong-token-0123456")
        assert delays.begun.get(timeout=20) == 0.5
        surplus = described(server, "wrong-token-7890123")
        assert (surplus.status, surplus.headers["connection"]) == (401, "close")
        assert not first.done()
        delays.end()
        assert first.result(20).status == 401
        assert "connection" not in first.result().headers
        assert described(server, "wrong-token-0123456").status == 401  # its place is free again
        assert delays.begun.get(timeout=20) == 0.5


def test_grpc_connections_over_the_limit_are_closed(narrow: Ports) -> None:
    host, port = narrow.grpc.rsplit(":", 1)
    held = [socket.create_connection((host, int(port)), timeout=20) for _ in range(3)]
    for connection in held:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        assert connection.recv(9)  # the server's settings
    with grpc.insecure_channel(narrow.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for connection in held:
            connection.close()
        assert call(b"", timeout=20, wait_for_ready=True) == ServerLiveResponse(live=True).SerializeToString()


def test_requests_under_way_share_the_request_memory() -> None:
    gate = Gate()
    with running(identity("one", gate=gate), queue_bytes=128 << 10) as server:
        body = json.dumps({"inputs": [x()]}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow:
            slow.sendall(b"POST /v2/models/one/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 131072\r\n\r\n{")
            eventually(lambda: server.plane.memory.used_bytes == 128 << 10)
            refused = ask(server, "POST", "/v2/models/one/infer", body)
            assert refused.status == 503
            assert "--queue-memory" in refused.error
            assert refused.headers["retry-after"] == "1"
            with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(INFER)(infer_request(), timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert int(dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        eventually(lambda: server.plane.memory.used_bytes == 0)  # the slow client has gone
        bomb = infer(server, "one", gzip.compress(bytes(200_000)), {"Content-Encoding": "gzip"})
        assert bomb.status == 503
        gate.open()
        assert ask(server, "POST", "/v2/models/one/infer", body).status == 200


@pytest.mark.parametrize("path", ["infer", "generate"])
def test_json_over_a_limit_names_the_one_that_holds(path: str) -> None:
    with running(identity("one")) as server:
        for most_json, holds, named in ((1000, 1000, "send tensors as binary data"), (2 * MIB, MIB, "--max-body")):
            server.plane.max_json_bytes = most_json
            body = b" " * (holds + 1)
            for sent, headers in ((body, {}), (gzip.compress(body), {"Content-Encoding": "gzip"})):
                error = ask(server, "POST", f"/v2/models/one/{path}", sent, headers).error
                assert f"over the limit of {holds} bytes" in error
                assert named in error.rpartition("; ")[2]


def test_bodies_of_control_calls_name_no_flag() -> None:
    with running(identity("one")) as server:
        for path in ("/v2/trace/setting", "/v2/repository/index"):
            error = ask(server, "POST", path, b" " * (64 * 1024 + 1)).error
            assert "limit of 65536 bytes" in error
            assert "--max" not in error


def test_more_requests_than_connections_may_wait_for_a_model() -> None:
    """A client with 1024 connections, each of which sends its next request after an answer, is not refused."""
    with running(identity("one", gate=(gate := Gate()))) as server:
        body = json.dumps({"inputs": [x()]}).encode()

        async def wait_together() -> list[Any]:
            plane = server.plane
            request = decode_request(memoryview(body), None, plane.describe("one"), RegionUse(plane.regions))

            async def one() -> None:
                with plane.memory.lease() as lease:
                    await plane.infer(request, plane.require_ready("one"), lease)

            waiting = [asyncio.create_task(one()) for _ in range(1024)]
            await asyncio.sleep(0)
            gate.open()
            return await asyncio.gather(*waiting, return_exceptions=True)

        assert server.run(wait_together()) == [None] * 1024


def test_the_queue_limit_is_above_what_one_front_end_can_have_under_way() -> None:
    config = ServeConfig(Path("models"), FixedSize(1))
    assert config.queue_limit > config.max_connections + MOST_CALLS


@pytest.mark.parametrize(("refusal", "seen"), [(QueueFull, 2), (LevelFull, 3)])
def test_a_full_queue_refuses_before_the_engine_is_asked_again(refusal: type[QueueFull], seen: int) -> None:
    def refuse(x: Array) -> dict[str, Array]:
        raise refusal.of_model("one", 64, 3.5)

    model = identity("one", gate=(gate := Gate()))
    identical, body = model.function, json.dumps({"inputs": [x()]}).encode()
    with running(model) as server, ThreadPoolExecutor() as clients:
        waiting = clients.submit(ask, server, "POST", "/v2/models/one/infer", body)
        assert gate.entered.acquire(timeout=20)
        model.gate, model.function = None, refuse
        for _ in range(2):
            refused = ask(server, "POST", "/v2/models/one/infer", body)
            assert (refused.status, refused.headers["retry-after"]) == (503, "4")
            assert "64 requests wait for model 'one'" in refused.error
        assert len(model.requests) == seen
        model.function = identical
        gate.open()
        assert waiting.result(20).status == 200
        assert ask(server, "POST", "/v2/models/one/infer", body).status == 200


async def test_a_grpc_port_in_use_stops_the_start(narrow: Ports) -> None:
    port = int(narrow.grpc.rpartition(":")[2])
    second = GrpcServer(narrow.plane, max_body_bytes=1, max_connections=1)
    with pytest.raises(ConfigError, match="--grpc-port: cannot listen on"):
        await second.start(["127.0.0.1"], port)
    await second.stop(0)


def every_kind_of(error: type[RequestError]) -> Iterator[type[RequestError]]:
    for kind in error.__subclasses__():
        yield kind
        yield from every_kind_of(kind)


REFUSALS = {
    "Unauthenticated": (401, "UNAUTHENTICATED"),
    "PermissionMissing": (403, "PERMISSION_DENIED"),
    "ForeignSite": (403, "PERMISSION_DENIED"),
    "InvalidRequest": (400, "INVALID_ARGUMENT"),
    "TensorMismatch": (400, "INVALID_ARGUMENT"),
    "ModelNotListed": (400, "INVALID_ARGUMENT"),
    "AlreadyRegistered": (400, "ALREADY_EXISTS"),
    "LoadFailed": (400, "INVALID_ARGUMENT"),
    "SequenceLost": (400, "INVALID_ARGUMENT"),
    "ModelNotFound": (404, "NOT_FOUND"),
    "RegionNotFound": (404, "NOT_FOUND"),
    "ClientTooSlow": (408, "DEADLINE_EXCEEDED"),
    "PayloadTooLarge": (413, "RESOURCE_EXHAUSTED"),
    "RateLimited": (429, "UNAVAILABLE"),
    "ExecutionFailed": (500, "INTERNAL"),
    "EngineFailed": (500, "INTERNAL"),
    "NotInRepository": (500, "INTERNAL"),
    "Unsupported": (501, "UNIMPLEMENTED"),
    "UnknownEncoding": (501, "UNIMPLEMENTED"),
    "ModelNotReady": (503, "UNAVAILABLE"),
    "Overloaded": (503, "UNAVAILABLE"),
    "QueueFull": (503, "UNAVAILABLE"),
    "LevelFull": (503, "UNAVAILABLE"),
    "EngineUnavailable": (503, "UNAVAILABLE"),
    "ShuttingDown": (503, "UNAVAILABLE"),
    "DeviceUnavailable": (503, "UNAVAILABLE"),
    "ControlOff": (503, "UNAVAILABLE"),
    "RequestTimedOut": (503, "DEADLINE_EXCEEDED"),
}


def test_the_table_has_every_refusal() -> None:
    classes = {kind.__name__ for kind in every_kind_of(RequestError)} - {"Refused"}
    assert classes | {*get_args(RefusalKind)} == REFUSALS.keys() == ANSWERS.keys()


def refusal_of(kind: str) -> RequestError:
    """An error as the engine's process sends it."""
    error = from_wire(WireError(kind, "the reason", 2.0))
    assert to_wire(error).kind == kind
    assert isinstance(error, RequestError)
    return Unauthenticated("the reason") if isinstance(error, Unauthenticated) else error


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_refusal_has_its_status_over_both_protocols_and_its_words(narrow: Ports, kind: str) -> None:
    def refuse(x: Array) -> dict[str, Array]:
        raise refusal_of(kind)

    (model,) = narrow.engine.models.values()
    message = ModelInferRequest(model_name="one")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(bytes(16))
    identical, model.function = model.function, refuse
    try:
        over_http = ask(narrow, "POST", "/v2/models/one/infer", json.dumps({"inputs": [x()]}).encode())
        with grpc.insecure_channel(narrow.grpc) as channel, pytest.raises(grpc.RpcError) as over_grpc:
            channel.unary_unary(INFER)(message.SerializeToString(), timeout=20)
    finally:
        model.function = identical
    assert (over_http.status, over_grpc.value.code().name) == REFUSALS[kind]
    prefix = "[request id: <id_unknown>] " if refusal_of(kind).names_request else ""
    assert over_http.error == over_grpc.value.details() == f"{prefix}the reason"
    pushback = dict(over_grpc.value.trailing_metadata()).get("grpc-retry-pushback-ms")
    retried = ("2", "2000") if isinstance(refusal_of(kind), Overloaded) else (None, None)
    assert (over_http.headers.get("retry-after"), pushback) == retried


@pytest.mark.parametrize(("dims", "error"), [(65, "has 65 dimensions, at most 64"), (70_000, "more than 64 dim")])
def test_a_grpc_tensor_has_at_most_64_dimensions(narrow: Ports, dims: int, error: str) -> None:
    message = ModelInferRequest(model_name="one")
    message.inputs.add(name="x", datatype="FP32", shape=[1] * dims)
    with grpc.insecure_channel(narrow.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(INFER)(message.SerializeToString(), timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error in caught.value.details()
