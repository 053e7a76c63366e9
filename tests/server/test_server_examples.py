"""What tritonclient's public examples show, over HTTP and gRPC, with the unchanged client."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http.aio as triton_http_aio
from clients import PROTOCOLS, Client, connect
from server_fakes import FakeServable, Gate, Running, identity, running, serving
from tritonclient.utils import InferenceServerException

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = np.full((2, 4), 0.5, np.float32)


@pytest.fixture(params=PROTOCOLS)
def client(server: Running, request: pytest.FixtureRequest) -> Iterator[Client]:
    client = connect(server, request.param)
    with client.raw:
        yield client


def pair(client: Client) -> list[Any]:
    return [client.input("a", A, "FP32"), client.input("b", B, "FP32")]


def test_one_set_of_inputs_and_outputs_for_many_requests(client: Client) -> None:
    inputs = pair(client)
    outputs = [client.api.InferRequestedOutput("sum"), client.api.InferRequestedOutput("diff")]
    for shift in range(4):
        inputs[1].set_data_from_numpy(B + np.float32(shift))
        result = client.raw.infer("adder", inputs, outputs=outputs[: 1 + shift % 2])
        np.testing.assert_array_equal(result.as_numpy("sum"), A + B + np.float32(shift))
        assert (result.as_numpy("diff") is not None) == bool(shift % 2)


def test_strings_are_understood_and_refused(client: Client) -> None:
    words = np.array([[b"a", b"\xff", b"", b"long" * 99]], dtype=object)
    with pytest.raises(InferenceServerException, match="PyTorch models have no string tensors") as caught:
        client.raw.infer("id_int32", [client.input("x", words, "BYTES")])
    assert client.status(caught.value) in ("400", "INVALID_ARGUMENT")


def test_bfloat16(client: Client) -> None:
    array = np.array([[1, -2.5, 0, 96]], ml_dtypes.bfloat16)
    result = client.raw.infer("id_bf16", [client.input("x", array, "BF16")])
    np.testing.assert_array_equal(result.as_numpy("y").astype(np.float32), array.astype(np.float32))


def test_priority_timeout_and_parameters_of_ones_own(client: Client) -> None:
    parameters = {"note": "x", "weight": 0.5, "count": 3, "flag": True}
    result = client.raw.infer("adder", pair(client), priority=2, timeout=10_000_000, parameters=parameters)
    np.testing.assert_array_equal(result.as_numpy("sum"), A + B)


def test_sequences_are_refused_with_the_reason(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="keep no state between requests") as caught:
        client.raw.infer("adder", pair(client), sequence_id=7, sequence_start=True)
    assert client.status(caught.value) in ("501", "UNIMPLEMENTED")


def test_errors_carry_the_requests_id(client: Client) -> None:
    zeros = np.zeros((1, 4), np.float32)
    for model, message in (("broken", "failed to execute"), ("id_int32", "data-type is 'FP32'")):
        with pytest.raises(InferenceServerException, match=rf"\[request id: seven\] .*{message}"):
            client.raw.infer(model, [client.input("x", zeros, "FP32")], request_id="seven")


def test_other_versions_are_not_found(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="'adder' version 1 is not found"):
        client.raw.infer("adder", pair(client), model_version="1")


@pytest.mark.parametrize("module", [triton_http_aio, triton_grpc_aio], ids=PROTOCOLS)
async def test_many_requests_at_once(server: Running, module: Any) -> None:
    address = server.address if module is triton_http_aio else server.grpc
    async with module.InferenceServerClient(address) as client:

        async def ask(number: int) -> None:
            inputs = [module.InferInput(name, [2, 4], "FP32") for name in "ab"]
            inputs[0].set_data_from_numpy(A + np.float32(number))
            inputs[1].set_data_from_numpy(B)
            result = await client.infer("adder", inputs, request_id=str(number))
            np.testing.assert_array_equal(result.as_numpy("sum"), A + B + np.float32(number))

        await asyncio.gather(*(ask(number) for number in range(32)))


def until_nothing_waits(server: Running) -> None:
    deadline_s = time.monotonic() + 10
    while b'nv_inference_pending_request_count{model="gated",version="1"} 0\n' not in metrics(server):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def metrics(server: Running) -> bytes:
    with urlopen(server.server.metrics_url) as answer:
        text: bytes = answer.read()
    return text


def test_a_client_that_gives_up_leaves_the_queue() -> None:
    gate = Gate()
    with running(serving(FakeServable(identity("gated", "FP32").info, gate))) as server:
        client = connect(server, "grpc")
        inputs = [client.input("x", np.zeros((1, 4), np.float32), "FP32")]
        first = client.raw.async_infer("gated", inputs, callback=lambda result, error: None)
        assert gate.entered.wait(10)
        with pytest.raises(InferenceServerException, match=r"DEADLINE_EXCEEDED|Deadline Exceeded"):
            client.raw.infer("gated", inputs, client_timeout=0.2)
        until_nothing_waits(server)
        gate.open.set()
        assert first is not None
        assert client.raw.infer("gated", inputs) is not None
        counted = client.raw.get_inference_statistics("gated").model_stats[0]
        assert counted.execution_count == 2
        client.raw.close()
