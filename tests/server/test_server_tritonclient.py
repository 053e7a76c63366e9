"""The unchanged tritonclient, synchronous and asyncio, against a server in this process."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from server_fakes import FakeLoaded, Running
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = np.full((2, 4), 0.5, np.float32)


@pytest.fixture
def client(server: Running) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str, binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def test_server_is_live_and_ready(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()


def test_models_are_ready_unless_they_failed_or_are_unknown(client: triton.InferenceServerClient) -> None:
    assert client.is_model_ready("adder")
    assert client.is_model_ready("adder", "3")
    assert not client.is_model_ready("adder", "1")
    assert not client.is_model_ready("damaged")
    assert not client.is_model_ready("nope")


def test_server_metadata_names_its_extensions(client: triton.InferenceServerClient) -> None:
    metadata = client.get_server_metadata()
    assert metadata["name"] == "cohabit"
    assert {"binary_tensor_data", "statistics"} <= set(metadata["extensions"])


def test_model_metadata_has_the_batch_in_front(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata("adder")
    assert metadata["versions"] == ["3"]
    assert metadata["inputs"] == [
        {"name": "a", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "b", "datatype": "FP32", "shape": [-1, 4]},
    ]
    assert client.get_model_metadata("fixed")["inputs"][0]["shape"] == [2, 3]


def test_model_config_is_complete(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("adder")
    assert config["max_batch_size"] == 8
    assert config["input"][0]["name"] == "a"
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["input"][0]["dims"] == [4]
    assert config["input"][0]["optional"] is False
    assert config["input"][0]["is_shape_tensor"] is False
    assert "sequence_batching" not in config


def test_repository_index_lists_failures_with_their_reason(client: triton.InferenceServerClient) -> None:
    index = {entry["name"]: entry for entry in client.get_model_repository_index()}
    assert index["adder"] == {"name": "adder", "version": "3", "state": "READY"}
    assert index["damaged"]["state"] == "UNAVAILABLE"
    assert index["damaged"]["reason"] == "model.pt2 is truncated"


def test_statistics_count_inferences(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics("wide")["model_stats"][0]
    client.infer("wide", [tensor("x", np.zeros((3, 4096), np.float32), "FP32")])
    after = client.get_inference_statistics("wide")["model_stats"][0]
    assert after["inference_count"] == before["inference_count"] + 3
    assert after["execution_count"] == before["execution_count"] + 1
    assert after["inference_stats"]["success"]["ns"] >= after["inference_stats"]["compute_infer"]["ns"] > 0
    assert after["inference_stats"]["cache_miss"] == {"count": 0, "ns": 0}
    assert any(stats["batch_size"] == 3 for stats in after["batch_stats"])
    assert len(client.get_inference_statistics()["model_stats"]) > 1


def test_statistics_of_an_unknown_model_are_refused(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="requested model 'nope' is not available") as caught:
        client.get_inference_statistics("nope")
    assert caught.value.status() == "400"


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_inference_over_json_and_binary(
    client: triton.InferenceServerClient, binary_in: bool, binary_out: bool
) -> None:
    result = client.infer(
        "adder",
        [tensor("b", B, "FP32", binary_in), tensor("a", A, "FP32", binary_in)],
        outputs=[triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("diff", "sum")],
        request_id="seven",
        model_version="3",
    )
    np.testing.assert_array_equal(result.as_numpy("sum"), A + B)
    np.testing.assert_array_equal(result.as_numpy("diff"), A - B)
    response = result.get_response()
    assert response["id"] == "seven"
    assert response["model_name"] == "adder"
    assert response["model_version"] == "3"
    assert [output["name"] for output in response["outputs"]] == ["sum", "diff"]  # the model's order


def test_without_outputs_all_come_back(client: triton.InferenceServerClient) -> None:
    result = client.infer("adder", [tensor("a", A, "FP32"), tensor("b", B, "FP32", binary=False)])
    np.testing.assert_array_equal(result.as_numpy("diff"), A - B)
    assert "id" not in result.get_response()


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP64"])
@pytest.mark.parametrize("binary", [True, False])
def test_every_datatype_survives(client: triton.InferenceServerClient, datatype: str, binary: bool) -> None:
    array = np.array([[0, 1, 1, 0]]).astype(triton_to_np_dtype(datatype))
    output = triton.InferRequestedOutput("y", binary_data=binary)
    result = client.infer(f"id_{datatype.lower()}", [tensor("x", array, datatype, binary)], outputs=[output])
    np.testing.assert_array_equal(result.as_numpy("y"), array)


def test_fp16_travels_as_bytes(client: triton.InferenceServerClient) -> None:
    array = np.array([[1.0, -2.5, 0.0, 96.0]], np.float16)
    result = client.infer("id_fp16", [tensor("x", array, "FP16")])
    np.testing.assert_array_equal(result.as_numpy("y"), array)


def test_infinity_comes_back_as_json(client: triton.InferenceServerClient) -> None:
    array = np.array([[np.inf, -np.inf, np.nan, 1.5]], np.float64)
    output = triton.InferRequestedOutput("y", binary_data=False)
    result = client.infer("id_fp64", [tensor("x", array, "FP64")], outputs=[output])
    np.testing.assert_array_equal(result.as_numpy("y"), array)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_both_ways(client: triton.InferenceServerClient, algorithm: str) -> None:
    array = np.zeros((2, 4096), np.float32)
    result = client.infer(
        "wide",
        [tensor("x", array, "FP32")],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(result.as_numpy("y"), array)


def test_failure_in_a_model_is_this_requests_error(client: triton.InferenceServerClient) -> None:
    zeros = np.zeros((1, 4), np.float32)
    with pytest.raises(InferenceServerException, match=r"'broken' failed to execute: .*caught fire") as caught:
        client.infer("broken", [tensor("x", zeros, "FP32")])
    assert caught.value.status() == "500"
    with pytest.raises(InferenceServerException, match="row 7") as caught:
        client.infer("broken", [tensor("x", zeros + 7, "FP32")])
    assert caught.value.status() == "400"
    assert client.infer("adder", [tensor("a", A, "FP32"), tensor("b", B, "FP32")]) is not None


def test_unknown_and_failed_models(client: triton.InferenceServerClient) -> None:
    for model, version, message in (
        ("nope", "", "Request for unknown model: 'nope' is not found"),
        ("adder", "9", "'adder' version 9 is not found"),
        ("damaged", "", "'damaged' has no available versions: model.pt2 is truncated"),
    ):
        with pytest.raises(InferenceServerException, match=message) as caught:
            client.infer(model, [tensor("x", A, "FP32")], model_version=version)
        assert caught.value.status() == "404"


async def test_asyncio_client(server: Running, loaded: FakeLoaded) -> None:
    array = np.arange(4096, dtype=np.float32).reshape(1, 4096)
    async with triton_aio.InferenceServerClient(server.address) as client:
        assert await client.is_server_ready()
        for algorithm in (None, "gzip", "deflate"):
            result = await client.infer(
                "wide",
                [tensor("x", array, "FP32")],
                request_compression_algorithm=algorithm,
                response_compression_algorithm=algorithm,
            )
            np.testing.assert_array_equal(result.as_numpy("y"), array)
        with pytest.raises(InferenceServerException, match="unexpected inference input"):
            await client.infer("wide", [tensor("z", array, "FP32")])
