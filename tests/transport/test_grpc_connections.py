"""gRPC calls that are cut short, held back or malformed; health and reflection."""

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2 as pb

from cohabit.server.frontend.access import Access, Permission
from cohabit.server.grpc import handlers
from tests.support.server.transport_fakes import Gate, Ports, identity, running

SERVICE = "/inference.GRPCInferenceService"
INFER, STREAM = f"{SERVICE}/ModelInfer", f"{SERVICE}/ModelStreamInfer"


@pytest.fixture
def channel(server: Ports) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield channel


def request(model: str = "wide", columns: int = 4096) -> bytes:
    made = pb.ModelInferRequest(model_name=model, raw_input_contents=[np.ones(columns, np.float32).tobytes()])
    made.inputs.add(name="x", datatype="FP32", shape=[1, columns])
    written: bytes = made.SerializeToString()
    return written


class Held:
    """Messages that the test sends one by one; the end comes with `close`."""

    def __init__(self, *messages: bytes) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for message in messages:
            self.send(message)

    def send(self, message: bytes | None) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self.send(None)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue.get, None)


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_a_message_that_does_not_come_is_given_up(channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "MESSAGE_S", 0.05)
    held = Held()
    code, text = refused(lambda: channel.stream_unary(INFER)(iter(held), timeout=20))
    held.close()
    assert (code, text) == (grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not arrive within 0.05 s")
    assert channel.unary_unary(INFER)(request(), timeout=20)


def test_a_call_without_a_message_is_refused(channel: grpc.Channel) -> None:
    code, text = refused(lambda: channel.stream_unary(INFER)(iter([]), timeout=20))
    assert (code, text) == (grpc.StatusCode.INTERNAL, "the call ended without a message")


def test_a_token_is_asked_for_before_the_message() -> None:
    held = Held()
    closed = Access(open=frozenset({Permission.HEALTH}))
    with running(identity("one"), access=closed) as server, grpc.insecure_channel(server.grpc) as channel:
        code, text = refused(lambda: channel.stream_unary(INFER)(iter(held), timeout=20))
        held.close()
        assert (code, "needs a token" in text) == (grpc.StatusCode.UNAUTHENTICATED, True)
        assert channel.unary_unary(f"{SERVICE}/ServerReady")(b"", timeout=20)
        with pytest.raises(grpc.RpcError, match="needs a token"):
            ProtoReflectionDescriptorDatabase(channel).get_services()


@pytest.mark.parametrize("path", [f"{SERVICE}/Nothing", "/other.Service/ModelInfer"])
def test_unknown_calls_are_unimplemented(channel: grpc.Channel, path: str) -> None:
    assert refused(lambda: channel.unary_unary(path)(b"", timeout=20))[0] is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("call", ["ModelInfer", "ModelConfig"])
def test_what_is_no_message_is_the_clients_error(channel: grpc.Channel, call: str) -> None:
    code, text = refused(lambda: channel.unary_unary(f"{SERVICE}/{call}")(b"\xff" * 50, timeout=20))
    assert (code, f"is not a {call}Request" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100])
def test_what_is_not_http2_is_cut_off(server: Ports, channel: grpc.Channel, data: bytes) -> None:
    host, _, port = server.grpc.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(data)
        while raw.recv(1 << 16):
            pass
    assert channel.unary_unary(INFER)(request(), timeout=20)


def test_a_client_that_cancels_frees_its_request() -> None:
    gate = Gate()
    with running(identity("one", gate=gate)) as server, grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(INFER)
        first, second = (call.future(request("one", 4), timeout=20) for _ in range(2))
        for _ in range(2):
            assert gate.entered.acquire(timeout=20)
        second.cancel()
        assert gate.cancelled.acquire(timeout=20)
        gate.open()
        assert first.result(20)


def test_a_stream_that_is_cancelled_cancels_its_requests() -> None:
    gate = Gate()
    with running(identity("one", gate=gate)) as server, grpc.insecure_channel(server.grpc) as channel:
        held = Held(*[request("one", 4)] * 3)
        answers = channel.stream_stream(STREAM)(iter(held), timeout=20)
        for _ in range(3):
            assert gate.entered.acquire(timeout=20)
        answers.cancel()
        for _ in range(3):
            assert gate.cancelled.acquire(timeout=20)
        held.close()


def test_a_stream_has_64_requests_under_way() -> None:
    gate, asked = Gate(), 100
    with running(identity("one", gate=gate)) as server, grpc.insecure_channel(server.grpc) as channel:
        answers = channel.stream_stream(STREAM)(iter([request("one", 4)] * asked), timeout=60)
        for _ in range(64):
            assert gate.entered.acquire(timeout=20)
        assert not gate.entered.acquire(timeout=0.1)
        gate.open()
        assert len(list(answers)) == asked


def test_a_server_that_stops_answers_what_is_under_way() -> None:
    gate = Gate()
    with running(identity("one", gate=gate)) as server, grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary(INFER).future(request("one", 4), timeout=20)
        assert gate.entered.acquire(timeout=20)
        server.loop.call_soon_threadsafe(server.loop.create_task, server.grpc_server.stop(20))
        gate.open()
        assert call.result(20)


@pytest.mark.parametrize("call", [INFER, STREAM])
def test_large_messages_come_whole(call: str) -> None:
    columns = 3 << 20
    message = request("wide", columns)
    limits = [("grpc.max_receive_message_length", -1)]
    with (
        running(identity("wide", shape=(columns,)), max_body_bytes=16 << 20, queue_bytes=128 << 20) as server,
        grpc.insecure_channel(server.grpc, limits) as channel,
    ):
        if call == INFER:
            answers = [pb.ModelInferResponse.FromString(channel.unary_unary(call)(message, timeout=20))]
        else:
            sent = channel.stream_stream(call)(iter([message] * 3), timeout=60)
            answers = [pb.ModelStreamInferResponse.FromString(answer).infer_response for answer in sent]
            assert len(answers) == 3
    assert all(answer.raw_output_contents[0] == np.ones(columns, np.float32).tobytes() for answer in answers)


