"""Seeded noise at every parser: no internal error, no hang, no growth."""

import json
import random
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest

from cohabit.server.errors import RepositoryError
from cohabit.server.triton.model_config import read_config
from tests.support.server.server_http import HEADER_LENGTH, ask, infer
from tests.support.server.transport_fakes import Ports, identity, running

ROUNDS = 400
FORESEEN = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
GROWTH_KIB = 64 << 10
SURPRISES = (b"[", b"{", b'"', b"-1", b"9" * 30, b"null", b"\xff", b"1e999")
ACCEPTED = {200, 400, 404, 413, 501, 503}
"""503 for timeouts that noise makes too short."""


@pytest.fixture(scope="module")
def own() -> Iterator[Ports]:
    with running(identity("one")) as handle:
        yield handle


@pytest.fixture(autouse=True)
def _does_not_grow() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KIB


def mutated(data: bytes, generator: random.Random) -> bytes:
    """Change, repeat, cut or move some bytes."""
    changed = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        start = generator.randrange(len(changed) + 1)
        end = min(len(changed), start + generator.randint(0, 8))
        piece = changed[start:end]
        match generator.randrange(5):
            case 0:
                changed[start:end] = generator.randbytes(generator.randint(0, 8))
            case 1:
                changed[start:end] = piece * generator.randint(0, 40)
            case 2:
                del changed[start:end]
            case 3:
                changed[start:start] = generator.choice(SURPRISES)
            case _:
                changed = changed[end:] + changed[:end]
    return bytes(changed)


def http_body() -> tuple[bytes, int]:
    described = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    wanted = [{"name": "y", "parameters": {"binary_data": True, "classification": 0}}]
    header = {"id": "7", "inputs": [described], "outputs": wanted, "parameters": {"priority": 1, "timeout": 10**9}}
    text = json.dumps(header).encode()
    return text + np.ones(4, np.float32).tobytes(), len(text)


def json_body() -> bytes:
    described = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [[1, 2.5, 3, 4], [5, 6, 7, 8e3]]}
    return json.dumps({"inputs": [described], "outputs": [{"name": "y"}]}).encode()


def grpc_message(raw: bool) -> bytes:
    message: Any = ModelInferRequest(model_name="one", id="7")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    if raw:
        message.raw_input_contents.append(np.ones(4, np.float32).tobytes())
    else:
        tensor.contents.fp32_contents.extend([1, 2, 3, 4])
    message.outputs.add(name="y").parameters["classification"].int64_param = 2
    message.parameters["priority"].uint64_param = 1
    return bytes(message.SerializeToString())


def test_json_with_binary_tensors(own: Ports) -> None:
    generator = random.Random(5)
    body, length = http_body()
    for _ in range(ROUNDS):
        told = length if generator.random() < 0.5 else generator.choice([0, 1, length - 1, length + 1, 10**9])
        answer = infer(own, "one", mutated(body, generator), {HEADER_LENGTH: str(told)})
        assert answer.status in ACCEPTED, answer.body


@pytest.mark.parametrize("path", ["infer", "generate"])
def test_json(own: Ports, path: str) -> None:
    generator = random.Random(6)
    bodies = {
        "infer": json_body(),
        "generate": b'{"id": "7", "x": [1, 2, 3, 4], "parameters": {"timeout": 99999999}}',
    }
    for _ in range(ROUNDS):
        answer = ask(own, "POST", f"/v2/models/one/{path}", mutated(bodies[path], generator))
        assert answer.status in ACCEPTED, answer.body


@pytest.mark.parametrize(
    "path", ["/v2/logging", "/v2/repository/index", "/v2/systemsharedmemory/region/r/register"]
)
def test_small_json(own: Ports, path: str) -> None:
    generator = random.Random(7)
    body = (
        b'{"log_info": true, "ready": true, "key": "/none", "offset": 0, "byte_size": 16, "log_verbose_level": 0}'
    )
    for _ in range(ROUNDS // 2):
        answer = ask(own, "POST", path, mutated(body, generator))
        assert answer.status in ACCEPTED, answer.body


def test_raw_http(own: Ports) -> None:
    """Bytes that are hardly HTTP any more: answered or closed, and never waited for."""
    generator = random.Random(8)
    body = json_body()
    head = (
        b"POST /v2/models/one/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        % len(body)
    )
    for _ in range(ROUNDS // 4):
        with socket.create_connection(("127.0.0.1", own.port), timeout=20) as connection:
            connection.sendall(mutated(head, generator) + body)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while part := connection.recv(1 << 16):
                received += part
        assert not received or b" 500 " not in received.split(b"\r\n", 1)[0]


def outcome(call: Any, request: bytes) -> grpc.StatusCode:
    try:
        call(request, timeout=20)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        hung = code is grpc.StatusCode.DEADLINE_EXCEEDED and "Request timeout expired" not in error.details()
        return grpc.StatusCode.UNKNOWN if hung else code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "typed"])
def test_grpc_messages(own: Ports, raw: bool) -> None:
    generator = random.Random(9)
    data = grpc_message(raw)
    with grpc.insecure_channel(own.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(ROUNDS):
            padding = bytes(generator.choice([0, 5000]))  # long messages are taken apart in another way
            assert outcome(call, mutated(data, generator) + padding) in FORESEEN


@pytest.mark.parametrize("call", ["ModelConfig", "RepositoryIndex", "SystemSharedMemoryRegister", "TraceSetting"])
def test_other_grpc_calls(own: Ports, call: str) -> None:
    generator = random.Random(10)
    with grpc.insecure_channel(own.grpc) as channel:
        method = channel.unary_unary(f"/inference.GRPCInferenceService/{call}")
        for _ in range(ROUNDS // 4):
            assert outcome(method, mutated(b"\x0a\x03one\x12\x01\x31\x18\x04", generator)) in FORESEEN


def test_a_stream_of_noise_stays_open(own: Ports) -> None:
    generator = random.Random(11)
    good = grpc_message(raw=True)
    noise = [mutated(good, generator) for _ in range(ROUNDS // 4)]
    with grpc.insecure_channel(own.grpc) as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = list(stream(iter([*noise, good]), timeout=60))
    assert len(answers) == len(noise) + 1
    assert b"triton_final_response" in answers[-1]


def test_config_pbtxt(tmp_path: Path) -> None:
    generator = random.Random(12)
    text = b'name: "one"\nmax_batch_size: 8\ninput [{name: "x", data_type: TYPE_FP32, dims: [4]}]\n'
    text += b"version_policy: {specific {versions: [1, 2]}}\n"
    path = tmp_path / "config.pbtxt"
    for _ in range(ROUNDS):
        path.write_bytes(mutated(text, generator))
        with suppress(RepositoryError):
            assert read_config(path).max_batch_size is not None
