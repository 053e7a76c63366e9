"""Scaled-out serving without Ray: which engine gets which request, what becomes of it when the engine dies."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from cohabit.planner.sizing.assignment import ModelTraffic, assign
from cohabit.server import cli
from cohabit.server.commands.scale import require_resources
from cohabit.server.config.config import decode_config, encode_config
from cohabit.server.errors import ConfigError, EngineUnavailable, RepositoryError
from cohabit.server.scale import assigner
from cohabit.server.scale.assigner import Assigner
from cohabit.server.scale.routing import ForwardedAnswer, ForwardedRequest, Router
from cohabit.server.scale.settings import plan_engines

pytestmark = pytest.mark.process

LIVE = "/v2/health/live"


class Replicas:
    """An engine that answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[ForwardedRequest] = []
        self.deaths = 0
        """So many requests of clients are lost with the replica that has them."""
        self.hold: asyncio.Event | None = None
        self.content: Callable[[], object] = lambda: {"engine": name}

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        if request.target == LIVE:
            return ForwardedAnswer(200, {}, b"")
        self.asked.append(request)
        if self.deaths:
            self.deaths -= 1
            raise EngineUnavailable("its replica died")
        if self.hold is not None:
            await self.hold.wait()
        return ForwardedAnswer(200, {"x-engine": self.name}, json.dumps(self.content()).encode())


@pytest.fixture
def engines() -> dict[str, Replicas]:
    return {name: Replicas(name) for name in ("one", "two")}


@pytest.fixture
def router(engines: dict[str, Replicas]) -> Router:
    router = Router(["a", "b", "both"], lambda engine: None)
    router.engines.update(engines)
    router.route({"a": ["one"], "b": ["two"], "both": ["one", "two"]}, {})
    return router


def infer(model: str, parameters: str = "{}", tensor: bytes = b"") -> ForwardedRequest:
    head = f'{{"inputs": [], "parameters": {parameters}}}'.encode()
    headers = {"inference-header-content-length": str(len(head))}
    return ForwardedRequest("POST", f"/v2/models/{model}/infer", headers, head + tensor)


def get(target: str) -> ForwardedRequest:
    return ForwardedRequest("GET", target, {}, b"")


async def test_a_request_goes_to_the_engine_that_has_its_model_as_it_came(
    router: Router, engines: dict[str, Replicas]
) -> None:
    asked = infer("b", tensor=b"\0\1\2")
    answer = await router.answer(asked)
    assert answer.headers["x-engine"] == "two"
    assert engines["two"].asked == [asked]
    assert engines["one"].asked == []


@pytest.mark.parametrize("path", ["/v2/models/b", "/v2/models/b/versions/3/infer", "/v2/models/%62/ready?x=1"])
async def test_every_path_of_a_model_goes_to_its_engine(router: Router, path: str) -> None:
    assert (await router.answer(get(path))).headers["x-engine"] == "two"


async def test_of_two_engines_with_a_model_the_one_with_fewer_requests_under_way_is_asked(
    router: Router, engines: dict[str, Replicas]
) -> None:
    engines["one"].hold = asyncio.Event()
    waiting = asyncio.create_task(router.answer(infer("a")))
    await asyncio.sleep(0)
    answers = [await router.answer(infer("both")) for _ in range(3)]
    assert [answer.headers["x-engine"] for answer in answers] == ["two"] * 3
    engines["one"].hold.set()
    await waiting
    assert (await router.answer(infer("both"))).headers["x-engine"] == "one"


async def test_a_request_whose_engine_dies_is_asked_again_of_another_that_has_the_model(
    router: Router, engines: dict[str, Replicas]
) -> None:
    engines["one"].deaths = 1
    answer = await router.answer(infer("both"))
    assert (answer.status, answer.headers["x-engine"]) == (200, "two")
    assert (await router.answer(infer("both"))).headers["x-engine"] == "two"  # the other one is lost


async def test_a_request_whose_only_engine_dies_waits_for_its_successor(
    router: Router, engines: dict[str, Replicas]
) -> None:
    engines["one"].deaths = 1
    first, second = asyncio.create_task(router.answer(infer("a"))), asyncio.create_task(router.answer(infer("a")))
    await asyncio.wait({first, second}, timeout=0)
    assert (await router.answer(get("/v2/health/ready"))).status == 400
    assert not first.done()
    router.engines["three"] = Replicas("three")
    router.route({"a": ["three"], "b": ["two"], "both": ["two"]}, {})
    assert [(await task).headers["x-engine"] for task in (first, second)] == ["three", "three"]
    assert (await router.answer(get("/v2/health/ready"))).status == 200


