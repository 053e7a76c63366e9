"""Every way to get a request wrong: its status, its JSON error, and a server that still serves."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.server_http import HEADER_LENGTH, Answer, ask, binary_x, infer, infer_binary, x
from tests.support.server.transport_fakes import Ports

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _still_serves(server: Ports) -> Iterator[None]:
    yield
    assert infer(server, "id_int32", {"inputs": [x(datatype="INT32")]}).status == 200


def refused(answer: Answer, status: int, *parts: str) -> None:
    assert answer.headers["content-type"].startswith("application/json")
    assert "content-encoding" not in answer.headers
    error = answer.error
    assert answer.status == status, error
    for part in parts:
        assert part in error


BAD_INPUTS: dict[str, tuple[str, list[dict[str, Any]], tuple[str, ...]]] = {
    "unknown input": ("wide", [x(name="q")], ("unexpected inference input 'q' for model 'wide'", "['x']")),
    "missing input": ("adder", [x(name="a")], ("expected 2 inputs but got 1", "missing required input(s) ['b']")),
    "no input": ("adder", [], ("expected 2 inputs but got 0",)),
    "duplicate input": ("adder", [x(name="a"), x(name="a")], ("input 'a' already exists in request",)),
    "wrong datatype": ("id_int32", [x()], ("input 'x' data-type is 'FP32'", "expects 'INT32'")),
    "nonsense datatype": (
        "id_int32",
        [x(datatype="FLOAT")],
        ("invalid datatype 'FLOAT' of input 'x'", "BOOL, UINT8,", "FP64, BF16, BYTES"),
    ),
    "strings": ("id_int32", [x(datatype="BYTES")], ("'BYTES'", "no string tensors")),
    "wrong rank": (
        "id_fp64",
        [x(datatype="FP64", shape=[4])],
        ("unexpected shape for input 'x'", "[-1, 4]", "[4]"),
    ),
    "wrong shape": ("id_fp64", [x(datatype="FP64", shape=[1, 5])], ("Expected [-1, 4], got [1, 5]",)),
    "wrong fixed shape": ("fixed", [x(datatype="INT32", shape=[3, 2])], ("Expected [2, 3], got [3, 2]",)),
    "batch over the maximum": ("adder", [x(name="a", shape=[9, 4]), x(name="b", shape=[9, 4])], ("must be <= 8",)),
    "batch of nothing": ("id_fp64", [x([], datatype="FP64", shape=[0, 4])], ("at least 1, got 0",)),
    "two batches": (
        "adder",
        [x(name="a"), x(name="b", shape=[2, 4])],
        ("input 'b' batch size does not match other inputs for 'adder'",),
    ),
    "too few values": ("id_fp64", [x([1, 2], datatype="FP64")], ("input 'x' has 2 values", "takes 4")),
    "too many values": ("id_fp64", [x([1] * 9, datatype="FP64")], ("has 9 values",)),
    "nested otherwise": ("id_fp64", [x([[1, 2], [3, 4]], datatype="FP64")], ("nested as [2, 2]", "[1, 4]")),
    "ragged": ("id_fp64", [x([[1, 2, 3], [4]], datatype="FP64", shape=[2, 4])], ("nested unevenly",)),
    "nested too deep for its shape": ("id_fp64", [x([[[1, 2, 3, 4]]], datatype="FP64")], ("nested 3 deep",)),
    "mixed nesting": ("id_fp64", [x([[1], 2], datatype="FP64")], ("input 'x'",)),
    "scalar": ("id_fp64", [x(5, datatype="FP64")], ("nested 0 deep",)),
    "text": ("id_fp64", [x("abcd", datatype="FP64")], ("nested 0 deep",)),
    "object": ("id_fp64", [x({"a": 1}, datatype="FP64")], ("nested 0 deep",)),
    "300 for UINT8": ("id_uint8", [x([300, 0, 0, 0], datatype="UINT8")], ("input 'x' does not fit UINT8",)),
    "-1 for UINT8": ("id_uint8", [x([-1, 0, 0, 0], datatype="UINT8")], ("input 'x' does not fit UINT8",)),
    "1.5 for INT32": ("id_int32", [x([1.5, 0, 0, 0], datatype="INT32")], ("input 'x' does not fit INT32",)),
    "huge for INT64": ("id_int64", [x([2**63, 0, 0, 0], datatype="INT64")], ("input 'x' does not fit INT64",)),
    "huge for UINT64": ("id_uint64", [x([2**64, 0, 0, 0], datatype="UINT64")], ("input 'x' does not fit UINT64",)),
    "true for FP64": ("id_fp64", [x([True, 0, 0, 0], datatype="FP64")], ("input 'x' does not fit FP64",)),
    "true for INT32": ("id_int32", [x([True, 0, 0, 0], datatype="INT32")], ("input 'x' does not fit INT32",)),
    "1 for BOOL": ("id_bool", [x(datatype="BOOL")], ("input 'x' does not fit BOOL",)),
    "null": ("id_fp64", [x([None, 1, 2, 3], datatype="FP64")], ("input 'x' does not fit FP64",)),
    "NaN for INT32": ("id_int32", [x([float("nan"), 1, 2, 3], datatype="INT32")], ("'x' does not fit INT32",)),
    "Infinity for BOOL": ("id_bool", [x([True, float("inf"), True, True], datatype="BOOL")], ("not fit BOOL",)),
    "1e39 for FP32": ("adder", [x([1e39, 0, 0, 0], name="a"), x(name="b")], ("'a' does not fit FP32", "1e+39")),
    "FP16 as JSON": ("id_fp16", [x(datatype="FP16")], ("receiving FP16 data via JSON is not supported", "'x'")),
    "BF16 as JSON": ("id_bf16", [x(datatype="BF16")], ("receiving BF16 data via JSON is not supported",)),
    "negative dimension": ("id_fp64", [x(datatype="FP64", shape=[-1, 4])], ("`$.inputs[0].shape[0]`",)),
    "huge dimension": ("id_fp64", [x(datatype="FP64", shape=[2**70, 4])], ("`$.inputs[0].shape[0]`",)),
    "shape of floats": ("id_fp64", [x(datatype="FP64", shape=[1.0, 4])], ("`$.inputs[0].shape[0]`",)),
    "65 dimensions": (
        "id_fp64",
        [x(datatype="FP64", shape=[1] * 65)],
        ("the shape of input 'x' has 65 dimensions, at most 64 are allowed; the model takes 2",),
    ),
    "a body full of dimensions": (
        "id_fp64",
        [x(datatype="FP64", shape=[1] * (MIB // 4))],
        ("the shape of input 'x' has", "bytes of JSON", "a tensor has no more than 64 dimensions"),
    ),
    "no data at all": (
        "id_fp64",
        [{"name": "x", "datatype": "FP64", "shape": [1, 4]}],
        ("Input must set only one of", "'x' sets none"),
    ),
    "neither data nor size": ("id_fp64", [x(datatype="FP64", data=None) | {"data": None}], ("nested 0 deep",)),
    "parameter of a list": ("id_fp64", [x(datatype="FP64", parameters={"a": [1]})], ("`$.inputs[0].parameters",)),
    "size without bytes": ("id_fp64", [binary_x(32, datatype="FP64")], ("binary_data_size 32", "0 bytes")),
    "negative size": ("id_fp64", [binary_x(-8, datatype="FP64")], ("at most 18446744073709551615, got -8",)),
    "size that is true": (
        "id_fp64",
        [binary_x(True, datatype="FP64")],
        ("at most 18446744073709551615, got True",),
    ),
    "size that is text": (
        "id_fp64",
        [binary_x("32", datatype="FP64")],
        ("at most 18446744073709551615, got '32'",),
    ),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_refused(server: Ports, case: str) -> None:
    model, inputs, parts = BAD_INPUTS[case]
    refused(infer(server, model, {"inputs": inputs}), 400, *parts)


TWICE = x(datatype="FP64", parameters={"binary_data_size": 32})
IN_JSON = x(datatype="FP64")


@pytest.mark.parametrize(
    ("given", "binary", "parts"),
    [
        (TWICE, bytes(32), ("'x' sets two",)),
        (binary_x(24, datatype="FP64"), bytes(24), ("byte size mismatch for input 'x'", "takes 32 bytes, got 24")),
        (binary_x(32, datatype="FP64"), bytes(31), ("binary_data_size 32, but only 31 bytes",)),
        (
            binary_x(32, datatype="FP64"),
            bytes(33),
            ("unexpected additional input data for", "'id_fp64'", "1 bytes"),
        ),
        (IN_JSON, b"abc", ("additional input data",)),
    ],
    ids=["data twice", "other size than the shape's", "cut off", "surplus", "surplus after JSON"],
)
def test_bad_bytes_after_the_json_are_refused(
    server: Ports, given: dict[str, Any], binary: bytes, parts: tuple[str, ...]
) -> None:
    refused(infer_binary(server, "id_fp64", {"inputs": [given]}, binary), 400, *parts)


NO_NUMBER = (HEADER_LENGTH, "is not a number of bytes")


@pytest.mark.parametrize(
    ("length", "parts"),
    [
        *((length, NO_NUMBER) for length in ("-1", "x", "1e3", "0x10", "", "٣", "9" * 30, "1 2")),
        *((length, (f"{HEADER_LENGTH} is {length}", "bytes")) for length in ("1000", "999999999999999999")),
        ("10", ("parse",)),
    ],
)
def test_a_length_of_the_json_that_is_none_is_refused(server: Ports, length: str, parts: tuple[str, ...]) -> None:
    header = {HEADER_LENGTH: length.encode().decode("latin-1")}
    refused(infer(server, "id_fp64", {"inputs": [IN_JSON]}, header), 400, *parts)


@pytest.mark.parametrize("number", [b"1e400", b"-1e400", b"9" * 400, b"1e99999999999"])
def test_number_beyond_all_doubles_names_the_input(server: Ports, number: bytes) -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP64","shape":[1,4],"data":[' + number + b",0,0,0]}]}"
    refused(infer(server, "id_fp64", body), 400, "input 'x' does not fit FP64", "out of range")


@pytest.mark.parametrize("model", ["id_int64", "id_uint64"])
@pytest.mark.parametrize("digits", [30, 4299, 4301, 20000])
def test_integer_of_many_digits(server: Ports, model: str, digits: int) -> None:
    datatype = model.removeprefix("id_").upper()
    template = '{"inputs":[{"name":"x","datatype":"DATATYPE","shape":[1,4],"data":[NUMBER,0,0,0]}]}'
    body = template.replace("DATATYPE", datatype).replace("NUMBER", "9" * digits)
    refused(infer(server, model, body.encode()), 400, "input 'x'")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"not json",
        b"\xff\xfe",
        b'{"inputs": [}',
        b'{"inputs": []} trailing',
        b"[]",
        b"null",
        b"7",
        b'"text"',
        b"{}",
        b'{"inputs": {}}',
        b'{"inputs": [7]}',
        b'{"inputs": [{"name": 7}]}',
        b'{"inputs": [], "id": 7}',
        b'{"inputs": [], "outputs": "x"}',
        b'{"inputs": [{"name": "\xff", "datatype": "FP64", "shape": [1]}]}',
        b'{"inputs": [], "parameters": {"a": {}}}',
        b'{"inputs": [], "parameters": {"a": null}}',
        b'{"inputs": [], "parameters": {"a": ' + b"9" * 5000 + b"}}",
        b"[" * 100_000,
        b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 50_000,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_malformed_json_is_the_clients_error(server: Ports, body: bytes) -> None:
    refused(infer(server, "id_fp64", body), 400, "request")


@pytest.mark.parametrize("depth", [2, 50_000])
def test_data_nested_too_deeply_is_the_clients_error(server: Ports, depth: int) -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP64","shape":[1,4],"data":[%b1%b]}]}' % (
        b"[" * depth,
        b"]" * depth,
    )
    refused(infer(server, "id_fp64", body), 400, f"data of input 'x' is nested {depth + 1} deep")


def test_an_empty_body_is_named(server: Ports) -> None:
    refused(infer(server, "id_fp64", b""), 400, "'id_fp64' has an empty body")


@pytest.mark.parametrize(
    ("header", "binary"),
    [
        ({"inputs": [x(datatype="FP32")]}, b""),
        ({"inputs": [x(datatype="FP64", shape=[1, 5])]}, b""),
        ({"inputs": [x(datatype="FP64", shape=[9, 4])]}, b""),
        ({"inputs": []}, b""),
        ({"inputs": [x(datatype="FP64")] * 2}, b""),
        ({"inputs": [x(datatype="FP64")], "outputs": [{"name": "y"}] * 2}, b""),
        ({"inputs": [binary_x(24, datatype="FP64")]}, bytes(24)),
    ],
)
def test_errors_of_what_does_not_fit_the_model_name_the_request_as_in_triton(
    server: Ports, header: dict[str, Any], binary: bytes
) -> None:
    unknown = infer_binary(server, "id_fp64", header, binary)
    refused(unknown, 400, "[request id: <id_unknown>] ")
    named = infer_binary(server, "id_fp64", {"id": "7", **header}, binary)
    refused(named, 400, unknown.error.replace("<id_unknown>", "7"))


def test_other_errors_name_the_request_only_if_it_has_a_name(server: Ports) -> None:
    for header in ({"inputs": [x(name="q")]}, {"inputs": [x(datatype="FP64")], "outputs": [{"name": "q"}]}):
        assert not infer(server, "id_fp64", header).error.startswith("[")
        assert infer(server, "id_fp64", {"id": "7", **header}).error.startswith("[request id: 7] unexpected")
    raw = infer(server, "adder", bytes(16), {HEADER_LENGTH: "0"})
    refused(raw, 400, "[request id: <id_unknown>] a raw binary request")


@pytest.mark.parametrize(
    ("outputs", "status", "part"),
    [
        ([{"name": "q"}], 400, "unexpected inference output 'q' for model 'id_fp64'"),
        ([{"name": "y"}, {"name": "y"}], 400, "output 'y' already exists"),
        ([{"name": "y", "parameters": {"binary_data": 1}}], 400, "'binary_data' must be true or false"),
        ([{"name": "y", "parameters": {"classification": -3}}], 400, "unsigned"),
        ([{"name": "y", "parameters": {"shared_memory_region": "r"}}], 400, "'shared_memory_byte_size' is missing"),
    ],
)
def test_bad_outputs(server: Ports, outputs: list[dict[str, Any]], status: int, part: str) -> None:
    refused(infer(server, "id_fp64", {"inputs": [x(datatype="FP64")], "outputs": outputs}), status, part)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_has_no_json_form(server: Ports, datatype: str) -> None:
    answer = infer_binary(server, f"id_{datatype.lower()}", {"inputs": [binary_x(8, datatype=datatype)]}, bytes(8))
    refused(answer, 400, f"sending {datatype} data via JSON is not supported", "'y'")


@pytest.mark.parametrize(
    "parameters",
    [
        {"timeout": -1},
        {"timeout": "soon"},
        {"timeout": 1.5},
        {"timeout": True},
        {"timeout": 2**70},
        {"priority": -1},
        {"priority": "high"},
        {"binary_data_output": "yes"},
        {"triton_enable_empty_final_response": True},
    ],
    ids=str,
)
def test_bad_parameters(server: Ports, parameters: dict[str, Any]) -> None:
    answer = infer(server, "id_fp64", {"inputs": [x(datatype="FP64")], "parameters": parameters})
    refused(answer, 400, "param")


@pytest.mark.parametrize("key", ["timeout", "priority"])
def test_timeout_and_priority_are_uint64(server: Ports, key: str) -> None:
    def given(value: int) -> Answer:
        return infer(server, "id_fp64", {"inputs": [x(datatype="FP64")], "parameters": {key: value}})

    assert [given(value).status for value in (2**63 - 1, 2**63, 2**64 - 1)] == [200] * 3
    for value in (-1, 2**64, -(2**70)):
        refused(given(value), 400, f"'{key}' of the request", "at most 18446744073709551615", f"got {value}")


@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_a_region_is_not_registered_without_a_name(server: Ports, kind: str) -> None:
    answer = ask(server, "POST", f"/v2/{kind}sharedmemory/register", b'{"key": "/a", "byte_size": 4}')
    refused(answer, 400, f"'region name' is necessary to register {kind} shared memory region")


def test_raw_request_that_fits_no_batch(server: Ports) -> None:
    refused(infer(server, "id_fp64", bytes(33), {HEADER_LENGTH: "0"}), 400, "raw binary input 'x' of 33 bytes")
    refused(infer(server, "id_fp64", bytes(32 * 9), {HEADER_LENGTH: "0"}), 400, "must be <= 8")
    refused(infer(server, "fixed", bytes(23), {HEADER_LENGTH: "0"}), 400, "takes 24 bytes, got 23")
    refused(infer(server, "adder", bytes(32), {HEADER_LENGTH: "0"}), 400, "one input", "has 2")


def test_body_over_the_limit(server: Ports) -> None:
    refused(infer(server, "id_fp64", bytes(MIB + 1)), 413, "1048577 bytes", "limit of 1048576 bytes", "--max-body")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_bomb_is_not_inflated(server: Ports, encoding: str) -> None:
    compress = gzip.compress if encoding == "gzip" else zlib.compress
    answer = infer(server, "id_fp64", compress(bytes(20 * MIB)), {"Content-Encoding": encoding})
    refused(answer, 413, "inflated request body", "limit")
    assert server.plane.memory.used_bytes == 0


@pytest.mark.parametrize(
    "body",
    [b"not compressed", gzip.compress(b"x" * 999)[:-5], gzip.compress(b"x") + b"tail"],
    ids=["no gzip", "cut off", "with a tail"],
)
def test_corrupt_compression(server: Ports, body: bytes) -> None:
    refused(infer(server, "id_fp64", body, {"Content-Encoding": "gzip"}), 400, "not gzip")


def test_unknown_compression(server: Ports) -> None:
    answer = infer(server, "id_fp64", b"x", {"Content-Encoding": "br"})
    refused(answer, 501, "unknown Content-Encoding 'br'")
    assert answer.headers["accept-encoding"] == "gzip, deflate"


@pytest.mark.parametrize(
    ("method", "path", "status", "part"),
    [
        ("GET", "/", 404, "Not Found"),
        ("GET", "/v3/models", 404, "Not Found"),
        ("GET", "/v2/models", 404, "Not Found"),
        ("GET", "/v2/health/live/", 404, "Not Found"),
        ("POST", "/v2/health/live", 405, "Method Not Allowed"),
        ("HEAD", "/v2/health/live", 200, ""),
        ("HEAD", "/v2/models/adder", 405, ""),
        ("OPTIONS", "/v2", 405, "Method Not Allowed"),
        ("GET", "/v2/models/id_fp64/infer", 405, "Method Not Allowed"),
        ("GET", "/v2/repository/index", 405, "Method Not Allowed"),
        ("POST", "/v2/models/adder/versions/99999999999999999999/infer", 400, "largest version"),
        ("GET", "/v2/models/adder/versions/" + "9" * 5000, 400, "largest version"),
        ("GET", "/v2/models/adder/versions/x", 404, "Not Found"),
        ("GET", "/v2/models/%2e%2e%2fetc", 404, "unknown model"),
        ("GET", "/v2/models/nope/config", 404, "Request for unknown model: 'nope' is not found"),
        ("GET", "/v2/models/damaged", 404, "has no available versions: model.pt2 is truncated"),
        ("GET", "/v2/models/damaged/ready", 400, "Model version not ready"),
    ],
)
def test_paths_and_methods(server: Ports, method: str, path: str, status: int, part: str) -> None:
    answer = ask(server, method, path)
    assert answer.status == status
    if method != "HEAD":
        refused(answer, status, part)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("repository/index", b"{"),
        ("repository/index", b'{"ready": 1}'),
        ("repository/index", b"[" * 9999),
        ("trace/setting", b"[[]]"),
        ("logging", b'{"log_verbose_level": [[1]]}'),
        ("logging", b'{"log_info": {}}'),
    ],
)
def test_bad_bodies_of_control_calls(server: Ports, path: str, body: bytes) -> None:
    refused(ask(server, "POST", f"/v2/{path}", body), 400)


def test_errors_are_never_compressed(server: Ports) -> None:
    body = json.dumps({"inputs": [x(name="q" * 5000)]}).encode()
    refused(infer(server, "id_fp64", body, {"Accept-Encoding": "gzip"}), 400, "unexpected inference input")
