"""A rewrite that changes outputs is found when a model is lowered, and left out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from cohabit.planner.shapes import Bucket
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering import fusion, packing, rewrite, validation
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.lowering.model import FxModel
from cohabit.runtime.lowering.rewrites import in_place
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from tests.runtime.test_packed_fusion import ACTIVATIONS
from tests.support.runtime import models
from tests.support.runtime.backends import cpu, opened

pytestmark = pytest.mark.skipif(packing.unavailable() is not None, reason=str(packing.unavailable()))
aten = torch.ops.aten


class Image(nn.Module):
    """A padded convolution, a batch norm, an activation that oneDNN fuses, and a value that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)
        self.second, self.third = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.silu(self.norm(self.conv(functional.pad(x, (1, 1, 1, 1)))))
        z = torch.tanh(y)
        return torch.cat((torch.relu(self.third(functional.silu(self.second(z)))), y), 1)


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).view(-1, 4, 4) @ torch.sin(self.b(x).view(-1, 4, 4))


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(12, 4) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([table(ids[:, n]) for n, table in enumerate(self.tables)], 1)


def after(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[FxModel], None]) -> None:
    """Let a rewrite do something wrong after what it does."""
    right = getattr(rewrite, name)

    def wrong(model: FxModel, *given: Any) -> None:
        right(model, *given)
        spoil(model)

    wrong.__name__ = name
    monkeypatch.setattr(rewrite, name, wrong)


def calls(model: FxModel, target: Any) -> list[Any]:
    return [node for node in model.graph.nodes if node.target is target]


def fold_with_another_epsilon(patch: pytest.MonkeyPatch) -> None:
    right = rewrite._fold
    patch.setattr(
        rewrite, "_fold", lambda weight, bias, statistics, eps: right(weight, bias, statistics, eps + 1e-2)
    )


def fuse_another_function(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(fusion.ACTIVATIONS, aten.silu.default, lambda _: fusion.Activation("hardswish"))


def overwrite_what_is_read_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(in_place._Names, "last_read", lambda names, operand, reader: operand in names._whole)


def read_the_next_column(patch: pytest.MonkeyPatch) -> None:
    def spoil(model: FxModel) -> None:
        for node in calls(model, aten.embedding.default):
            with model.graph.inserting_before(node):
                turned = model.graph.call_function(aten.flip.default, (node.args[1], [0]))
            node.args = (node.args[0], turned)

    after(patch, "join_tables", spoil)


def fuse_what_hides_nan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fusion, "_HIDES_NAN", ())


def fail_to_understand(patch: pytest.MonkeyPatch) -> None:
    def fail(model: FxModel) -> None:
        raise IndexError("no such dimension")

    after(patch, "pad_by_numbers", fail)


X = {"x": torch.zeros(3, 4, 6, 6)}
PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], type[nn.Module], dict[str, torch.Tensor]]] = {
    "fold_batch_norms": (fold_with_another_epsilon, Image, X),
    "fuse": (fuse_another_function, Image, X),
    "work_in_place": (overwrite_what_is_read_again, Image, X),
    "join_tables": (read_the_next_column, Columns, {"ids": torch.zeros(3, 4, dtype=torch.int64)}),
    "fuse, NaN": (fuse_what_hides_nan, Image, X),
    "pad_by_numbers": (fail_to_understand, Image, X),
}


def lowered_model(
    kind: type[nn.Module], examples: dict[str, torch.Tensor], folder: Path
) -> tuple[nn.Module, Lowered]:
    torch.manual_seed(0)
    model = kind().eval()
    return model, models.lowered(model, examples, folder, "model", [1, 2], options=Options(packed=True))


