"""Ensembles: which configurations are refused and why, and that answers are those of a client that calls the steps."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from msgspec.structs import replace
from tritonclient.utils import InferenceServerException

from cohabit.planner.shapes import Bucket
from cohabit.server.errors import ExecutionFailed, InvalidRequest, ModelNotFound, RequestTimedOut
from cohabit.server.frontend.engine_client import EngineClient
from cohabit.server.frontend.ensembles import Ensembles
from cohabit.server.frontend.memory import RequestMemory
from cohabit.server.frontend.threads import call
from cohabit.server.frontend.tokenizer_entries import TokenizerEntries
from cohabit.server.frontend.tokenizers import Tokenizers
from cohabit.server.ipc.catalog import ModelEntry, ModelState
from cohabit.server.ipc.model import ENSEMBLE, Array, ModelFootprint, ModelInfo, ModelKey, TensorSpec
from cohabit.server.ipc.request import Answer, Request
from cohabit.server.ipc.statistics import EngineReport, ModelCounters, ModelStatistics
from cohabit.server.observe.spans import events_of, stages_of
from cohabit.server.observe.tracing import Tracer
from cohabit.server.repository.registry import Registry
from cohabit.server.repository.scan import scan
from cohabit.server.repository.sources import EnsembleSource, ModelSource, Unloadable
from cohabit.server.triton.ensembles import description_of, steps_of
from cohabit.server.triton.model_config import ModelConfig
from cohabit.server.view.live_document import stages_of as stages_of_ensemble
from tests.support.server import fake_engine, frontends, transport_fakes
from tests.support.server.clients import Client
from tests.support.server.ensembles import DIAMOND, TWICE, X, Y, config_text, put, step, tensor
from tests.support.server.frontends import FrontEnd, rows, until_entered
from tests.support.server.metrics_client import scrape
from tests.support.server.server_fakes import (
    Running,
    adder,
    fixed,
    identity,
    refused,
    running,
    serving,
    tensors,
    write_repository,
)

pytestmark = pytest.mark.process

COUNT = ModelInfo("count", 1, tensors(("x", "FP32", (4,))), tensors(("n", "INT64", (1,))), 8)
ROWS = ModelInfo("rows", 1, tensors(("x", "FP32", (16, 4))), tensors(("y", "FP32", (16, 4))))
OPTIONAL = ModelInfo(
    "optional", 1, (TensorSpec("x", "FP32", (4,)), TensorSpec("scale", "FP32", (1,), default=1.0)), COUNT.inputs, 8
)
KEPT = ModelInfo("kept", 1, COUNT.inputs, COUNT.outputs, 8, sequences=True)
ANY = ModelInfo("any", 1, tensors(("x", "FP32", (-1,))), tensors(("y", "FP32", (-1,))), 8)
MODELS = (
    identity("double", "FP32").info, adder(2).info, adder(3).info, fixed().info, COUNT, ROWS, OPTIONAL, KEPT, ANY,
    identity("small", "FP32", max_batch=4).info,
)  # fmt: skip


def source(info: ModelInfo) -> ModelSource:
    return ModelSource(info.name, info.version, Path("none"))


def serve(registry: Registry, *infos: ModelInfo) -> None:
    for info in infos:
        registry.loading(source(info))
        registry.served(source(info), info, ModelFootprint())


def reason_of(repository: Path, text: str, name: str = "e") -> str | None:
    """Return why an ensemble is not served beside these models; None if it is ready."""
    put(repository, name, text)
    (found,) = scan(repository)
    if isinstance(found, Unloadable):
        return found.reason
    assert isinstance(found, EnsembleSource)
    registry = Registry()
    serve(registry, *MODELS)
    return registry.serve_ensemble(found)


ONE = step("double", {"x": "X"}, {"y": "Y"})
DOUBLE_Z = step("double", {"x": "X"}, {"y": "Z"})
FIXED = tensor("input", "X", "INT32", "2, 3") + tensor("output", "Y", "INT32", "2, 3")
ROWS_OUT = tensor("output", "Y", dims="16, 4")
UNBATCHED = "platform: 'ensemble'\n"


@pytest.mark.parametrize(
    "text",
    [
        config_text(X + Y, ONE),
        config_text(X + Y, step("double", {"x": "X"}, {"y": "Y"}, version=None)),
        config_text(X + Y, step("double", {"x": "X"}, {"y": "Y"}, version=1)),
        TWICE,
        DIAMOND,
        config_text(X + Y, step("adder", {"a": "X", "b": "X"}, {"sum": "Y"}, version=2)),
        config_text(X + Y, step("adder", {"a": "X", "b": "X"}, {"sum": "Y", "diff": "unread"})),
        config_text(X + Y, step("optional", {"x": "X"}, {"x": "Y"})),
        config_text(tensor("input", "X", dims="-1") + Y, step("any", {"x": "X"}, {"y": "Y"})),
        config_text(X + Y, step("any", {"x": "X"}, {"y": "Z"}), step("double", {"x": "Z"}, {"y": "Y"})),
        config_text(FIXED, step("fixed", {"x": "X"}, {"y": "Y"}), head=UNBATCHED),
        config_text(tensor("input", "X", dims="3, 4") + tensor("output", "Y", dims="-1, 4"), ONE, head=UNBATCHED),
        config_text(tensor("input", "X", dims="16, 4") + ROWS_OUT, step("rows", {"x": "X"}, {"y": "Y"}),
                    head=UNBATCHED),
        config_text(X + Y, step("rows", {"x": "X"}, {"y": "Y"})),
    ],
)  # fmt: skip
def test_a_right_configuration_is_ready(tmp_path: Path, text: str) -> None:
    assert reason_of(tmp_path, text) is None


CASES = [
    # The form of the configuration.
    ("platform: 'ensemble'" + X + Y, "platform is 'ensemble', but there are no steps; add ensemble_scheduling"),
    (config_text(X + Y, ONE, head=""), "platform is ''; an ensemble has no program"),
    (config_text(X + Y, ONE, head="platform: 'pytorch_pt2'"), "platform is 'pytorch_pt2'; an ensemble has no program"),
    (config_text(X + Y), "there is no step; name the models that it runs"),
    (config_text(Y, ONE), "there is no input; the tensors of an entry without a program must be listed"),
    (config_text(X, ONE), "there is no output; the tensors of an entry without a program must be listed"),
    (config_text(X + X + Y, ONE), "input 'X' is there twice"),
    (config_text(X + Y + Y, ONE), "output 'Y' is there twice"),
    (config_text("input { data_type: TYPE_FP32 dims: 4 }" + Y, ONE), "an input has no name"),
    (config_text("input { name: 'X' dims: 4 }" + Y, ONE), "input 'X' has no data_type"),
    (config_text(tensor("input", "X", "STRING") + Y, ONE), "input 'x' is FP32, but input 'X' of the ensemble is BYTES"),
    (config_text(tensor("input", "X", dims="0, 4") + Y, ONE), "input 'X' has dims [0, 4]; 0 is neither a size nor -1"),
    (config_text(X + tensor("output", "Y", dims="-2"), ONE), "output 'Y' has dims [-2]; -2 is neither a size nor -1"),
    (config_text("input { name: 'X' data_type: TYPE_FP32 dims: 4 optional: true }" + Y, ONE),
     "input 'X' is optional; an entry without a program needs all of its inputs"),
    (config_text(X + Y, ONE, head="platform: 'ensemble' instance_group { count: 1 }"),
     "an ensemble has no instance_group; set it for the models of its steps"),
    (config_text(X + Y, ONE, head="platform: 'ensemble' model_warmup { name: 'w' }"),
     "an ensemble has no model_warmup; set it for the models of its steps"),
    (config_text(X + Y, ONE, head="platform: 'ensemble' backend: 'pytorch'"), "an ensemble has no backend"),
    # The steps.
    (config_text(X + Y, "step { input_map { key: 'x' value: 'X' } }"), "step 1 has no model_name"),
    (config_text(X + Y, step("e", {"x": "X"}, {"y": "Y"})), "step 1 ('e') is the ensemble itself"),
    (config_text(X + Y, step("double", {"x": "X"}, {"y": "Y"}, version=-2)),
     "step 1 ('double'): model_version is -2; say a version, or -1 for the latest"),
    (config_text(X + Y, step("double", {}, {"y": "Y"})), "step 1 ('double'): input_map is empty"),
    (config_text(X + Y, step("double", {"x": "X"}, {})), "step 1 ('double'): output_map is empty"),
    (config_text(X + Y, step("double", {"x": ""}, {"y": "Y"})), "step 1 ('double'): input_map has no value for 'x'"),
    (config_text(X + Y, step("double", {"x": "X"}, {"": "Y"})), "step 1 ('double'): output_map has no key for 'Y'"),
    # The flow of tensors.
    (config_text(X + Y, ONE, ONE), "step 2 ('double'): output 'y' writes tensor 'Y', which step 1 ('double') writes"),
    (config_text(X + Y, step("adder", {"a": "X", "b": "X"}, {"sum": "Y", "diff": "Y"})),
     "writes tensor 'Y', which step 1 ('adder') writes"),
    (config_text(X + Y, ONE, step("double", {"x": "Y"}, {"y": "X"})),
     "step 2 ('double'): output 'y' writes tensor 'X', which is an input of the ensemble"),
    (config_text(X + Y, ONE, step("double", {"x": "Yy"}, {"y": "Z"})),
     "step 2 ('double'): input 'x' reads tensor 'Yy', which is neither an input of the ensemble nor an output of a"
     " step; did you mean 'Y'?"),
    (config_text(X + tensor("input", "U") + Y, ONE), "no step reads input 'U'"),
    (config_text(X + Y + tensor("output", "U"), ONE), "no step writes output 'U'"),
    (config_text(X + Y, DOUBLE_Z), "no step writes output 'Y'"),
    (config_text(X + Y, ONE, step("double", {"x": "a"}, {"y": "a"})),
     "step 2 ('double') reads tensor 'a' of step 2 ('double')"),
    (config_text(X + Y, step("adder", {"a": "X", "b": "r"}, {"sum": "Y"}), step("double", {"x": "Y"}, {"y": "r"})),
     "a cycle"),
    # The models of the steps.
    (config_text(X + Y, step("nothing", {"x": "X"}, {"y": "Y"})), "step 1 ('nothing'): there is no such model"),
    (config_text(X + Y, step("double", {"x": "X"}, {"y": "Y"}, version=7)),
     "step 1 ('double'): there is no version 7 of it"),
    (config_text(X + Y, step("double", {"z": "X"}, {"y": "Y"})),
     "step 1 ('double'): the model has no input 'z' for tensor 'X'; it has x"),
    (config_text(X + Y, step("double", {"x": "X"}, {"z": "Y"})),
     "step 1 ('double'): the model has no output 'z' for tensor 'Y'; it has y"),
    (config_text(X + Y, step("adder", {"a": "X"}, {"sum": "Y"})),
     "step 1 ('adder'): input 'b' of the model is not in input_map"),
    (config_text(X + Y, step("small", {"x": "X"}, {"y": "Y"})),
     "step 1 ('small'): the model takes batches of up to 4, the ensemble 8"),
    (config_text(X + Y, step("kept", {"x": "X"}, {"n": "Y"})), "step 1 ('kept'): the model keeps state"),
    (config_text(X + Y, step("count", {"x": "X"}, {"n": "N"}), step("double", {"x": "N"}, {"y": "Y"})),
     "step 2 ('double'): input 'x' is FP32, but output 'n' of step 1 ('count') is INT64 (tensor 'N')"),
    (config_text(tensor("input", "X", "INT8") + Y, ONE),
     "step 1 ('double'): input 'x' is FP32, but input 'X' of the ensemble is INT8 (tensor 'X')"),
    (config_text(X + Y, step("count", {"x": "X"}, {"n": "Y"})),
     "output 'Y' of the ensemble is FP32, but output 'n' of step 1 ('count') is INT64"),
    (config_text(tensor("input", "X", dims="5") + Y, ONE),
     "step 1 ('double'): input 'x' has shape [-1, 4], but input 'X' of the ensemble has [-1, 5] (tensor 'X')"),
    (config_text(X + tensor("output", "Y", dims="4, 1"), ONE),
     "output 'Y' of the ensemble has shape [-1, 4, 1], but output 'y' of step 1 ('double') has [-1, 4]"),
    (config_text(X + Y, ONE, head=UNBATCHED), "input 'x' has shape [-1, 4], but input 'X' of the ensemble has [4]"),
    (config_text(tensor("input", "X", dims="16, 4") + ROWS_OUT, step("rows", {"x": "X"}, {"y": "Z"}),
                 step("double", {"x": "Z"}, {"y": "Y"}), head=UNBATCHED),
     "step 2 ('double'): input 'x' takes batches of up to 8, output 'y' of step 1 ('rows') is a batch of 16"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), CASES)
def test_a_wrong_configuration_is_refused_in_one_line_with_its_step_and_tensor(
    tmp_path: Path, text: str, reason: str
) -> None:
    refusal = reason_of(tmp_path, text)
    assert refusal is not None
    assert reason in refusal
    assert "\n" not in refusal


def parsed(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def ensemble(name: str, text: str) -> EnsembleSource:
    config = parsed(text)
    return EnsembleSource(description_of(name, 1, config, {}), steps_of(name, config), config)


def of_one(name: str, model: str) -> EnsembleSource:
    return ensemble(name, config_text(X + Y, step(model, {"x": "X"}, {"y": "Y"})))


def states(registry: Registry) -> dict[str, tuple[ModelState, str]]:
    return {entry.name: (entry.state, entry.reason) for entry in registry}


READY = (ModelState.READY, "")


def test_an_ensemble_is_ready_whenever_its_steps_are_and_otherwise_says_why() -> None:
    registry, doubler = Registry(), identity("double", "FP32").info
    inner, outer = (
        of_one("inner", "double"),
        ensemble("outer", config_text(X + Y, step("inner", {"X": "X"}, {"Y": "Y"}))),
    )
    registry.loading(source(doubler))
    assert registry.serve_ensemble(outer) == "step 1 ('inner'): there is no such model"
    assert registry.serve_ensemble(inner) == "step 1 ('double') is still loading"
    assert states(registry)["outer"] == (ModelState.LOADING, "step 1 ('inner') is still loading")
    registry.served(source(doubler), doubler, ModelFootprint())
    assert states(registry) == dict.fromkeys(("double", "inner", "outer"), READY)
    registry.unloading(doubler.key)
    registry.unloaded(doubler.key)
    assert states(registry)["inner"] == (ModelState.UNAVAILABLE, "step 1 ('double') is not ready: unloaded")
    assert states(registry)["outer"][1] == "step 1 ('inner') is not ready: step 1 ('double') is not ready: unloaded"
    other = replace(doubler, inputs=tensors(("x", "FP32", (5,))))
    serve(registry, other)
    assert "input 'x' has shape [-1, 5]" in states(registry)["inner"][1], "a new load has other tensors"
    serve(registry, doubler)
    assert states(registry)["outer"] == READY
    registry.unload_ensembles("inner", ())
    assert states(registry)["inner"] == (ModelState.UNAVAILABLE, "unloaded")
    assert states(registry)["double"] == READY


def test_a_new_configuration_that_does_not_fit_leaves_the_ensemble_that_is_served() -> None:
    registry = Registry()
    serve(registry, *MODELS)
    assert registry.serve_ensemble(of_one("e", "double")) is None
    assert registry.serve_ensemble(of_one("e", "nothing")) == "step 1 ('nothing'): there is no such model"
    assert states(registry)["e"] == READY
    registry.unloading(identity("double", "FP32").info.key)
    assert states(registry)["e"][1] == "step 1 ('double') is not ready: unloading"


def test_ensembles_that_are_steps_of_one_another_are_refused() -> None:
    registry = Registry()
    for name, inner in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        of_inner = ensemble(name, config_text(X + Y, step(inner, {"X": "X"}, {"Y": "Y"})))
        assert registry.serve_ensemble(of_inner) is not None
    found = {name: reason for name, (_, reason) in states(registry).items()}
    assert {found[name] for name in "abc"} == {"it is a step of an ensemble that is a step of it"}
    assert found["d"] == "step 1 ('a') is not ready: it is a step of an ensemble that is a step of it"


ENSEMBLES = {
    "twice": TWICE,
    "diamond": DIAMOND,
    "nested": config_text(X + Y, step("diamond", {"X": "X"}, {"D": "d"}), step("twice", {"X": "d"}, {"Y": "Y"})),
    "old": config_text(X + Y, step("adder", {"a": "X", "b": "X"}, {"sum": "Y"}, version=2)),
    "rows_of_one": config_text(
        tensor("input", "X", dims="-1, 4") + tensor("output", "Y", dims="-1, 4"), ONE, head=UNBATCHED
    ),
    "slow_second": config_text(X + Y, DOUBLE_Z, step("slow", {"x": "Z"}, {"y": "Y"})),
    **{
        f"chain_{count}": config_text(
            X + Y,
            *(step("double", {"x": f"t{k}" if k else "X"}, {"y": f"t{k + 1}"}) for k in range(count - 1)),
            step("double", {"x": f"t{count - 1}"}, {"y": "Y"}),
        )
        for count in (3, 6)
    },
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    repository = tmp_path_factory.mktemp("repository")
    doubler, negative = identity("double", "FP32"), adder(2)
    doubler.function = lambda x: {"y": x * np.float32(1.1)}
    negative.function = lambda a, b: {"diff": b - a, "sum": -a - b}
    loaded = serving(doubler, negative, adder(3), identity("slow", "FP32"))
    write_repository(repository, loaded)
    for name, text in ENSEMBLES.items():
        put(repository, name, text)
    with running(loaded, repository=repository) as handle:
        yield handle


def asked(
    client: Client, model: str, inputs: dict[str, Array], outputs: list[str], version: str = ""
) -> dict[str, Array]:
    sent = [client.input(name, array, "FP32") for name, array in inputs.items()]
    wanted = [client.api.InferRequestedOutput(name) for name in outputs]
    result = client.raw.infer(model, sent, outputs=wanted, model_version=version)
    return {name: result.as_numpy(name) for name in outputs}


def by_steps(client: Client, name: str, x: Array) -> dict[str, Array]:
    """Call the steps one by one, in any order in which their inputs are there."""
    config, found = parsed(ENSEMBLES[name]), {"X": x}
    left = list(config.ensemble_scheduling.step)
    while left:
        now = next(s for s in left if set(s.input_map.values()) <= found.keys())
        left.remove(now)
        inputs = {own: found[tensor] for own, tensor in now.input_map.items()}
        version = str(now.model_version) if now.model_version > 0 else ""
        outputs = asked(client, now.model_name, inputs, list(now.output_map), version)
        found |= {now.output_map[own]: array for own, array in outputs.items()}
    return {output.name: found[output.name] for output in config.output}


@pytest.mark.parametrize("name", ["twice", "diamond", "nested", "old", "rows_of_one", "chain_6"])
def test_answers_are_those_of_a_client_that_calls_the_steps(client: Client, name: str) -> None:
    random = np.random.default_rng(0)
    for batch in (1, 3, 8):
        x = random.standard_normal((batch, 4)).astype(np.float32)
        expected = by_steps(client, name, x)
        answer = asked(client, name, {"X": x}, list(expected))
        for output, array in expected.items():
            np.testing.assert_array_equal(answer[output], array)
            (alone,) = asked(client, name, {"X": x}, [output]).values()
            np.testing.assert_array_equal(alone, array)


def test_an_ensemble_is_described_as_any_other_model(client: Client, own: Running) -> None:
    options = {"as_json": True} if client.protocol == "grpc" else {}
    assert client.raw.is_server_ready()
    assert client.raw.is_model_ready("diamond", "1")
    metadata = client.raw.get_model_metadata("diamond", **options)
    assert metadata["platform"] == ENSEMBLE
    assert [tensor["name"] for tensor in metadata["outputs"]] == ["Y", "D"]
    assert [int(size) for size in metadata["inputs"][0]["shape"]] == [-1, 4]
    config = client.raw.get_model_config("diamond", **options)
    steps = config.get("config", config)["ensemble_scheduling"]["step"]
    assert [step["model_name"] for step in steps] == ["adder", "double", "double"], "perf_analyzer reads them here"
    assert not config.get("config", config).get("instance_group")


def test_an_ensemble_counts_its_requests_and_its_steps_theirs(client: Client, own: Running) -> None:
    def counts(name: str) -> list[int]:
        options = {"as_json": True} if client.protocol == "grpc" else {}
        (stats,) = client.raw.get_inference_statistics(name, **options)["model_stats"][-1:]
        success = stats["inference_stats"]["success"]
        return [
            int(stats.get("execution_count", 0)),
            int(stats.get("inference_count", 0)),
            int(success.get("count", 0)),
        ]

    before = {name: counts(name) for name in ("diamond", "double", "adder")}
    asked(client, "diamond", {"X": rows(1, 2, 3)}, ["Y"])
    grown = {name: [now - old for now, old in zip(counts(name), before[name], strict=True)] for name in before}
    assert grown == {"diamond": [1, 3, 1], "double": [2, 6, 2], "adder": [1, 3, 1]}
    labels = (("model", "diamond"), ("version", "1"))
    samples = scrape(own)
    assert samples["nv_inference_count", labels] == counts("diamond")[1]
    assert samples["cohabit_request_seconds_count", labels] >= 1


def test_a_request_that_does_not_fit_names_the_ensemble_or_the_step(client: Client) -> None:
    for name, x, message in (
        ("twice", np.zeros((1, 5), np.float32), "unexpected shape for input 'X' for model 'twice'"),
        ("twice", np.zeros((9, 4), np.float32), "inference request batch-size must be <= 8 for 'twice'"),
        (
            "rows_of_one",
            np.zeros((9, 4), np.float32),
            r"ensemble 'rows_of_one', step 1 \('double'\): inference request",
        ),
    ):
        with pytest.raises(InferenceServerException, match=message) as caught:
            asked(client, name, {"X": x}, ["Y"])
        assert client.status(caught.value) in ("400", "INVALID_ARGUMENT")


def test_unloading_an_ensemble_leaves_its_steps_unless_dependents_go_too(
    client: Client, own: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    unloaded: list[str] = []

    async def unload(model: str) -> None:
        unloaded.append(model)

    monkeypatch.setattr(own.engine.lifecycle, "unload", unload)
    client.raw.unload_model("slow_second")
    client.raw.unload_model("slow_second", unload_dependents=True)
    client.raw.unload_model("double", unload_dependents=True)
    assert unloaded == ["slow_second", "slow_second", "slow", "double"], "other ensembles have `double`"


def test_an_ensemble_to_load_at_the_start_brings_its_steps(tmp_path: Path) -> None:
    loaded = serving(identity("double", "FP32"), identity("slow", "FP32"))
    write_repository(tmp_path, loaded)
    put(tmp_path, "outer", config_text(X + Y, step("twice", {"X": "X"}, {"Y": "Y"})))
    put(tmp_path, "twice", TWICE)
    with running(loaded, repository=tmp_path, model_control="explicit", load_models=("outer",)) as handle:
        entries = {entry.name: entry.state for entry in handle.server.client.catalog}
        assert entries == {
            **dict.fromkeys(("outer", "twice", "double"), ModelState.READY),
            "slow": ModelState.ABSENT,
        }


def ensembles_of(client: EngineClient) -> Ensembles:
    return Ensembles(client, TokenizerEntries(Tokenizers(Path("none")), call))


class Composed:
    """Ensembles over the fake engine."""

    def __init__(self, front_end: FrontEnd) -> None:
        self.front_end = front_end
        self.ensembles = ensembles_of(front_end.client)

    async def infer(self, name: str, *values: float, timeout_s: float | None = None) -> Array:
        info, memory = self.front_end.client.catalog.require(name), self.front_end.memory
        with memory.lease() as lease:
            request = self.front_end.request(lease, info, timeout_s, X=rows(*values))
            answer = await self.ensembles.infer(request, info, lease, None)
            return answer.outputs["Y"].copy()


@pytest.fixture(params=["process", "in_process"])
async def composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Composed]:
    monkeypatch.setenv("FAKE_ENGINE", str(tmp_path))
    for name, text in ENSEMBLES.items():
        put(tmp_path / "repository", name, text)
    async with (frontends.process if request.param == "process" else frontends.in_process)(tmp_path) as front_end:
        yield Composed(front_end)
        fake_engine.open_gate()
        await front_end.all_released()


async def test_requests_of_several_ensembles_on_the_same_steps_are_answered_side_by_side(
    composed: Composed,
) -> None:
    values = [[float(100 * n + k) for k in range(1 + n % 8)] for n in range(24)]
    factors = {"twice": 4.0, "chain_3": 8.0, "chain_6": 64.0}
    asked = [(name, batch) for batch in values for name in factors]
    answers = await asyncio.gather(*(composed.infer(name, *batch) for name, batch in asked))
    for (name, batch), answer in zip(asked, answers, strict=True):
        np.testing.assert_array_equal(answer, rows(*batch) * factors[name])


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (fake_engine.REFUSED, InvalidRequest, "7 is outside of the table"),
        (
            fake_engine.FAILS,
            ExecutionFailed,
            "model 'double' failed to execute: RuntimeError: the kernel has failed",
        ),
    ],
)
async def test_an_error_names_its_step_and_leaves_nothing(
    composed: Composed, value: float, error: type[Exception], text: str
) -> None:
    for name, count in (("twice", 2), ("chain_3", 3), ("chain_6", 6)):
        with pytest.raises(error, match=rf"^ensemble '{name}', step {count} \('double'\): {text}"):
            await composed.infer(name, value / 2 ** (count - 1))
    np.testing.assert_array_equal(await composed.infer("twice", 1.0), rows(1.0) * 4)


async def test_a_step_gets_what_is_left_of_the_deadline(composed: Composed) -> None:
    with pytest.raises(
        RequestTimedOut, match=r"^ensemble 'slow_second', step 2 \('slow'\): Request timeout expired"
    ):
        await composed.infer("slow_second", 1.0, timeout_s=30.0)


@pytest.mark.parametrize("composed", ["process"], indirect=True)
async def test_tensors_are_freed_with_their_last_reader(composed: Composed) -> None:
    """While the last step executes, a long chain has as much memory as a short one."""
    used = []
    for name, count in (("chain_3", 3), ("chain_6", 6)):
        held = asyncio.create_task(composed.infer(name, fake_engine.HELD / 2 ** (count - 1)))
        await until_entered()
        used.append(composed.front_end.memory.used_bytes)
        fake_engine.open_gate()
        await held
        fake_engine.close_gate()
    assert used[0] == used[1] > 0


async def test_a_client_that_leaves_frees_all_tensors_when_its_step_has_ended(composed: Composed) -> None:
    held = asyncio.create_task(composed.infer("chain_3", fake_engine.HELD / 4))
    await until_entered()
    used_bytes = composed.front_end.memory.used_bytes
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    for _ in range(3):
        await composed.front_end.client.report()
    assert composed.front_end.memory.used_bytes == used_bytes > 0, "the step reads its inputs"
    fake_engine.open_gate()
    await composed.front_end.all_released()


@pytest.mark.parametrize("composed", ["process"], indirect=True)
async def test_a_step_under_way_in_a_crash_is_tried_again_and_after_a_second_one_refused(
    composed: Composed,
) -> None:
    front_end = composed.front_end
    assert front_end.supervisor is not None

    async def killed(deaths: int) -> None:
        await until_entered(deaths)
        assert front_end.supervisor is not None
        assert front_end.supervisor.pid is not None
        os.kill(front_end.supervisor.pid, signal.SIGKILL)
        while front_end.client.restarts < deaths or front_end.client.unavailable:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    held = asyncio.create_task(composed.infer("chain_3", fake_engine.HELD / 4))
    waiting = [asyncio.create_task(composed.infer(name, 0.75)) for name in ("twice", "chain_6")]
    await killed(1)
    assert front_end.client.catalog.find("chain_3").is_ready
    await killed(2)
    with refused("EngineFailed", match=r"^ensemble 'chain_3', step 3 \('double'\): .* died twice"):
        await held
    for task, factor in zip(waiting, (4, 64), strict=True):
        np.testing.assert_array_equal(await task, rows(0.75) * factor)


def catalogued(*models: transport_fakes.FakeModel, **ensembles: str) -> transport_fakes.FakeEngine:
    engine = transport_fakes.FakeEngine(*models)
    for name, text in ensembles.items():
        made = ensemble(name, text)
        config = made.config.SerializeToString()
        engine.catalog.update(ModelEntry(name, 1, ModelState.READY, info=made.info, config=config))
    return engine


async def infer_over(engine: transport_fakes.FakeEngine, memory: RequestMemory, name: str, **changes: Any) -> Array:
    front_end = FrontEnd(engine, memory, None)
    info = engine.catalog.require(name)
    with memory.lease() as lease:
        request = replace(front_end.request(lease, info, X=rows(1.0)), **changes)
        return (await ensembles_of(engine).infer(request, info, lease, None)).outputs["Y"].copy()


async def test_steps_without_order_run_at_the_same_time_and_one_failure_ends_the_others() -> None:
    gates = transport_fakes.Gate(), transport_fakes.Gate()
    left, right = (transport_fakes.identity(n, gate=gate) for n, gate in zip(("l", "r"), gates, strict=True))
    sums = transport_fakes.FakeModel(adder(1).info, lambda a, b: {"sum": a + b, "diff": a - b})
    both = config_text(
        X + Y,
        step("l", {"x": "X"}, {"y": "a"}),
        step("r", {"x": "X"}, {"y": "b"}),
        step("adder", {"a": "a", "b": "b"}, {"sum": "Y"}),
    )
    engine, memory = catalogued(left, right, sums, both=both), RequestMemory(1 << 20)
    answer = asyncio.create_task(infer_over(engine, memory, "both"))
    for gate in gates:
        assert await asyncio.to_thread(gate.entered.acquire, timeout=20)
    for gate in gates:
        gate.open()
    np.testing.assert_array_equal(await answer, rows(1.0) * 2)

    def fail(x: Array) -> dict[str, Array]:
        raise RuntimeError("no")

    left.function, left.gate, right.gate = fail, transport_fakes.Gate(), transport_fakes.Gate()
    answer = asyncio.create_task(infer_over(engine, memory, "both"))
    for gate in (left.gate, right.gate):
        assert await asyncio.to_thread(gate.entered.acquire, timeout=20)
    left.gate.open()
    with pytest.raises(ExecutionFailed, match=r"ensemble 'both', step 1 \('l'\): model 'l' failed to execute: no"):
        await answer
    assert right.gate.cancelled.acquire(blocking=False)
    assert memory.used_bytes == 0


async def test_what_each_step_does_is_known_for_the_live_page() -> None:
    """Of a diamond's steps, those that wait for the same number of steps stand together."""
    gate = transport_fakes.Gate()
    sums = transport_fakes.FakeModel(adder(1).info, lambda a, b: {"sum": a + b, "diff": a - b})
    engine = catalogued(transport_fakes.identity("double", gate=gate), sums, diamond=DIAMOND)
    ensembles, memory, info = ensembles_of(engine), RequestMemory(1 << 20), engine.catalog.require("diamond")
    with memory.lease() as lease:
        request = FrontEnd(engine, memory, None).request(lease, info, X=rows(1.0))
        answer = asyncio.create_task(ensembles.infer(request, info, lease, None))
        assert await asyncio.to_thread(gate.entered.acquire, timeout=20)
        stages = ensembles.stages(info.key)
        assert [[step.model for step in stage] for stage in stages] == [["double"], ["double"], ["adder"]]
        assert [stage[0].under_way for stage in stages] == [1, 0, 0]
        report = EngineReport({ModelKey("double", 1): ModelCounters(ModelStatistics(), pending=1)})
        ((first,), *_) = stages_of_ensemble(info.key, ensembles, report)
        assert (first.model, first.running, first.queued, first.took.value) == ("double", 0, 1, None)
        gate.open()
        await answer
    assert [stage[0].under_way for stage in stages] == [0, 0, 0]
    assert all((stage[0].took_s or 0.0) > 0.0 for stage in stages)
    assert ensembles.stages(ModelKey("double", 1)) == []


