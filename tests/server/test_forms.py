"""Requests whose form is known are what they would be if they were read: over HTTP and over gRPC."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from server.errors import RequestError
from server.grpc import forms as grpc_forms
from server.grpc.codec import decode_request as decode_grpc
from server.grpc.wire import parse, raw_fields_at_the_end
from server.http import forms as http_forms
from server.http.codec import decode_request as decode_http
from server.protocol.model import Array, ModelInfo, TensorSpec
from server.protocol.request import InferRequest
from server.protocol.shared_memory import Regions


def model(name: str, *inputs: TensorSpec) -> ModelInfo:
    return ModelInfo(
        name, 1, inputs, (TensorSpec("y", "FP32", (4,)), TensorSpec("z", "INT64", ())), max_batch_size=4
    )


A, B = TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "INT64", (2,))
ONE, TWO = model("one", A), model("two", A, B)
REGIONS = Regions()


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    """What a client wants of one of the models; some of it is refused."""
    info = draw(st.sampled_from([ONE, TWO]))
    batch = draw(st.integers(1, 2))
    arrays = {"a": np.full((batch, draw(st.integers(0, 3))), draw(st.integers(0, 9)), np.float32)}
    if info is TWO:
        arrays["b"] = np.full((batch, draw(st.sampled_from([2, 2, 2, 3]))), draw(st.integers(0, 9)), np.int64)
    return {
        "info": info,
        "arrays": arrays,
        "id": draw(st.sampled_from(["", "", "", "r1"])),
        "outputs": draw(st.sampled_from([(), ("y",), ("z", "y"), ("nope",)])),
        "timeout": draw(st.sampled_from([0, 0, 5000])),
        "reverse": draw(st.booleans()),
        "cut": draw(st.sampled_from([0, 0, 0, 4])),
    }


def over_http(wanted: dict[str, Any]) -> tuple[bytes, int]:
    arrays: list[tuple[str, Array]] = list(wanted["arrays"].items())
    arrays = arrays[::-1] if wanted["reverse"] else arrays
    datatypes = {"a": "FP32", "b": "INT64"}
    message: dict[str, Any] = {
        "inputs": [
            {"name": n, "datatype": datatypes[n], "shape": a.shape, "parameters": {"binary_data_size": a.nbytes}}
            for n, a in arrays
        ],
        "parameters": {"timeout": wanted["timeout"]} if wanted["timeout"] else {},
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in wanted["outputs"]],
    }
    if wanted["id"]:
        message["id"] = wanted["id"]
    head = json.dumps(message).encode()
    tail = b"".join(a.tobytes() for _, a in arrays)
    return head + tail[: len(tail) - wanted["cut"]], len(head)


def over_grpc(wanted: dict[str, Any]) -> bytes:
    arrays: list[tuple[str, Array]] = list(wanted["arrays"].items())
    arrays = arrays[::-1] if wanted["reverse"] else arrays
    message = pb.ModelInferRequest(model_name=wanted["info"].name, id=wanted["id"])
    for name, array in arrays:
        message.inputs.add(name=name, datatype={"a": "FP32", "b": "INT64"}[name], shape=array.shape)
        message.raw_input_contents.append(array.tobytes()[: array.nbytes - wanted["cut"]])
    for name in wanted["outputs"]:
        message.outputs.add(name=name)
    if wanted["timeout"]:
        message.parameters["timeout"].int64_param = wanted["timeout"]
    written: bytes = message.SerializeToString()
    return written


def told(request: InferRequest) -> tuple[Any, ...]:
    inputs = {name: (a.dtype.str, a.shape, a.tolist()) for name, a in request.inputs.items()}
    outputs = [(o.tensor, o.binary, o.classes, o.window) for o in request.outputs]
    own = (request.model, request.version, request.batch, request.id, request.priority, request.timeout_s)
    return inputs, outputs, own


def outcome(function: Any) -> Any:
    try:
        return told(function())
    except RequestError as error:
        return type(error), str(error)


@settings(max_examples=150, deadline=None)
@given(st.lists(asked(), min_size=1, max_size=12))
def test_over_http(sequence: list[dict[str, Any]]) -> None:
    forms = http_forms.Forms()
    for wanted in [*sequence, *sequence]:
        body, length = over_http(wanted)
        read = outcome(lambda: decode_http(memoryview(body), length, wanted["info"], REGIONS))  # noqa: B023
        known = outcome(lambda: decode_http(memoryview(body), length, wanted["info"], REGIONS, forms))  # noqa: B023
        assert known == read


def by_grpc(data: bytes, forms: grpc_forms.Forms, models: Sequence[ModelInfo]) -> InferRequest:
    """As the service does it."""
    form = forms.find(data)
    if form is not None and any(form.info is info for info in models):
        return form.request(data)
    parsed = parse(data)
    info = next(info for info in models if info.name == parsed.message.model_name)
    request = decode_grpc(parsed.message, parsed.raw, info, REGIONS)
    forms.remember(data, parsed.message, raw_fields_at_the_end(data), request, info)
    return request


@settings(max_examples=150, deadline=None)
@given(st.lists(asked(), min_size=1, max_size=12))
def test_over_grpc(sequence: list[dict[str, Any]]) -> None:
    forms = grpc_forms.Forms()
    for wanted in [*sequence, *sequence]:
        data = over_grpc(wanted)
        parsed = parse(data)
        read = outcome(lambda: decode_grpc(parsed.message, parsed.raw, wanted["info"], REGIONS))  # noqa: B023
        assert outcome(lambda: by_grpc(data, forms, [ONE, TWO])) == read  # noqa: B023


def wanted(**changes: Any) -> dict[str, Any]:
    arrays = {"a": np.ones((1, 3), np.float32), "b": np.ones((1, 2), np.int64)}
    plain = {"info": TWO, "arrays": arrays, "id": "", "outputs": ("y",), "timeout": 0, "reverse": False, "cut": 0}
    return plain | changes


def test_a_form_is_known_the_second_time_and_its_tensors_are_views() -> None:
    http, grpc = http_forms.Forms(), grpc_forms.Forms()
    body, length = over_http(wanted())
    assert http.request(body[:length], memoryview(body), TWO) is None
    decode_http(memoryview(body), length, TWO, REGIONS, http)
    request = http.request(body[:length], memoryview(body), TWO)
    assert request is not None
    assert not request.inputs["a"].flags.owndata
    data = over_grpc(wanted())
    assert grpc.find(data) is None
    by_grpc(data, grpc, [TWO])
    form = grpc.find(memoryview(data))
    assert form is not None
    assert not form.request(data).inputs["b"].flags.owndata


@pytest.mark.parametrize("what", [{"id": "r1"}, {"arrays": {"a": np.ones((1, 0), np.float32)}, "info": ONE}])
def test_requests_with_ids_of_their_own_or_empty_tensors_are_not_remembered(what: dict[str, Any]) -> None:
    http, grpc = http_forms.Forms(), grpc_forms.Forms()
    asked = wanted(**what)
    body, length = over_http(asked)
    decode_http(memoryview(body), length, asked["info"], REGIONS, http)
    assert http.request(body[:length], memoryview(body), asked["info"]) is None
    data = over_grpc(asked)
    by_grpc(data, grpc, [ONE, TWO])
    assert grpc.find(data) is None


def test_another_version_of_the_model_is_fitted_anew() -> None:
    body, length = over_http(wanted())
    forms = http_forms.Forms()
    decode_http(memoryview(body), length, TWO, REGIONS, forms)
    other = model("two", A, TensorSpec("b", "INT64", (3,)))
    with pytest.raises(RequestError, match="unexpected shape for input 'b'"):
        decode_http(memoryview(body), length, other, REGIONS, forms)


def test_tensors_before_other_fields_are_read_each_time() -> None:
    data = over_grpc(wanted())
    late = pb.ModelInferRequest(model_version="1").SerializeToString()
    assert raw_fields_at_the_end(data + late) == []
    grpc = grpc_forms.Forms()
    by_grpc(data + late, grpc, [TWO])
    assert grpc.find(data + late) is None


def test_forms_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_forms, "_MOST", 3)
    monkeypatch.setattr(grpc_forms, "_MOST_LENGTHS", 3)
    http, grpc = http_forms.Forms(), grpc_forms.Forms()
    several = [wanted(info=ONE, arrays={"a": np.ones((1, n), np.float32)}) for n in range(1, 9)]
    for asked in several:
        body, length = over_http(asked)
        decode_http(memoryview(body), length, ONE, REGIONS, http)
        by_grpc(over_grpc(asked), grpc, [ONE])
    bodies = [over_http(asked) for asked in several]
    assert 1 <= sum(http.request(b[:n], memoryview(b), ONE) is not None for b, n in bodies) <= 3
    assert 1 <= sum(grpc.find(over_grpc(asked)) is not None for asked in several) <= 3