@pytest.mark.parametrize("version", ["1", ""], ids=["a version", "no version"])
def test_a_streams_error_says_which_request_of_which_model_it_is_of(channel: grpc.Channel, version: str) -> None:
    made = pb.ModelInferRequest(model_name="wide", model_version=version, id="seven")
    made.inputs.add(name="nope", datatype="FP32", shape=[1, 4])
    (answer,) = map(
        pb.ModelStreamInferResponse.FromString,
        channel.stream_stream(STREAM)(iter([made.SerializeToString()]), timeout=20),
    )
    assert "unexpected inference input 'nope'" in answer.error_message
    failed = answer.infer_response
    assert (failed.id, failed.model_name, failed.model_version) == ("seven", "wide", "1")


@pytest.mark.parametrize("kind", ["System", "Cuda"])
def test_a_region_is_not_registered_without_a_name(channel: grpc.Channel, kind: str) -> None:
    call = channel.unary_unary(f"{SERVICE}/{kind}SharedMemoryRegister")
    code, text = refused(lambda: call(b"", timeout=20))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert text == f"'region name' is necessary to register {kind.lower()} shared memory region"


def test_typed_contents_of_any_length(channel: grpc.Channel) -> None:
    made = pb.ModelInferRequest(model_name="wide")
    made.inputs.add(name="x", datatype="FP32", shape=[8, 4096]).contents.fp32_contents.extend([0.5] * 8 * 4096)
    response = pb.ModelInferResponse.FromString(channel.unary_unary(INFER)(made.SerializeToString(), timeout=20))
    assert response.raw_output_contents[0] == np.full(8 * 4096, 0.5, np.float32).tobytes()


def test_typed_contents_and_raw_ones_exclude_each_other(channel: grpc.Channel) -> None:
    made = pb.ModelInferRequest.FromString(request())
    made.inputs[0].contents.fp32_contents.extend([1.0] * 4096)
    code, text = refused(lambda: channel.unary_unary(INFER)(made.SerializeToString(), timeout=20))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "contents field must not be specified when using raw_input_contents for 'x' for model 'wide'" in text


def test_a_version_that_is_not_a_number_is_named(channel: grpc.Channel) -> None:
    made = pb.ModelInferRequest.FromString(request())
    made.model_version = "wrong"
    _, text = refused(lambda: channel.unary_unary(INFER)(made.SerializeToString(), timeout=20))
    assert "failed to get model version from specified version string 'wrong'" in text


@pytest.mark.parametrize("field", ["inputs", "outputs"])
def test_a_request_of_too_many_tensors_is_refused_by_their_number(channel: grpc.Channel, field: str) -> None:
    made = pb.ModelInferRequest.FromString(request())
    for number in range(4096 - len(getattr(made, field)) + 1):
        getattr(made, field).add(name=str(number))
    code, text = refused(lambda: channel.unary_unary(INFER)(made.SerializeToString(), timeout=20))
    assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "the request has over 4096 inputs or outputs")


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
def test_the_standard_health_service(channel: grpc.Channel, service: str) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    asked = health_pb2.HealthCheckRequest(service=service)
    assert stub.Check(asked).status == health_pb2.HealthCheckResponse.SERVING
    watch = stub.Watch(asked)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_the_standard_health_service_knows_no_others(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    asked = health_pb2.HealthCheckRequest(service="other")
    assert refused(lambda: stub.Check(asked)) == (grpc.StatusCode.NOT_FOUND, "unknown service 'other'")
    watch = stub.Watch(asked)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


def test_reflection_describes_the_services(channel: grpc.Channel) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= set(database.get_services())
    described = database.FindFileContainingSymbol("inference.GRPCInferenceService")
    assert "ModelInfer" in [method.name for service in described.service for method in service.method]


@pytest.mark.parametrize("each", [40 << 10, 100], ids=["one entry", "many entries"])
def test_too_much_metadata_fails_its_call_and_no_other(each: int) -> None:
    gate = Gate()
    live = f"{SERVICE}/ServerLive"
    with running(identity("gated", gate=gate)) as own, grpc.insecure_channel(own.grpc) as channel:
        other = channel.unary_unary(INFER).future(request("gated", 4))
        assert gate.entered.acquire(timeout=20)
        large = [(f"x-{number}", "a" * each) for number in range((40 << 10) // each)]
        code, _ = refused(lambda: channel.unary_unary(live)(b"", metadata=large, timeout=20))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        for _ in range(20):
            channel.unary_unary(live)(b"", metadata=[("x", "a" * (12 << 10))], timeout=20)
        gate.open()
        assert other.result(20)


def test_a_burst_of_calls_waits_until_the_event_loop_accepts_it() -> None:
    free = threading.Event()
    with running(identity("one")) as own, grpc.insecure_channel(own.grpc) as channel:
        described = channel.unary_unary(f"{SERVICE}/ServerMetadata")
        described(b"", timeout=20)
        own.loop.call_soon_threadsafe(free.wait, 60)
        calls = [
            described.future(b"") for _ in range(1300)
        ]  # of more than 1,000, the library cancels some by default
        # The library refuses this one by itself, so it has received those before it.
        refused(lambda: described(b"", metadata=[("x", "a" * (40 << 10))], timeout=30))
        free.set()
        assert all(call.result(60) for call in calls)
