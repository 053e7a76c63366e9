"""The Ray Serve application: a deployment per engine, and the ingress.

serve run cohabit.server.scale.app:app repository=/models memory=8GiB replicas=2
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from cohabit.server.config.config import decode_config, encode_config
from cohabit.server.config.setting import parsed
from cohabit.server.errors import EngineUnavailable, too_large
from cohabit.server.scale.engine import ServedEngine
from cohabit.server.scale.routing import ForwardedAnswer, ForwardedRequest, Router, refusal
from cohabit.server.scale.settings import EnginePlan, count, plan_engines, read_rates

_MOST_UNDER_WAY = 8192
"""Queues are the engines' own, which shed by deadlines and limits."""
_HEALTH_CHECK_S = 1.0


def app(values: Mapping[str, Any]) -> Application:
    """Build the application from the settings of `cohabit scale` by key. Raises ConfigError and RepositoryError."""
    settings = {
        key: ",".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in values.items()
    }
    replicas = parsed("replicas", settings.pop("replicas", "2"), count)
    copies = parsed("copies", settings.pop("copies", "1"), count)
    rates = settings.pop("rates", None)
    given_rates = None if rates is None else read_rates(Path(rates))
    return application(plan_engines({**settings}, replicas, copies, given_rates))


def application(plans: Sequence[EnginePlan]) -> Application:
    """Bind the engines and the ingress."""
    options = {"max_ongoing_requests": _MOST_UNDER_WAY, "health_check_period_s": _HEALTH_CHECK_S}
    engines = {}
    for plan in plans:
        share = {"num_cpus": plan.cpus, "num_gpus": plan.gpus}
        engine = serve.deployment(EngineDeployment, name=plan.name, ray_actor_options=share, **options)
        engines[plan.name] = engine.bind(encode_config(plan.config))
    models = {plan.name: list(plan.models) for plan in plans}
    ingress = serve.deployment(Ingress, ray_actor_options={"num_cpus": 0}, **options)
    return ingress.bind(models, min(plan.config.max_body_bytes for plan in plans), **engines)


class EngineDeployment:
    """An engine in an actor of its own; Ray sends it requests once its models are served."""

    async def __init__(self, config: bytes) -> None:  # type: ignore[misc]  # Ray awaits it
        self._engine = ServedEngine(decode_config(config))
        await self._engine.start()

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        return await self._engine.answer(request)

    def check_health(self) -> None:
        self._engine.check()


class _Replicas:
    """An engine's replicas, through their handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        try:
            answer: ForwardedAnswer = await self._handle.answer.remote(request)
            return answer
        except (RayActorError, DeploymentUnavailableError) as error:
            raise EngineUnavailable(f"its replica is lost: {type(error).__name__}") from error


class Ingress:
    """Takes HTTP requests, whose bodies it passes on as they came."""

    def __init__(
        self, models: Mapping[str, Sequence[str]], max_body_bytes: int, **engines: DeploymentHandle
    ) -> None:
        self._router = Router({name: _Replicas(handle) for name, handle in engines.items()}, models)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body_bytes:
                return _response(refusal(too_large("the request body", self._max_body_bytes)))
        query = f"?{request.url.query}" if request.url.query else ""
        path = request.scope.get("raw_path", request.url.path.encode()).decode("ascii")
        forwarded = ForwardedRequest(request.method, f"{path}{query}", dict(request.headers), bytes(body))
        return _response(await self._router.answer(forwarded))


def _response(answer: ForwardedAnswer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers))
