"""Texts that follow schemas: from a model of random logits, through tokenizers of several kinds."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.server.noise_model import byte_fallback, byte_level, served
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


@pytest.fixture(params=[byte_level, byte_fallback])
def ports(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ports]:
    yield from served(tmp_path, request.param())


def completed(ports: Ports, **more: Any) -> Any:
    body = {"model": "lm", "prompt": "a: ", "max_tokens": 1500, "seed": 1, **more}
    return ask(ports, "POST", "/v1/completions", json.dumps(body).encode())


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


@pytest.mark.parametrize("schema", [PERSON, TREE], ids=["person", "tree"])
@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"top_p": 0.3}, {"logit_bias": {"5": 100}}], ids=str)
def test_texts_obey_their_schema(ports: Ports, schema: Any, more: dict[str, Any]) -> None:
    answer = completed(ports, n=4, **schema_of(schema), **more).json
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
        ({"guided_regex": r"[ab]{3}/\d\\\n\/x"}, r"[ab]{3}/[0-9]\\\n/x"),
        ({"guided_choice": ['say "no"', "東京/"]}, 'say "no"|東京/'),
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
