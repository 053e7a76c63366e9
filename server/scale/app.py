"""The Ray Serve application: engines, which are replicas of one deployment, and the ingress.

serve run cohabit.server.scale.app:app repository=/models memory=8GiB replicas=2
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import AutoscalingContext
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus
from starlette.requests import Request
from starlette.responses import Response

from cohabit.planner.sizing.assignment import ModelTraffic
from cohabit.server.background import Background
from cohabit.server.config.config import decode_config, encode_config
from cohabit.server.config.setting import parsed
from cohabit.server.errors import RequestError, too_large
from cohabit.server.frontend.memory import RequestMemory
from cohabit.server.http.body import BodyBuffer
from cohabit.server.scale.assigner import Assigner
from cohabit.server.scale.engine import EngineAddress, ServedEngine, engine_session
from cohabit.server.scale.routing import ForwardedAnswer, ForwardedRequest, refusal
from cohabit.server.scale.settings import MOST_REPLICAS, ScalePlan, count, plan_engines

_MOST_UNDER_WAY = 8192
"""Limit of Ray's queues. Queues are in the engines, which shed by deadlines and limits."""
_HEALTH_CHECK_S = 1.0
_ENGINE = "Engine"
"""The engines' deployment, as Ray's config files name it."""
_DRAIN_S = 120.0
"""Maximum seconds for a stopping engine to wait for others to load its models, and for its requests."""
_KEPT = ("STARTING", "UPDATING", "RECOVERING", "RUNNING")
"""States of replicas that Ray keeps."""


def app(values: Mapping[str, Any]) -> Application:
    """Build the application from the settings of `cohabit scale` by key. Raises ConfigError and RepositoryError."""
    settings = {
        key: ",".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in values.items()
    }
    replicas = parsed("replicas", settings.pop("replicas", "2"), count)
    copies = parsed("copies", settings.pop("copies", "1"), count)
    rates = settings.pop("rates", "").split(",")
    return application(plan_engines({**settings, "rates": [item for item in rates if item]}, copies), replicas)


def application(plan: ScalePlan, replicas: int) -> Application:
    """Bind the engines and the ingress. Only Ray's number of replicas depends on `replicas`."""
    options = {"max_ongoing_requests": _MOST_UNDER_WAY, "health_check_period_s": _HEALTH_CHECK_S}
    share = {"num_cpus": plan.cpus, "num_gpus": plan.gpus}
    engines = serve.deployment(
        EngineDeployment,
        name=_ENGINE,
        num_replicas=replicas,
        ray_actor_options=share,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=_DRAIN_S,
        **options,
    )
    ingress = serve.deployment(Ingress, ray_actor_options={"num_cpus": 0}, **options)
    config = encode_config(plan.config)
    return ingress.bind(config, plan.traffic, plan.copies, engines.bind(config))


def requests_per_engine(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the number of engines that the requests under way need, by Ray's setting `target_ongoing_requests`.

    A policy of Ray's autoscaler, which applies its limits, factors and delays to it. Ray's own policy does not see the
    requests, since they do not reach the engines through Ray.
    """
    under_way = sum((context.aggregated_metrics or {}).get("requests", {}).values())
    return under_way / context.config.get_target_ongoing_requests(), {}


class EngineDeployment:
    """An engine in its own actor. It has started once its models are served."""

    async def __init__(self, config: bytes) -> None:  # type: ignore[misc]  # Ray awaits it
        context = serve.get_replica_context()
        self._name, self._app_name = context.replica_tag, context.app_name
        self._ingress = serve.get_deployment_handle("Ingress", context.app_name)
        self._requests = 0
        self._background = Background()
        self._engine = ServedEngine(decode_config(config), ray.util.get_node_ip_address())
        await self._engine.start(await self._ingress.join.remote(self._name))
        await self._register()
        self._background.keep("telling the ingress of the engine", self._keep_registered)

    def record_autoscaling_stats(self) -> dict[str, int]:
        return {"requests": self._requests}

    def check_health(self) -> None:
        self._engine.check()

    async def __del__(self) -> None:  # Ray also awaits this, when the replica is to stop
        await self._background.close()
        with suppress(RayError, TimeoutError):
            if not await asyncio.to_thread(self._application_stops):
                await asyncio.wait_for(self._ingress.leave.remote(self._name), _DRAIN_S / 2)
        await self._engine.stop()

    def _application_stops(self) -> bool:
        """Whether the whole application is stopping, so that there is no ingress to call."""
        application = serve.status().applications.get(self._app_name)
        return application is None or application.status == ApplicationStatus.DELETING

    async def _keep_registered(self) -> None:
        while True:
            await asyncio.sleep(_HEALTH_CHECK_S)
            with suppress(RayError):
                await self._register()

    async def _register(self) -> None:
        """Register the engine with the ingress, which knows it already unless the ingress has restarted."""
        self._requests = await self._ingress.joined.remote(self._name, self._engine.url, self._engine.token)


class Ingress:
    """Receives HTTP requests, passes their bodies on unchanged, and assigns models to engines."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: bytes, traffic: Sequence[ModelTraffic], copies: int, _: DeploymentHandle
    ) -> None:
        plan = ScalePlan(decode_config(config), traffic, copies, 0, 0)
        self._app_name = serve.get_replica_context().app_name
        self._assigner = Assigner([model.name for model in traffic], plan.assigned, self._count_engines)
        self._max_body_bytes = plan.config.max_body_bytes
        self._memory = RequestMemory(plan.config.queue_bytes)
        self._session = engine_session()
        self._background = Background()
        self._background.keep("assigning models to engines", self._assigner.run)

    async def __call__(self, request: Request) -> Response:
        with self._memory.lease() as lease:
            length = int(request.headers.get("content-length", 0))
            limit, over_limit = self._max_body_bytes, too_large("the request body", self._max_body_bytes)
            try:
                if length > limit:
                    raise over_limit
                body = BodyBuffer(lease, over_limit, limit, length)
                async for chunk in request.stream():
                    body.append(chunk)
            except RequestError as error:
                return _response(refusal(error))
            query = f"?{request.url.query}" if request.url.query else ""
            path = request.scope.get("raw_path", request.url.path.encode()).decode("ascii")
            forwarded = ForwardedRequest(request.method, f"{path}{query}", dict(request.headers), body.view)
            return _response(await self._assigner.router.answer(forwarded))

    async def join(self, engine: str) -> Sequence[ModelTraffic]:
        return await self._assigner.join(engine)

    async def joined(self, engine: str, url: str, token: str) -> int:
        """Return the number of an engine's requests."""
        if engine not in self._assigner.router.engines:
            await self._assigner.joined(engine, EngineAddress(self._session, url, token, self._memory))
        return self._assigner.router.load(engine)

    async def leave(self, engine: str) -> None:
        await self._assigner.leave(engine)

    async def wait_until_loaded(self) -> None:
        await self._assigner.wait_until_loaded()

    async def _count_engines(self) -> int:
        """Return the number of engines that run or are starting."""

        def counted() -> int:
            states = serve.status().applications[self._app_name].deployments[_ENGINE].replica_states
            return sum(states.get(state, 0) for state in _KEPT)

        try:
            return await asyncio.to_thread(counted)
        except (KeyError, RayError):  # Ray's controller is starting
            return MOST_REPLICAS


def _response(answer: ForwardedAnswer) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers))
