"""`cohabit.load`, `cohabit.plan` and `cohabit.Server`, as a program or a notebook uses them."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

import cohabit
from cohabit.loadgen.client import address_of
from cohabit.loadgen.errors import ServerFailed
from cohabit.module import Example
from cohabit.planner.errors import InfeasibleBudget
from cohabit.runtime.errors import UnsupportedModel
from cohabit.serving import _converted

pytestmark = pytest.mark.process

WIDTH = 256
NOTEBOOK = Path(__file__).parent.parent / "examples" / "plan.ipynb"


class TwoInputs(nn.Module):
    """Takes inputs by name, and returns tensors in a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, object]:
        for layer in self.layers:
            x = torch.relu(layer(x)) * scale
        return {"last": x, "means": (x.mean(0), x.mean())}


def quick(module: nn.Module, example: Example, memory: int | str, **options: Any) -> cohabit.LoadedModule:
    return cohabit.load(module, example, memory, search_seconds=0.2, **options)


class Masking(nn.Module):
    """Changes its input, which the caller keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 0
        return x * 2


def test_inputs_that_a_module_changes_are_named_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(2, 4)
    with quick(Masking().eval(), x.clone(), "1MiB") as loaded:
        given = x.clone()
        assert torch.equal(loaded(given), Masking()(x.clone()))
    assert torch.equal(given, x)
    assert "inputs x: the program changes them in place, which callers do not see" in caplog.text


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return TwoInputs().eval()


@pytest.fixture(scope="module")
def example() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, WIDTH), "scale": torch.tensor(1.5)}


@pytest.fixture(scope="module")
def loaded(module: nn.Module, example: dict[str, torch.Tensor]) -> Iterator[cohabit.LoadedModule]:
    with quick(module, example, "60%") as loaded:
        yield loaded


def test_importing_the_package_imports_no_torch() -> None:
    program = "import cohabit, sys; assert 'load' in dir(cohabit); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


def test_what_there_is_not_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        cohabit.lode  # noqa: B018


def test_a_loaded_module_answers_as_the_module_in_its_structure(
    loaded: cohabit.LoadedModule, module: nn.Module
) -> None:
    x, scale = torch.randn(4, WIDTH), torch.tensor(0.5)
    kept = x.clone()
    answer = loaded(x=x, scale=scale)
    with torch.no_grad():
        expected = module(x, scale)
    torch.testing.assert_close(answer, expected)
    torch.testing.assert_close(loaded(scale=scale, x=x), answer, rtol=0, atol=0)
    assert torch.equal(x, kept)
    answer["last"].add_(1)  # outputs are the caller's, and no tensors of inference mode


def test_memory_holds_less_than_all_weights(loaded: cohabit.LoadedModule, module: nn.Module) -> None:
    weights = loaded.plan.graph.parameter_bytes
    assert weights >= sum(parameter.nbytes for parameter in module.parameters())
    assert loaded.plan.memory_bytes <= 0.6 * weights + 1
    assert 0 < loaded.plan.peak <= loaded.plan.memory_bytes
    assert sum(loaded.plan.graph.tensors[p.tensor].nbytes for p in loaded.plan.plan.residents) < weights


def test_threads_may_call_at_once(loaded: cohabit.LoadedModule, module: nn.Module) -> None:
    inputs = [torch.randn(4, WIDTH) for _ in range(4)]
    answers: dict[int, dict[str, torch.Tensor]] = {}

    def call(number: int) -> None:
        answers[number] = loaded(x=inputs[number], scale=torch.tensor(1.0))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, x in enumerate(inputs):
        torch.testing.assert_close(answers[number]["last"], module(x, torch.tensor(1.0))["last"])


def test_settings_of_torch_stay_as_they_are(loaded: cohabit.LoadedModule, example: dict[str, torch.Tensor]) -> None:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        for kept in (False, True):
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(kept, warn_only=True)
            loaded(**example)
            assert torch.get_num_threads() == 1
            assert torch.are_deterministic_algorithms_enabled() is kept
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=True)


def test_other_inputs_than_the_examples_are_refused(loaded: cohabit.LoadedModule) -> None:
    x, scale = torch.randn(4, WIDTH), torch.tensor(1.0)
    with pytest.raises(TypeError, match=r"1 inputs in order and \['scale'\] by name; the example had 0 in order"):
        loaded(x, scale=scale)
    with pytest.raises(
        ValueError, match=r"x is torch.float32 \[3, 256\]; the example was torch.float32 \[4, 256\]"
    ):
        loaded(x=x[:3], scale=scale)
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        loaded(x=x.double(), scale=scale)


def test_a_module_runs_from_a_file_whose_folder_is_gone() -> None:
    torch.manual_seed(1)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).eval()
    x = torch.randn(1, WIDTH)
    with quick(layers, x, "60%", store="file") as small:
        torch.testing.assert_close(small(x), layers(x).detach())


def test_a_closed_module_raises_instead_of_answering_or_waiting(module: nn.Module) -> None:
    """With copies it waited for ever; without any it answered from memory that was given back."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).eval()
    for memory in ("60%", "200%"):
        small = quick(layers, torch.zeros(1, WIDTH), memory)
        small.close()
        small.close()
        with pytest.raises(RuntimeError, match="the module was closed"):
            small(torch.zeros(1, WIDTH))


