from pathlib import Path

import pytest
import torch

from cohabit.loadgen.cli import main
from cohabit.loadgen.errors import UsageError
from cohabit.loadgen.zoo import ZOO
from cohabit.loadgen.zoo.repository import Recipe, is_intact, prepare, recipes

pytestmark = pytest.mark.process


def test_sixteen_models_are_fifteen_rankers_and_minilm() -> None:
    chosen = recipes(16)
    assert [r.name for r in chosen] == [f"ranker_{k:02d}" for k in range(15)] + ["minilm"]
    assert len({(r.entry, r.seed) for r in chosen}) == 16


def test_named_models_are_taken_in_turn() -> None:
    names = [r.name for r in recipes(5, ["resnet50", "gpt2"])]
    assert names == ["resnet50_00", "gpt2_00", "resnet50_01", "gpt2_01", "resnet50_02"]
    assert [r.name for r in recipes(2, ["resnet50", "gpt2"])] == ["resnet50", "gpt2"]


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UsageError, match="no model alexnet"):
        recipes(1, ["alexnet"])


def test_what_is_there_and_complete_is_kept(tmp_path: Path) -> None:
    chosen = [Recipe("r", "ranker", 0)]
    (built,) = prepare(tmp_path, chosen)
    assert built.weight_bytes == ZOO["ranker"].parameter_bytes
    (kept,) = prepare(tmp_path, chosen)
    (forced,) = prepare(tmp_path, chosen, force=True)
    assert (built.was_there, kept.was_there, forced.was_there) == (False, True, False)
    assert [p.name for p in built.path.parent.iterdir()] == ["model.pt2"]


def test_what_is_cut_short_or_of_another_seed_is_built_again(tmp_path: Path) -> None:
    recipe = Recipe("r", "ranker", 0)
    (built,) = prepare(tmp_path, [recipe])
    assert is_intact(built.path, recipe)
    assert not is_intact(built.path, Recipe("r", "ranker", 1))
    built.path.write_bytes(built.path.read_bytes()[:-1000])
    assert not is_intact(built.path, recipe)


def test_prepare_writes_models_that_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", str(tmp_path), "--zoo", "ranker,torchcrepe", "--seed", "3"]) == 0
    assert "torchcrepe" in capsys.readouterr().out
    program = torch.export.load(tmp_path / "ranker" / "1" / "model.pt2").module()
    score = program(features=torch.zeros(7, 256), categories=torch.zeros(7, 4, dtype=torch.int64))
    assert score["score"].shape == (7, 1)


def test_the_list_shows_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ZOO)