async def test_a_request_that_loses_two_engines_is_not_tried_a_third_time(
    router: Router, engines: dict[str, Replicas]
) -> None:
    engines["one"].deaths = engines["two"].deaths = 1
    answer = await router.answer(infer("both"))
    assert answer.status == 500
    assert b"model 'both': the engine's process died twice" in answer.body
    assert len(engines["one"].asked) + len(engines["two"].asked) == 2


async def test_a_lost_engine_is_waited_for_no_longer_than_the_requests_timeout(
    router: Router, engines: dict[str, Replicas]
) -> None:
    engines["one"].deaths = 1
    answer = await router.answer(infer("a", '{"timeout": 20000}'))
    assert answer.status == 503
    assert json.loads(answer.body)["error"].startswith(
        "Request timeout expired: model 'a' cannot answer within 20 ms"
    )


@pytest.mark.parametrize("parameters", ['{"timeout": "soon"}', '{"timeout": -1}', '{"timeout": ', '{"timeout": 0}'])
async def test_a_timeout_that_is_none_is_left_to_the_engine(router: Router, parameters: str) -> None:
    assert (await router.answer(infer("a", parameters))).headers["x-engine"] == "one"


async def test_a_model_that_no_engine_has_is_refused_by_any(router: Router, engines: dict[str, Replicas]) -> None:
    await router.answer(infer("nothing"))
    assert len(engines["one"].asked) + len(engines["two"].asked) == 1


async def test_the_index_has_each_version_once_and_ready_where_one_engine_serves_it(
    router: Router, engines: dict[str, Replicas]
) -> None:
    ready = {"name": "a", "version": "1", "state": "READY"}
    engines["one"].content = lambda: [ready, {"name": "b"}]
    engines["two"].content = lambda: [{"name": "a"}, {"name": "b", "version": "1", "state": "UNAVAILABLE"}]
    answer = await router.answer(ForwardedRequest("POST", "/v2/repository/index", {}, b""))
    entries = json.loads(answer.body)
    assert ready in entries
    assert [entry["name"] for entry in entries].count("a") == 1


async def test_statistics_have_those_of_every_engine_with_the_model(
    router: Router, engines: dict[str, Replicas]
) -> None:
    for engine in engines.values():
        engine.content = lambda name=engine.name: {"model_stats": [{"name": name}]}  # type: ignore[misc]
    answer = await router.answer(get("/v2/models/both/stats"))
    assert json.loads(answer.body) == {"model_stats": [{"name": "one"}, {"name": "two"}]}
    answer = await router.answer(get("/v2/models/b/stats"))
    assert json.loads(answer.body) == {"model_stats": [{"name": "two"}]}


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/models/a/load",
        "/v2/systemsharedmemory/status",
        "/v2/cudasharedmemory/region/r/register",
        "/v2/models/a/trace/setting",
        "/v2/logging",
    ],
)
async def test_what_belongs_to_one_engine_is_refused(
    router: Router, engines: dict[str, Replicas], path: str
) -> None:
    assert (await router.answer(get(path))).status == 501
    assert not engines["one"].asked
    assert not engines["two"].asked


async def test_an_unknown_path_is_not_found(router: Router) -> None:
    assert (await router.answer(get("/v3/models/a"))).status == 404


def repository(folder: Path, **models: int) -> dict[str, str | bool | list[str] | None]:
    """Archives of so many bytes; the settings that name them."""
    for name, nbytes in models.items():
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.pt2").write_bytes(bytes(nbytes))
    return {"repository": str(folder), "memory": "8MiB"}


def test_models_are_assigned_by_their_rates_and_engines_get_the_settings(tmp_path: Path) -> None:
    values = repository(tmp_path, busy=100, large=800, small=10)
    plan = plan_engines({**values, "threads": "2", "watchdog": "3", "rates": ["busy=9", "large=1"]}, 2)
    held = [{model.name: model.rate_per_s for model in models} for models in plan.assigned(2)]
    assert held == [{"large": 1.0, "busy": 4.5}, {"busy": 4.5, "small": 5.0}]
    assert (plan.cpus, plan.gpus, plan.config.watchdog_s, plan.config.model_control) == (2, 0, 3.0, "explicit")
    assert decode_config(encode_config(plan.config)) == plan.config


