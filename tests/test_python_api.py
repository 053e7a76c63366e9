"""`cohabit.load`, `cohabit.plan` and `cohabit.Server`, as a program or a notebook uses them."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

import cohabit
from cohabit.flat_call import FlatCall
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


class Applied(nn.Module):
    """Calls a function of a layer and the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.function = function

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self.layer, *inputs, **named)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


VALUES = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
STRUCTURES: dict[str, tuple[Callable[..., Any], Example]] = {
    "numbers, flags, text and None among outputs": (
        lambda f, x: {"y": f(x), "rows": x.shape[0], "more": [None, True, 0.5, "text", (x * 2, None)]},
        VALUES,
    ),
    "an input is returned, twice": (lambda f, x: (x, f(x), x), VALUES),
    "named tuples of the user and of torch": (lambda f, x: Pair(f(x).max(1), None), VALUES),
    "numbers and flags among inputs": (lambda f, x, k, on: f(x) * k if on else x, (VALUES, 3, True)),
    "None in a structure of inputs, by name": (
        lambda f, x, past: f(x) + (past["b"][1] if past["a"] is None else 0),
        {"x": VALUES, "past": {"b": [None, VALUES * 2], "a": None}},
    ),
    "one tensor in two places": (lambda f, x, own: f(x) - own[0] * 2, (VALUES, [VALUES])),
    "a named tuple as input": (lambda f, pair: f(pair.first), (Pair(VALUES, None),)),
    "a size": (lambda f, x: (f(x), x.shape, [x.size()]), VALUES),
    "complex numbers": (lambda f, x: torch.fft.rfft(f(x)), VALUES),
}


def leaves_of(tree: Any) -> list[Any]:
    """The leaves, a size being one: torch would take it apart."""
    return pytree.tree_leaves(tree, is_leaf=lambda value: isinstance(value, torch.Size))


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_and_values_of_inputs_and_outputs_are_the_modules_own(name: str) -> None:
    function, example = STRUCTURES[name]
    module = Applied(function).eval()
    in_order, by_name = ((), example) if isinstance(example, dict) else (example, {})
    in_order = (in_order,) if isinstance(in_order, torch.Tensor) else in_order

    def other(value: Any) -> Any:
        return torch.randn(value.shape) if isinstance(value, torch.Tensor) else value

    with quick(module, example, "1MiB") as loaded, torch.no_grad():
        in_order, by_name = pytree.tree_map(other, (in_order, by_name))
        found, expected = loaded(*in_order, **by_name), module(*in_order, **by_name)
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    for own, eager in zip(leaves_of(found), leaves_of(expected), strict=True):
        assert type(own) is type(eager)
        if isinstance(eager, torch.Tensor):
            torch.testing.assert_close(own, eager)
        else:
            assert own == eager


def test_other_constants_and_structures_than_the_examples_are_refused() -> None:
    module = Applied(lambda f, x, scale, past: f(x) * scale).eval()
    with quick(module, (VALUES, 3, [None, VALUES]), "1MiB") as loaded:
        loaded(VALUES, 3, (None, VALUES))
        for scale in (4, 3.0, True, VALUES):
            with pytest.raises(ValueError, match=r"args_1 is .*; the example was 3, which is a constant"):
                loaded(VALUES, scale, [None, VALUES])
        with pytest.raises(ValueError, match="args_2_1 is None; the example was a tensor"):
            loaded(VALUES, 3, [None, None])
        with pytest.raises(TypeError, match=r"more: \[2\]\[2\]"):
            loaded(VALUES, 3, [None, VALUES, VALUES])
        assert repr(loaded).startswith(
            "<LoadedModule Applied(args_0 float32 [4, 16], args_2_1 float32 [4, 16]) in 1."
        )


CONSTANTS = (
    0,
    False,
    0.0,
    -0.0,
    1,
    True,
    1.0,
    float("nan"),
    0j,
    complex(0.0, -0.0),
    complex(-0.0, 0.0),
    "0",
    b"0",
    None,
)


@pytest.mark.parametrize("own", CONSTANTS, ids=repr)
def test_a_constant_is_the_examples_only_if_no_operation_tells_them_apart(own: Any) -> None:
    call = FlatCall(nn.Identity(), (VALUES, own), {})
    accepted = []
    for value in CONSTANTS:
        with suppress(ValueError):
            call.tensors((VALUES, value), {})
            accepted.append(value)
    assert [repr(value) for value in accepted] == [repr(own)]


