"""Fused convolutions are found where they mean the same, and nowhere else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import relu

from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from tests.support.runtime import models
from tests.support.runtime.backends import cpu, opened
from tests.support.runtime.plans import streaming_plan

FUSED = Options(fused=True)


class Pattern(nn.Module):
    """Two convolutions, and something done with an image and them."""

    def __init__(self, forward: Callable[..., torch.Tensor], *, groups: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.a = nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=bias)
        self.b = nn.Conv2d(8, 8, 1, bias=bias)
        self.norm = nn.BatchNorm2d(8)
        nn.init.normal_(self.norm.running_mean)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        self.pattern = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pattern(self, x)


def in_place(m: Pattern, x: torch.Tensor) -> torch.Tensor:
    y = m.norm(m.a(x))
    y += x
    return relu(y, inplace=True)


def in_place_between(m: Pattern, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    left = x[:, :4]
    left.add_(1)
    return relu(y) + x


def strided(m: Pattern, x: torch.Tensor) -> torch.Tensor:
    return relu(torch.conv2d(x, m.a.weight, None, [2], 2, 2))


def read_in_place(m: Pattern, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    left = y[:, :4]
    return relu(y, inplace=True)[:, :4] + left


PATTERNS: dict[str, tuple[Pattern, int, int]] = {
    "relu": (Pattern(lambda m, x: relu(m.b(relu(m.a(x))))), 2, 0),
    "norm and relu in place": (Pattern(lambda m, x: relu(m.norm(m.a(x)), inplace=True)), 1, 0),
    "no bias": (Pattern(lambda m, x: relu(m.a(x)), bias=False), 1, 0),
    "depthwise": (Pattern(lambda m, x: relu(m.a(x) + x), groups=8), 0, 1),
    "other strides": (Pattern(strided), 1, 0),
    "residual behind": (Pattern(lambda m, x: relu(m.a(x) + x)), 0, 1),
    "residual in front": (Pattern(lambda m, x: relu(x + m.a(x))), 0, 1),
    "residual in place": (Pattern(in_place), 0, 1),
    "two convolutions": (Pattern(lambda m, x: relu(m.a(x) + m.b(x))), 0, 1),
    "a sum of fused ones": (Pattern(lambda m, x: relu(m.a(x)) + relu(m.b(relu(m.a(x))) + x)), 2, 1),
    "a result that is read again": (Pattern(lambda m, x: (lambda y: relu(y) + y)(m.a(x))), 0, 0),
    "a sum that is read again": (Pattern(lambda m, x: (lambda y: relu(y) + y)(m.a(x) + x)), 0, 0),
    "a result read through a view": (Pattern(read_in_place), 1, 0),
    "a result added to itself": (Pattern(lambda m, x: (lambda y: relu(y + y))(m.a(x))), 0, 0),
    "a number added": (Pattern(lambda m, x: relu(m.a(x) + 1)), 0, 0),
    "a broadcast residual": (Pattern(lambda m, x: relu(m.a(x) + x[:, :1])), 0, 0),
    "a scaled residual": (Pattern(lambda m, x: relu(torch.add(m.a(x), x, alpha=2))), 0, 0),
    "operands that change in between": (Pattern(in_place_between), 1, 0),
    "no relu": (Pattern(lambda m, x: torch.sigmoid(m.a(x) + x)), 0, 0),
}


def lowered_pattern(name: str, folder: Path, options: Options = FUSED) -> Lowered:
    pattern, _, _ = PATTERNS[name]
    return models.lowered(pattern, {"x": torch.zeros(3, 8, 6, 6)}, folder, "pattern", [2], options=options)


def targets(lowered: Lowered) -> list[str]:
    return [op.target for op in lowered.graphs[Bucket(2)].ops]


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_fused_where_it_means_the_same(name: str, tmp_path: Path) -> None:
    pattern, plain, with_residual = PATTERNS[name]
    lowered = lowered_pattern(name, tmp_path)
    found = targets(lowered)
    assert (found.count("conv_relu"), found.count("conv_add_relu")) == (plain, with_residual)
    (x,) = lowered.examples(Bucket(2))
    with torch.no_grad():
        expected = pattern.eval()(x.clone())
    with opened(cpu, lowered) as bench:
        for plan in (resident_plan(bench.graph), streaming_plan(bench.graph)):
            (output,) = bench.run(bench.program(plan)).outputs
            torch.testing.assert_close(output, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


def test_a_convolution_and_two_sums_are_two_ops(tmp_path: Path) -> None:
    found = targets(lowered_pattern("two convolutions", tmp_path))
    assert found == ["aten.conv2d.default", "conv_add_relu"], "the later convolution adds the earlier one's result"


def test_nothing_is_fused_unless_it_is_asked_for(tmp_path: Path) -> None:
    plain = lowered_pattern("residual in place", tmp_path, Options())
    assert targets(plain) == ["aten.conv2d.default", "aten.add_.Tensor", "aten.relu_.default"]
    fused = lowered_pattern("residual in place", tmp_path)
    assert targets(fused) == ["conv_add_relu"]
    assert fused.weights_path != plain.weights_path