def test_numbers_are_converted_where_nothing_is_lost() -> None:
    halves, whole = np.array([0.5, 1.0]), np.array([3, 4])
    assert _converted(halves, "FP32").dtype == np.float32
    assert _converted(whole, "INT32").dtype == np.int32
    assert _converted(whole, "FP32").dtype == np.float32
    assert _converted(whole.astype(float), "INT64").dtype == np.int64
    for kept, datatype in (
        (halves, "INT64"),
        (np.array([1 << 40]), "INT32"),
        (np.array([1e300]), "FP32"),
        (np.array([-1]), "UINT8"),
        (halves, "BYTES"),
        (halves, None),
        (np.array(["text"], object), "FP32"),
    ):
        assert _converted(kept, datatype) is kept


def test_a_plan_is_drawn_in_notebooks_and_terminals(
    loaded: cohabit.LoadedModule, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = loaded.plan
    assert plan._repr_html_().startswith("<iframe")
    assert "TwoInputs" in plan.to_html()
    plan.show()
    assert "TwoInputs, batch 1, in" in capsys.readouterr().out
    assert plan.latency_s >= plan.bound_s > 0
    assert plan.gap == pytest.approx(plan.latency_s / plan.bound_s - 1)
    assert repr(plan).startswith("<ModulePlan TwoInputs in 0.9 MiB: ")


def test_what_does_not_fit_or_cannot_be_exported_is_refused(
    module: nn.Module, example: dict[str, torch.Tensor]
) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(InfeasibleBudget, match="needs a budget of"):
        cohabit.plan(module, example, "1KiB")
    with pytest.raises(UnsupportedModel, match="Branches cannot be exported: "):
        cohabit.plan(Branches().eval(), torch.randn(2), "1MiB")
    with pytest.raises(ValueError, match=r"Branches is in training mode; call .eval\(\) first"):
        cohabit.load(Branches(), torch.randn(2), "1MiB")
    with pytest.raises(ValueError, match="'plenty' is not a size"):
        cohabit.plan(module, example, "plenty")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "scorer" / "1").mkdir(parents=True)
    torch.manual_seed(0)
    exported = torch.export.export(nn.Linear(8, 2).eval(), (torch.zeros(2, 8),))
    torch.export.save(exported, folder / "scorer" / "1" / "model.pt2")
    return folder


async def test_a_server_serves_a_block_inside_a_running_event_loop(repository: Path, tmp_path: Path) -> None:
    """As in a notebook, whose cells run in a loop."""
    assert asyncio.get_running_loop().is_running()
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 2).eval(), np.ones((2, 8), np.float32)
    with cohabit.Server(repository, "1MiB", "--cache", str(tmp_path), "--engine", "in-process") as server:
        expected = linear(torch.from_numpy(x)).detach().numpy()
        for given in (x, x.astype(np.float64)):
            np.testing.assert_allclose(
                server.infer("scorer", input=given)["output"], expected, rtol=1e-5, atol=1e-6
            )
        assert server.client.is_model_ready("scorer")
        with pytest.raises(InferenceServerException, match="nobody"):
            server.infer("nobody", input=x)
    with pytest.raises(OSError, match="refused"):
        InferenceServerClient(address_of(server.url)).is_server_live()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="does not exist"), cohabit.Server(tmp_path / "missing", "1MiB"):
        pass


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 2
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
