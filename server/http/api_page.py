"""The page at `/docs`: the endpoints of the OpenAPI document, each with a call to copy."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from cohabit.page.html import static_page

_METHODS = ("get", "post")
_EXAMPLES: Mapping[str, Any] = {
    "InferRequest": {
        "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0.1, 0.2, 0.3, 0.4]}],
    },
    "GenerateRequest": {"x": [0.1, 0.2, 0.3, 0.4]},
    "EmbeddingsRequest": {"model": "minilm", "input": "a text"},
    "RerankRequest": {"model": "reranker", "query": "a question", "documents": ["a text", "another one"]},
}
"""Example bodies, by the name of their schema."""
_HINTS = """\
<p>For tools: <a href="/v2/openapi.json">/v2/openapi.json</a>. What a model takes: <code>GET /v2/models/{model}</code>.
Each path with <code>{model}</code> also takes <code>/versions/{version}</code> behind it.</p>
"""


def api_page(document: Mapping[str, Any]) -> str:
    """Render an OpenAPI document as a page that loads nothing, needs no script, and shows nothing of this server."""
    groups: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        if "{version}" in path or (path.endswith("/") and len(path) > 1):
            continue  # another way to call the previous endpoint
        for method in _METHODS:
            if method in item:
                groups.setdefault(_group(path), []).append(_endpoint(document, path, method, item))
    sections = "".join(
        f'<section class="card"><h2>{escape(name)}</h2>{"".join(endpoints)}</section>'
        for name, endpoints in groups.items()
    )
    head = f"<header>\n<h1>HTTP endpoints</h1>\n<p>{escape(document['info']['description'])}</p>\n{_HINTS}</header>"
    return static_page("Cohabit: HTTP endpoints", f"{head}\n{sections}")


def _group(path: str) -> str:
    if path.startswith("/v1/"):
        return "In OpenAI's form"
    if path.startswith("/v2/models/"):
        return "Models"
    if path.startswith("/v2/repository/"):
        return "Repository"
    return "Shared memory" if "sharedmemory" in path else "Server"


def _endpoint(document: Mapping[str, Any], path: str, method: str, item: Mapping[str, Any]) -> str:
    operation = item[method]
    security = operation.get("security", document["security"])
    scopes = sorted({scope for way in security for scopes in way.values() for scope in scopes})
    parts = [
        f"<p>{escape(operation['description'])}</p>" if "description" in operation else "",
        _parameters(document, item.get("parameters", [])),
        f"<p>Where tokens are asked for, it needs: {escape(', '.join(scopes))}.</p>" if scopes else "",
        f"<pre>{escape(_call(path, method, operation))}</pre>",
        *_schemas(document, operation),
    ]
    return (
        f'<details class="endpoint"><summary><b>{method.upper()}</b> <code>{escape(path)}</code>'
        f" <span>{escape(operation['summary'])}</span></summary>{''.join(parts)}</details>"
    )


def _parameters(document: Mapping[str, Any], references: list[Mapping[str, str]]) -> str:
    found = [_resolved(document, reference["$ref"]) for reference in references]
    rows = [
        f"<dt><code>{escape(p['name'])}</code></dt><dd>{escape(p.get('description', _kind(p['schema'])))}</dd>"
        for p in found
    ]
    return f"<dl>{''.join(rows)}</dl>" if rows else ""


def _call(path: str, method: str, operation: Mapping[str, Any]) -> str:
    """Return a curl call; the page cannot know how its reader reaches the server."""
    url = f"http://localhost:8000{path}"
    if method == "get":
        return f"curl '{url}'"
    example = _EXAMPLES.get(_body_name(operation), {})
    return f"curl '{url}' -H 'Content-Type: application/json' -d '{json.dumps(example)}'"


def _schemas(document: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[str]:
    """Show the JSON schema of the body, and of each answer that has one."""
    named = {"Body": operation["requestBody"]} if "requestBody" in operation else {}
    named |= {f"Answer {status}": answer for status, answer in operation["responses"].items()}
    for title, part in named.items():
        content = (
            _resolved(document, part["$ref"])["content"] if _has_content(document, part) else part.get("content")
        )
        for kind, media in (content or {}).items():
            schema = json.dumps(_expanded(document, media["schema"], ()), indent=2)
            yield f"<details><summary>{escape(title)}, {escape(kind)}</summary><pre>{escape(schema)}</pre></details>"


def _has_content(document: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    return "$ref" in part and "content" in _resolved(document, part["$ref"])


def _body_name(operation: Mapping[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _expanded(document: Mapping[str, Any], schema: Any, above: tuple[str, ...]) -> Any:
    """Inline the referenced schemas; a recursive one stays a name."""
    if isinstance(schema, Mapping):
        reference = schema.get("$ref")
        if reference is None:
            return {key: _expanded(document, value, above) for key, value in schema.items()}
        if reference in above:
            return reference.rpartition("/")[2]
        return _expanded(document, _resolved(document, reference), (*above, reference))
    if isinstance(schema, list):
        return [_expanded(document, element, above) for element in schema]
    return schema


def _resolved(document: Mapping[str, Any], reference: str) -> Any:
    found: Any = document
    for name in reference.removeprefix("#/").split("/"):
        found = found[name]
    return found


def _kind(schema: Mapping[str, Any]) -> str:
    return " or ".join(map(str, schema["enum"])) if "enum" in schema else str(schema["type"])
