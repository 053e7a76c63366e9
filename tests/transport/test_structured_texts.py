"""Texts that follow schemas: from a model of random logits, through tokenizers of several kinds."""

import http.client
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
from tokenizers import Tokenizer

from tests.support.server.noise_model import byte_fallback, byte_level, served, word_level, word_piece
from tests.support.server.server_fakes import eventually
from tests.support.server.server_http import ask
from tests.support.server.transport_fakes import Ports

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "😀"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "string", "pattern": "^[a-c]{1,3}$"},
                "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "left"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def ports(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Ports]:
    with served(tmp_path_factory.mktemp("models"), request.param()) as (ports, _):
        yield ports


def completed(ports: Ports, **more: Any) -> Any:
    body = {"model": "lm", "prompt": "a: ", "max_tokens": 1500, "seed": 1, **more}
    return ask(ports, "POST", "/v1/completions", json.dumps(body).encode())


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


@pytest.mark.parametrize("schema", [PERSON, TREE], ids=["person", "tree"])
@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"top_p": 0.3}, {"logit_bias": {"5": 100}}], ids=str)
def test_texts_obey_their_schema(ports: Ports, schema: Any, more: dict[str, Any]) -> None:
    answer = completed(ports, n=2, **schema_of(schema), **more).json
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), schema)


def test_a_text_whose_schema_has_no_end_in_sight_ends_by_length(ports: Ports) -> None:
    (choice,) = completed(ports, max_tokens=3, **schema_of(PERSON)).json["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*\}"),
        ({"guided_regex": r"[ab]{3}/\d\\\n\/x"}, r"[ab]{3}/\d\\\n/x"),
        ({"guided_choice": ['say "no"', "東京/"]}, 'say "no"|東京/'),
        ({"guided_choice": ["\x01\x08\x0c\x7f\\u0041\u2028😀%s"]}, "\x01\x08\x0c\x7f\\\\u0041\u2028😀%s"),
        ({"guided_json": {"enum": [1, "x"]}}, '1|"x"'),
        ({"structured_outputs": {"regex": "x+y"}}, "x+y"),
        ({"structured_outputs": {"choice": ["x"]}}, "x"),
    ],
    ids=str,
)
def test_other_structures_are_obeyed(ports: Ports, field: dict[str, Any], pattern: str) -> None:
    (choice,) = completed(ports, **field).json["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["text"]), choice["text"]


def test_a_stream_has_the_text_of_the_whole_and_seeds_repeat_it(ports: Ports) -> None:
    asked = {"temperature": 0, "logprobs": 2, **schema_of(PERSON)}
    body = completed(ports, stream=True, **asked).body
    events = [json.loads(line[6:]) for line in body.split(b"\n\n") if line and line != b"data: [DONE]"]
    text = "".join(event["choices"][0]["text"] for event in events)
    jsonschema.validate(json.loads(text), PERSON)
    tokens = [name for event in events if (named := event["choices"][0]["logprobs"]) for name in named["tokens"]]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(tokens) == len(events) - 1


def chain(length: int) -> dict[str, Any]:
    """Definitions that refer to one another."""
    links = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "integer"}}}


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (schema_of({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (schema_of({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "uniqueItems"),
        (schema_of({"items": {"uniqueItems": True, "x-guidance": {"lenient": True}}}), "uniqueItems"),
        (schema_of({"$ref": "http://localhost/schema"}), "http://localhost/schema"),
        (schema_of({"type": "string", "pattern": "("}), "the schema is not supported"),
        (schema_of({"type": "string", "pattern": "(?=a)b"}), "the schema is not supported"),
        (schema_of(chain(3000)), "nested too deeply; send a simpler one"),
        (schema_of({"enum": [f"{n:0300}" for n in range(1000)]}), "the limit is 262144"),
        ({"response_format": {"type": "json_schema"}}, "response_format is json_schema without"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "without a json_schema that has",
        ),
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"guided_choice": []}, "1 to 1024 texts"),
        ({"guided_regex": "(a"}, "the schema is not supported"),
        ({"guided_regex": "a\\"}, "the schema is not supported"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "exactly one"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "exclude one another"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos is true"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_schemas_that_cannot_be_obeyed_are_refused_with_their_reason(
    ports: Ports, field: dict[str, Any], said: str
) -> None:
    answer = completed(ports, **field)
    assert (answer.status, said in answer.json["error"]["message"]) == (400, True), answer.json
    assert completed(ports, guided_choice=["after it"]).json["choices"][0]["text"] == "after it"


@pytest.mark.parametrize(
    ("make", "status", "said"),
    [
        (word_piece, 501, "decodes a token by those around it"),
        (word_level, 400, "no token of the model can come next"),
    ],
)
def test_tokenizers_that_cannot_write_a_text_refuse_it(
    tmp_path: Path, make: Callable[[], Tokenizer], status: int, said: str
) -> None:
    with served(tmp_path, make()) as (ports, _):
        answer = completed(ports, prompt=[2, 3], guided_choice=["a"])
        assert (answer.status, said in answer.json["error"]["message"]) == (status, True), answer.json


def test_the_process_of_a_text_ends_with_its_client(tmp_path: Path) -> None:
    with served(tmp_path, byte_level()) as (ports, _):
        before = {*psutil.Process().children()}
        completed(ports, guided_choice=["a"])
        (process,) = {*psutil.Process().children()} - before
        connection = http.client.HTTPConnection("127.0.0.1", ports.port, timeout=30)
        body = {"model": "lm", "prompt": "a", "max_tokens": 5000, "guided_regex": "x{5000}", "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body).encode())
        assert connection.getresponse().read(10)
        assert process.children()
        connection.sock.close()
        connection.close()
        eventually(lambda: not process.children())
        assert ports.plane._texts == 0
    assert not process.is_running()
