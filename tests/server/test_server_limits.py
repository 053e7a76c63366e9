"""What a client may take of the server: connections, patience, fields and bytes."""

import asyncio
import gzip
import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import numpy as np
import pytest
from server.grpc.port import GrpcServer
from server.grpc.wire import parse
from server_fakes import Running, identity, running, serving
from server_http import ask, infer, x
from tritonclient.grpc.service_pb2 import ModelInferRequest, ServerLiveResponse

from server.errors import ClientTooSlow, ConfigError, InvalidRequest, PayloadTooLarge, RequestError
from server.grpc.errors import CODES
from server.http.body import Body
from server.http.errors import STATUS
from server.protocol import patience
from server.protocol.body_memory import BodyMemory
from server.protocol.json_numbers import decode, encode

MIB = 1 << 20


@pytest.fixture(scope="module")
def narrow() -> Iterator[Running]:
    with running(serving(identity("one", "FP32")), max_connections=3, max_body_bytes=MIB) as handle:
        yield handle


def connected(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def until_refused(server: Running) -> bytes:
    """Connect once more and say nothing; returns what is said to that."""
    with connected(server) as late:
        late.settimeout(10)
        received = b""
        while part := late.recv(4096):
            received += part
        return received


def test_connections_over_the_limit_are_told_so(narrow: Running) -> None:
    held = [connected(narrow) for _ in range(3)]
    for connection in held:  # an answer shows that each has been accepted
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    refusal = until_refused(narrow)
    assert refusal.startswith(b"HTTP/1.1 503 ")
    assert b'{"error":"3 connections are open already, see --max-connections"}' in refusal
    for connection in held:
        connection.close()
    deadline = time.monotonic() + 10
    while True:
        try:
            assert infer(narrow, "one", {"inputs": [x()]}).status == 200
            return
        except (ConnectionError, AssertionError):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_grpc_connections_over_the_limit_are_closed(narrow: Running) -> None:
    host, port = narrow.grpc.rsplit(":", 1)
    address = (host.strip("[]"), int(port))
    held = [socket.create_connection(address, timeout=10) for _ in range(3)]
    for connection in held:  # the server's settings come at once
        assert connection.recv(9)
    with grpc.insecure_channel(narrow.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for connection in held:
            connection.close()
        assert call(b"", timeout=20, wait_for_ready=True) == ServerLiveResponse(live=True).SerializeToString()


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.1)
    body, memory = Body(20, MIB, lambda: None), BodyMemory(MIB)
    body.add(b"beginning")
    with memory.share() as share:
        reading = asyncio.create_task(body.read(MIB, share))
        await asyncio.sleep(0)
        assert memory.is_receiving
        with pytest.raises(ClientTooSlow, match=r"9 bytes in 0\.1"):
            await reading
    assert not memory.is_receiving


async def test_a_body_that_goes_on_coming_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.05)
    body = Body(None, MIB, lambda: None)
    with BodyMemory(MIB).share() as share:
        reading = asyncio.create_task(body.read(MIB, share))
        for _ in range(3):
            body.add(bytes(200))  # 200 bytes are good for another 49 ms
            await asyncio.sleep(0.04)
        assert not reading.done()
        body.end()
        assert bytes(await reading) == bytes(600)


def test_bodies_under_way_share_a_budget() -> None:
    gzipped = gzip.compress(bytes(200_000))
    with running(serving(identity("one", "FP32")), queue_bytes=99_850) as server:
        body = json.dumps({"inputs": [x()]}).encode()
        with connected(server) as slow:
            head = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99900\r\n\r\n"
            slow.sendall(head + b" " * 99_840)
            deadline = time.monotonic() + 10
            while (refused := ask(server, "POST", "/v2/models/one/infer", body)).status != 503:
                assert time.monotonic() < deadline
            assert "being received take 97.5 KiB of 97.5 KiB already" in refused.error
            assert refused.headers["retry-after"] == "1"
            with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(grpc_request(), timeout=10)
            assert "being received take 97.5 KiB" in caught.value.details()  # HTTP's are in the way of gRPC's
        while ask(server, "POST", "/v2/models/one/infer", body).status != 200:  # the slow client has gone
            assert time.monotonic() < deadline
        inflated = infer(server, "one", gzipped, {"Content-Encoding": "gzip"})
        assert inflated.status == 503
        assert infer(server, "one", {"inputs": [x()]}).status == 200


