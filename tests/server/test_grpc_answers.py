"""Responses over gRPC are what protobuf would write of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from server.errors import InvalidRequest
from server.grpc.answers import as_stream_response, encode_response, failed_stream_response
from server.protocol.model import TensorSpec
from server.protocol.request import InferResponse, OutputTensor
from server.protocol.shared_memory import Regions, SystemRequest, Window
from server.protocol.shared_memory_files import open_region

SIZES = st.sampled_from([0, 1, 31, 32, 4095, 4096, 40_000])
"""In FP32: lengths of one to three bytes of varint."""


def response_of(sizes: list[int], request_id: str | None) -> InferResponse:
    outputs = tuple(
        OutputTensor(
            TensorSpec(f"y{n}", "FP32", (size,)), np.arange(size, dtype=np.float32).reshape(1, size), binary=True
        )
        for n, size in enumerate(sizes)
    )
    return InferResponse("model", 3, outputs, request_id)


def by_protobuf(response: InferResponse, final: bool) -> Any:
    message = pb.ModelInferResponse(
        model_name=response.model, model_version=str(response.version), id=response.id or ""
    )
    for output in response.outputs:
        message.outputs.add(name=output.tensor.name, datatype="FP32", shape=output.array.shape)
        message.raw_output_contents.append(output.array.tobytes())
    if final:
        message.parameters["triton_final_response"].bool_param = True
    return message


@given(st.lists(SIZES, max_size=3), st.sampled_from([None, "", "request 1"]), st.booleans())
@example([150_528], None, False)
@settings(deadline=None, max_examples=60)
def test_a_response_is_to_the_byte_what_protobuf_writes(
    sizes: list[int], request_id: str | None, final: bool
) -> None:
    response = response_of(sizes, request_id)
    message = by_protobuf(response, final)
    for _ in range(2):  # the second time it is remembered
        assert encode_response(response, final) == message.SerializeToString(deterministic=True)
    whole = pb.ModelStreamInferResponse(infer_response=message).SerializeToString(deterministic=True)
    assert as_stream_response(encode_response(response, final)) == whole


def test_what_is_remembered_of_one_response_is_not_told_of_another() -> None:
    small, large = response_of([3], None), response_of([4], None)
    other = InferResponse("other", 3, small.outputs, None)
    for response in (small, large, other, small):
        assert pb.ModelInferResponse.FromString(encode_response(response)) == by_protobuf(response, False)
    assert encode_response(response_of([3], "a")) != encode_response(response_of([3], "b"))


@pytest.fixture
def regions() -> Any:
    key = f"/cohabit_test_{Path(__file__).stem}"
    path = Path("/dev/shm") / key[1:]
    path.write_bytes(bytes(64))
    regions = Regions(open_region)
    regions.register_system(SystemRequest("out", key, 0, 64))
    yield regions, path
    regions.unregister("system", None)
    path.unlink()


@pytest.mark.parametrize("offset", [0, 16])
def test_what_goes_to_shared_memory_is_written_there_and_told_without_its_values(regions: Any, offset: int) -> None:
    found, path = regions
    (region,) = found.system("out")
    (output,) = response_of([4], None).outputs
    placed = OutputTensor(output.tensor, output.array, True, Window(region, offset, 16))
    message = pb.ModelInferResponse.FromString(encode_response(InferResponse("model", 3, (placed,), None)))
    assert list(message.raw_output_contents) == [b""]
    told = message.outputs[0].parameters
    assert told["shared_memory_region"].string_param == "out"
    assert told["shared_memory_byte_size"].int64_param == 16
    assert ("shared_memory_offset" in told) == bool(offset)
    assert path.read_bytes()[offset : offset + 16] == output.array.tobytes()
    small = OutputTensor(output.tensor, output.array, True, Window(region, offset, 15))
    with pytest.raises(InvalidRequest, match="should be at least 16 bytes"):
        encode_response(InferResponse("model", 3, (small,), None))


def test_a_failure_is_an_answer_of_its_stream_s_request() -> None:
    message = pb.ModelStreamInferResponse.FromString(failed_stream_response("no such model", "7"))
    assert message.error_message == "no such model"
    assert message.infer_response.id == "7"
    assert message.infer_response.parameters["triton_final_response"].bool_param
