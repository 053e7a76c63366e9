"""Lowering finds out whether the rows of a batch influence one another: models in which they do, and do not."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.lowering.rows import proof
from cohabit.runtime.options import Dtype, Options
from tests.support.runtime import models
from tests.support.runtime.mixing import Computed, Experts, Lookup

FLOATS = torch.zeros(3, 16)
TOKENS = torch.zeros(3, 5, dtype=torch.int64)
NUMBERS = torch.zeros(3, dtype=torch.int64)

INTERACTING: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "less_than_rounding": (lambda: Computed(lambda x: x + 1e-9 * x.mean(0)), FLOATS),
    "batch_norm_that_trains": (lambda: nn.BatchNorm1d(16, track_running_stats=False), FLOATS),
    "branch_on_a_sum": (models.Branch, torch.zeros(3, 8)),
    "embeddings_from_a_small_table": (lambda: Lookup(3, lambda x: x - x.mean(0)), NUMBERS),
    "experts_with_a_capacity": (lambda: Experts(capacity=0.5), torch.zeros(3, 6, 16)),
    "dropout_that_trains": (lambda: Computed(lambda x: nn.functional.dropout(x, 0.5, True)), FLOATS),
}
"""A few of the kinds in `tests.support.runtime.rows`, and what no rule is needed for."""
INDEPENDENT: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "embeddings_from_a_small_table": (lambda: Lookup(3, lambda x: x.cumsum(1)), TOKENS),
    "experts_without_a_capacity": (lambda: Experts(capacity=None), torch.zeros(3, 6, 16)),
    "logarithm": (lambda: Computed(torch.log), FLOATS),
    "masked_with_infinity": (lambda: Computed(lambda x: x.masked_fill(x < 0, -torch.inf)), FLOATS),
    "nothing_but_nan": (lambda: Computed(lambda x: x * torch.nan), FLOATS),
    "constant_output": (lambda: Computed(lambda x: (x * 2, torch.ones_like(x))), FLOATS),
    "integer_output": (lambda: Computed(lambda x: x.argmax(-1)), FLOATS),
    "bytes": (lambda: Computed(lambda x: x.float() / 255), torch.zeros(3, 4, 4, dtype=torch.uint8)),
    "no_elements": (lambda: Computed(lambda x: x[:, :0]), FLOATS),
}


def lowered_model(
    make: Callable[[], nn.Module], example: torch.Tensor, folder: Path, *batches: list[int], options: Options
) -> list[Lowered]:
    """Export a model and lower it for each of these lists of batch sizes."""
    torch.manual_seed(0)
    models.export(Named(make()), {"x": example}, folder / "model.pt2")
    return [lower(folder / "model.pt2", "m", own, folder / "cache", options=options) for own in batches]


class Named(nn.Module):
    """Gives a model's input the name that the tests have for it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> object:
        return self.model(x)


@pytest.mark.parametrize("name", INTERACTING)
def test_rows_that_influence_one_another_are_found(name: str, tmp_path: Path) -> None:
    batches = [1, 2, 4, 8], [4], [1, 2]
    for lowered in lowered_model(*INTERACTING[name], tmp_path, *batches, options=Options(packed=True)):
        assert (lowered.interaction or "").startswith("op "), lowered.batches


@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_that_do_not_are_left_alone(name: str, tmp_path: Path) -> None:
    make, example = INDEPENDENT[name]
    models.export(Named(make()), {"x": example}, tmp_path / "model.pt2")
    for dtype in get_args(Dtype):
        options = Options(dtype, packed=True)
        lowered = lower(tmp_path / "model.pt2", "m", [1, 2, 4, 8], tmp_path / "cache", options=options)
        assert lowered.interaction is None, dtype


def test_the_finding_is_kept_with_the_lowered_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = lowered_model(*INTERACTING["less_than_rounding"], tmp_path, [1, 2, 4], options=Options())
    monkeypatch.setattr(proof, "find_mixing", None)
    again = lower(tmp_path / "model.pt2", "m", [1, 2, 4], tmp_path / "cache")
    assert again.interaction == first.interaction is not None


@pytest.mark.parametrize(("batches", "dynamic"), [([1], True), ([1, 2], False)])
def test_a_model_of_one_batch_size_needs_no_trial(batches: list[int], dynamic: bool, tmp_path: Path) -> None:
    model = Named(Computed(lambda x: x.softmax(0)))
    assert models.lowered(model, {"x": FLOATS}, tmp_path, "m", batches, dynamic=dynamic).interaction is None
