"""The OpenAPI document of the HTTP port, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.observe.access import OPEN, Access, Permission
from server.protocol.datatypes import BYTES, DTYPES

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
        "anyOf": [_FLAG, {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"type": "number"}, _TEXT]
    },
}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    names = {"required": [*required]} if required else {}
    return {"type": "object", "properties": {**required, **(optional or {})}, **names}


_TENSOR = {"name": _TEXT, "datatype": _DATATYPE, "shape": _array(_COUNT)}
_METADATA_TENSOR = _object({"name": _TEXT, "datatype": _DATATYPE, "shape": _array(_DIM)})
_DURATION = _object({"count": _COUNT, "ns": _COUNT})
_BATCH_DURATIONS = ("compute_input", "compute_infer", "compute_output")
_DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)

_SCHEMAS: Mapping[str, Schema] = {
    "Error": _object({"error": _TEXT}),
    "Live": _object({"live": _FLAG}),
    "Ready": _object({"ready": _FLAG}),
    "ModelReady": _object({"name": _TEXT, "ready": _FLAG}),
    "ServerMetadata": _object({"name": _TEXT, "version": _TEXT, "extensions": _array(_TEXT)}),
    "ModelMetadata": _object(
        {
            "name": _TEXT,
            "versions": _array(_TEXT),
            "platform": _TEXT,
            "inputs": _array(_METADATA_TENSOR),
            "outputs": _array(_METADATA_TENSOR),
        }
    ),
    "ModelConfig": _object(
        {"name": _TEXT, "max_batch_size": _COUNT, "input": {"type": "array"}, "output": {"type": "array"}}
    ),
    "InferRequest": _object(
        {"inputs": _array(_object(_TENSOR, {"data": _DATA, "parameters": _PARAMETERS}))},
        {
            "id": _TEXT,
            "outputs": _array(_object({"name": _TEXT}, {"parameters": _PARAMETERS})),
            "parameters": _PARAMETERS,
        },
    ),
    "InferResponse": _object(
        {
            "model_name": _TEXT,
            "model_version": _TEXT,
            "outputs": _array(_object(_TENSOR, {"data": _DATA, "parameters": _PARAMETERS})),
        },
        {"id": _TEXT},
    ),
    "GenerateRequest": {
        "type": "object",
        "properties": {"id": _TEXT, "parameters": _PARAMETERS},
        "description": "besides, each input of the model by its name: a value, or an array nested like its shape",
    },
    "GenerateResponse": _object({"model_name": _TEXT, "model_version": _TEXT}, {"id": _TEXT}),
    "Statistics": _object(
        {
            "model_stats": _array(
                _object(
                    {
                        "name": _TEXT,
                        "version": _TEXT,
                        "last_inference": _COUNT,
                        "inference_count": _COUNT,
                        "execution_count": _COUNT,
                        "inference_stats": _object(dict.fromkeys(_DURATIONS, _DURATION)),
                        "batch_stats": _array(
                            _object({"batch_size": _COUNT, **dict.fromkeys(_BATCH_DURATIONS, _DURATION)})
                        ),
                    }
                )
            )
        }
    ),
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
            "trace_rate": {"type": ["string", "null"]},
            "trace_count": {"type": ["string", "null"]},
            "log_frequency": {"type": ["string", "null"]},
            "trace_file": _TEXT,
            "trace_mode": _TEXT,
        },
    },
    "LogSettings": _object(
        {},
        {
            "log_file": _TEXT,
            "log_info": _FLAG,
            "log_warning": _FLAG,
            "log_error": _FLAG,
            "log_verbose_level": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
            "log_format": {"enum": ["default", "ISO8601"]},
        },
    ),
}

_MODELS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
_TRACE = ("/v2/trace/setting", "/v2/models/{model}/trace/setting")


@dataclass(frozen=True, slots=True)
class _Operation:
    method: str
    paths: Sequence[str]
    summary: str
    request: str | None = None
    response: str | None = None
    """The schema's name; None for an empty body."""
    permission: Permission = Permission.INFERENCE


