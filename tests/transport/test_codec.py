"""The codec without HTTP: whatever is encoded comes back, and garbage is always the client's error."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cohabit.planner.shapes import Dimension, DynamicShape
from cohabit.server.errors import InvalidRequest, RequestError, TensorMismatch, Unsupported
from cohabit.server.http.codec import decode_request, encode_response, parse_header_length
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from cohabit.server.ipc.request import Answer, Request, Timing
from cohabit.server.protocol import json_numbers
from cohabit.server.protocol.datatypes import BINARY_ONLY, DTYPES
from cohabit.server.protocol.shared_memory import Regions, RegionUse

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

PAIR = ModelInfo(
    "pair",
    1,
    (TensorSpec("a", "FP32", (2, 3)), TensorSpec("b", "INT64", ())),
    (TensorSpec("a", "FP32", (2, 3)), TensorSpec("b", "INT64", ())),
    max_batch_size=4,
)


def decode(body: memoryview, header_length: int | None, info: ModelInfo) -> Request:
    return decode_request(body, header_length, info, RegionUse(Regions()))


def encode(request: Request, info: ModelInfo, outputs: Mapping[str, Array]) -> list[bytes | memoryview]:
    return encode_response(request, Answer(info.key, outputs, Timing()), info, RegionUse(Regions()))


def info_for(datatype: str, shape: tuple[int, ...]) -> ModelInfo:
    tensor = (TensorSpec("x", datatype, shape),)
    return ModelInfo("m", 1, tensor, tensor, max_batch_size=1 << 16)


@st.composite
def tensors(draw: st.DrawFn, datatypes: list[str]) -> tuple[str, Array]:
    datatype = draw(st.sampled_from(datatypes))
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=5))
    elements = {"allow_nan": False, "allow_infinity": False} if DTYPES[datatype].kind == "f" else None
    return datatype, draw(hnp.arrays(DTYPES[datatype], shape, elements=elements))


def json_request(datatype: str, array: Array, nested: bool) -> bytes:
    data = array.tolist() if nested else array.ravel().tolist()
    body = {"inputs": [{"name": "x", "datatype": datatype, "shape": array.shape, "data": data}]}
    return json.dumps(body).encode()


def binary_request(datatype: str, array: Array, header: dict[str, Any] | None = None) -> tuple[bytes, int]:
    described = {
        "name": "x",
        "datatype": datatype,
        "shape": array.shape,
        "parameters": {"binary_data_size": array.nbytes},
    }
    text = json.dumps({"inputs": [described], **(header or {})}).encode()
    return text + array.tobytes(), len(text)


@QUICK
@given(tensors(sorted(set(DTYPES) - BINARY_ONLY)), st.booleans())
def test_json_round_trip(tensor: tuple[str, Array], nested: bool) -> None:
    datatype, array = tensor
    info = info_for(datatype, array.shape[1:])
    request = decode(memoryview(json_request(datatype, array, nested)), None, info)
    np.testing.assert_array_equal(request.inputs["x"], array)
    answer = json.loads(b"".join(encode(request, info, request.inputs)))
    (output,) = answer["outputs"]
    back = np.array(output["data"], DTYPES[datatype]).reshape(output["shape"])
    np.testing.assert_array_equal(back, array)


@QUICK
@given(tensors(sorted(DTYPES)))
def test_binary_round_trip_to_the_bit(tensor: tuple[str, Array]) -> None:
    datatype, array = tensor
    info = info_for(datatype, array.shape[1:])
    body, length = binary_request(datatype, array, {"parameters": {"binary_data_output": True}})
    request = decode(memoryview(body), length, info)
    assert request.batch == array.shape[0]
    _, tensor_bytes = encode(request, info, request.inputs)
    assert tensor_bytes == array.tobytes()


def test_binary_inputs_are_views_of_the_body() -> None:
    array = np.arange(6, dtype=np.float32).reshape(1, 6)
    body, length = binary_request("FP32", array)
    buffer = bytearray(body)
    request = decode(memoryview(buffer), length, info_for("FP32", (6,)))
    buffer[length : length + 4] = np.float32(42).tobytes()
    assert request.inputs["x"][0, 0] == 42
    assert request.inputs["x"].flags.writeable


def test_outputs_of_other_layouts_are_written_in_order() -> None:
    info = info_for("FP32", (2,))
    body, length = binary_request(
        "FP32", np.zeros((2, 2), np.float32), {"parameters": {"binary_data_output": True}}
    )
    transposed = np.array([[1, 2], [3, 4]], np.float64).T
    request = decode(memoryview(body), length, info)
    _, tensor_bytes = encode(request, info, {"x": transposed})
    assert tensor_bytes == np.array([1, 3, 2, 4], np.float32).tobytes()


def test_priority_and_timeout_are_read() -> None:
    body, length = binary_request(
        "FP32", np.zeros((1, 2), np.float32), {"parameters": {"priority": 2, "timeout": 1500}}
    )
    request = decode(memoryview(body), length, info_for("FP32", (2,)))
    assert (request.priority, request.timeout_s) == (2, 0.0015)
    body, length = binary_request(
        "FP32", np.zeros((1, 2), np.float32), {"parameters": {"priority": 0, "timeout": 0}}
    )
    request = decode(memoryview(body), length, info_for("FP32", (2,)))
    assert (request.priority, request.timeout_s) == (None, None)


def test_any_size_matches_a_free_dimension() -> None:
    info = ModelInfo("m", 1, (TensorSpec("x", "UINT8", (-1,)),), (TensorSpec("x", "UINT8", (-1,)),))
    assert decode(memoryview(bytes(7)), 0, info).inputs["x"].shape == (7,)


def test_header_length() -> None:
    assert parse_header_length(None) is None
    assert parse_header_length(" 12 ") == 12
    with pytest.raises(InvalidRequest, match="not a number of bytes"):
        parse_header_length("-1")


VALID, VALID_LENGTH = (lambda text, tail: (text + tail, len(text)))(
    json.dumps(
        {
            "id": "1",
            "inputs": [
                {"name": "a", "datatype": "FP32", "shape": [1, 2, 3], "parameters": {"binary_data_size": 24}},
                {"name": "b", "datatype": "INT64", "shape": [1], "data": [5]},
            ],
            "outputs": [{"name": "b"}],
        }
    ).encode(),
    bytes(24),
)


def survives(body: bytes, header_length: int | None) -> None:
    """Decode, or refuse in a way that is not the server's fault."""
    try:
        decode(memoryview(body), header_length, PAIR)
    except (InvalidRequest, Unsupported):
        pass
    except RequestError as error:
        pytest.fail(f"an input error became {type(error).__name__}: {error}")