async def test_an_answer_that_is_not_sent_yet_counts_with_the_outputs_of_its_steps() -> None:
    """gRPC limits the bytes of answers that a connection does not read."""
    engine, memory = catalogued(transport_fakes.identity("double"), twice=TWICE), RequestMemory(1 << 20)
    info = engine.catalog.require("twice")
    with memory.lease() as lease:
        request = FrontEnd(engine, memory, None).request(lease, info, X=rows(1.0, 2.0))
        answer = await ensembles_of(engine).infer(request, info, lease, None)
        assert lease.nbytes == request.inputs["X"].nbytes + answer.outputs["Y"].nbytes == 64
    assert memory.used_bytes == 0


async def test_a_traced_request_has_a_span_for_each_step() -> None:
    engine, memory = catalogued(transport_fakes.identity("double"), twice=TWICE), RequestMemory(1 << 20)
    with Tracer().request("00-" + "a" * 32 + "-" + "b" * 16 + "-01") as trace:
        await infer_over(engine, memory, "twice")
        ended_s = time.monotonic()
        spans = list(stages_of(trace, ended_s))
    assert [name for name, _, _ in spans] == ["double", "double"]
    times = [trace.began_s, *(moment for _, start_s, end_s in spans for moment in (start_s, end_s)), ended_s]
    assert times == sorted(times), "one after the other"
    on_lane = [event for event in events_of(trace, ended_s) if event["ph"] == "X"]
    assert [event["name"] for event in on_lane] == ["double", "double"]


