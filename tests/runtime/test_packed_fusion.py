"""Every pattern of the fusion table becomes one call of oneDNN's, and computes what eager PyTorch computes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from cohabit.planner.shapes import Bucket
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering import fusion, packing
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.lowering.rewrites import slicing
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from tests.support.runtime import models
from tests.support.runtime.backends import cpu, opened
from tests.support.runtime.plans import streaming_plan

pytestmark = pytest.mark.skipif(packing.unavailable() is not None, reason=str(packing.unavailable()))

CONV, SUM, SUM_IN_PLACE = (
    "mkldnn._convolution_pointwise.default",
    "mkldnn._convolution_pointwise.binary",
    "mkldnn._convolution_pointwise_.binary",
)
CONV1X1, CONV1X1_ADD, PIXEL = "conv1x1", "conv1x1_add", "conv_pixel"
CONV1D, CONV1D_ADD = "conv1d", "conv1d_add"
LINEAR, LINEAR_SUM = "mkldnn._linear_pointwise.default", "mkldnn._linear_pointwise.binary"

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "relu6": functional.relu6,
    "hardtanh": lambda x: functional.hardtanh(x, -0.5, 0.25),
    "clamp": lambda x: x.clamp(-0.5, 0.25),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.2),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class Layers(nn.Module):
    """Convolutions and linear layers, and something done with an image (8 x 6 x 6), signal or vector (6) and them."""

    def __init__(self, forward: Callable[["Layers", torch.Tensor], object], **options: object) -> None:
        super().__init__()
        self.a = nn.Conv2d(8, 8, 3, **{"padding": 1, **options})  # type: ignore[arg-type]
        self.b = nn.Conv2d(8, 8, 1, bias=False)
        self.s = nn.Conv1d(8, 8, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose1d(8, 6, 8, 4, padding=2)
        self.p = nn.Linear(6, 6)
        self.q = nn.Linear(6, 6, bias=False)
        self.pattern = forward

    def forward(self, x: torch.Tensor) -> object:
        return self.pattern(self, x)


def se_gate(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    return y * torch.sigmoid(m.b(y.mean((2, 3), keepdim=True)))


def read_twice(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    return torch.relu(y) + y


PLAIN = {
    "relu": "aten.relu_.default",
    "relu6": "aten.relu6_.default",
    "hardtanh": "aten.hardtanh_.default",
    "clamp": "aten.clamp_.default",
    "hardsigmoid": "aten.hardsigmoid_.default",
}
"""Those of which oneDNN makes a number of NaN, by the operators that they stay."""


def with_activation(name: str, *layers: str) -> list[str]:
    """The ops of layers with an activation function after each."""
    return [op for layer in layers for op in ((layer, PLAIN[name]) if name in PLAIN else (layer,))]


PATTERNS: dict[str, tuple[Layers, list[str]]] = {
    **{
        name: (
            Layers(lambda m, x, f=f: (f(m.a(x)), f(m.b(x)), f(m.p(x)))),  # type: ignore[misc]
            with_activation(name, CONV, CONV1X1, LINEAR),
        )
        for name, f in ACTIVATIONS.items()
    },
    "conv silu": (Layers(lambda m, x: functional.silu(m.a(x))), [CONV]),
    "linear gelu tanh": (Layers(lambda m, x: functional.gelu(m.p(x), approximate="tanh")), [LINEAR]),
    "1x1 convs": (
        Layers(lambda m, x: tuple(f(m.b(x)) for f in ACTIVATIONS.values())),
        [op for name in ACTIVATIONS for op in with_activation(name, CONV1X1)],
    ),
    "depthwise": (Layers(lambda m, x: functional.silu(m.a(x)), groups=8), [CONV]),
    "strided and dilated": (Layers(lambda m, x: m.a(x), stride=2, dilation=2, padding=2), [CONV]),
    "padding same": (Layers(lambda m, x: functional.silu(m.a(x)), padding="same"), [CONV]),
    "padding valid": (Layers(lambda m, x: functional.silu(m.a(x)), padding="valid"), [CONV]),
    "se gate": (Layers(se_gate), [CONV, "aten.mean.dim", CONV1X1, "aten.mul_.Tensor"]),
    "input as residual": (Layers(lambda m, x: torch.relu(m.a(x) + x)), [SUM, "aten.relu_.default"]),
    "sum without relu": (Layers(lambda m, x: x + m.b(x)), [SUM]),
    "sum and silu": (Layers(lambda m, x: functional.silu(m.a(x) + x)), [SUM, "aten.silu_.default"]),
    "dying residual": (Layers(lambda m, x: (lambda y: m.b(m.b(y)) + y)(m.a(x))), [CONV, CONV1X1, SUM_IN_PLACE]),
    "its own input as residual": (Layers(lambda m, x: (lambda y: m.b(y) + y)(m.a(x))), [CONV, SUM]),
    "two convolutions": (
        Layers(lambda m, x: torch.relu(m.a(x) + m.b(x))),
        [CONV, SUM_IN_PLACE, "aten.relu_.default"],
    ),
    "sum of activated ones": (
        Layers(lambda m, x: torch.relu(m.a(x)) + torch.relu(m.b(x))),
        [CONV, "aten.relu_.default", CONV1X1, "aten.relu_.default", "aten.add_.Tensor"],
    ),
    "read twice": (Layers(read_twice), [CONV, "aten.relu.default", "aten.add_.Tensor"]),
    "linear sum": (Layers(lambda m, x: m.p(x) + x), [LINEAR_SUM]),
    "linear sum and relu": (Layers(lambda m, x: torch.relu(x + m.q(x))), [LINEAR_SUM, "aten.relu_.default"]),
    "linear sum, broadcast": (Layers(lambda m, x: m.p(x) + x[:, :1]), [LINEAR, "aten.add_.Tensor"]),
    "dropout between": (Layers(lambda m, x: functional.dropout(m.p(x), 0.1, m.training) + x), [LINEAR_SUM]),
    "signal": (Layers(lambda m, x: functional.gelu(m.s(x.flatten(2)))), [CONV1D]),
    "strided signal": (Layers(lambda m, x: functional.conv1d(x.flatten(2), m.s.weight, None, 2, 1)), [CONV1D]),
    "signal and its residual": (
        Layers(lambda m, x: (lambda y: y + m.s(functional.leaky_relu(y)))(x.flatten(2))),
        ["aten.leaky_relu.default", CONV1D_ADD],
    ),
    "signal, residual and relu": (
        Layers(lambda m, x: torch.relu(m.s(x.flatten(2)) + x.flatten(2))),
        [CONV1D_ADD, "aten.relu_.default"],
    ),
    "transposed": (Layers(lambda m, x: m.up(x.flatten(2))), [CONV1D]),
    "transposed, odd length": (Layers(lambda m, x: m.up(x.flatten(2)[..., :5])), [CONV1D]),
    "transposed to another length": (
        Layers(lambda m, x: functional.conv_transpose1d(x.flatten(2), m.up.weight, m.up.bias, 3)),
        ["aten.conv_transpose1d.default"],
    ),
    "matrix product": (Layers(lambda m, x: torch.mm(x.flatten(0, 2), m.q.weight).view(x.shape)), [LINEAR]),
    "product and bias": (
        Layers(lambda m, x: torch.addmm(m.p.bias, x.flatten(0, 2), m.p.weight).view(x.shape)),
        [LINEAR],
    ),
}


def lowered_pattern(layers: Layers, folder: Path, options: Options) -> Lowered:
    return models.lowered(layers, {"x": torch.zeros(3, 8, 6, 6)}, folder, "pattern", [2], options=options)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_becomes_these_ops_and_computes_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    layers, expected_ops = PATTERNS[name]
    lowered = lowered_pattern(layers, tmp_path, Options(packed=True))
    assert [op.target for op in lowered.graphs[Bucket(2)].ops] == expected_ops
    assert_the_answers_are_right(layers, lowered)
    assert lower(
        tmp_path / "model.pt2", "pattern", [2], tmp_path / "cache", options=Options(packed=True)
    ).graphs == (lowered.graphs), "and the cache has the same program"


def test_a_gate_s_convolutions_of_one_pixel_are_plain_products(tmp_path: Path) -> None:
    layers, _ = PATTERNS["se gate"]
    lowered = lowered_pattern(layers, tmp_path, Options(packed=True))
    expected_ops = [CONV, "aten.mean.dim", PIXEL, "aten.sigmoid_.default", "aten.mul_.Tensor"]
    assert [op.target for op in lowered.graphs[Bucket(2)].ops] == expected_ops
    assert_the_answers_are_right(layers, lowered)


class Tables(nn.Module):
    """Five tables, each with its own number of rows, of which a column of the ids chooses one."""

    def __init__(self, *, stacked: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 4) for rows in (3, 7, 2, 5, 9))
        self.stacked = stacked

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [table(ids[:, n + 1]) for n, table in enumerate(self.tables)]
        return torch.stack([rows[0] * 2, *rows], 1) if self.stacked else torch.cat(rows, -1)


@pytest.mark.parametrize("stacked", [True, False])
def test_tables_that_are_read_together_are_one_and_refuse_their_own_bad_ids(stacked: bool, tmp_path: Path) -> None:
    model = Tables(stacked=stacked)
    lowered = models.lowered(
        model, {"ids": torch.ones(3, 6, dtype=torch.int64)}, tmp_path, "tables", [2], options=Options(packed=True)
    )
    targets = [op.target for op in lowered.graphs[Bucket(2)].ops]
    assert targets.count("rows_of_tables") == 1
    assert targets.count("aten.embedding.default") == (2 if stacked else 1), (
        "a row that is read otherwise, too, stays"
    )
    ids = torch.tensor([[0, 2, 6, 1, 4, 8], [9, 0, 3, 0, 0, 5]])
    with opened(cpu, lowered) as bench, torch.no_grad():
        program = bench.program(resident_plan(bench.graph))
        assert torch.equal(bench.executor.run(program, [ids]).outputs[0], model(ids))
        for wrong in (3, -1):  # the next table's first row, and the last table's
            bad = ids.clone()
            bad[0, 3 if wrong > 0 else 2] = wrong
            with pytest.raises(DeviceError, match="index out of range"):
                bench.executor.run(program, [bad])


@pytest.mark.parametrize(
    ("name", "expected_ops"),
    [
        ("1x1 convs", PATTERNS["1x1 convs"][1]),
        ("sum without relu", [CONV1X1_ADD]),
        ("dying residual", [CONV, CONV1X1, CONV1X1_ADD]),
        ("two convolutions", [CONV, CONV1X1_ADD, "aten.relu_.default"]),
    ],
)
def test_a_1x1_convolution_with_several_layouts_is_a_linear_layer(
    name: str, expected_ops: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion.OneDnnKernels, "_layouts", lambda *given: 2)
    layers, _ = PATTERNS[name]
    lowered = lowered_pattern(layers, tmp_path, Options(packed=True))
    assert [op.target for op in lowered.graphs[Bucket(2)].ops] == expected_ops
    assert_the_answers_are_right(layers, lowered)


@pytest.mark.parametrize(
    ("name", "slices"),
    [("conv silu", [CONV] * 8), ("strided and dilated", [CONV] * 8), ("linear gelu tanh", [LINEAR] * 2)],
)
def test_slices_of_a_layer_are_packed_with_the_activation_function_behind_it(
    name: str, slices: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    monkeypatch.setattr(slicing, "PACKED_SPLIT_BYTES", 100)
    monkeypatch.setattr(slicing, "MOST_PACKED_SLICE_BYTES", 100)
    layers, _ = PATTERNS[name]
    lowered = lowered_pattern(layers, tmp_path, Options(packed=True))
    assert [op.target for op in lowered.graphs[Bucket(2)].ops] == [*slices, "aten.cat.default"]
    assert_the_answers_are_right(layers, lowered)


def assert_the_answers_are_right(
    layers: nn.Module, lowered: Lowered, shape: tuple[int, ...] = (2, 8, 6, 6)
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = pytree.tree_leaves(layers.eval()(x.clone()))
    with opened(cpu, lowered) as bench:
        resident, streamed = (
            bench.executor.run(bench.program(plan), [x.clone()]).outputs
            for plan in (resident_plan(bench.graph), streaming_plan(bench.graph))
        )
    for kept, swapped, want in zip(resident, streamed, expected, strict=True):
        torch.testing.assert_close(kept, want, atol=1e-5 * float(want.abs().max()), rtol=0)
        assert torch.equal(kept, swapped), "the same bits at every budget"


@pytest.mark.parametrize(("length", "plain"), [(10, True), (16, False), (18, False), (31, True), (136, False)])
def test_attention_of_a_short_length_that_fills_no_vectors_is_plain_products(
    length: int, plain: bool, tmp_path: Path
) -> None:
    layers = Layers(lambda m, x: functional.scaled_dot_product_attention(x, x + 1, 2 * x))
    lowered = models.lowered(
        layers, {"x": torch.zeros(3, 2, length, 4)}, tmp_path, "attention", [2], options=Options(packed=True)
    )
    found = [op.target for op in lowered.graphs[Bucket(2)].ops]
    assert ("short_attention" in found) == plain
    assert ("aten.scaled_dot_product_attention.default" in found) != plain
    assert_the_answers_are_right(layers, lowered, (2, 2, length, 4))


class GrowingDecoder(nn.Module):
    """One layer of attention to past and new keys, whose heads serve several queries' heads each."""

    def __init__(self, heads: int, count: int, *, other_reader: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 8 * n) for n in (4, heads, heads))
        self.times, self.count, self.other_reader = 4 // heads, count, other_reader

    def forward(self, x: torch.Tensor, past: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).view(x.shape[0], self.count, -1, 8).transpose(1, 2) for p in (self.q, self.k, self.v))
        before = (torch.arange(past.shape[3]) < length[:, None])[:, None].expand(-1, self.count, -1)
        among = torch.ones(self.count, self.count, dtype=torch.bool).tril().expand(x.shape[0], -1, -1)
        mask = torch.where(torch.cat([before, among], 2)[:, None], 0.0, torch.finfo(torch.float32).min)
        keys, values = torch.cat([past[:, 0], k], 2), torch.cat([past[:, 1], v], 2)
        whole = x.shape[0], 4, past.shape[3] + self.count, 8
        shared = [t[:, :, None].expand(-1, -1, self.times, -1, -1).reshape(whole) for t in (keys, values)]
        if self.times == 1:
            shared = [keys, values]
        y = functional.scaled_dot_product_attention(q, *shared, attn_mask=mask).transpose(1, 2).reshape(x.shape)
        return y + keys.mean((1, 2, 3))[:, None, None] if self.other_reader else y


