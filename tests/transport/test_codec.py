"""The codec without HTTP: whatever is encoded comes back, and garbage is always the client's error."""

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cohabit.planner.shapes import Dimension, DynamicShape
from cohabit.server.errors import InvalidRequest, Refused, RequestError, TensorMismatch
from cohabit.server.http.codec import decode_request, encode_response, parse_header_length
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from cohabit.server.ipc.request import Answer, Request, Timing
from cohabit.server.protocol.datatypes import BINARY_ONLY, DTYPES
from cohabit.server.protocol.shared_memory import Regions, RegionUse
from cohabit.server.protocol.tensors import MOST_JSON_VALUES, from_json, to_json

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
    except (InvalidRequest, Refused):
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


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
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


def read(text: bytes, datatype: str, shape: tuple[int, ...]) -> Array:
    return from_json(msgspec.Raw(text), "x", datatype, shape)


@pytest.mark.parametrize("shape", [(MOST_JSON_VALUES,), (MOST_JSON_VALUES, 1)])
def test_arrays_of_up_to_a_mebibyte_are_read(shape: tuple[int, ...]) -> None:
    array = np.linspace(-1, 1, MOST_JSON_VALUES).reshape(shape)
    for text in (bytes(to_json(array)), str(array.tolist()).encode()):
        np.testing.assert_array_equal(read(text, "FP64", shape), array)


@pytest.mark.parametrize("datatype", ["FP32", "INT8"])
def test_larger_arrays_are_to_be_sent_as_binary(datatype: str) -> None:
    text = b"[" + b"1," * MOST_JSON_VALUES + b"1]"
    with pytest.raises(InvalidRequest, match=r"input 'x' has 262145 values.*; send it as binary data"):
        read(text, datatype, (MOST_JSON_VALUES + 1,))


def test_more_values_than_the_shape_takes_are_counted_before_they_are_read() -> None:
    with pytest.raises(InvalidRequest, match=r"input 'x' has 3 values, but its shape \[2\] takes 2"):
        read(b"[1,2,unread]", "FP32", (2,))


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("INT64", [-(2**63), 2**63 - 1, 2**53 + 1]),
        ("UINT64", [2**64 - 1, 2**53 + 1]),
        ("FP64", [0.1, 5e-324, 1.7976931348623157e308, 2.5, -0.0]),
        ("FP32", [0.1, 1e-45, 3.4028234663852886e38, 16777217]),
    ],
)
def test_numbers_are_exact(datatype: str, values: list[float]) -> None:
    array = read(json.dumps(values).encode(), datatype, (len(values),))
    np.testing.assert_array_equal(array, np.array(values, DTYPES[datatype]))
    np.testing.assert_array_equal(read(bytes(to_json(array)), datatype, array.shape), array)


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
@pytest.mark.parametrize("shape", [(7,), (7, 1), (1, 7)])
def test_bare_constants_are_values_as_triton_takes_them(datatype: str, shape: tuple[int, ...]) -> None:
    text = b'{"id":"NaN","inputs":[{"name":"x","datatype":"%b","shape":%b,"data":%b}],"parameters":{"own":"-Infinity"}}'
    data = b"[ NaN,1.5,-Infinity, Infinity ,-Inf,Inf,-NaN]"
    if len(shape) > 1:
        data = b"[%b]" % (data if shape[0] == 1 else data[1:-1].replace(b",", b"],["))
        data = data if shape[0] == 1 else b"[%b]" % data
    body = text % (datatype.encode(), str(list(shape)).encode(), data)
    spec = TensorSpec("x", datatype, shape)
    found = decode(memoryview(body), None, ModelInfo("m", 1, (spec,), (), 0))
    expected = [np.nan, 1.5, -np.inf, np.inf, -np.inf, np.inf, np.nan]
    np.testing.assert_array_equal(found.inputs["x"].ravel(), np.array(expected, DTYPES[datatype]))
    assert found.id == "NaN"


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[NaN],"data":[1]}]}',
        b'{"inputs":[{"name":NaN,"datatype":"FP32","shape":[1],"data":[1]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[1]}],"parameters":{"timeout":NaN}}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":["   "]}],"parameters":{"a":NaN}}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[nan]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":["NaN"]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[NaN NaN]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2],"data":[NaN,1e999]}]}',
        b"NaN",
        b"[NaN",
    ],
)
def test_constants_are_taken_as_values_of_tensors_only(body: bytes) -> None:
    info = ModelInfo("m", 1, (TensorSpec("x", "FP32", (-1,), sizes=(None,)),), (), 0)
    with pytest.raises(InvalidRequest):
        decode_request(memoryview(body), None, info, RegionUse(Regions()))


NESTED = st.recursive(
    st.sampled_from([0, 1, -2.5, 1e300, True, None, "1", math.nan, math.inf]),
    lambda c: st.lists(c, max_size=3),
    max_leaves=8,
)


@QUICK
@given(NESTED, st.lists(st.integers(0, 3), min_size=1, max_size=3), st.sampled_from(["FP64", "INT32", "BOOL"]))
def test_nested_values_are_read_where_numpy_has_an_array_of_them(
    value: Any, shape: list[int], datatype: str
) -> None:
    """Compared with an array that json and numpy make, of the type's values alone."""
    kinds = {"FP64": (int, float), "INT32": (int,), "BOOL": (bool,)}[datatype]

    def leaves(part: Any) -> list[Any]:
        return [leaf for inner in part for leaf in leaves(inner)] if isinstance(part, list) else [part]

    fits = isinstance(value, list) and all(type(leaf) in kinds for leaf in leaves(value))
    try:
        array = np.array(value, DTYPES[datatype]) if fits else None
    except ValueError:  # ragged
        array = None
    if array is not None and array.size != math.prod(shape):
        array = None
    if array is not None and array.ndim > 1 and array.shape != tuple(shape):
        array = None
    text = json.dumps(value).encode()
    if array is None:
        with pytest.raises(InvalidRequest):
            read(text, datatype, tuple(shape))
    else:
        np.testing.assert_array_equal(read(text, datatype, tuple(shape)), array.reshape(shape))


def test_infinities_of_long_outputs() -> None:
    long = np.linspace(-1, 1, 96_000)
    values = json.loads(bytes(to_json(np.where(long > 0, np.inf, long))))
    assert values == [np.inf if value > 0 else value for value in long]


def test_arrays_without_values() -> None:
    assert bytes(to_json(np.zeros((0, 3)))) == b"[]"
    assert read(b"[[],[]]", "FP32", (2, 0)).shape == (2, 0)
    with pytest.raises(InvalidRequest, match="has 262145 values"):
        read(b"[" + b"[]," * MOST_JSON_VALUES + b"[]]", "FP32", (MOST_JSON_VALUES + 1, 0))


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
