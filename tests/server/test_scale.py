"""Scaled-out serving without Ray: which engine gets which request, what becomes of it when the engine dies."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cohabit.server import cli
from cohabit.server.commands.scale import require_resources
from cohabit.server.config.config import decode_config, encode_config
from cohabit.server.errors import ConfigError, EngineUnavailable, RepositoryError
from cohabit.server.scale.routing import ForwardedAnswer, ForwardedRequest, Router
from cohabit.server.scale.settings import plan_engines, read_rates

LIVE = "/v2/health/live"


class Replicas:
    """An engine that answers with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[ForwardedRequest] = []
        self.deaths = 0
        """So many requests of clients are lost with the replica that has them."""
        self.is_gone = False
        """Whether there is no replica for now."""
        self.hold: asyncio.Event | None = None
        self.returned = asyncio.Event()
        self.content: Callable[[], object] = lambda: {"engine": name}

    async def answer(self, request: ForwardedRequest) -> ForwardedAnswer:
        if request.target == LIVE:
            if self.is_gone:
                await self.returned.wait()
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
    return Router(engines, {"one": ["a", "both"], "two": ["b", "both"]})


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
    engines["one"].deaths, engines["one"].is_gone = 1, True
    answer = await router.answer(infer("both"))
    assert (answer.status, answer.headers["x-engine"]) == (200, "two")
    assert (await router.answer(infer("both"))).headers["x-engine"] == "two"  # the other one is not back yet


async def test_a_request_whose_only_engine_dies_waits_for_its_successor(
    router: Router, engines: dict[str, Replicas]
) -> None:
    one = engines["one"]
    one.deaths, one.is_gone = 1, True
    first, second = asyncio.create_task(router.answer(infer("a"))), asyncio.create_task(router.answer(infer("a")))
    await asyncio.wait({first, second}, timeout=0)
    assert (await router.answer(get("/v2/health/ready"))).status == 400
    assert not first.done()
    one.returned.set()
    assert [(await task).status for task in (first, second)] == [200, 200]
    assert (await router.answer(get("/v2/health/ready"))).status == 200


async def test_a_request_that_loses_two_engines_is_not_tried_a_third_time(
    router: Router, engines: dict[str, Replicas]
) -> None:
    engines["one"].deaths = 3
    answer = await router.answer(infer("a"))
    assert answer.status == 500
    assert b"model 'a': the engine's process died twice" in answer.body
    assert len(engines["one"].asked) == 2


async def test_a_lost_engine_is_waited_for_no_longer_than_the_requests_timeout(
    router: Router, engines: dict[str, Replicas]
) -> None:
    engines["one"].deaths, engines["one"].is_gone = 1, True
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


def test_every_engine_gets_its_models_their_rates_and_the_settings(tmp_path: Path) -> None:
    values = repository(tmp_path, busy=100, large=800, small=10)
    plans = plan_engines({**values, "threads": "2", "watchdog": "3"}, 2, 2, {"busy": 9.0, "large": 1.0})
    held = {plan.name: dict(plan.config.model_rates) for plan in plans}
    assert held == {"engine-0": {"large": 1.0, "busy": 4.5}, "engine-1": {"busy": 4.5, "small": 5.0}}
    for plan in plans:
        assert set(plan.models) == held[plan.name].keys()
        assert (plan.cpus, plan.gpus, plan.config.watchdog_s, plan.config.model_control) == (2, 0, 3.0, "explicit")
        assert decode_config(encode_config(plan.config)) == plan.config


def test_an_engine_of_a_gpu_asks_ray_for_one(tmp_path: Path) -> None:
    values = repository(tmp_path, a=1) | {"device": "cuda"}
    assert [plan.gpus for plan in plan_engines(values, 2)] == [1, 1]
    with pytest.raises(ConfigError, match="--device cuda:1: Ray chooses the GPU"):
        plan_engines(values | {"device": "cuda:1"}, 2)


def test_engines_that_ray_could_never_place_are_refused_with_what_it_found(tmp_path: Path) -> None:
    values = repository(tmp_path, a=1)
    require_resources(plan_engines(values, 2), {"CPU": 2.0})
    with pytest.raises(ConfigError, match="--replicas 2: the engines need 2 GPUs, and Ray found 0; take fewer"):
        require_resources(plan_engines(values | {"device": "cuda"}, 2), {"CPU": 8.0})
    with pytest.raises(ConfigError, match=r"need 8 CPUs, and Ray found 2;.* fewer --threads"):
        require_resources(plan_engines(values | {"threads": "4"}, 2), {"CPU": 2.0})


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
        plan_engines({**repository(tmp_path, a=1), **changes}, 2)


def test_an_empty_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match="is empty"):
        plan_engines(repository(tmp_path), 2)


def test_a_file_of_rates_has_a_line_per_model_and_says_which_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "rates"
    file.write_text("# measured\na=5\n\nb=0.5  # rare\n")
    assert read_rates(file) == {"a": 5.0, "b": 0.5}
    file.write_text("a=5\nb\n")
    with pytest.raises(ConfigError, match=r"--rates: .*, line 2: 'b' is not of the form NAME=RATE"):
        read_rates(file)
    with pytest.raises(ConfigError, match=r"--rates: .* has no model 'c'; it has a"):
        plan_engines(repository(tmp_path / "models", a=1), 2, 1, {"c": 1.0})


def test_without_ray_the_command_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cohabit.server.commands.scale.find_spec", lambda name: None)
    values = repository(tmp_path, a=1)
    assert cli.main(["scale", str(values["repository"]), "--memory", "8MiB"]) == 2
    assert "pip install 'cohabit[scale]'" in capsys.readouterr().err