class Replacing(transport_fakes.FakeEngine):
    """An engine whose model is replaced, or unloaded, while its first request waits."""

    replaced: ModelInfo | None = None
    was_asked = False

    async def infer(self, request: Request, *arguments: Any) -> Answer:
        if self.was_asked:
            return await super().infer(request, *arguments)
        self.was_asked = True
        old = self.catalog.find(request.model.name)
        self.catalog.update(replace(old, state=ModelState.UNAVAILABLE, reason="unloaded", info=None))
        if self.replaced is not None:
            self.models = {self.replaced.key: transport_fakes.FakeModel(self.replaced, lambda x: {"y": -x})}
            self._statistics = {self.replaced.key: ModelStatistics()}
            self.catalog.update(ModelEntry("double", self.replaced.version, ModelState.READY, info=self.replaced))
        raise ModelNotFound(*request.model, reason="unloaded")


SLOW_S = {"a": 0.5, "b": 2.0, "c": 4.0}
LATE = {
    "line": config_text(
        X + Y, step("a", {"x": "X"}, {"y": "1"}), step("b", {"x": "1"}, {"y": "2"}), step("c", {"x": "2"}, {"y": "Y"})
    ),
    "fork": config_text(
        X + Y + tensor("output", "Z"),
        step("a", {"x": "X"}, {"y": "1"}), step("b", {"x": "1"}, {"y": "Y"}), step("c", {"x": "1"}, {"y": "Z"}),
    ),
    "inner": config_text(X + Y, step("b", {"x": "X"}, {"y": "1"}), step("c", {"x": "1"}, {"y": "Y"})),
    "outer": config_text(X + Y, step("a", {"x": "X"}, {"y": "1"}), step("inner", {"X": "1"}, {"Y": "Y"})),
}  # fmt: skip


