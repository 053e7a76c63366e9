"""Every example runs as its first lines say, and is at most a page long."""

import asyncio
import json
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from google.protobuf import text_format
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import cohabit
from cohabit.loadgen.client import address_of
from cohabit.loadgen.server_process import running_server
from cohabit.planner.compiled import cache_folder
from cohabit.server.cli import main
from cohabit.server.triton.model_config import ModelConfig
from examples.agent.folders import CHAT
from examples.detection import steps
from examples.photo_library import models as photo_library
from examples.sentences import embed, table
from examples.serve_module import Scorer
from examples.workflows.models import MODELS, WORKFLOWS
from examples.workflows.models import ensemble as workflow
from tests.support.server.fake_kserve import serving_app

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parent.parent / "examples"
PAGE_LINES, FOLDER_LINES = 66, 180
PORTS = ("--http-port", "0", "--grpc-port", "off", "--metrics-port", "off")
START_S, FIRST_START_S = 120.0, 900.0


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder of all of them: one example serves what another has made; compiled code is the user's."""
    folder, compiled = tmp_path_factory.mktemp("examples"), cache_folder()
    assert compiled is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("NUMBA_CACHE_DIR", str(compiled.parent))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        yield folder


@pytest.fixture
def printed_by(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function that runs an example in this process, which has imported torch."""

    def run(example: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [example, *arguments])
        status: object = 0
        try:
            runpy.run_path(str(EXAMPLES / example), run_name="__main__")
        except SystemExit as ended:
            status = ended.code
        assert not status
        return capfd.readouterr().out

    return run


@contextmanager
def served(*command: str, patience_s: float = START_S) -> Iterator[str]:
    """Yields the address, on a loop of its own."""
    with asyncio.Runner() as runner:
        server = running_server(command, patience_s)
        address = address_of(runner.run(server.__aenter__()))
        try:
            yield address
        finally:
            runner.run(server.__aexit__(None, None, None))


def is_score_of_the_module(printed: str) -> bool:
    """Compare what `client.py` prints with the module itself."""
    features = torch.from_numpy(np.random.default_rng(0).uniform(0, 1, (1, 256)).astype(np.float32))
    torch.manual_seed(0)
    expected = Scorer().eval()(features)["score"].item()
    name, _, value = printed.strip().partition(" ")
    return name == "score" and float(value.strip("[]")) == pytest.approx(expected, rel=1e-4)


def test_a_module_is_served_and_then_from_a_bundle(printed_by: Callable[..., str]) -> None:
    with served(sys.executable, str(EXAMPLES / "serve_module.py"), "--memory", "1MiB", *PORTS) as address:
        assert is_score_of_the_module(printed_by("client.py", "scorer", address))
    with served("sh", str(EXAMPLES / "bundle.sh"), *PORTS) as address:
        assert is_score_of_the_module(printed_by("client.py", "scorer", address))


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("huggingface.py", "tiny_bert can be served"),
        ("module_in_budget.py", "in 50% of the weights' memory, largest difference"),
        ("train_in_little_memory.py", "the same as PyTorch's"),
        ("train_with_trainer.py", "the same as the Trainer's"),
        ("train_with_lightning.py", "the same as Lightning's"),
    ],
)
def test_an_example_runs(example: str, printed: str, printed_by: Callable[..., str]) -> None:
    assert printed in printed_by(example)


def put_step(
    repository: Path, step: nn.Module | Callable[..., dict[str, torch.Tensor]], name: str, *given: Any
) -> Any:
    """Export a step as `cohabit import` does, and return its outputs."""
    module = step if isinstance(step, nn.Module) else nn.Module()
    if module is not step:
        module.forward = step
    (repository / name / "1").mkdir(parents=True)
    torch.export.save(torch.export.export(module, given), repository / name / "1" / "model.pt2")
    with torch.no_grad():
        return module(*given)


@pytest.mark.slow
def test_an_ensemble_of_functions_and_networks_answers_as_eager_pytorch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of boxes depends on the image; networks of 16 channels stand for those of 512."""
    monkeypatch.setattr(steps, "CHANNELS", 16)
    repository = folder / "detection"
    image, detector, classifier = torch.zeros(480, 640, 3, dtype=torch.uint8), steps.detector(), steps.classifier()
    pixels = put_step(repository, steps.prepare, "prepare", image)["pixels"]
    raw = put_step(repository, detector, "detector", pixels)["found"]
    boxes = put_step(repository, steps.select, "select", raw)["boxes"]
    crops = put_step(repository, steps.crop, "crop", pixels, boxes)["crops"]
    put_step(repository, classifier, "classifier", crops)
    (repository / "find" / "1").mkdir(parents=True)
    shutil.copy(EXAMPLES / "detection" / "config.pbtxt", repository / "find")
    counts = set()
    with cohabit.Server(repository, "12MiB") as server:
        for seed in range(6):
            drawn = np.random.default_rng(seed).integers(0, 256, (480, 640, 3))
            image = torch.from_numpy((drawn * (seed / 5)).astype(np.uint8))
            answer = server.infer("find", image=image.numpy())
            with torch.no_grad():
                pixels = steps.prepare(image)["pixels"]
                found = steps.select(detector(pixels)["found"])
                classes = classifier(steps.crop(pixels, found["boxes"])["crops"])["found"]
            for name, expected in {**found, "classes": classes}.items():
                np.testing.assert_allclose(answer[name], expected, rtol=1e-3, atol=1e-4)
            counts.add(int(answer["count"][0]))
    assert len(counts) > 1


@pytest.fixture(scope="module")
def selecting() -> nn.Module:
    """The exported step of the example "detection"."""
    module = nn.Module()
    module.forward = steps.select
    exported: nn.Module = torch.export.export(module, (torch.randn(1, 3, 16, 16),)).module()
    return exported


@pytest.mark.parametrize("seed", range(20))
def test_boxes_are_suppressed_as_one_by_one(selecting: nn.Module, seed: int) -> None:
    """Compare the exported loop over masks with the usual form: take the best box, drop what overlaps it."""
    raw = 3 * torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    order = raw[0, 2].flatten().sigmoid().argsort(descending=True)[: steps.TRIED].tolist()
    left = [n for n in order if raw[0, 2].flatten()[n].sigmoid() > steps.LEAST]
    taken: list[list[float]] = []
    while left and len(taken) < steps.MOST:
        taken.append(box_of(raw, left[0]))
        left = [n for n in left[1:] if overlap(taken[-1], box_of(raw, n)) <= 0.3]
    found = selecting(raw)
    assert int(found["count"]) == len(taken)
    np.testing.assert_allclose(found["boxes"][: len(taken)], np.array(taken).reshape(-1, 4), rtol=1e-5)
    assert not found["boxes"][len(taken) :].any()


def box_of(raw: torch.Tensor, patch: int) -> list[float]:
    row, column = divmod(patch, 16)
    half = [0.05 + float(raw[0, side, row, column].sigmoid()) / 10 for side in (0, 1)]
    center = [(row + 0.5) / 16, (column + 0.5) / 16]
    return [center[0] - half[0], center[1] - half[1], center[0] + half[0], center[1] + half[1]]


def overlap(a: list[float], b: list[float]) -> float:
    shared = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return shared / (areas - shared)


def test_a_plan_made_by_hand_is_shown(printed_by: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    assert "resident 24.0 ms" in printed_by("plan.py")
    assert main(["show", "plans/chain.plan.json"]) == 0
    assert "chain, batch 1, in 16.0 MiB" in capfd.readouterr().out


PUBLIC_SIZES = {
    "clip_image": 87_849_216,
    "clip_text": 63_428_096,
    "face_detector": 16.9e6 / 4,
    "face_embedder": 174.4e6 / 4,
    "ocr_detector": 4.7e6 / 4,
    "ocr_recognizer": 16.5e6 / 4,
}
"""Parameters: CLIP ViT-B/32's as published, and those of buffalo_l's and PP-OCRv5 mobile's files."""


@pytest.mark.parametrize(("name", "parameters"), PUBLIC_SIZES.items())
def test_a_model_of_the_photo_library_has_its_public_size(name: str, parameters: float) -> None:
    with torch.device("meta"):
        module = getattr(photo_library, name)()
    within = 0.0 if name.startswith("clip") else 0.2
    assert sum(parameter.numel() for parameter in module.parameters()) == pytest.approx(parameters, rel=within)


def test_the_agents_chat_model_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**CHAT))
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def test_six_workflows_run_three_to_five_of_twelve_models_each() -> None:
    run = {
        name: [
            step.model_name for step in text_format.Parse(workflow(models), ModelConfig()).ensemble_scheduling.step
        ]
        for name, models in WORKFLOWS.items()
    }
    assert len(run) == 6
    assert {len(set(steps)) for steps in run.values()} == {3, 4, 5}
    assert {model for steps in run.values() for model in steps} == set(MODELS)
    assert len(MODELS) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("photo_library", "cosines of the search:"),
        ("workflows", "the same answers"),
        ("agent", " tokens: "),
        ("detection", " objects are found:"),
    ],
)
def test_an_example_with_several_models_is_served_and_asked(
    example: str, printed: str, folder: Path, monkeypatch: pytest.MonkeyPatch, printed_by: Callable[..., str]
) -> None:
    monkeypatch.setenv("MODELS", str(folder / example))
    with served("sh", str(EXAMPLES / example / "run.sh"), *PORTS, patience_s=FIRST_START_S) as address:
        text = printed_by(f"{example}/client.py", address)
    assert printed in text
    assert "other answers" not in text