def test_an_engine_of_a_gpu_asks_ray_for_one(tmp_path: Path) -> None:
    values = repository(tmp_path, a=1) | {"device": "cuda"}
    assert plan_engines(values).gpus == 1
    with pytest.raises(ConfigError, match="--device cuda:1: Ray chooses the GPU"):
        plan_engines(values | {"device": "cuda:1"})


def test_engines_that_ray_could_never_place_are_refused_with_what_it_found(tmp_path: Path) -> None:
    values = repository(tmp_path, a=1)
    require_resources(plan_engines(values), 2, {"CPU": 2.0})
    with pytest.raises(ConfigError, match="--replicas 2: the engines need 2 GPUs, and Ray found 0; take fewer"):
        require_resources(plan_engines(values | {"device": "cuda"}), 2, {"CPU": 8.0})
    with pytest.raises(ConfigError, match=r"need 8 CPUs, and Ray found 2;.* fewer --threads"):
        require_resources(plan_engines(values | {"threads": "4"}), 2, {"CPU": 2.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": "25%"}, "--memory: give the size that each engine has"),
        ({"memory": None}, "--memory is missing"),
        ({"http_port": "80"}, "http_port: engines have no such setting"),
    ],
)
def test_settings_that_engines_cannot_have_are_refused(
    tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_engines({**repository(tmp_path, a=1), **changes})


def test_an_empty_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="is empty"):
        plan_engines(repository(tmp_path))


def test_a_rate_of_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--rates: .* has no model 'c'; it has a"):
        plan_engines({**repository(tmp_path, a=1), "rates": ["c=1"]})


def test_without_ray_the_command_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cohabit.server.commands.scale.find_spec", lambda name: None)
    values = repository(tmp_path, a=1)
    assert cli.main(["scale", str(values["repository"]), "--memory", "8MiB"]) == 2
    assert "pip install 'cohabit[scale]'" in capsys.readouterr().err


class Loading(Replicas):
    """An engine that loads and unloads models by request, and answers only for those that it has."""

    def __init__(self, name: str, fleet: "Fleet", models: Sequence[str]) -> None:
        super().__init__(name)
        self.fleet = fleet
        self.models = set(models)
        self.has_no_memory_for: set[str] = set()

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        if self.name not in self.fleet.running:
            raise EngineUnavailable("it died")
        match request.target.strip("/").split("/"):
            case ["v2", "repository", "index"]:
                return ForwardedAnswer(200, {}, json.dumps([{"name": name} for name in self.models]).encode())
            case ["v2", "repository", "models", model, "load"]:
                await asyncio.sleep(0)
                if model in self.has_no_memory_for and self.models:
                    return ForwardedAnswer(400, {}, b'{"error": "no memory"}')
                self.fleet.loads.append((self.name, model))
                self.models.add(model)
                return ForwardedAnswer(200, {}, b"")
            case ["v2", "repository", "models", model, "unload"]:
                self.models.remove(model)
                return ForwardedAnswer(200, {}, b"")
            case ["v2", "models", model, "infer"]:
                self.asked.append(request)
                await asyncio.sleep(0)
                return ForwardedAnswer(200 if model in self.models else 404, {"x-engine": self.name}, b"")
        return ForwardedAnswer(200, {}, b"")


class Fleet:
    """Engines as Ray starts, stops and loses them; the repository has four models of one size."""

    def __init__(self) -> None:
        traffic = [ModelTraffic(name, 100, 1.0) for name in "abcd"]
        self.starting: set[str] = set()
        self.stopping: set[str] = set()
        self.running: dict[str, Loading] = {}
        self.loads: list[tuple[str, str]] = []
        self.assigner = Assigner(list("abcd"), lambda engines: assign(traffic, engines, 1000), self.count)

    async def count(self) -> int:
        return len(self.starting) + len(self.running) - len(self.stopping)

    async def start(self, *names: str) -> None:
        """Start engines at once; returns once they serve, and models have moved to them."""
        self.starting.update(names)
        await asyncio.gather(*map(self._start, names))
        await self.assigner.wait_until_loaded()

    async def _start(self, name: str) -> None:
        models = await self.assigner.join(name)
        self.running[name] = Loading(name, self, [model.name for model in models])
        self.starting.remove(name)
        await self.assigner.joined(name, self.running[name])

    async def stop(self, name: str) -> None:
        self.stopping.add(name)
        await self.assigner.leave(name)
        self.stopping.remove(name)
        del self.running[name]

    def held(self) -> dict[str, set[str]]:
        return {name: engine.models for name, engine in self.running.items()}

    async def answered(self) -> list[int]:
        return [(await self.assigner.router.answer(infer(model))).status for model in "abcd"]


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(assigner, "_POLL_S", 0.0)
    fleet = Fleet()
    running = asyncio.create_task(fleet.assigner.run())
    yield fleet
    running.cancel()