@pytest.mark.parametrize("value", [VALUES.to_sparse(), VALUES.to("meta")], ids=["sparse", "meta"])
def test_a_tensor_without_elements_of_its_own_is_refused_by_name(value: torch.Tensor) -> None:
    call = FlatCall(nn.Identity(), (VALUES,), {})
    with pytest.raises(ValueError, match=r"input is a .* tensor; only dense ones work"):
        call.tensors((value,), {})


@pytest.mark.filterwarnings("ignore:`torch.jit.script`", "ignore::DeprecationWarning")
def test_a_scripted_module_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnsupportedModel, match="pass the module that was scripted"):
        cohabit.plan(torch.jit.script(nn.Linear(16, 16).eval()), VALUES, "1MiB")


@pytest.mark.parametrize(
    ("function", "example", "reason"),
    [
        (lambda f, x: x.sum().item(), VALUES, r"output is a number that is read from a tensor \(.item\(\)\)"),
        (lambda f, x: 3, VALUES, "it returns no tensor"),
        (lambda f, x: (f(x), f), VALUES, r"output\[1\] is a torch.nn.modules.linear.Linear"),
        (lambda f, x, y: f(x), (VALUES, np.ones(3)), "input args_1 is a numpy.ndarray"),
        (lambda f, x, y: f(x), (VALUES, VALUES.to_sparse()), "input args_1 is a torch.sparse_coo tensor"),
        (lambda f, k: f.weight * k, (3,), "its example has no tensor"),
        (lambda f, x: f(x) if x.sum() > 0 else x, VALUES, "depends on values, in .*test_python_api.py, line"),
    ],
)
def test_calls_that_no_program_has_are_refused_in_one_line(
    function: Callable[..., Any], example: Example, reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        cohabit.plan(Applied(function).eval(), example, "1MiB")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


class Padded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32))

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padded)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("options", [{}, {"activation": "gelu"}, {"norm_first": True}])
def test_padded_positions_of_an_encoder_are_those_of_eager_pytorch(options: dict[str, Any]) -> None:
    """Its fast path, which torch.export leaves out, fills them with zeros if padding comes last in all rows."""
    torch.manual_seed(0)
    module, x = Padded(**options).eval(), torch.randn(3, 12, 32)
    last = torch.arange(12) >= torch.tensor([[12], [3], [7]])
    with quick(module, (x, torch.zeros_like(last)), "1MiB") as loaded, torch.no_grad():
        for padded in (last, last.flip(1), torch.rand(3, 12) < 0.3, torch.zeros_like(last)):
            torch.testing.assert_close(loaded(x, padded), module(x, padded), rtol=1e-4, atol=1e-5)


class Unlike(nn.Module):
    """Computes something else while it is exported."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_compiling() else torch.where(x > 5, x * 3, x * 2)


def test_a_program_that_is_not_the_module_is_refused() -> None:
    for example in (torch.full((8,), 6.0), torch.tensor([1.0, 9.0])):
        with pytest.raises(UnsupportedModel, match=r"output differs from eager PyTorch's by 0\.\d+ of its largest"):
            quick(Unlike().eval(), example, "1MiB")


class InBfloat16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.softmax(self.layer(x), -1)


def test_autocast_of_the_caller_changes_nothing_and_that_of_the_module_is_kept() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, 8, batch_first=True)).eval()
    x = torch.randn(2, 3, WIDTH)
    with quick(layers, x, "1MiB") as loaded:
        outside = loaded(x)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(loaded(x), outside, rtol=0, atol=0)
            assert torch.is_autocast_enabled("cpu")
            with pytest.raises(ValueError, match="Sequential is loaded inside torch"):
                quick(layers, x, "1MiB")
    own = InBfloat16().eval()
    with quick(own, x, "1MiB") as loaded, torch.no_grad():
        torch.testing.assert_close(loaded(x), own(x), rtol=1e-2, atol=1e-3)


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


def test_texts_are_sent_as_utf_8() -> None:
    made = _converted(np.array([["größer"], ["a"]]), "BYTES")
    assert made.tolist() == [["größer".encode()], [b"a"]]
    assert np_to_triton_dtype(made.dtype) == "BYTES"


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
    assert "TwoInputs, batch 4, in" in capsys.readouterr().out
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
