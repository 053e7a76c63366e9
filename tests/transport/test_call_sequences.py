"""Sequences of calls that tritonclient's example programs make, where the other tests make the calls one by one."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.server.clients import PROTOCOLS, Client, connect
from tests.support.server.transport_fakes import Ports

A = np.arange(4, dtype=np.float32)[None]
B = np.full((1, 4), -1, np.float32)
QUERY = {"test_1": 1, "test_2": 2}
HEADERS = {"test": "1", "dummy": "2"}  # tritonclient adds to what it is given


@pytest.fixture(params=PROTOCOLS)
def client(server: Ports, request: pytest.FixtureRequest) -> Iterator[Client]:
    client = connect(server, request.param)
    with client.raw:
        yield client


@pytest.fixture
def stub(server: Ports) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def pair(api: Any, **binary: bool) -> list[Any]:
    """Inputs of the adder; `a` and `b` say which are binary over HTTP."""
    made = []
    for name, array in (("a", A), ("b", B)):
        tensor = api.InferInput(name, [1, 4], "FP32")
        tensor.set_data_from_numpy(array, **({"binary_data": binary[name]} if binary else {}))
        made.append(tensor)
    return made


def is_right(result: Any) -> bool:
    return np.array_equal(result.as_numpy("sum"), A + B) and np.array_equal(result.as_numpy("diff"), A - B)


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
def test_a_request_with_json_and_binary_tensors_and_query_parameters(server: Ports, algorithm: str | None) -> None:
    """With outputs named and not, compressed in both directions, then the statistics and a model that is not there."""
    options: dict[str, Any] = {"query_params": QUERY, "headers": {**HEADERS}}
    options |= {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
    inputs = pair(triton_http, a=False, b=True)
    outputs = [triton_http.InferRequestedOutput(n, binary_data=b) for n, b in (("sum", True), ("diff", False))]
    with triton_http.InferenceServerClient(server.address) as client:
        assert is_right(client.infer("adder", inputs, outputs=outputs, **options))
        assert len(client.get_inference_statistics("adder", headers={**HEADERS})["model_stats"]) == 1
        assert is_right(client.infer("adder", inputs, outputs=None, **options))
        with pytest.raises(InferenceServerException) as caught:
            client.infer("wrong_model_name", inputs, outputs=outputs, **options)
        assert caught.value.message().startswith("Request for unknown model")


def test_health_and_metadata_with_parameters_and_headers(client: Client) -> None:
    options: dict[str, Any] = {"headers": {**HEADERS}} | (
        {"query_params": QUERY} if client.protocol == "http" else {}
    )
    assert client.raw.is_server_live(**options)
    assert client.raw.is_server_ready(**options)
    assert client.raw.is_model_ready("adder", **options)
    metadata = client.raw.get_model_metadata("adder", **options)
    assert (metadata["name"] if client.protocol == "http" else metadata.name) == "adder"
    with pytest.raises(InferenceServerException, match="Request for unknown model"):
        client.raw.get_model_metadata("wrong_model_name", **options)
    assert client.raw.is_server_live()


@pytest.mark.parametrize("module", [triton_http_aio, triton_grpc_aio], ids=PROTOCOLS)
async def test_asyncio_requests_in_parallel_after_an_error(server: Ports, module: Any) -> None:
    address = server.address if module is triton_http_aio else server.grpc
    async with module.InferenceServerClient(address) as client:
        with pytest.raises(InferenceServerException, match="Request for unknown model"):
            await client.infer("wrong_model_name", pair(module))
        outputs = [module.InferRequestedOutput(name) for name in ("sum", "diff")]
        results = await asyncio.gather(
            client.infer("adder", pair(module), outputs=outputs, headers={**HEADERS}),
            client.infer("adder", pair(module), outputs=None),
        )
        assert all(map(is_right, results))


def test_requests_that_wait_for_their_results_later(server: Ports) -> None:
    with triton_http.InferenceServerClient(server.address, concurrency=2) as client:
        waiting = [client.async_infer("adder", pair(triton_http)) for _ in range(2)]
        assert all(is_right(request.get_result()) for request in waiting)


def test_the_same_inputs_and_outputs_in_shared_memory_and_not(client: Client) -> None:
    regions = [f"{name}_{os.getpid()}" for name in ("a", "b", "sum", "diff")]
    handles = {}
    client.raw.unregister_system_shared_memory()
    client.raw.unregister_cuda_shared_memory()
    try:
        for name in regions:
            handles[name] = shm.create_shared_memory_region(name, f"/cohabit_{name}", 16)
            client.raw.register_system_shared_memory(name, f"/cohabit_{name}", 16)
        inputs = pair(client.api)
        outputs = [client.api.InferRequestedOutput(name) for name in ("sum", "diff")]
        for shared, factor in ((True, 1), (False, 2), (True, 3)):
            own_b = B * factor
            for name, tensor, array in zip(regions[:2], inputs, (A, own_b), strict=True):
                if shared:
                    shm.set_shared_memory_region(handles[name], [array])
                    tensor.set_shared_memory(name, 16)
                else:
                    tensor.set_data_from_numpy(array)
            for name, output in zip(regions[2:], outputs, strict=True):
                if shared:
                    output.set_shared_memory(name, 16)
                else:
                    output.unset_shared_memory()
            result = client.raw.infer("adder", inputs, outputs=outputs)
            for name, output, expected in zip(regions[2:], ("sum", "diff"), (A + own_b, A - own_b), strict=True):
                assert result.get_output(output) is not None
                found = (
                    shm.get_contents_as_numpy(handles[name], np.float32, [1, 4])
                    if shared
                    else result.as_numpy(output)
                )
                np.testing.assert_array_equal(found, expected)
    finally:
        client.raw.unregister_system_shared_memory()
        for handle in handles.values():
            shm.destroy_shared_memory_region(handle)


def typed_request() -> Any:
    request = service_pb2.ModelInferRequest(model_name="adder")
    for name, array in (("a", A), ("b", B)):
        tensor = request.inputs.add(name=name, datatype="FP32", shape=[1, 4])
        tensor.contents.fp32_contents.extend(array.ravel().tolist())
    for name in ("sum", "diff"):
        request.outputs.add(name=name)
    return request


def test_typed_contents_and_raw_ones_exclude_each_other(stub: Any) -> None:
    request = typed_request()
    answer = stub.ModelInfer(request)
    found = [np.frombuffer(raw, np.float32) for raw in answer.raw_output_contents]
    np.testing.assert_array_equal(found, np.concatenate([A + B, A - B]))
    request.raw_input_contents.append(A.tobytes())
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request)
    expected = "contents field must not be specified when using raw_input_contents for 'a' for model 'adder'"
    assert expected in caught.value.details()


def test_a_version_that_is_no_number_is_named(stub: Any) -> None:
    request = typed_request()
    request.model_version = "wrong_specification"
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(request)
    assert (
        "failed to get model version from specified version string 'wrong_specification'" in caught.value.details()
    )


def test_channel_arguments_of_the_clients_own(server: Ports) -> None:
    arguments = [
        ("grpc.max_send_message_length", 1 << 20),
        ("grpc.max_receive_message_length", 1 << 20),
        ("grpc.keepalive_time_ms", 2**31 - 1),
        ("grpc.http2.max_pings_without_data", 2),
    ]
    with triton_grpc.InferenceServerClient(server.grpc, channel_args=arguments) as client:
        assert is_right(client.infer("adder", pair(triton_grpc), headers={**HEADERS}))