def grpc_request() -> bytes:
    request = ModelInferRequest(model_name="one", raw_input_contents=[np.ones(4, np.float32).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    written: bytes = request.SerializeToString()
    return written


def test_messages_of_grpc_that_are_being_decoded_count_in_the_budget() -> None:
    with running(serving(identity("one", "FP32")), queue_bytes=99_850) as server:
        bodies = server.server.plane.bodies
        with grpc.insecure_channel(server.grpc) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            bodies.take(99_850 - 10)
            with pytest.raises(grpc.RpcError) as caught:
                call(grpc_request(), timeout=10)
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
            bodies.give_back(99_850 - 10)
            for _ in range(3):
                assert call(grpc_request(), timeout=10)
        bodies.take(99_850)  # nothing is left behind


async def test_a_grpc_port_in_use_stops_the_start(narrow: Running) -> None:
    port = int(narrow.grpc.rpartition(":")[2])
    second = GrpcServer(narrow.server.plane, MIB)
    with pytest.raises(ConfigError, match="--grpc-port: cannot listen on"):
        await second.start("127.0.0.1", port)
    await second.stop(0)


def every_kind_of(error: type[RequestError]) -> Iterator[type[RequestError]]:
    for kind in error.__subclasses__():
        yield kind
        yield from every_kind_of(kind)


@pytest.mark.parametrize("table", [STATUS, CODES], ids=["http", "grpc"])
def test_every_error_of_a_request_has_a_status(table: Mapping[type[RequestError], Any]) -> None:
    for kind in every_kind_of(RequestError):
        assert any(parent in table for parent in kind.__mro__), kind


def test_errors_of_limits_name_the_number_and_the_way_out() -> None:
    assert "--max-body" in str(PayloadTooLarge("the request body", 10))
    assert "9 bytes in 30 s" in str(ClientTooSlow(9, 30.0))


def test_headers_over_the_limit(narrow: Running) -> None:
    assert ask(narrow, "GET", "/v2", headers={"X-Long": "x" * 20_000}).status == 400
    assert ask(narrow, "GET", "/v2", headers={f"X-{n}": "x" for n in range(300)}).status == 400
    assert ask(narrow, "GET", "/v2/" + "x" * 20_000).status == 400


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_grpc_messages_over_the_limit_are_not_taken(narrow: Running, compression: Any) -> None:
    with grpc.insecure_channel(narrow.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(20 * MIB), compression=compression)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_tensors_of_a_grpc_message_are_views_of_it() -> None:
    tensor = np.arange(4096, dtype=np.float32)
    message = ModelInferRequest(model_name="one", id="seven", raw_input_contents=[tensor.tobytes(), b"", b"tail"])
    data = message.SerializeToString()
    parsed, raw, nbytes, message_bytes = parse(data)
    assert (nbytes, message_bytes < 100) == (len(data), True)
    assert (parsed.model_name, parsed.id, len(parsed.raw_input_contents)) == ("one", "seven", 0)
    assert [bytes(part) for part in raw] == [tensor.tobytes(), b"", b"tail"]
    assert np.shares_memory(np.frombuffer(raw[0], np.uint8), np.frombuffer(data, np.uint8))


def test_a_grpc_message_has_so_many_fields() -> None:
    with pytest.raises(InvalidRequest, match="over 4096 inputs, outputs"):
        parse(ModelInferRequest(raw_input_contents=[b"x"] * 5000).SerializeToString())


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\xff" * 4000, b"\xff" * 9000, b"\x3a" + b"\xff" * 9 + b"\x01" * 5000]
)
def test_what_is_no_grpc_message(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="is no ModelInferRequest"):
        parse(data)


LONG = np.linspace(-1, 1, 96_000)


@pytest.mark.parametrize("shape", [(96_000,), (3, 32_000), (1, 96_000), (20, 30, 160), (96_000, 1)])
def test_long_arrays_are_read_as_short_ones_are(shape: tuple[int, ...]) -> None:
    array = LONG.reshape(shape)
    for text in (encode(array), str(array.tolist()).encode()):
        assert len(text) > 1 << 20
        np.testing.assert_array_equal(decode(memoryview(text), "x", "FP64", shape), array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-1] + b", 5]", "more values than the 96000"),
        (lambda text: text.replace(b"-1.0, ", b"", 1), "has 95999 values"),
        (lambda text: text[:-40] + text[-40:].replace(b", ", b"], [", 1), "not nested like its shape"),
        (lambda text: text.replace(b", ", b", true, ", 1), "does not fit FP64"),
        (lambda text: text[:-30] + b"," + text[-30:], "does not fit FP64"),
        (lambda text: b"[[" + b" " * 70_000 + text[2:], "a value of over 65536 characters"),
    ],
)
def test_long_arrays_that_are_wrong(change: Any, message: str) -> None:
    text = change(str(LONG.reshape(3, 32_000).tolist()).encode())
    with pytest.raises(InvalidRequest, match=message):
        decode(memoryview(text), "x", "FP64", (3, 32_000))


def test_infinities_in_long_arrays() -> None:
    values = json.loads(encode(np.where(LONG > 0, np.inf, LONG)))
    assert values == [np.inf if value > 0 else value for value in LONG]
