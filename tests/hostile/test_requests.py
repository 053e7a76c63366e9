"""Small requests that would explode: counts are bounded before anything is built from them, on both protocols."""

import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec import Raw
from tritonclient.grpc.service_pb2 import ModelInferRequest, TraceSettingRequest

from cohabit.server.errors import InvalidRequest, RequestError
from cohabit.server.grpc import api as grpc_api
from cohabit.server.grpc.wire import described_bytes
from cohabit.server.http import generate
from cohabit.server.http.codec import decode_request
from cohabit.server.protocol.shared_memory import Regions, RegionUse
from cohabit.server.protocol.tensors import compact, nested_shape, nesting
from tests.support.server.server_http import ask, infer
from tests.support.server.transport_fakes import MIB, Ports, identity, running

SERVICE = "/inference.GRPCInferenceService/"
INFO = identity("one").info


@pytest.fixture(scope="module")
def server() -> Iterator[Ports]:
    with running(identity("one"), max_body_bytes=64 * MIB, queue_bytes=256 * MIB) as ports:
        yield ports


def peak_of(function: Callable[[], object]) -> tuple[int, str]:
    """The most memory that Python allocated at once during a call, and the call's error."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1], ""
    except RequestError as error:
        return tracemalloc.get_traced_memory()[1], str(error)
    finally:
        tracemalloc.stop()


def listed(items: bytes, size: int) -> bytes:
    return items * (size // len(items)) + items.rstrip(b",")


SIZE = 2 * MIB
INPUT = b'{"name":"x","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}'
BODIES: dict[str, bytes] = {
    "inputs": b'{"inputs":[%b]}' % listed(b'{"name":"x","datatype":"F","shape":[]},', SIZE),
    "empty objects": b'{"inputs":[%b]}' % listed(b"{},", SIZE),
    "outputs": b'{"inputs":[%b],"outputs":[%b]}' % (INPUT, listed(b'{"name":"y"},', SIZE)),
    "dimensions": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%b],"data":[1]}]}' % listed(b"1,", SIZE),
    "keys": b'{"inputs":[%b],"parameters":{%b}}' % (INPUT, b",".join(b'"k%d":1' % n for n in range(100_000))),
    "arrays": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[%b]}]}' % listed(b"[],", SIZE),
    "nesting": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":%b}]}' % (b"[" * SIZE),
    "values": b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[%b]}]}' % listed(b"1,", SIZE),
}


@pytest.mark.parametrize("kind", BODIES)
def test_json_does_not_explode(kind: str) -> None:
    body = memoryview(BODIES[kind])
    peak, error = peak_of(lambda: decode_request(body, None, INFO, RegionUse(Regions())))
    assert error
    assert peak < 4 * len(body), error


GENERATE = {
    "keys": b'{"x":[1,2,3,4],%b}' % b",".join(b'"k%d":1' % n for n in range(100_000)),
    "items": b'{"x":[%b]}' % listed(b"1,", SIZE),
    "rows": b'{"x":[%b]}' % listed(b"[1],", SIZE),
    "nesting": b'{"x":%b}' % (b"[" * SIZE),
}


@pytest.mark.parametrize("kind", GENERATE)
def test_generate_does_not_explode(kind: str) -> None:
    body = memoryview(GENERATE[kind])
    peak, error = peak_of(lambda: generate.decode_request(body, INFO, RegionUse(Regions())))
    assert error
    assert peak < 4 * len(body), error


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 4), (2, 1), (1, 0), (0,), (3, 2, 5), (2, 0), (1, 1, 1)])
def test_shapes_of_nested_values_are_counted_as_numpy_does(shape: tuple[int, ...]) -> None:
    text = compact(Raw(json.dumps(np.zeros(shape).tolist(), indent=1).encode()), "x")
    depth = text.index(b"0" if 0 not in shape else b"]")
    assert nesting(text) == depth
    found = nested_shape(text, depth)
    seen = np.zeros(shape)
    expected = list(np.array(seen.tolist()).shape) if 0 not in shape else [*[1] * (depth - 1), 0]
    assert found == expected


def message(**changes: Any) -> Any:
    request = ModelInferRequest(model_name="one", raw_input_contents=[np.ones(4, np.float32).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=changes.get("shape", [1, 4]))
    for name in ("inputs", "outputs"):
        for _ in range(changes.get(name, 0)):
            getattr(request, name).add(name="y")
    for n in range(changes.get("parameters", 0)):
        request.parameters[f"k{n}"].int64_param = n
    return request


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"inputs": 20_000}, "over 16384 tensors"),
        ({"outputs": 20_000}, "over 16384 tensors"),
        ({"parameters": 20_000}, "over 16384 tensors"),
        ({"shape": [1] * 100_000}, "shape of an input has over 640 bytes"),
    ],
    ids=["inputs", "outputs", "parameters", "dimensions"],
)
def test_grpc_counts_before_it_parses(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        described_bytes(message(**changes).SerializeToString())


def test_the_wire_is_read_as_protobuf_reads_it() -> None:
    raw = np.ones(1 << 20, np.uint8).tobytes()
    request = message()
    request.raw_input_contents.append(raw)
    request.inputs[0].parameters["a"].string_param = "b"
    data = request.SerializeToString()
    request.ClearField("raw_input_contents")
    without = request.ByteSize()
    assert without < described_bytes(data) < without + 64  # the raw entries' tags and lengths


@pytest.mark.parametrize("seed", range(20))
def test_damaged_messages_are_refused_without_parsing(seed: int) -> None:
    generator = np.random.default_rng(seed)
    data = bytearray(message(parameters=5000).SerializeToString() + bytes(generator.bytes(1000)))
    assert len(data) > 64 << 10
    for place in generator.integers(0, len(data), 50):
        data[place] = generator.integers(0, 256)
    try:
        assert described_bytes(bytes(data)) <= len(data)
    except InvalidRequest as error:
        assert "protobuf message" in str(error) or "over" in str(error)  # noqa: PT017


def call(server: Ports, method: str, data: bytes, **options: Any) -> grpc.RpcError:
    with grpc.insecure_channel(server.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(SERVICE + method)(data, timeout=20, **options)
        return caught.value


def test_grpc_dimensions_are_never_built(server: Ports, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_api, "parse_request", lambda data: pytest.fail("the message was parsed"))
    data = message(shape=[1] * MIB).SerializeToString()
    error = call(server, "ModelInfer", data, compression=grpc.Compression.Gzip)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "shape of an input" in error.details()


def test_grpc_inflates_up_to_its_limit(server: Ports) -> None:
    error = call(server, "ModelInfer", bytes(80 * MIB), compression=grpc.Compression.Gzip)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in error.details()


def test_grpc_takes_no_more_description_than_json(server: Ports) -> None:
    request = ModelInferRequest(model_name="one")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([0.0] * (5 * MIB))
    error = call(server, "ModelInfer", request.SerializeToString())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "raw_input_contents" in error.details()


def test_other_calls_take_small_messages(server: Ports) -> None:
    request = TraceSettingRequest()
    request.settings["trace_level"].value.extend(["x" * 100] * 20_000)
    error = call(server, "TraceSetting", request.SerializeToString())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "the TraceSetting message" in error.details()


def test_a_clients_text_is_cut_in_errors(server: Ports) -> None:
    name = "x" * MIB
    answer = infer(server, "one", {"inputs": [{"name": name, "datatype": "FP32", "shape": [1, 4], "data": [1]}]})
    assert answer.status == 400
    assert len(answer.body) < 4096


def test_a_load_request_has_few_parameters(server: Ports) -> None:
    parameters = {f"k{n}": 1 for n in range(1000)}
    answer = ask(server, "POST", "/v2/repository/models/one/load", json.dumps({"parameters": parameters}).encode())
    assert answer.status == 400
    assert "the limit is 64" in answer.error
