"""The generate extension: plain JSON in and out."""

import json
from typing import Any

import pytest

from tests.support.server.server_http import Answer, ask
from tests.support.server.transport_fakes import Ports


def generate(server: Ports, model: str, body: Any, stream: bool = False) -> Answer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ask(server, "POST", f"/v2/models/{model}/generate{'_stream' if stream else ''}", raw)


@pytest.mark.parametrize("value", [[1, 2, 3, 4], [[1, 2, 3, 4]]], ids=["sample", "batch"])
def test_inputs_by_name(server: Ports, value: Any) -> None:
    answer = generate(server, "adder", {"id": "seven", "a": value, "b": [1, 1, 1, 1]})
    assert answer.json == {
        "id": "seven",
        "model_name": "adder",
        "model_version": "3",
        "sum": [2, 3, 4, 5],
        "diff": [0, 1, 2, 3],
    }


def test_a_batch_and_a_model_without_one(server: Ports) -> None:
    two = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert generate(server, "id_fp64", {"x": two}).json["y"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert generate(server, "fixed", {"x": [[1, 2, 3], [4, 5, 6]]}).json["y"] == [2, 4, 6, 8, 10, 12]


def test_a_stream_of_one_event(server: Ports) -> None:
    answer = generate(server, "id_fp64", {"x": [1, 2, 3, 4]}, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    event = answer.body.decode().removeprefix("data: ")
    assert event.endswith("\n\n")
    assert json.loads(event)["y"] == [1, 2, 3, 4]
    assert "'nope'" in generate(server, "nope", {}, stream=True).error


@pytest.mark.parametrize(
    ("model", "body", "status", "part"),
    [
        ("id_fp64", {}, 400, "missing required input(s) ['x']"),
        ("id_fp64", {"x": [1, 2, 3]}, 400, "unexpected shape"),
        ("id_fp64", {"x": 1}, 400, "unexpected shape"),
        ("id_fp64", {"x": [[1, 2, 3, 4], [5]]}, 400, "nested unevenly"),
        ("id_fp64", {"x": "text"}, 400, "'x'"),
        ("id_fp64", {"x": [1, 2, 3, 4], "other": [1]}, 400, "'other' is neither an input"),
        ("id_fp64", {"x": [1, 2, 3, 4], "triton_x": 1}, 400, "reserved"),
        ("id_fp64", {"x": [1, 2, 3, 4], "id": 7}, 400, "'id'"),
        ("id_fp64", b"[]", 400, "parse"),
        ("id_fp64", b'{"x": ' + b"[" * 9999, 400, "parse"),
        ("id_fp64", b'{"x": ' + b"[" * 900 + b"]" * 900 + b"}", 400, "'x'"),
        ("id_fp16", {"x": [1, 2, 3, 4]}, 400, "FP16"),
        ("nope", {}, 404, "'nope' is not found"),
    ],
    ids=str,
)
def test_bad_requests(server: Ports, model: str, body: Any, status: int, part: str) -> None:
    answer = generate(server, model, body)
    assert (answer.status, part in answer.error) == (status, True), answer.error


def test_parameters_of_any_name_are_taken(server: Ports) -> None:
    assert generate(server, "id_fp64", {"x": [1, 2, 3, 4], "temperature": 0.5, "stop": "x"}).status == 200
