"""Functions that models spell out become one op, and what only resembles them stays as it is."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering import fusion, packing
from cohabit.runtime.lowering.lower import lower
from cohabit.runtime.lowering.rewrites import linear_forms
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from tests.support.runtime import models
from tests.support.runtime.backends import cpu, opened
from tests.support.runtime.mixing import Computed
from tests.support.runtime.plans import streaming_plan

pytestmark = pytest.mark.skipif(packing.unavailable() is not None, reason=str(packing.unavailable()))
Function = Callable[[torch.Tensor], torch.Tensor]
ROOT = math.sqrt(2 / math.pi)

GELUS: dict[str, Function] = {
    "transformers": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "few digits": lambda x: 0.5 * x * (torch.tanh((torch.pow(x, 3) * 0.044715 + x) * 0.7978845608) + 1),
    "products": lambda x: (1 + torch.tanh(ROOT * (x + 0.044715 * (x * x * x)))) * (x * 0.5),
}
NO_GELUS: dict[str, Function] = {
    "another constant": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.05 * torch.pow(x, 3.0)))),
    "another power": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 5.0)))),
    "another summand": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x.sin() + 0.044715 * torch.pow(x, 3.0)))),
    "another half": lambda x: 0.5 * x.cos() * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
}


def lowered_ops(model: nn.Module, folder: Path) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """The targets of the lowered program's ops, its answer, and eager PyTorch's."""
    lowered = models.lowered(
        model.eval(), {"x": torch.zeros(3, 5, 24)}, folder, "m", [1, 2], options=Options(packed=True)
    )
    assert lowered.validation is not None
    assert lowered.validation.left_out == ()
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    with opened(cpu, lowered) as bench, torch.no_grad():
        program = bench.program(resident_plan(bench.graph))
        answer = bench.executor.run(program, [x.clone()]).outputs[0].clone()
        return [op.target for op in bench.graph.ops], answer, model(x)


@pytest.mark.parametrize("name", GELUS)
def test_gelu_that_is_spelled_out_is_one_op(name: str, tmp_path: Path) -> None:
    targets, answer, expected = lowered_ops(Computed(GELUS[name]), tmp_path)
    assert targets == ["aten.gelu.default"]
    torch.testing.assert_close(answer, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", NO_GELUS)
def test_what_resembles_gelu_stays(name: str, tmp_path: Path) -> None:
    targets, answer, expected = lowered_ops(Computed(NO_GELUS[name]), tmp_path)
    assert not any("gelu" in target for target in targets)
    torch.testing.assert_close(answer, expected, atol=1e-6, rtol=1e-6)


class Norm(nn.Module):
    def __init__(self, dim: int = -1, times: int = 1) -> None:
        super().__init__()
        self.weight, self.dim, self.times = nn.Parameter(torch.randn(24)), dim, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(self.dim, keepdim=True) + 1e-5)
        return self.weight * (x * scale) + (scale if self.times > 1 else 0)


class CastNorm(Norm):
    """As transformers has it, with casts for lower precisions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


@pytest.mark.parametrize("model", [Norm(), CastNorm()], ids=["plain", "with casts"])
def test_root_mean_square_norm_is_one_op(model: nn.Module, tmp_path: Path) -> None:
    targets, answer, expected = lowered_ops(model, tmp_path)
    assert "rms_norm" in targets
    assert not any("rsqrt" in target or "mean" in target for target in targets)
    torch.testing.assert_close(answer, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("model", [Norm(dim=1), Norm(times=2)], ids=["over another dimension", "its scale is read"])
def test_what_resembles_a_norm_stays(model: nn.Module, tmp_path: Path) -> None:
    targets, answer, expected = lowered_ops(model, tmp_path)
    assert "rms_norm" not in targets
    torch.testing.assert_close(answer, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.to(torch.float64).to(torch.float32),
        lambda x: x.to(torch.bfloat16).to(torch.float32),
        lambda x: x.to(torch.float32).to(memory_format=torch.preserve_format) + 0,
        lambda x: x.mT.to(torch.float32, memory_format=torch.contiguous_format).view(x.shape[0], 24, 5).mT,
    ],
    ids=["there and back", "rounded", "none", "laid out differently"],
)
def test_casts_that_change_something_stay(cast: Function, tmp_path: Path) -> None:
    _, answer, expected = lowered_ops(Computed(cast), tmp_path)
    torch.testing.assert_close(answer, expected, atol=0, rtol=0)