LENGTH = 12


async def metadata(request: web.Request) -> web.Response:
    inputs = [{"name": n, "datatype": "INT64", "shape": [-1, LENGTH]} for n in ("input_ids", "attention_mask")]
    return web.json_response({"name": "minilm", "inputs": inputs, "outputs": []})


async def count_tokens(request: web.Request) -> web.Response:
    """Answer as an embedding, in binary as servers do, the number of tokens that the mask lets through, and 1."""
    body = await request.read()
    head = json.loads(body[: int(request.headers["Inference-Header-Content-Length"])])
    assert [i["name"] for i in head["inputs"]] == ["input_ids", "attention_mask"]
    ids, mask = np.frombuffer(body[-2 * 3 * LENGTH * 8 :], np.int64).reshape(2, 3, LENGTH)
    assert (ids[mask == 0] == 0).all()
    vectors = np.array([[float(n), 1.0] for n in mask.sum(axis=1)], np.float32).tobytes()
    size = {"binary_data_size": len(vectors)}
    output = {"name": "embedding", "datatype": "FP32", "shape": [3, 2], "parameters": size}
    answer = json.dumps({"model_name": "minilm", "model_version": "1", "outputs": [output]}).encode()
    return web.Response(body=answer + vectors, headers={"Inference-Header-Content-Length": str(len(answer))})


