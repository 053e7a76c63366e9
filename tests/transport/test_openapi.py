"""The served OpenAPI document: requests made from it never break the server, and every answer is as it says."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from server_http import ask
from transport_fakes import Ports, identity, running

from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.http.endpoints import endpoints
from cohabit.server.http.openapi import document

ENDPOINTS = list(endpoints(cast(DataPlane, None), 0))
DOCUMENT = document("0", ENDPOINTS)
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
TEXT = st.text(max_size=6) | st.sampled_from(
    ["wide", "small", "x", "y", "0", "timeout", "binary_data_size", "\x00"]
)


@pytest.fixture(scope="module")
def own() -> Iterator[Ports]:
    with running(identity("small", "FP32"), identity("wide", "INT64", (2, 2))) as handle:
        yield handle


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Whatever a schema allows, of the part of JSON Schema that the document uses."""
    if "$ref" in schema:
        return values(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return st.one_of([values(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return st.one_of([of_type(name, schema) for name in types])


def of_type(name: str, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if name == "object":
        return objects(schema)
    if name == "array":
        return st.lists(values(schema.get("items", {"type": "null"})), max_size=4)
    if name == "integer":
        low, high = schema.get("minimum"), schema.get("maximum")
        return st.integers(low, high) | st.integers(max(low or 0, 0), 4)
    simple = {
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return TEXT if name == "string" else simple[name]


def objects(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    known = {key: values(its) for key, its in schema.get("properties", {}).items()}
    required = {key: known.pop(key) for key in schema.get("required", [])}
    made = st.fixed_dictionaries(required, optional=known)
    if "additionalProperties" not in schema:
        return made
    return st.dictionaries(TEXT, values(schema["additionalProperties"]), max_size=3)


def segments() -> st.SearchStrategy[str]:
    plain = st.sampled_from(["small", "wide", "1", "9"])
    return plain | st.text("abz0.~-é ", min_size=1, max_size=8).filter(lambda text: text.strip(". ") != "")


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, str, bytes]:
    """An operation's path and method, the path filled in, and a body."""
    path, method = draw(st.sampled_from(OPERATIONS))
    operation = DOCUMENT["paths"][path][method]
    filled = path
    for parameter in operation["parameters"]:
        filled = filled.replace("{" + parameter["name"] + "}", draw(segments()))
    if "requestBody" not in operation:
        return path, method, filled, b""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return path, method, filled, json.dumps(draw(values(schema))).encode()


def check(schema: Mapping[str, Any], answer: Any) -> None:
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(answer)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests())
def test_requests_made_from_the_document_are_answered_as_it_says(own: Ports, request: Any) -> None:
    path, method, filled, body = request
    answer = ask(own, method.upper(), quote(filled), body)
    operation = DOCUMENT["paths"][path][method]["responses"]
    assert answer.status < 500 or answer.status in (501, 503), answer.body
    if answer.status != 200:
        check(operation["default"]["content"]["application/json"]["schema"], answer.json)
    elif "content" in operation["200"]:
        check(operation["200"]["content"]["application/json"]["schema"], answer.json)
    else:
        assert answer.body == b""


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_operation_of_the_document_is_there(own: Ports, path: str, method: str) -> None:
    filled = path.replace("{model}", "small").replace("{version}", "1").replace("{region}", "r")
    answer = ask(own, method.upper(), filled, b"{}" if method == "post" else None)
    assert answer.status != 405
    assert answer.status != 404 or "region" in answer.error


def test_the_document_is_served_and_is_openapi(own: Ports) -> None:
    served = ask(own, "GET", "/v2/openapi.json").json
    assert served["openapi"] == "3.1.0"
    assert served["paths"] == json.loads(json.dumps(DOCUMENT["paths"]))
    for schema in served["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_what_the_document_leaves_out() -> None:
    assert [endpoint.paths[0] for endpoint in ENDPOINTS if endpoint.summary is None] == [
        "/v2/models/{model}/generate_stream",
        "/v2/repository/{repository}/models/{model}/{order:(un)?load}",
        "/v2/systemsharedmemory/register",
        "/v2/cudasharedmemory/register",
    ]