@pytest.mark.parametrize(
    ("heads", "count", "other_reader"), [(4, 1, False), (4, 3, False), (2, 1, False), (1, 5, False), (2, 3, True)]
)
def test_past_keys_are_attended_to_where_they_are(
    heads: int, count: int, other_reader: bool, tmp_path: Path
) -> None:
    layer = GrowingDecoder(heads, count, other_reader=other_reader).eval()
    draws = torch.Generator().manual_seed(0)
    past = torch.randn(8, 6, heads, 40, 8, generator=draws)[2:4, 1:3, :, :24]  # a part of a larger tensor
    length = torch.tensor([0, 7])
    past[1, :, :, 7:] *= 1e6
    given = {"x": torch.randn(2, count, 32, generator=draws), "past": past, "length": length}
    lowered = models.lowered(layer, given, tmp_path, "growing", [2], options=Options(packed=True))
    found = [op.target for op in lowered.graphs[Bucket(2)].ops]
    assert ("joined_attention" in found) != other_reader
    assert ("aten.scaled_dot_product_attention.default" in found) == other_reader
    with opened(cpu, lowered) as bench, torch.no_grad():
        (own,) = bench.executor.run(bench.program(resident_plan(bench.graph)), list(given.values())).outputs
        torch.testing.assert_close(own, layer(**given), atol=1e-6, rtol=1e-5)