class Layers(nn.Module):
    """Linear layers with and without a bias, an activation function, a residual, and rows in two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(24, 48), nn.Linear(48, 24, bias=False), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(nn.functional.gelu(self.a(x)))
        return torch.tanh(self.c(y) + x) + self.a(x[:, 0])[:, None, :24]


@pytest.mark.parametrize(
    ("form", "by_columns"), [("plain", False), ("plain", True), ("transposed", False), ("packed", False)]
)
def test_each_form_of_a_layer_is_right_at_every_budget(
    form: str, by_columns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    if by_columns:
        monkeypatch.setattr(fusion, "LEAST_BY_COLUMNS", 0)
    monkeypatch.setattr(fusion, "fastest", lambda shape: form)
    torch.manual_seed(0)
    model = Layers().eval()
    lowered = models.lowered(
        model, {"x": torch.zeros(3, 5, 24)}, tmp_path, "m", [1, 2], options=Options(packed=True)
    )
    assert lowered.validation is not None
    assert lowered.validation.left_out == ()
    targets = {op.target for op in lowered.graphs[Bucket(2)].ops}
    kind = {
        "plain": "linear_by_columns" if by_columns else "aten.linear.default",
        "transposed": "linear_transposed",
        "packed": "mkldnn._linear_pointwise",
    }
    assert any(kind[form] in target for target in targets)
    x = torch.randn(2, 5, 24)
    with opened(cpu, lowered) as bench, torch.no_grad():
        plans = (resident_plan(bench.graph), streaming_plan(bench.graph))
        found = [bench.executor.run(bench.program(plan), [x.clone()]).outputs[0].clone() for plan in plans]
        torch.testing.assert_close(found[0], model(x), atol=1e-5, rtol=1e-5)
        assert torch.equal(found[0], found[1])


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty table of forms, in use by this process until the end of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    linear_forms.fastest.cache_clear()
    yield tmp_path / "user" / "cohabit" / "choices"
    linear_forms.fastest.cache_clear()


SHAPE = linear_forms.LayerShape(
    64, 48, (1, 4), (1, 1), has_bias=True, fused=("gelu", (), "none"), adds=False, packs=True, threads=1
)


def measured_as(form: linear_forms.Form) -> Callable[..., linear_forms.Form]:
    """What measures a layer, and finds this form fastest."""
    return lambda shape, timed: form


@pytest.mark.parametrize(
    ("timed", "seconds", "form"),
    [
        (((1, 1), (64, 64)), {"plain": (5, 99), "transposed": (5, 99), "packed": (9, 64)}, "plain"),
        (((1, 1), (64, 1)), {"plain": (5, 99), "transposed": (5, 99), "packed": (9, 64)}, "packed"),
        (((1, 1), (4, 1)), {"plain": (9, 9), "transposed": (5, 6), "packed": (9, 9)}, "transposed"),
        (((1, 1), (4, 1)), {"plain": (9, 9), "transposed": (9, 8), "packed": (9, 9)}, "packed"),
    ],
)
def test_a_form_is_chosen_by_its_times_at_all_sizes_of_batches_and_requests(
    timed: Sequence[tuple[int, int]],
    seconds: dict[linear_forms.Form, tuple[float, ...]],
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text has a step for each token, and one for 64 tokens of its prompt: these count less."""
    in_order = iter([seconds[each][n] for each in ("plain", "transposed", "packed") for n in range(len(timed))])
    monkeypatch.setattr(linear_forms, "cold_seconds", lambda calls: next(in_order))
    assert linear_forms._measured(SHAPE, timed) == form


def test_layers_are_measured_with_the_rows_of_sizes_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[linear_forms.LayerShape] = []
    monkeypatch.setattr(fusion, "fastest", lambda shape: measured.append(shape) or "plain")
    tokens = torch.export.Dim("tokens", min=1, max=64)
    program = torch.export.export(
        nn.Sequential(nn.Linear(24, 48)).eval(),
        (torch.zeros(3, 5, 24),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8), 1: tokens},),
    )
    torch.export.save(program, tmp_path / "m.pt2")
    lower(tmp_path / "m.pt2", "m", [1, 2], tmp_path / "cache", options=Options(packed=True))
    (shape,) = measured
    assert shape.rows == (1, 2, 16, 32, 64, 128)
    assert shape.lengths == (1, 1, 16, 16, 32, 64)


@pytest.mark.parametrize("packs", [True, False])
def test_what_takes_long_is_not_measured(table: Path, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_forms, "_measured", lambda shape, timed: pytest.fail("it was measured"))
    large = msgspec.structs.replace(SHAPE, inputs=4096, outputs=4096, rows=(64, 128), packs=packs)
    assert linear_forms.fastest(large) == ("packed" if packs else "plain")


def test_processes_that_measure_at_a_time_take_the_form_that_was_written_first(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(shape: linear_forms.LayerShape, timed: Sequence[int]) -> linear_forms.Form:
        monkeypatch.setattr(linear_forms, "_measured", measured_as("plain"))
        assert linear_forms.fastest(SHAPE) == "plain"  # as another process, meanwhile
        return "transposed"

    monkeypatch.setattr(linear_forms, "_measured", measured)
    assert linear_forms.fastest(SHAPE) == "plain"


def test_a_damaged_form_is_measured_again_and_replaced(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_forms, "_measured", measured_as("plain"))
    linear_forms.fastest(SHAPE)
    (path,) = table.glob("*/*.json")
    path.write_bytes(path.read_bytes()[:-3])
    for form in ("transposed", "packed"):
        linear_forms.fastest.cache_clear()
        monkeypatch.setattr(linear_forms, "_measured", measured_as(form))
        assert linear_forms.fastest(SHAPE) == "transposed"


def test_without_a_place_for_the_table_each_process_measures(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table.parent.parent.write_text("a file where the folder should be")
    for form in ("plain", "transposed"):
        linear_forms.fastest.cache_clear()
        monkeypatch.setattr(linear_forms, "_measured", measured_as(form))
        assert linear_forms.fastest(SHAPE) == form


def test_a_model_in_two_caches_has_the_same_weights(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the measurements come out the second time."""
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    found = []
    for form in ("transposed", "packed"):
        linear_forms.fastest.cache_clear()
        monkeypatch.setattr(linear_forms, "_measured", measured_as(form))
        torch.manual_seed(0)
        lowered = models.lowered(
            Layers().eval(), {"x": torch.zeros(3, 5, 24)}, tmp_path / form, "m", [2], options=Options(packed=True)
        )
        found.append(lowered.weights_path.read_bytes())
    assert found[0] == found[1]
