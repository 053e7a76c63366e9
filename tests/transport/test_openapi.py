"""The served OpenAPI document: it has every route, requests made from it never break the server, and answers fit it."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp.web import Application
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.http import app
from cohabit.server.http.app import make_app
from cohabit.server.protocol.datatypes import BYTES, DTYPES
from cohabit.server.view.live import LiveFeed
from tests.support.server.server_http import ask
from tests.support.server.transport_fakes import Ports, identity, running

DOCUMENT = app._described()
OPERATIONS = [
    (path, method) for path, item in DOCUMENT["paths"].items() for method in item if method in ("get", "post")
]
PAGES = {("/", "get"), ("/ui/events", "get")}
"""What `--ui off` removes. The events go on until their client leaves."""
TEXT = st.text(max_size=6) | st.sampled_from(
    ["wide", "small", "x", "y", "0", "timeout", "binary_data_size", "\x00"]
)


@pytest.fixture(scope="module")
def own() -> Iterator[Ports]:
    with running(identity("small", "FP32"), identity("wide", "INT64", (2, 2))) as handle:
        yield handle


def resolved(part: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in part:
        kind, name = part["$ref"].split("/")[2:]
        part = DOCUMENT["components"][kind][name]
    return part


def content(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """Schemas by media type."""
    return {kind: media["schema"] for kind, media in resolved(response).get("content", {}).items()}


def values(schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Whatever a schema allows, of the part of JSON Schema that the document uses."""
    schema = resolved(schema)
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
    path, method = draw(st.sampled_from([it for it in OPERATIONS if it not in PAGES]))
    operation = DOCUMENT["paths"][path][method]
    filled = path
    for parameter in map(resolved, DOCUMENT["paths"][path].get("parameters", [])):
        known = parameter["schema"].get("enum")
        filled = filled.replace(
            "{" + parameter["name"] + "}", draw(st.sampled_from(known) if known else segments())
        )
    if "requestBody" not in operation:
        return path, method, filled, b""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return path, method, filled, json.dumps(draw(values(schema))).encode()


def check(schema: Mapping[str, Any], answer: Any) -> None:
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(answer)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests())
def test_requests_made_from_the_document_are_answered_as_it_says(own: Ports, request: Any) -> None:
    path, method, filled, body = request
    answer = ask(own, method.upper(), quote(filled), body)
    responses = DOCUMENT["paths"][path][method]["responses"]
    assert answer.status < 500 or answer.status in (501, 503), answer.body
    if answer.status != 200:
        check(content(responses["default"])["application/json"], answer.json)
        return
    (expected,) = content(responses["200"]).items() or [("", None)]
    kind, schema = expected
    assert answer.headers.get("content-type", "").replace(" ", "").startswith(kind.replace(" ", ""))
    if schema is None:
        assert answer.body == b""
    elif kind == "application/json":
        check(schema, answer.json)


def served(app: Application) -> set[tuple[str, str]]:
    """The routes of an application by path and method. HEAD is GET without a body, and in no document."""
    routes = [route for route in app.router.routes() if route.method != "HEAD"]
    paths = [str(route.resource and route.resource.canonical) for route in routes]
    return {
        (re.sub(r":[^{}]+}", "}", path), route.method.lower()) for path, route in zip(paths, routes, strict=True)
    }


def test_the_document_has_every_route_and_every_route_is_in_the_document(own: Ports) -> None:
    plane = own.plane
    config = ServeConfig(repository=Path("fakes"), memory=FixedSize(1))
    feed = LiveFeed(config, plane.ensembles, plane.tracer, plane.is_draining)
    assert served(make_app(plane, 1, feed=feed)) == set(OPERATIONS)
    assert served(make_app(plane, 1)) == set(OPERATIONS) - PAGES


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_path_names_its_parameters(path: str, method: str) -> None:
    parameters = map(resolved, DOCUMENT["paths"][path].get("parameters", []))
    assert re.findall(r"{(\w+)}", path) == [parameter["name"] for parameter in parameters]


def test_the_document_is_served_and_is_openapi(own: Ports) -> None:
    served = ask(own, "GET", "/v2/openapi.json").json
    assert served == DOCUMENT
    assert served["openapi"] == "3.1.0"
    assert set(served["components"]["schemas"]["Datatype"]["enum"]) == {*DTYPES, BYTES}
    for schema in served["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
