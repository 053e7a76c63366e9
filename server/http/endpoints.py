"""The endpoints of the HTTP port in one table; openapi.json describes them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aiohttp.typedefs import Handler

from cohabit.server.frontend.access import Permission
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.http.api import InferenceApi
from cohabit.server.http.completions import CompletionsApi
from cohabit.server.http.control import ControlApi
from cohabit.server.http.openai import OpenAiApi

_TRACE = ("/v2/trace/setting", "/v2/models/{model}/trace/setting")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One operation, at one or more paths."""

    method: str
    paths: Sequence[str]
    handler: Handler
    permission: Permission = Permission.INFERENCE

    @property
    def changes_server(self) -> bool:
        """Whether a call may change models, shared memory or settings."""
        return self.method != "GET" and self.permission is Permission.CONTROL


def endpoints(plane: DataPlane, max_body_bytes: int) -> Iterator[Endpoint]:
    """Yield all endpoints, inference first, since aiohttp tries the routes of a prefix in this order."""
    texts = CompletionsApi(plane, max_body_bytes)
    api, control = InferenceApi(plane, texts, max_body_bytes), ControlApi(plane)
    yield Endpoint("POST", _of_models("/infer"), api.infer)
    yield Endpoint("POST", _of_models("/generate"), api.generate)
    yield Endpoint("POST", _of_models("/generate_stream"), api.generate_stream)
    openai = OpenAiApi(plane, max_body_bytes)
    yield Endpoint("POST", ("/v1/embeddings",), openai.embeddings)
    yield Endpoint("POST", ("/v1/rerank",), openai.rerank)
    yield Endpoint("POST", ("/v1/completions",), texts.completions)
    yield Endpoint("POST", ("/v1/chat/completions",), texts.chat)
    yield Endpoint("GET", ("/v1/models", "/v1/models/{model}"), openai.models)
    yield from _described(api)
    yield from _model_control(control)
    system = (control.system_status, control.system_register, control.system_unregister)
    yield from _shared_memory("/v2/systemsharedmemory", *system)
    cuda = (control.cuda_status, control.cuda_register, control.cuda_unregister)
    yield from _shared_memory("/v2/cudasharedmemory", *cuda)
    for paths, handler in ((_TRACE, control.trace_settings), (("/v2/logging",), control.log_settings)):
        yield Endpoint("GET", paths, handler, Permission.CONTROL)
        yield Endpoint("POST", paths, handler, Permission.CONTROL)


def _described(api: InferenceApi) -> Iterator[Endpoint]:
    yield Endpoint("GET", ("/v2", "/v2/"), api.server_metadata)
    statistics = ("/v2/models/stats", *_of_models("/stats"))  # precedes the route of a model named "stats"
    yield Endpoint("GET", statistics, api.statistics)
    yield Endpoint("GET", _of_models(""), api.model_metadata)
    yield Endpoint("GET", _of_models("/ready"), api.model_ready)
    yield Endpoint("GET", _of_models("/config"), api.model_config)
    yield Endpoint("GET", ("/v2/health/live",), api.live, Permission.HEALTH)
    yield Endpoint("GET", ("/v2/health/ready",), api.ready, Permission.HEALTH)


def _model_control(api: ControlApi) -> Iterator[Endpoint]:
    one = "/v2/repository/models/{model}"
    yield Endpoint("POST", ("/v2/repository/index",), api.index)
    yield Endpoint("POST", (f"{one}/load",), api.load, Permission.CONTROL)
    yield Endpoint("POST", (f"{one}/unload",), api.unload, Permission.CONTROL)
    other = ("/v2/repository/{repository}/models/{model}/{order:(un)?load}",)
    yield Endpoint("POST", other, api.other_repository, Permission.CONTROL)


def _shared_memory(path: str, status: Handler, register: Handler, unregister: Handler) -> Iterator[Endpoint]:
    region = f"{path}/region/{{region}}"
    yield Endpoint("GET", (f"{path}/status", f"{region}/status"), status)
    # A registration without a name is refused, as Triton does.
    yield Endpoint("POST", (f"{region}/register", f"{path}/register"), register, Permission.CONTROL)
    yield Endpoint("POST", (f"{path}/unregister", f"{region}/unregister"), unregister, Permission.CONTROL)


def _of_models(suffix: str) -> Sequence[str]:
    return [f"/v2/models/{{model}}{suffix}", f"/v2/models/{{model}}/versions/{{version:[0-9]+}}{suffix}"]