async def test_sentences_are_cut_and_padded_to_the_models_length() -> None:
    app = web.Application()
    app.router.add_get("/v2/models/minilm", metadata)
    app.router.add_post("/v2/models/minilm/infer", count_tokens)
    sentences = ["Hello.", "One two three.", "word " * 50]
    async with serving_app(app) as url:
        vectors = await asyncio.to_thread(embed, address_of(url), sentences)
    counts = np.array([4.0, 6.0, LENGTH])
    np.testing.assert_allclose(vectors[:, 0] / vectors[:, 1], counts, rtol=1e-5)
    assert table(["a", "b"], np.array([[1.0, 0.0], [0.6, 0.8]], np.float32)).split() == [
        *("a", "1.000", "0.600"),
        *("b", "0.600", "1.000"),
    ]


def test_every_example_is_a_page_and_has_a_test() -> None:
    tested = Path(__file__).read_text() + (Path(__file__).parent / "runtime" / "test_tiling_command.py").read_text()
    for example in (path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".sh")):
        of_folder = example.parent != EXAMPLES
        assert len(example.read_text().splitlines()) <= (FOLDER_LINES if of_folder else PAGE_LINES), example
        name = f'"{example.parent.name}"' if of_folder else example.name
        assert name in tested or f"examples.{example.stem} " in tested, example
