"""What the HTTP surface answers when all is well, byte by byte."""

import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest

from tests.support.server.server_http import HEADER_LENGTH, Answer, ask, binary_x, infer, infer_binary, x
from tests.support.server.transport_fakes import Ports


def split(answer: Answer) -> tuple[Any, bytes]:
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers[HEADER_LENGTH.lower()])
    return json.loads(answer.body[:length]), answer.body[length:]


@pytest.mark.parametrize("path", ["/v2", "/v2/"])
def test_server_metadata(server: Ports, path: str) -> None:
    assert ask(server, "GET", path).json["name"] == "cohabit"


def test_health_answers_are_json(server: Ports) -> None:
    assert ask(server, "GET", "/v2/health/live").json == {"live": True}
    assert ask(server, "GET", "/v2/health/ready").json == {"ready": True}
    assert ask(server, "GET", "/v2/models/adder/versions/3/ready").json == {"name": "adder", "ready": True}


def test_index_can_be_cut_to_what_is_ready(server: Ports) -> None:
    every = ask(server, "POST", "/v2/repository/index").json
    ready = ask(server, "POST", "/v2/repository/index", b'{"ready": true}').json
    assert {entry["name"] for entry in every} - {entry["name"] for entry in ready} == {"damaged"}


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6, 7, 8], [[1, 2, 3, 4], [5, 6, 7, 8]]], ids=["flat", "nested"])
def test_json_in_both_forms(server: Ports, data: Any) -> None:
    answer = infer(server, "id_fp64", {"id": "é", "inputs": [x(data, datatype="FP64", shape=[2, 4])]})
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.json == {
        "model_name": "id_fp64",
        "model_version": "1",
        "id": "é",
        "outputs": [{"name": "y", "datatype": "FP64", "shape": [2, 4], "data": [1, 2, 3, 4, 5, 6, 7, 8]}],
    }


def test_model_without_batch(server: Ports) -> None:
    answer = infer(server, "fixed", {"inputs": [x([[1, 2, 3], [4, 5, 6]], datatype="INT32", shape=[2, 3])]})
    assert answer.json["outputs"][0]["data"] == [2, 4, 6, 8, 10, 12]


def test_raw_binary_request_is_answered_in_binary(server: Ports) -> None:
    values = np.arange(12, dtype=np.float64).reshape(3, 4)
    header, binary = split(infer(server, "id_fp64", values.tobytes(), {HEADER_LENGTH: "0"}))
    assert header["outputs"][0]["shape"] == [3, 4]
    np.testing.assert_array_equal(np.frombuffer(binary), values.ravel())


def test_outputs_mix_json_and_binary_in_the_models_order(server: Ports) -> None:
    outputs = [{"name": "diff", "parameters": {"binary_data": True}}, {"name": "sum"}]
    header, binary = split(infer(server, "adder", {"inputs": [x(name="a"), x(name="b")], "outputs": outputs}))
    assert [o["name"] for o in header["outputs"]] == ["sum", "diff"]
    assert header["outputs"][0]["data"] == [2, 4, 6, 8]
    assert header["outputs"][1]["parameters"] == {"binary_data_size": 16}
    assert binary == bytes(16)


def test_one_output_of_two(server: Ports) -> None:
    answer = infer(server, "adder", {"inputs": [x(name="a"), x(name="b")], "outputs": [{"name": "diff"}]})
    assert [o["name"] for o in answer.json["outputs"]] == ["diff"]


def test_infinities_stand_bare_in_json(server: Ports) -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0.5]).tobytes()
    answer = infer_binary(server, "id_fp64", {"inputs": [binary_x(32, datatype="FP64")]}, values)
    assert b"[NaN, Infinity, -Infinity, 0.5]" in answer.body


def test_harmless_parameters_are_accepted(server: Ports) -> None:
    parameters = {"priority": 3, "timeout": 10**12, "sequence_id": 0, "note": "x", "weight": 0.5}
    answer = infer(server, "id_fp64", {"inputs": [x(datatype="FP64")], "parameters": parameters, "extra": [{}]})
    assert answer.status == 200
    none = [{"name": "y", "parameters": {"classification": 0}}]
    assert infer(server, "id_fp64", {"inputs": [x(datatype="FP64")], "outputs": none}).status == 200


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip;q=0.5, deflate;q=0.9, identity;q=0.1", "deflate"),
        ("gzip;q=0", None),
        ("gzip;q=0.5, identity;q=0.9", None),
        ("gzip, deflate, br", None),
        ("br", None),
        ("identity", None),
        ("gzip;q=nonsense", None),
        ("", None),
    ],
)
def test_answers_are_compressed_where_the_client_chose_it(server: Ports, accept: str, encoding: str | None) -> None:
    body = {"inputs": [x([0] * 4096, shape=[1, 4096])]}
    answer = infer(server, "wide", body, {"Accept-Encoding": accept})
    assert answer.headers.get("content-encoding") == encoding
    undo = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: lambda raw: raw}[encoding]
    assert json.loads(undo(answer.body))["outputs"][0]["data"] == [0.0] * 4096


def test_small_answers_are_compressed_as_well(server: Ports) -> None:
    body = {"inputs": [x([0] * 6, datatype="INT32", shape=[2, 3])]}
    answer = infer(server, "fixed", body, {"Accept-Encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(answer.body))["outputs"][0]["data"] == [0] * 6


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
def test_compressed_requests(server: Ports, encoding: str) -> None:
    header = json.dumps({"inputs": [binary_x(32, datatype="FP64")]}).encode()
    body = header + np.ones(4).tobytes()
    compress = {"gzip": gzip.compress, "deflate": zlib.compress, "identity": bytes}[encoding]
    headers = {"Content-Encoding": encoding, HEADER_LENGTH: str(len(header))}
    assert infer(server, "id_fp64", compress(body), headers).json["outputs"][0]["data"] == [1, 1, 1, 1]
