"""The endpoints of the HTTP port in one table, from which its routes and its OpenAPI document are made."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aiohttp.typedefs import Handler

from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.http.api import InferenceApi
from cohabit.server.http.control import ControlApi
from cohabit.server.observe.access import Permission

_TRACE = ("/v2/trace/setting", "/v2/models/{model}/trace/setting")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One operation, at one path or several. `request` and `response` name schemas; None is for an empty body."""

    method: str
    paths: Sequence[str]
    handler: Handler
    summary: str | None = None
    """For the OpenAPI document; None leaves the endpoint out."""
    request: str | None = None
    response: str | None = None
    permission: Permission = Permission.INFERENCE


def endpoints(plane: DataPlane, max_body_bytes: int) -> Iterator[Endpoint]:
    """Yield all endpoints, inference first: aiohttp tries the routes of a prefix in this order."""
    api, control = InferenceApi(plane, max_body_bytes), ControlApi(plane)
    yield Endpoint("POST", _of_models("/infer"), api.infer, "Run an inference", "InferRequest", "InferResponse")
    yield from _described(api)
    yield from _model_control(control)
    system = (control.system_status, control.system_register, control.system_unregister)
    yield from _shared_memory("System", "/v2/systemsharedmemory", *system)
    cuda = (control.cuda_status, control.cuda_register, control.cuda_unregister)
    yield from _shared_memory("Cuda", "/v2/cudasharedmemory", *cuda)
    trace, logs = control.trace_settings, control.log_settings
    for paths, handler, what, schema in (
        (_TRACE, trace, "trace settings", "TraceSettings"),
        (("/v2/logging",), logs, "log settings", "LogSettings"),
    ):
        yield Endpoint("GET", paths, handler, f"Return {what}", None, schema, Permission.CONTROL)
        yield Endpoint("POST", paths, handler, f"Change {what}", schema, schema, Permission.CONTROL)


def _described(api: InferenceApi) -> Iterator[Endpoint]:
    yield Endpoint("GET", ("/v2", "/v2/"), api.server_metadata, "Describe the server", None, "ServerMetadata")
    statistics = ("/v2/models/stats", *_of_models("/stats"))  # before a model called "stats"
    yield Endpoint("GET", statistics, api.statistics, "Return statistics", None, "Statistics")
    yield Endpoint("GET", _of_models(""), api.model_metadata, "Describe a model", None, "ModelMetadata")
    ready = "Say whether a model can serve"
    yield Endpoint("GET", _of_models("/ready"), api.model_ready, ready, None, "ModelReady")
    config = "Return a model's configuration"
    yield Endpoint("GET", _of_models("/config"), api.model_config, config, None, "ModelConfig")
    generate = "Run an inference with plain values"
    yield Endpoint("POST", _of_models("/generate"), api.generate, generate, "GenerateRequest", "GenerateResponse")
    yield Endpoint("POST", _of_models("/generate_stream"), api.generate_stream)
    live = "Say whether the server runs"
    yield Endpoint("GET", ("/v2/health/live",), api.live, live, None, "Live", Permission.HEALTH)
    ready = "Say whether every requested model can serve"
    yield Endpoint("GET", ("/v2/health/ready",), api.ready, ready, None, "Ready", Permission.HEALTH)


def _model_control(api: ControlApi) -> Iterator[Endpoint]:
    index, one = ("/v2/repository/index",), "/v2/repository/models/{model}"
    yield Endpoint("POST", index, api.index, "List the repository's models", "IndexRequest", "Index")
    body, change = "ControlRequest", Permission.CONTROL
    yield Endpoint("POST", (f"{one}/load",), api.load, "Load a model", body, permission=change)
    yield Endpoint("POST", (f"{one}/unload",), api.unload, "Unload a model", body, permission=change)
    other = ("/v2/repository/{repository}/models/{model}/{order:(un)?load}",)
    yield Endpoint("POST", other, api.other_repository, permission=change)


def _shared_memory(
    name: str, path: str, status: Handler, register: Handler, unregister: Handler
) -> Iterator[Endpoint]:
    region, what, change = f"{path}/region/{{region}}", f"{name} shared memory", Permission.CONTROL
    listed, forgotten = (f"{path}/status", f"{region}/status"), (f"{path}/unregister", f"{region}/unregister")
    yield Endpoint("GET", listed, status, f"List {what}", None, f"{name}Regions")
    yield Endpoint("POST", (f"{region}/register",), register, f"Register {what}", f"{name}Region", None, change)
    yield Endpoint(
        "POST", (f"{path}/register",), register, permission=change
    )  # without a name, as Triton refuses it
    yield Endpoint("POST", forgotten, unregister, f"Forget {what}", permission=change)


def _of_models(suffix: str) -> Sequence[str]:
    return [f"/v2/models/{{model}}{suffix}", f"/v2/models/{{model}}/versions/{{version:[0-9]+}}{suffix}"]
