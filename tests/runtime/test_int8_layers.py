"""Layers with weights in int8: the kernel beside float64, and models at every budget beside eager PyTorch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering import fusion
from cohabit.runtime.lowering.encoding import int8_kernel, int8_layers
from cohabit.runtime.lowering.encoding.choice import LEAST_COSINE, cosine
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.rewrites import linear_forms
from cohabit.runtime.lowering.rewrites.linear_forms import forms_of
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from tests.support.runtime import models
from tests.support.runtime.backends import cpu, opened
from tests.support.runtime.plans import streaming_plan

IN_INT8 = Options(packed=True, weights="int8")


def operands(rows: int, outputs: int, inputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of different sizes, a weight, and outputs' scales and biases."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, inputs)) * 10.0 ** generator.integers(-9, 9, (rows, 1))
    weight = generator.integers(-127, 128, (outputs, inputs))
    terms = generator.standard_normal((2, outputs))
    return torch.from_numpy(x).float(), torch.from_numpy(weight).to(torch.int8), torch.from_numpy(terms).float()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 9), st.integers(1, 70), st.integers(0, 99))
def test_a_row_is_its_product_in_float64_whatever_rows_are_beside_it(
    rows: int, fours: int, sixteens: int, seed: int
) -> None:
    x, weight, terms = operands(rows, 4 * fours, 16 * sixteens, seed)
    found = int8_kernel.product(x, weight, terms)
    scale, bias = terms.double()
    expected = x.double() @ weight.double().T * scale + bias
    # Each input is rounded by at most half a step, and each sum once.
    step = x.double().abs().amax(1, keepdim=True) / min(32767, (2**31 - 1) // (127 * x.shape[1]))
    error = (step / 2 * weight.double().abs().sum(1) * scale.abs()) + 1e-6 * (expected.abs() + bias.abs())
    assert bool(((found - expected).abs() <= 1.01 * error + 1e-6 * step * scale.abs() * 1e4).all())
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(int8_kernel.product(x[row : row + 1], weight, terms)[0], found[row])


@pytest.mark.parametrize("largest", [16, 512, 8192, int8_kernel.MOST_INPUTS])
def test_sums_of_the_largest_numbers_do_not_overflow(largest: int) -> None:
    x, weight, terms = (
        torch.full((3, largest), 2.0),
        torch.full((4, largest), 127, dtype=torch.int8),
        torch.ones(2, 4),
    )
    expected = 2.0 * 127 * largest + 1
    found = int8_kernel.product(torch.cat([x, -x]), weight, terms)
    np.testing.assert_allclose(found[:3], expected, rtol=1e-5)
    np.testing.assert_allclose(found[3:], 2 - expected, rtol=1e-5)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_number_and_changes_no_other_row(broken: float) -> None:
    x, weight, terms = operands(5, 8, 32, 0)
    expected = int8_kernel.product(x, weight, terms)
    x[2, 7] = broken
    found = int8_kernel.product(x, weight, terms)
    assert bool(found[2].isnan().all())
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], expected[others])


def test_zeros_and_no_rows_give_biases_and_nothing() -> None:
    _, weight, terms = operands(1, 8, 32, 0)
    assert torch.equal(int8_kernel.product(torch.zeros(2, 32), weight, terms), terms[1].expand(2, 8))
    assert int8_kernel.product(torch.zeros(0, 32), weight, terms).shape == (0, 8)


class Products(nn.Module):
    """Layers alone, before each activation function, with a residual, without a bias, and with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 128), nn.Linear(128, 64, bias=False), nn.Linear(64, 64)
        self.odd, self.tied = nn.Linear(64, 67), nn.Linear(64, 64)
        self.tied.weight = self.c.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(nn.functional.gelu(self.a(x))) + x
        y = self.b(torch.tanh(self.a(y))) + self.c(nn.functional.silu(self.c(y)))
        y = self.c(nn.functional.leaky_relu(self.c(torch.relu(self.c(y))), 0.2))
        return self.odd(y) * torch.sigmoid(self.tied(y[:, 0]))[:, None, :1]


class Points(nn.Module):
    """1x1 convolutions, alone, before an activation function, and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3)
        self.a, self.b = nn.Conv2d(64, 128, 1), nn.Conv2d(128, 64, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return (self.b(nn.functional.silu(self.a(x))) + x).mean((2, 3))


def lowered_in_int8(model: nn.Module, x: torch.Tensor, folder: Path, patch: pytest.MonkeyPatch) -> Lowered:
    patch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    patch.setattr(int8_layers, "computes_in_int8", lambda shape: True)
    return models.lowered(model, {"x": x}, folder, "m", [1, 2], options=IN_INT8)


@pytest.mark.parametrize(
    ("make", "shape", "layers"), [(Products, (5, 64), 9), (Points, (3, 9, 9), 1)], ids=["products", "points"]
)
def test_layers_in_int8_have_the_same_bits_at_every_budget_and_close_to_eager_outputs(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    layers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    lowered = lowered_in_int8(model, torch.zeros(3, *shape), tmp_path, monkeypatch)
    targets = [call.target for call in lowered.traces[Bucket(2)].instructions]
    assert forms_of(targets)["int8"] >= layers
    x = torch.randn(2, *shape)
    with opened(cpu, lowered) as bench, torch.no_grad():
        plans = (resident_plan(bench.graph), streaming_plan(bench.graph))
        found = [bench.executor.run(bench.program(plan), [x.clone()]).outputs[0].clone() for plan in plans]
    assert torch.equal(found[0], found[1])
    with torch.no_grad():
        assert cosine(found[0].double(), model(x).double()) > LEAST_COSINE
    pieces = {piece.name: piece for segment in lowered.manifest.segments for piece in segment.pieces}
    stored = [piece for name, piece in pieces.items() if name.endswith("_int8")]
    assert stored
    assert all(piece.dtype == "int8" and piece.codec == "plain" for piece in stored)
    assert lowered.weight_bytes > lowered.manifest.segment_bytes, "shares of memory are those of float32"


def test_a_layer_stays_in_float32_where_that_is_faster_and_the_answer_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    seconds = {"int8": 1.0, "packed": 0.8, "plain": 0.95}
    monkeypatch.setattr(linear_forms, "_seconds_of", lambda shape, timed, forms: seconds)
    shape = linear_forms.LayerShape(
        64, 48, (8,), (1,), has_bias=True, fused=None, adds=False, packs=True, threads=1
    )
    plain = linear_forms.LayerShape(
        64, 48, (8,), (1,), has_bias=True, fused=None, adds=False, packs=False, threads=1
    )
    for _ in range(2):
        linear_forms.computes_in_int8.cache_clear()
        assert not linear_forms.computes_in_int8(shape)
        assert linear_forms.computes_in_int8(plain), "a gain this small may be noise"
        seconds = {"int8": 0.1, "packed": 1.0, "plain": 1.0}
    linear_forms.computes_in_int8.cache_clear()