def _get(summary: str, response: str, *paths: str) -> _Operation:
    return _Operation("get", paths, summary, None, response)


def _post(summary: str, request: str | None, response: str | None, *paths: str) -> _Operation:
    return _Operation("post", paths, summary, request, response)


def _health(operation: _Operation) -> _Operation:
    return replace(operation, permission=Permission.HEALTH)


def _control(operation: _Operation) -> _Operation:
    return replace(operation, permission=Permission.CONTROL)


def _of_models(suffix: str) -> Sequence[str]:
    return [f"{model}{suffix}" for model in _MODELS]


def _shared_memory(kind: str, path: str) -> Sequence[_Operation]:
    region = f"{path}/region/{{region}}"
    return (
        _get(f"List {kind} shared memory", f"{kind}Regions", f"{path}/status", f"{region}/status"),
        _control(_post(f"Register {kind} shared memory", f"{kind}Region", None, f"{region}/register")),
        _control(_post(f"Forget {kind} shared memory", None, None, f"{path}/unregister", f"{region}/unregister")),
    )


_OPERATIONS = (
    _get("Describe the server", "ServerMetadata", "/v2", "/v2/"),
    _health(_get("Say whether the server runs", "Live", "/v2/health/live")),
    _health(_get("Say whether every model asked for can serve", "Ready", "/v2/health/ready")),
    _get("Describe a model", "ModelMetadata", *_MODELS),
    _get("Say whether a model can serve", "ModelReady", *_of_models("/ready")),
    _get("Return a model's configuration", "ModelConfig", *_of_models("/config")),
    _get("Return statistics", "Statistics", "/v2/models/stats", *_of_models("/stats")),
    _post("Run an inference", "InferRequest", "InferResponse", *_of_models("/infer")),
    _post("Run an inference with plain values", "GenerateRequest", "GenerateResponse", *_of_models("/generate")),
    _post("List the repository's models", "IndexRequest", "Index", "/v2/repository/index"),
    _control(_post("Load a model", "ControlRequest", None, "/v2/repository/models/{model}/load")),
    _control(_post("Unload a model", "ControlRequest", None, "/v2/repository/models/{model}/unload")),
    *_shared_memory("System", "/v2/systemsharedmemory"),
    *_shared_memory("Cuda", "/v2/cudasharedmemory"),
    _control(_get("Return trace settings", "TraceSettings", *_TRACE)),
    _control(_post("Change trace settings", "TraceSettings", "TraceSettings", *_TRACE)),
    _control(_get("Return log settings", "LogSettings", "/v2/logging")),
    _control(_post("Change log settings", "LogSettings", "LogSettings", "/v2/logging")),
)

_BEARER = "bearer"
_SCHEME = {"type": "http", "scheme": "bearer", "description": "a line of a --token-file or --control-token-file"}


def document(version: str, access: Access = OPEN) -> Mapping[str, Any]:
    """Return the whole document, with what needs a token as `access` has it.

    Tensors may also travel as bytes behind the JSON, which OpenAPI has no words for.
    """
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        for path in operation.paths:
            written = _written(operation, path)
            if operation.permission not in access.open:
                written["security"] = [{_BEARER: []}]
                written["responses"] |= _refusals(operation.permission)
            paths.setdefault(path, {})[operation.method] = written
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
    refusals = {"401": {"description": "a token is needed, or this is none", "content": _json("Error")}}
    if permission is Permission.CONTROL:
        refusals["403"] = {"description": "the token does not permit control", "content": _json("Error")}
    return refusals


def _written(operation: _Operation, path: str) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    done = {"content": _json(operation.response)} if operation.response else {}
    written: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [{"name": n, "in": "path", "required": True, "schema": _TEXT} for n in names],
        "responses": {
            "200": {"description": "done", **done},
            "default": {"description": "what is wrong", "content": _json("Error")},
        },
    }
    if operation.request is not None:
        required = "required" in _SCHEMAS[operation.request]
        written["requestBody"] = {"content": _json(operation.request), "required": required}
    return written


def _json(name: str) -> Mapping[str, Any]:
    return {"application/json": {"schema": _ref(name)}}