def predicting() -> transport_fakes.FakeEngine:
    engine = catalogued(*map(transport_fakes.identity, SLOW_S), **LATE)
    for name, seconds in SLOW_S.items():
        footprint = ModelFootprint(predicted_s={Bucket(1): seconds, Bucket(8): 3 * seconds})
        engine.catalog.update(replace(engine.catalog.find(name), footprint=footprint))
    return engine


@pytest.mark.parametrize(("name", "after_s"), [("line", 6.0), ("fork", 4.0), ("outer", 6.0)])
async def test_the_first_step_leaves_the_others_their_time_and_a_request_without_it_is_refused_there(
    name: str, after_s: float
) -> None:
    engine, memory = predicting(), RequestMemory(1 << 20)
    first = engine.models[ModelKey("a", 1)]
    following = rf"; the steps after it take at least {after_s * 1e3:.3g} ms".replace("+", r"\+")
    late = rf"^ensemble '{name}', step 1 \('a'\): Request timeout expired: .*{following}$"
    with pytest.raises(RequestTimedOut, match=late):
        await infer_over(engine, memory, name, timeout_s=after_s)
    assert not any(model.requests for model in engine.models.values()), "nothing was executed in vain"
    await infer_over(engine, memory, name, timeout_s=after_s + 5.0)
    (left_s,) = (request.timeout_s for request in first.requests)
    assert left_s is not None
    assert 4.0 < left_s < 5.0
    assert memory.used_bytes == 0


