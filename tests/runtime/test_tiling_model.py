"""Models' weights over several devices, beside Megatron-LM's tiling by hand; the commands that show tilings."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from cohabit.planner.tiling.arrays import NewArray
from cohabit.planner.tiling.graph import TilingGraph
from cohabit.planner.tiling.search import plan_tiling
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.tiling.model import by_hand, read_model
from cohabit.server.cli import main

TOKENS, WIDTH, HEADS, LAYERS, VOCABULARY = 16, 64, 4, 2, 96
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "tiling_regression.py"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        heads = [
            layer(y).view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        attended = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)
        x = x + self.out(attended)
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


def saved(model: nn.Module, example: torch.Tensor, path: Path) -> Path:
    path.parent.mkdir(parents=True)
    torch.export.save(torch.export.export(model.eval(), (example,)), path)
    return path


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *[Layer() for _ in range(LAYERS)])
    example = torch.zeros(1, TOKENS, dtype=torch.int64)
    return saved(model, example, tmp_path_factory.mktemp("tiling") / "transformer" / "1" / "model.pt2")


@pytest.mark.parametrize("devices", [2, 4])
def test_megatrons_tiling_all_reduces_twice_a_layer_and_once_for_the_embedding(
    transformer: Path, devices: int
) -> None:
    plan = by_hand(read_model(transformer, 1, devices), devices)
    activation = TOKENS * WIDTH * 4
    assert plan.moved.wire == (2 * LAYERS + 1) * 2 * (devices - 1) * activation
    matrices = {
        e.name: plan.tiling(e).name
        for e in plan.graph.expressions
        if isinstance(e.operator, NewArray) and len(e.shape) == 2 and e.name.startswith("1_")
    }
    assert matrices == {
        "1_query_weight": "column",
        "1_key_weight": "column",
        "1_value_weight": "column",
        "1_out_weight": "row",
        "1_wide_weight": "column",
        "1_narrow_weight": "row",
    }


@pytest.mark.parametrize("devices", [2, 4])
def test_the_best_tiling_moves_no_more_than_megatrons_in_the_same_memory(transformer: Path, devices: int) -> None:
    model = read_model(transformer, 1, devices)
    hand = by_hand(model, devices)
    best = plan_tiling(TilingGraph.of(model.outputs, devices, hand.extra_bytes, frees_results=True))
    assert best.moved.wire < hand.moved.wire
    assert best.extra_bytes <= hand.extra_bytes


def test_a_device_that_holds_all_weights_needs_no_bytes(transformer: Path) -> None:
    model = read_model(transformer, 1, 2)
    assert plan_tiling(TilingGraph.of(model.outputs, 2, model.weight_bytes, frees_results=True)).moved.wire == 0


def test_a_convolution_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(nn.Conv2d(3, 4, 3), torch.zeros(1, 3, 8, 8), tmp_path / "model" / "model.pt2")
    with pytest.raises(UnsupportedModel, match=r"conv2d.*reads p_weight; over several devices, only linear layers"):
        read_model(path, 1, 2)


def test_plan_shows_bytes_per_request_and_memory_beside_megatrons(
    transformer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(transformer.parent.parent), "--devices", "4", "--memory", "50%"]) == 0
    lines = capsys.readouterr().out.splitlines()
    hand = next(line for line in lines if "Megatron-LM's" in line)
    assert f"{5 * 2 * 3 * TOKENS * WIDTH * 4 / 1024:.1f} KiB" in hand
    assert any("exact" in line for line in lines)


def test_plan_refuses_devices_whose_memory_cannot_hold_their_share(
    transformer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(transformer), "--devices", "4", "--memory", "10%"]) == 1
    assert "raise the memory" in capsys.readouterr().err


def test_plan_without_memory_or_devices_says_what_to_give(
    transformer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(transformer)]) == 2
    assert "give --memory SIZE, or --devices N" in capsys.readouterr().err


def test_the_example_is_tiled_run_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "tiling.svg"
    assert main(["tile", f"{EXAMPLE}:program", "--workers", "2", "--run", "--svg", str(picture)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\bx +20000 x 32 +▤ +row", out)
    counted = next(line for line in out.splitlines() if line.startswith("run: "))
    assert "(640 bytes counted, 640 predicted)" in counted
    drawn = picture.read_text()
    assert drawn.startswith("<svg")
    assert ">x</text>" in drawn
    assert drawn.count("<path") > 30


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("missing.py:program", "there is no file 'missing.py'"),
        ("missing.py:x", "missing.py:x: there is no file"),  # :x: is no emoji
        (f"{EXAMPLE}:other", "defines no function 'other'"),
        (f"{__file__}:nothing", "must return arrays made from `newarray`, and returned 1"),
    ],
)
def test_a_program_that_cannot_be_tiled_is_refused(
    program: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tile", program]) == 2
    assert message in capsys.readouterr().err


def nothing() -> int:
    return 1