def test_damaged_bytes_are_the_clients_error() -> None:
    rng = np.random.default_rng(20)
    for _ in range(3000):
        body = bytearray(VALID)
        for position in rng.integers(0, len(body), rng.integers(1, 6)):
            body[position] = rng.integers(0, 256)
        cut = int(rng.integers(0, len(body) + 1)) if rng.random() < 0.3 else len(body)
        length = VALID_LENGTH if rng.random() < 0.5 else int(rng.integers(0, len(body) + 40))
        survives(bytes(body[:cut]), None if rng.random() < 0.2 else length)


ODD_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["a", "b", "x", "FP32", "INT64", "BYTES", "binary_data_size", 1e39, 2**63, 10**400]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["name", "datatype", "shape", "data", "parameters", "binary_data_size", "timeout"]),
            inner,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_odd_json_is_the_clients_error(data: st.DataObject) -> None:
    message = json.loads(VALID[:VALID_LENGTH])
    spot = data.draw(st.sampled_from(["id", "inputs", "outputs", "parameters", "input", "output"]))
    odd = data.draw(ODD_VALUES)
    if spot in ("input", "output"):
        part = message[spot + "s"][0]
        part[data.draw(st.sampled_from(["name", "datatype", "shape", "data", "parameters"]))] = odd
    else:
        message[spot] = odd
    text = json.dumps(message).encode()
    survives(text + bytes(24), len(text))


LONG = np.linspace(-1, 1, 96_000)


@pytest.mark.parametrize("shape", [(96_000,), (3, 32_000), (1, 96_000), (20, 30, 160), (96_000, 1)])
def test_long_arrays_are_read_as_short_ones_are(shape: tuple[int, ...]) -> None:
    array = LONG.reshape(shape)
    for text in (json_numbers.encode(array), str(array.tolist()).encode()):
        assert len(text) > 1 << 20
        np.testing.assert_array_equal(json_numbers.decode(memoryview(text), "x", "FP64", shape), array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-1] + b", 5]", "more values than the 96000"),
        (lambda text: text.replace(b"-1.0, ", b"", 1), "has 95999 values"),
        (lambda text: text[:-40] + text[-40:].replace(b", ", b"], [", 1), "not nested like its shape"),
        (lambda text: text.replace(b", ", b", true, ", 1), "does not fit FP64"),
        (lambda text: text[:-30] + b"," + text[-30:], "does not fit FP64"),
        (lambda text: b"[[" + b" " * 70_000 + text[2:], "a value of over 65536 characters"),
    ],
)
def test_long_arrays_that_are_wrong(change: Any, message: str) -> None:
    text = change(str(LONG.reshape(3, 32_000).tolist()).encode())
    with pytest.raises(InvalidRequest, match=message):
        json_numbers.decode(memoryview(text), "x", "FP64", (3, 32_000))


def test_infinities_in_long_arrays() -> None:
    values = json.loads(json_numbers.encode(np.where(LONG > 0, np.inf, LONG)))
    assert values == [np.inf if value > 0 else value for value in LONG]


SIZED = ModelInfo(
    "sized",
    1,
    (TensorSpec("x", "FP32", (-1,), sizes=("s",)), TensorSpec("y", "FP32", (-1, 2), sizes=("2*s + 1", 2))),
    (TensorSpec("z", "FP32", (-1,), sizes=("s//2",)),),
    max_batch_size=4,
    dynamic=DynamicShape((Dimension("s", 0, 1, 1, 0, 2, 64, (16, 32)),), ("Ne(s, 20)",)),
)


@pytest.mark.parametrize(
    ("x", "y", "error"),
    [
        (7, 15, None),
        (32, 65, None),
        (33, 67, "input 'x' for model 'sized': dimension 1 is 33, it can be 2 to 32"),
        (7, 14, r"input 'y' .* its last dimensions must be \[15, 2\], got \[14, 2\]"),
        (20, 41, r"exported under the condition Ne\(s, 20\), where s is 20"),
    ],
)
def test_sizes_must_be_those_that_the_model_was_exported_for(x: int, y: int, error: str | None) -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, x], "data": [0] * x},
        {"name": "y", "datatype": "FP32", "shape": [1, y, 2], "data": [0] * 2 * y},
    ]
    body = memoryview(json.dumps({"inputs": inputs}).encode())
    if error is None:
        assert decode(body, None, SIZED).sizes == (x,)
        return
    with pytest.raises(TensorMismatch, match=error):
        decode(body, None, SIZED)