async def test_a_step_that_was_faster_than_predicted_needs_less() -> None:
    engine, memory = predicting(), RequestMemory(1 << 20)
    ensembles = ensembles_of(engine)
    info = engine.catalog.require("line")
    for timeout_s in (100.0, 3.0):
        with memory.lease() as lease:
            request = replace(FrontEnd(engine, memory, None).request(lease, info, X=rows(1.0)), timeout_s=timeout_s)
            await ensembles.infer(request, info, lease, None)


async def test_a_step_whose_model_is_replaced_runs_on_its_successor_and_one_that_is_unloaded_is_refused() -> None:
    model, memory = transport_fakes.identity("double"), RequestMemory(1 << 20)
    for version, others in ((2, {}), (2, {"inputs": tensors(("z", "FP32", (4,)))}), (None, {})):
        engine = Replacing(model)
        made = ensemble("one", config_text(X + Y, ONE))
        config = made.config.SerializeToString()
        engine.catalog.update(ModelEntry("one", 1, ModelState.READY, info=made.info, config=config))
        engine.replaced = None if version is None else replace(model.info, version=version, **others)
        if version is not None and not others:
            np.testing.assert_array_equal(await infer_over(engine, memory, "one"), -rows(1.0))
            continue
        with refused("ModelNotReady", match=r"^ensemble 'one', step 1 \('double'\): .* unloaded"):
            await infer_over(engine, memory, "one")
    assert memory.used_bytes == 0


async def test_a_step_gets_the_priority_of_the_request_and_reads_the_tensor_where_the_last_one_wrote_it() -> None:
    model, memory = transport_fakes.identity("double"), RequestMemory(1 << 20)
    written: list[int | None] = []

    def identity_of(x: Array) -> dict[str, Array]:
        written.append(memory.offset_of(x))
        return {"y": x}

    model.function = identity_of
    engine = catalogued(model, twice=TWICE)
    await infer_over(engine, memory, "twice", priority=3, timeout_s=5.0)
    assert [request.priority for request in model.requests] == [3, 3]
    first, second = (request.timeout_s for request in model.requests)
    assert 5.0 > first > second > 4.0
    assert None not in written
    assert len(set(written)) == 2, "the input of the request, and the output of the first step"
    assert memory.used_bytes == 0