def answers(lowered: Lowered, x: torch.Tensor) -> torch.Tensor:
    with opened(cpu, lowered) as bench:
        (answer,) = bench.executor.run(bench.program(resident_plan(bench.graph)), [x.clone()]).outputs
        return answer.clone()


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_rewrite_is_left_out_and_answers_are_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    plant, kind, examples = PLANTED[name]
    plant(monkeypatch)
    model, lowered = lowered_model(kind, examples, tmp_path)
    assert lowered.validation is not None
    assert [left_out.rewrite for left_out in lowered.validation.left_out] == [name.partition(",")[0]]
    (example,) = examples.values()
    x = torch.randint(0, 9, (2, 4)) if "ids" in examples else torch.randn(2, *example.shape[1:])
    torch.testing.assert_close(answers(lowered, x), model(x), atol=1e-5, rtol=0)
    archive, cache = tmp_path / "model.pt2", tmp_path / "cache"
    again = lower(archive, "model", [1, 2], cache, options=Options(packed=True))
    assert again.validation == lowered.validation, "the cache keeps it"


def test_two_wrong_rewrites_are_both_left_out_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold_with_another_epsilon(monkeypatch)
    fuse_another_function(monkeypatch)
    model, lowered = lowered_model(Image, X, tmp_path)
    assert lowered.validation is not None
    assert {left_out.rewrite for left_out in lowered.validation.left_out} == {"fold_batch_norms", "fuse"}
    assert any(op.mutates for op in lowered.graphs[Bucket(2)].ops), "work_in_place is still made"
    x = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(answers(lowered, x), model(x), atol=1e-5, rtol=0)


def test_a_program_that_differs_without_any_rewrite_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = validation.Reference.run
    monkeypatch.setattr(
        validation.Reference, "run", lambda self, inputs, noise=None: [t * 1.5 for t in right(self, inputs, noise)]
    )
    with pytest.raises(UnsupportedModel, match=r"model: .* differs by 0\.\d+ .*; without, .* differs by 0\.\d+"):
        lowered_model(Projections, {"x": torch.zeros(3, 16)}, tmp_path)


class Ordered(nn.Module):
    """Amplifies rounding, as a sort of near ties does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.norm(self.conv(x)) * 1e5).frac()


def test_what_rounding_moves_is_no_difference(tmp_path: Path) -> None:
    _, lowered = lowered_model(Ordered, X, tmp_path)
    assert lowered.validation is not None
    assert lowered.validation.left_out == ()
    assert lowered.validation.largest > 1e-4


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def test_a_program_that_draws_random_numbers_is_not_compared_and_says_so(tmp_path: Path) -> None:
    _, lowered = lowered_model(Random, {"x": torch.zeros(3, 4)}, tmp_path)
    assert lowered.validation is not None
    assert lowered.validation.runs == 0
    assert "draws random numbers" in str(lowered.validation.unchecked)


FUNCTIONS = ACTIVATIONS | {"clamp above its maximum": lambda x: x.clamp(2, -1)}


class Layered(nn.Module):
    """Every kind of layer with an activation function after it, and with a residual."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.dense, self.one, self.depthwise = (
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
            nn.Conv2d(8, 8, 3, groups=8),
        )
        self.signal, self.linear = nn.Conv1d(8, 8, 3, padding=1), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layers = (self.dense, self.one, self.depthwise, self.linear)
        alone = tuple(self.function(layer(x)) for layer in layers)
        with_residual = tuple(self.function(layer(x) + 2 * x) for layer in (self.dense, self.one, self.linear))
        return *alone, *with_residual, self.function(self.signal(x[:, :, 0]))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_and_infinities_pass_through_every_layer_as_in_eager_pytorch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    torch.manual_seed(0)
    model = Layered(FUNCTIONS[name])
    lowered = models.lowered(
        model, {"x": torch.zeros(3, 8, 6, 6)}, tmp_path, "m", [2], options=Options(packed=True)
    )
    assert lowered.validation is not None
    assert lowered.validation.left_out == ()
    with opened(cpu, lowered) as bench:
        program = bench.program(resident_plan(bench.graph))
        for value in (torch.nan, torch.inf, -torch.inf, 1e30):
            x = torch.randn(2, 8, 6, 6)
            x[0, 3, 2, 2] = value
            found = bench.executor.run(program, [x.clone()]).outputs
            with torch.no_grad():
                expected = model(x)
            for own, other in zip(found, expected, strict=True):
                torch.testing.assert_close(own, other, equal_nan=True)
