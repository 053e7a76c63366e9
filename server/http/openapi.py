"""The OpenAPI document of the HTTP port."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from cohabit.server.http.endpoints import Endpoint
from cohabit.server.observe.access import OPEN, Access, Permission
from cohabit.server.protocol.datatypes import BYTES, DTYPES
from cohabit.server.protocol.matching import MOST_UNSIGNED

Schema = Mapping[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
_DIM: Schema = {"type": "integer", "minimum": -1, "maximum": 2**63 - 1}
_DATATYPE: Schema = {"type": "string", "enum": [*DTYPES, BYTES]}
_LEAF: Schema = {"type": ["number", "string", "boolean"]}
_DATA: Schema = {
    "type": "array",
    "items": {"anyOf": [_LEAF, {"type": "array", "items": {"anyOf": [_LEAF, {"type": "array", "items": _LEAF}]}}]},
    "description": "the values, flat or nested like the shape (to any depth)",
}
_PARAMETERS: Schema = {
    "type": "object",
    "additionalProperties": {
        "anyOf": [
            _FLAG,
            {"type": "integer", "minimum": -(2**63), "maximum": MOST_UNSIGNED},
            {"type": "number"},
            _TEXT,
        ]
    },
}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    names = {"required": [*required]} if required else {}
    return {"type": "object", "properties": {**required, **(optional or {})}, **names}


_TENSOR = {"name": _TEXT, "datatype": _DATATYPE, "shape": _array(_COUNT)}
_METADATA_TENSOR = _object(
    {"name": _TEXT, "datatype": _DATATYPE, "shape": _array(_DIM)}, {"parameters": _PARAMETERS}
)
_DURATION = _object({"count": _COUNT, "ns": _COUNT})
_STAGES = dict.fromkeys(("compute_input", "compute_infer", "compute_output"), _DURATION)
_DURATIONS = _STAGES | dict.fromkeys(("success", "fail", "queue", "cache_hit", "cache_miss"), _DURATION)
_TENSORS = _array(_object(_TENSOR, {"data": _DATA, "parameters": _PARAMETERS}))
_WANTED = _array(_object({"name": _TEXT}, {"parameters": _PARAMETERS}))

_MODEL_STATISTICS = {
    **dict.fromkeys(("name", "version"), _TEXT),
    **dict.fromkeys(("last_inference", "inference_count", "execution_count"), _COUNT),
    "inference_stats": _object(_DURATIONS),
    "batch_stats": _array(_object({"batch_size": _COUNT, **_STAGES})),
}

_SCHEMAS: Mapping[str, Schema] = {
    "Error": _object({"error": _TEXT}),
    "Live": _object({"live": _FLAG}),
    "Ready": _object({"ready": _FLAG}),
    "ModelReady": _object({"name": _TEXT, "ready": _FLAG}),
    "ServerMetadata": _object({"name": _TEXT, "version": _TEXT, "extensions": _array(_TEXT)}),
    "ModelMetadata": _object(
        {"name": _TEXT, "versions": _array(_TEXT), "platform": _TEXT}
        | dict.fromkeys(("inputs", "outputs"), _array(_METADATA_TENSOR))
    ),
    "ModelConfig": _object(
        {"name": _TEXT, "max_batch_size": _COUNT, "input": {"type": "array"}, "output": {"type": "array"}}
    ),
    "InferRequest": _object({"inputs": _TENSORS}, {"id": _TEXT, "outputs": _WANTED, "parameters": _PARAMETERS}),
    "InferResponse": _object({"model_name": _TEXT, "model_version": _TEXT, "outputs": _TENSORS}, {"id": _TEXT}),
    "GenerateRequest": {
        "type": "object",
        "properties": {"id": _TEXT, "parameters": _PARAMETERS},
        "description": "and each input of the model by its name: a value, or an array nested like its shape",
    },
    "GenerateResponse": _object({"model_name": _TEXT, "model_version": _TEXT}, {"id": _TEXT}),
    "Statistics": _object({"model_stats": _array(_object(_MODEL_STATISTICS))}),
    "IndexRequest": _object({}, {"ready": _FLAG}),
    "Index": _array(_object({"name": _TEXT}, {"version": _TEXT, "state": _TEXT, "reason": _TEXT})),
    "ControlRequest": _object({}, {"parameters": _PARAMETERS}),
    "SystemRegion": _object({"key": _TEXT, "byte_size": _COUNT}, {"offset": _COUNT}),
    "SystemRegions": _array(_object({"name": _TEXT, "key": _TEXT, "offset": _COUNT, "byte_size": _COUNT})),
    "CudaRegion": _object({"raw_handle": _object({"b64": _TEXT}), "device_id": _COUNT, "byte_size": _COUNT}),
    "CudaRegions": _array(_object({"name": _TEXT, "device_id": _COUNT, "byte_size": _COUNT})),
    "TraceSettings": {
        "type": "object",
        "properties": {
            "trace_level": {"anyOf": [_array({"enum": ["OFF", "TIMESTAMPS"]}), {"type": "null"}]},
            **{key: {"type": ["string", "null"]} for key in ("trace_rate", "trace_count", "log_frequency")},
            **dict.fromkeys(("trace_file", "trace_mode"), _TEXT),
        },
    },
    "LogSettings": _object(
        {},
        {
            "log_file": _TEXT,
            **dict.fromkeys(("log_info", "log_warning", "log_error"), _FLAG),
            "log_verbose_level": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            "log_format": {"enum": ["default", "ISO8601"]},
        },
    ),
}

_BEARER = "bearer"
_SCHEME = {"type": "http", "scheme": "bearer", "description": "a line of a --token-file or --control-token-file"}


def document(version: str, endpoints: Iterable[Endpoint], access: Access = OPEN) -> Mapping[str, Any]:
    """Return the document of endpoints that have a summary, and which of them need a token."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        for pattern in endpoint.paths if endpoint.summary is not None else ():
            path = re.sub(r":[^{}]+}", "}", pattern)
            operation = _operation(endpoint, path)
            if endpoint.permission not in access.open:
                operation["security"] = [{_BEARER: []}]
                operation["responses"] |= _refusals(endpoint.permission)
            paths.setdefault(path, {})[endpoint.method.lower()] = operation
    schemes = {} if access.open == frozenset(Permission) else {"securitySchemes": {_BEARER: _SCHEME}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Cohabit",
            "version": version,
            "description": "KServe v2 inference with Triton's extensions. With the header"
            " Inference-Header-Content-Length, binary tensors follow the JSON of infer's requests and answers.",
        },
        "paths": paths,
        "components": {"schemas": _SCHEMAS, **schemes},
    }


def _refusals(permission: Permission) -> dict[str, Any]:
    refusals = {"401": {"description": "no token, or an unknown one", "content": _json("Error")}}
    if permission is Permission.CONTROL:
        refusals["403"] = {"description": "the token does not permit control", "content": _json("Error")}
    return refusals


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    answer = {"content": _json(endpoint.response)} if endpoint.response else {}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "parameters": [{"name": n, "in": "path", "required": True, "schema": _TEXT} for n in names],
        "responses": {
            "200": {"description": "done", **answer},
            "default": {"description": "what is wrong", "content": _json("Error")},
        },
    }
    if endpoint.request is not None:
        required = "required" in _SCHEMAS[endpoint.request]
        operation["requestBody"] = {"content": _json(endpoint.request), "required": required}
    return operation


def _json(name: str) -> Mapping[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
