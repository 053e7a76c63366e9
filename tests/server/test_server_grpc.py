"""The unchanged tritonclient over gRPC, synchronous and asyncio, against a server in this process."""

import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_fakes import Running
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = np.full((2, 4), 0.5, np.float32)


@pytest.fixture
def client(server: Running) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc) as client:
        yield client


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def pair() -> list[triton.InferInput]:
    return [tensor("b", B, "FP32"), tensor("a", A, "FP32")]


def test_health(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("adder", "3")
    assert not client.is_model_ready("adder", "1")
    assert not client.is_model_ready("damaged")
    assert not client.is_model_ready("nope")


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
def test_standard_health_service(server: Running, service: str) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        assert stub.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(request)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


def test_standard_health_service_knows_no_others(server: Running) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="other"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


def test_metadata_and_config(client: triton.InferenceServerClient) -> None:
    assert client.get_server_metadata().name == "cohabit"
    metadata = client.get_model_metadata("adder", as_json=True)
    assert metadata["versions"] == ["3"]
    assert metadata["inputs"][0] == {"name": "a", "datatype": "FP32", "shape": ["-1", "4"]}
    config = client.get_model_config("adder").config
    assert config.max_batch_size == 8
    assert [tensor.name for tensor in config.output] == ["sum", "diff"]


def test_statistics(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics("wide").model_stats[0]
    client.infer("wide", [tensor("x", np.zeros((3, 4096), np.float32), "FP32")])
    after = client.get_inference_statistics("wide").model_stats[0]
    assert after.inference_count == before.inference_count + 3
    assert after.inference_stats.success.ns >= after.inference_stats.compute_infer.ns > 0
    assert len(client.get_inference_statistics().model_stats) > 1
    with pytest.raises(InferenceServerException, match="requested model 'nope' is not available"):
        client.get_inference_statistics("nope")


def test_repository_index(client: triton.InferenceServerClient) -> None:
    index = {entry.name: entry for entry in client.get_model_repository_index().models}
    assert (index["adder"].version, index["adder"].state) == ("3", "READY")
    assert index["damaged"].reason == "model.pt2 is truncated"


def test_inference(client: triton.InferenceServerClient) -> None:
    outputs = [triton.InferRequestedOutput(name) for name in ("diff", "sum")]
    result = client.infer("adder", pair(), model_version="3", outputs=outputs, request_id="seven", priority=1)
    np.testing.assert_array_equal(result.as_numpy("sum"), A + B)
    np.testing.assert_array_equal(result.as_numpy("diff"), A - B)
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("seven", "adder", "3")
    assert [output.name for output in response.outputs] == ["sum", "diff"]  # the model's order


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "FP64"])
def test_every_datatype_survives(client: triton.InferenceServerClient, datatype: str) -> None:
    array = np.array([[0, 1, 1, 0]]).astype(triton_to_np_dtype(datatype))
    result = client.infer(f"id_{datatype.lower()}", [tensor("x", array, datatype)])
    np.testing.assert_array_equal(result.as_numpy("y"), array)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client: triton.InferenceServerClient, algorithm: str) -> None:
    array = np.zeros((2, 4096), np.float32)
    result = client.infer("wide", [tensor("x", array, "FP32")], compression_algorithm=algorithm)
    np.testing.assert_array_equal(result.as_numpy("y"), array)


@pytest.mark.parametrize(
    ("model", "version", "status", "message"),
    [
        ("nope", "", "NOT_FOUND", "Request for unknown model: 'nope' is not found"),
        ("adder", "9", "NOT_FOUND", "'adder' version 9 is not found"),
        ("damaged", "", "NOT_FOUND", "has no available versions: model.pt2 is truncated"),
        ("adder", "x", "INVALID_ARGUMENT", "version"),
        ("id_int32", "", "INVALID_ARGUMENT", r"\[request id: seven\] unexpected inference input"),
    ],
)
def test_errors_have_tritons_codes(
    client: triton.InferenceServerClient, model: str, version: str, status: str, message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(model, pair(), model_version=version, request_id="seven")
    assert caught.value.status() == f"StatusCode.{status}"


def test_failure_in_a_model_is_this_requests_error(client: triton.InferenceServerClient) -> None:
    zeros = np.zeros((1, 4), np.float32)
    with pytest.raises(InferenceServerException, match=r"'broken' failed to execute: .*caught fire") as caught:
        client.infer("broken", [tensor("x", zeros, "FP32")])
    assert caught.value.status() == "StatusCode.INTERNAL"
    assert client.infer("adder", pair()) is not None


def test_message_over_the_limit(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="larger than max") as caught:
        client.infer("wide", [tensor("x", np.zeros((150, 4096), np.float32), "FP32")])
    assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_asynchronous_inference(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for _ in range(8):
        client.async_infer("adder", pair(), callback=lambda result, error: answers.put((result, error)))
    for _ in range(8):
        result, error = answers.get(timeout=20)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("sum"), A + B)


def test_stream_answers_in_order_and_survives_errors(client: triton.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    models = ["adder", "nope", "adder", "adder"]
    for number, model in enumerate(models):
        client.async_stream_infer(model, pair(), request_id=str(number), enable_empty_final_response=number == 2)
    received = [answers.get(timeout=20) for _ in models]
    client.stop_stream()
    errors = [None if error is None else error.message() for _, error in received]
    assert errors == [None, "Request for unknown model: 'nope' is not found", None, None]
    responses = [result.get_response() for result, error in received if error is None]
    assert [response.id for response in responses] == ["0", "2", "3"]
    assert all(response.parameters["triton_final_response"].bool_param for response in responses)


async def test_asyncio_client(server: Running) -> None:
    async with triton_aio.InferenceServerClient(server.grpc) as client:
        assert await client.is_server_ready()
        result = await client.infer("adder", pair())
        np.testing.assert_array_equal(result.as_numpy("sum"), A + B)

        async def requests() -> Any:
            for number in range(3):
                yield {"model_name": "adder", "inputs": pair(), "request_id": str(number)}

        seen = [result.get_response().id async for result, error in client.stream_infer(requests())]
        assert seen == ["0", "1", "2"]
        with pytest.raises(InferenceServerException, match="unknown model"):
            await client.infer("nope", pair())


def test_keep_alive_pings_keep_the_connection(server: Running) -> None:
    options = triton.KeepAliveOptions(
        keepalive_time_ms=100,
        keepalive_timeout_ms=5000,
        keepalive_permit_without_calls=True,
        http2_max_pings_without_data=0,
    )
    with triton.InferenceServerClient(server.grpc, keepalive_options=options) as client:
        for _ in range(3):
            assert client.infer("adder", pair()) is not None
