"""The unchanged tritonclient over both protocols, synchronous and asyncio."""

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from tests.support.server.clients import PROTOCOLS, Client, connect
from tests.support.server.transport_fakes import Gate, Ports, identity, running

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = np.full((2, 4), 0.5, np.float32)
INVALID, NOT_FOUND = ("400", "INVALID_ARGUMENT"), ("404", "NOT_FOUND")


@pytest.fixture(params=PROTOCOLS)
def client(server: Ports, request: pytest.FixtureRequest) -> Iterator[Client]:
    client = connect(server, request.param)
    with client.raw:
        yield client


@pytest.fixture
def grpc_client(server: Ports) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(server.grpc) as client:
        yield client


def pair(api: Any = triton_grpc) -> list[Any]:
    inputs = [api.InferInput(name, [2, 4], "FP32") for name in ("b", "a")]
    for made, array in zip(inputs, (B, A), strict=True):
        made.set_data_from_numpy(array)
    return inputs


def plain(answer: Any) -> Any:
    """An answer in HTTP's JSON form: gRPC's as_json writes 64-bit integers as strings."""
    if isinstance(answer, dict):
        return {key: plain(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [plain(value) for value in answer]
    return int(answer) if isinstance(answer, str) and answer.lstrip("-").isdigit() else answer


def asked(client: Client, call: str, *arguments: Any) -> Any:
    options = {"as_json": True} if client.protocol == "grpc" else {}
    return plain(getattr(client.raw, call)(*arguments, **options))


def test_health(client: Client) -> None:
    """Query parameters are ignored, as in Triton."""
    options = {"query_params": {"test_1": 1, "test_2": 2}} if client.protocol == "http" else {}
    assert client.raw.is_server_live(**options)
    assert client.raw.is_server_ready()
    assert client.raw.is_model_ready("adder", **options)
    assert client.raw.is_model_ready("adder", "3")
    for model, version in (("adder", "1"), ("damaged", ""), ("nope", "")):
        assert not client.raw.is_model_ready(model, version)


def test_metadata_has_the_batch_in_front(client: Client) -> None:
    server = asked(client, "get_server_metadata")
    assert server["name"] == "cohabit"
    assert {"binary_tensor_data", "statistics"} <= set(server["extensions"])
    metadata = asked(client, "get_model_metadata", "adder")
    assert metadata["versions"] == [3]
    assert metadata["inputs"] == [{"name": name, "datatype": "FP32", "shape": [-1, 4]} for name in "ab"]
    assert asked(client, "get_model_metadata", "fixed")["inputs"][0]["shape"] == [2, 3]


def test_the_config_is_complete(client: Client) -> None:
    config = asked(client, "get_model_config", "adder")
    config = config.get("config", config)
    assert config["max_batch_size"] == 8
    (first, _) = config["input"]
    assert (first["name"], first["data_type"], first["dims"]) == ("a", "TYPE_FP32", [4])
    assert [tensor["name"] for tensor in config["output"]] == ["sum", "diff"]
    assert "sequence_batching" not in config
    if client.protocol == "http":  # perf_analyzer wants them written
        assert (first["optional"], first["is_shape_tensor"]) == (False, False)


def test_the_index_lists_failures_with_their_reason(client: Client) -> None:
    listed = asked(client, "get_model_repository_index")
    index = {entry["name"]: entry for entry in (listed["models"] if client.protocol == "grpc" else listed)}
    assert index["adder"] == {"name": "adder", "version": 3, "state": "READY"}
    assert (index["damaged"]["state"], index["damaged"]["reason"]) == ("UNAVAILABLE", "model.pt2 is truncated")


def test_statistics(client: Client) -> None:
    before = asked(client, "get_inference_statistics", "wide")["model_stats"][0]
    client.raw.infer("wide", [client.input("x", np.zeros((3, 4096), np.float32), "FP32")])
    after = asked(client, "get_inference_statistics", "wide")["model_stats"][0]
    assert after["inference_count"] == before.get("inference_count", 0) + 3
    assert after["execution_count"] == before.get("execution_count", 0) + 1
    assert after["inference_stats"]["success"]["ns"] > 0
    assert any(stats["batch_size"] == 3 for stats in after["batch_stats"])
    assert len(asked(client, "get_inference_statistics")["model_stats"]) > 1
    with pytest.raises(InferenceServerException, match="requested model 'nope' is not available") as caught:
        client.raw.get_inference_statistics("nope")
    assert client.status(caught.value) in INVALID


def test_inference(client: Client) -> None:
    outputs = [client.api.InferRequestedOutput(name) for name in ("diff", "sum")]
    result = client.raw.infer(
        "adder", pair(client.api), model_version="3", outputs=outputs, request_id="seven", priority=1
    )
    np.testing.assert_array_equal(result.as_numpy("sum"), A + B)
    np.testing.assert_array_equal(result.as_numpy("diff"), A - B)
    response = result.get_response(as_json=True) if client.protocol == "grpc" else result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("seven", "adder", "3")
    assert [output["name"] for output in response["outputs"]] == ["sum", "diff"]  # the model's order


def test_optional_inputs_may_be_omitted(client: Client) -> None:
    x = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    shift = np.array([[10, 20, 30, 40]] * 2)
    scale = np.array([[0.5], [3.0]], ml_dtypes.bfloat16)
    optional = {"shift": (shift, "INT64"), "scale": (scale, "BF16")}
    for sent in ((), ("shift",), ("scale",), ("shift", "scale")):
        inputs = [client.input(name, *optional[name]) for name in sent]
        answer = client.raw.infer("optional", [*inputs, client.input("x", x, "FP32")]).as_numpy("y")
        factor = scale.astype(np.float32) if "scale" in sent else 2.5
        np.testing.assert_array_equal(answer, x * factor + (shift if "shift" in sent else -1))
    with pytest.raises(InferenceServerException, match=r"missing required input\(s\) \['x'\]"):
        client.raw.infer("optional", [client.input("shift", shift, "INT64")])


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_http_with_json_and_binary(server: Ports, binary_in: bool, binary_out: bool) -> None:
    with triton_http.InferenceServerClient(server.address) as client:
        for datatype in ("BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP64"):
            array = np.array([[0, 1, 1, 0]]).astype(triton_to_np_dtype(datatype))
            given = triton_http.InferInput("x", [1, 4], datatype)
            given.set_data_from_numpy(array, binary_data=binary_in)
            wanted = triton_http.InferRequestedOutput("y", binary_data=binary_out)
            result = client.infer(f"id_{datatype.lower()}", [given], outputs=[wanted])
            np.testing.assert_array_equal(result.as_numpy("y"), array)
            assert "id" not in result.get_response()


def test_every_datatype_survives(client: Client) -> None:
    for datatype in ("BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "FP64", "BF16"):
        dtype = ml_dtypes.bfloat16 if datatype == "BF16" else triton_to_np_dtype(datatype)
        array = np.array([[0, 1, 1, 0]]).astype(dtype)
        result = client.raw.infer(f"id_{datatype.lower()}", [client.input("x", array, datatype)])
        np.testing.assert_array_equal(result.as_numpy("y").astype(np.float32), array.astype(np.float32))


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression(client: Client, algorithm: str) -> None:
    array = np.zeros((2, 4096), np.float32)
    options = {"compression_algorithm": algorithm}
    if client.protocol == "http":
        options = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
    result = client.raw.infer("wide", [client.input("x", array, "FP32")], **options)
    np.testing.assert_array_equal(result.as_numpy("y"), array)


@pytest.mark.parametrize(
    ("model", "version", "statuses", "message"),
    [
        ("nope", "", NOT_FOUND, "Request for unknown model: 'nope' is not found"),
        ("adder", "9", NOT_FOUND, "'adder' version 9 is not found"),
        ("damaged", "", NOT_FOUND, "is truncated"),
        ("id_int32", "", INVALID, r"\[request id: seven\] unexpected inference input"),
    ],
)
def test_errors_have_tritons_statuses(
    client: Client, model: str, version: str, statuses: tuple[str, str], message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.raw.infer(model, pair(client.api), model_version=version, request_id="seven")
    assert client.status(caught.value) in statuses


def test_a_failure_in_a_model_is_this_requests_error(client: Client) -> None:
    zeros = np.zeros((1, 4), np.float32)
    for x, message, statuses in (
        (zeros, r"\[request id: seven\] model 'broken' failed to execute: .*caught fire", ("500", "INTERNAL")),
        (zeros + 7, r"\[request id: seven\] row 7", INVALID),
    ):
        with pytest.raises(InferenceServerException, match=message) as caught:
            client.raw.infer("broken", [client.input("x", x, "FP32")], request_id="seven")
        assert client.status(caught.value) in statuses
    assert client.raw.infer("adder", pair(client.api)) is not None


def test_strings_are_understood_and_refused(client: Client) -> None:
    words = np.array([[b"a", b"\xff", b"", b"long" * 99]], dtype=object)
    with pytest.raises(InferenceServerException, match="PyTorch models have no string tensors") as caught:
        client.raw.infer("id_int32", [client.input("x", words, "BYTES")])
    assert client.status(caught.value) in INVALID


def test_priority_timeout_and_parameters_of_ones_own(client: Client) -> None:
    parameters = {"note": "x", "weight": 0.5, "count": 3, "flag": True}
    options = {"priority": 2, "timeout": 10_000_000, "parameters": parameters}
    result = client.raw.infer("adder", pair(client.api), **options)
    np.testing.assert_array_equal(result.as_numpy("sum"), A + B)


def test_sequences_are_refused_with_the_reason(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="keeps no state between requests") as caught:
        client.raw.infer("adder", pair(client.api), sequence_id=7, sequence_start=True)
    assert client.status(caught.value) in ("501", "UNIMPLEMENTED")


@pytest.mark.parametrize("module", [triton_http_aio, triton_grpc_aio], ids=PROTOCOLS)
async def test_many_requests_at_once_of_the_asyncio_clients(server: Ports, module: Any) -> None:
    address = server.address if module is triton_http_aio else server.grpc
    async with module.InferenceServerClient(address) as client:
        assert await client.is_server_ready()

        async def ask(number: int) -> None:
            inputs = pair(module)
            inputs[1].set_data_from_numpy(A + np.float32(number))
            result = await client.infer("adder", inputs, request_id=str(number))
            np.testing.assert_array_equal(result.as_numpy("sum"), A + B + np.float32(number))

        await asyncio.gather(*(ask(number) for number in range(32)))
        with pytest.raises(InferenceServerException, match="unknown model"):
            await client.infer("nope", pair(module))


def test_callbacks(grpc_client: triton_grpc.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for _ in range(8):
        grpc_client.async_infer("adder", pair(), callback=lambda result, error: answers.put((result, error)))
    for _ in range(8):
        result, error = answers.get(timeout=20)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("sum"), A + B)


def test_a_stream_answers_in_order_and_survives_errors(grpc_client: triton_grpc.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    grpc_client.start_stream(lambda result, error: answers.put((result, error)))
    models = ["adder", "nope", "adder", "adder"]
    for number, model in enumerate(models):
        final = number == 2
        grpc_client.async_stream_infer(model, pair(), request_id=str(number), enable_empty_final_response=final)
    received = [answers.get(timeout=20) for _ in models]
    grpc_client.stop_stream()
    errors = [None if error is None else error.message() for _, error in received]
    assert errors == [None, "Request for unknown model: 'nope' is not found", None, None]
    responses = [result.get_response() for result, error in received if error is None]
    assert [response.id for response in responses] == ["0", "2", "3"]
    assert all(response.parameters["triton_final_response"].bool_param for response in responses)


def test_a_clients_timeout_cancels_its_request() -> None:
    gate = Gate()
    with running(identity("gated", gate=gate)) as server, triton_grpc.InferenceServerClient(server.grpc) as client:
        x = triton_grpc.InferInput("x", [1, 4], "FP32")
        x.set_data_from_numpy(np.zeros((1, 4), np.float32))
        with pytest.raises(InferenceServerException, match=r"DEADLINE_EXCEEDED|Deadline Exceeded"):
            client.infer("gated", [x], client_timeout=0.2)
        assert gate.cancelled.acquire(timeout=20)
        (request,) = server.engine.models["gated", 1].requests
        assert request.timeout_s is not None
        assert request.timeout_s <= 0.21
        gate.open()
        assert client.infer("gated", [x]) is not None


def test_keep_alive_pings_keep_the_connection(server: Ports) -> None:
    options = triton_grpc.KeepAliveOptions(
        keepalive_time_ms=100,
        keepalive_timeout_ms=5000,
        keepalive_permit_without_calls=True,
        http2_max_pings_without_data=0,
    )
    with triton_grpc.InferenceServerClient(server.grpc, keepalive_options=options) as client:
        for _ in range(3):
            assert client.infer("adder", pair()) is not None