async def test_engines_that_start_together_load_their_parts_at_once(fleet: Fleet) -> None:
    await fleet.start("one", "two")
    assert sorted(map(len, fleet.held().values())) == [2, 2]
    assert set().union(*fleet.held().values()) == set("abcd")
    assert fleet.loads == []  # none was loaded by request
    assert await fleet.answered() == [200] * 4


async def test_a_further_engine_takes_models_over_from_those_that_have_them(fleet: Fleet) -> None:
    await fleet.start("one")
    assert fleet.held() == {"one": set("abcd")}
    starting = asyncio.create_task(fleet.start("two"))
    while not starting.done():
        assert await fleet.answered() == [200] * 4
    await starting
    while len(fleet.running["one"].models) > 2:
        assert await fleet.answered() == [200] * 4
    assert fleet.held()["one"] | fleet.held()["two"] == set("abcd")
    assert len(fleet.running["two"].models) == 2


async def test_an_engine_that_is_to_stop_goes_once_others_have_loaded_its_models(fleet: Fleet) -> None:
    await fleet.start("one", "two")
    moving = set(fleet.running["two"].models)
    stopping = asyncio.create_task(fleet.stop("two"))
    while not stopping.done():
        assert await fleet.answered() == [200] * 4
    assert fleet.held() == {"one": set("abcd")}
    assert {model for _, model in fleet.loads} == moving
    assert "two" not in fleet.assigner.router.engines


async def test_the_last_engine_is_not_kept_from_stopping(fleet: Fleet) -> None:
    await fleet.start("one", "two")
    await asyncio.gather(fleet.stop("one"), fleet.stop("two"))
    assert fleet.running == {}


async def test_the_successor_of_a_lost_engine_gets_its_models_and_no_other_moves(fleet: Fleet) -> None:
    await fleet.start("one", "two")
    lost = set(fleet.running.pop("two").models)
    fleet.starting.add("successor")
    asked = [asyncio.create_task(fleet.assigner.router.answer(infer(model))) for model in lost]
    await asyncio.wait(asked, timeout=0)
    await fleet.start("successor")
    assert fleet.running["successor"].models == lost
    assert [(await each).headers["x-engine"] for each in asked] == ["successor", "successor"]
    assert fleet.loads == []


async def test_the_models_of_an_engine_that_is_lost_for_good_are_loaded_by_the_others(fleet: Fleet) -> None:
    await fleet.start("one", "two")
    lost = set(fleet.running.pop("two").models)
    assert await fleet.answered() == [200] * 4
    assert {model for _, model in fleet.loads} == lost


async def test_an_engine_that_ray_does_not_manage_to_start_is_not_waited_for_without_end(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assigner, "_STARTING_S", 0.01)
    await fleet.start("one", "two")
    del fleet.running["two"]
    fleet.starting.add("never")
    assert await fleet.answered() == [200] * 4
    assert fleet.held() == {"one": set("abcd")}


async def test_a_model_that_the_others_cannot_load_is_refused_with_the_reason(fleet: Fleet) -> None:
    await fleet.start("one", "two")
    (model, other) = sorted(fleet.running.pop("two").models)
    fleet.running["one"].has_no_memory_for = {model}
    refused = await fleet.assigner.router.answer(infer(model))
    assert (refused.status, json.loads(refused.body)["error"]) == (
        503, f"model '{model}' is not ready: no memory"
    )  # fmt: skip
    assert (await fleet.assigner.router.answer(infer(other))).status == 200
    assert (await fleet.assigner.router.answer(get("/v2/health/ready"))).status == 400


async def test_an_ingress_that_was_started_again_learns_which_engine_has_which_model(fleet: Fleet) -> None:
    await fleet.start("one", "two")
    held = {name: set(models) for name, models in fleet.held().items()}
    fleet.assigner = Assigner(fleet.assigner.router.models, fleet.assigner._assign, fleet.count)
    running = asyncio.create_task(fleet.assigner.run())
    for name, engine in fleet.running.items():
        await fleet.assigner.joined(name, engine)
    await fleet.assigner.wait_until_loaded()
    assert await fleet.answered() == [200] * 4
    assert fleet.held() == held
    running.cancel()
