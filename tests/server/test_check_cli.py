"""`cohabit check` as a user meets it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from cohabit.loadgen.zoo.exporting import save_model
from cohabit.runtime.lowering import rewrite
from cohabit.runtime.lowering.lower import lower
from cohabit.server.cli import main
from cohabit.server.engine.servable import describe
from tests.support.runtime import models
from tests.support.server.ensembles import config_text, put, step, tensor

pytestmark = pytest.mark.process

CONFIG = """
max_batch_size: 4
response_cache { enable: true }
parameters { key: "tuned" value { string_value: "yes" } }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers with 68 KiB each."""
    folder = tmp_path_factory.mktemp("check")
    models.export(models.Wide(4, 132), {"x": torch.zeros(3, 132)}, folder / "wide" / "1" / "model.pt2")
    (folder / "wide" / "config.pbtxt").write_text(CONFIG)
    return folder


def check(folder: Path, *flags: str) -> list[str]:
    return ["check", str(folder / "wide"), "--threads", "1", "--cache", str(folder / "cache"), *flags]


def reported(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Any]:
    status = main(check(folder, *flags, "--json"))
    return status, json.loads(capsys.readouterr().out)


def test_a_model_that_can_be_served(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(check(folder)) == 0
    shown = capsys.readouterr().out
    for text in (
        "[-1, 132]",
        "batch sizes   1, 2, 4",
        "linear layers ",
        "rows          independent",
        "least memory",
        "can be served",
    ):
        assert text in shown
    for field in ("response_cache.enable", "parameters[tuned]"):
        assert f"config.pbtxt: {field} is ignored: " in shown
    archive = folder / "wide" / "1" / "model.pt2"
    assert (
        main(["check", str(archive), "--threads", "1", "--cache", str(folder / "cache"), "--batch-sizes", "1"]) == 0
    )
    assert "batch sizes   1\n" in capsys.readouterr().out
    status, report = reported(folder, capsys)
    assert (status, report["servable"], report["batch_sizes"]) == (0, True, [1, 2, 4])
    assert sum(report["linear_forms"].values()) == 4
    memory = report["memory"]
    assert memory["weight_bytes"] == memory["swappable_bytes"] + memory["table_bytes"]
    budgets = {budget["memory_bytes"]: budget for budget in memory["budgets"]}
    latencies = [b["latency_s"]["1"] for _, b in sorted(budgets.items()) if b["reason"] is None]
    assert latencies == sorted(latencies, reverse=True)
    assert latencies[0] >= memory["resident_s"]["1"]
    for nbytes, budget in budgets.items():
        if budget["reason"] is None:
            assert budget["partition_bytes"] + budget["workspace_bytes"] <= nbytes


def test_an_ensemble_is_checked_with_the_models_of_its_steps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (output,) = reported(folder, capsys)[1]["info"]["outputs"]
    tensors = tensor("input", "X", dims="132") + tensor("output", "Y", dims="132")
    ensemble = ["check", str(folder / "pipeline"), "--threads", "1", "--cache", str(folder / "cache")]
    for most_batch, status, text in (
        (4, 0, "pipeline has platform ensemble, and can be served: its steps fit one another"),
        (8, 1, "pipeline cannot be served: step 1 ('wide'): the model takes batches of up to 4, the ensemble 8"),
    ):
        head = f"platform: 'ensemble' max_batch_size: {most_batch}\n"
        put(folder, "pipeline", config_text(tensors, step("wide", {"x": "X"}, {output["name"]: "Y"}), head=head))
        assert main(ensemble) == status
        assert text in capsys.readouterr().out


def test_the_least_memory_is_enough_and_a_page_less_is_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report = reported(folder, capsys)
    least = report["memory"]["least_bytes"]
    assert reported(folder, capsys, "--memory", f"{least}B")[0] == 0
    status, report = reported(folder, capsys, "--memory", f"{least - 4096}B,100%")
    assert (status, report["servable"]) == (1, False)
    assert "the budget is" in report["memory"]["budgets"][0]["reason"]
    assert "at batch 1," in report["memory"]["budgets"][0]["reason"], "larger ones run in parts"
    said = "8.0 KiB for activations of wide at batch 4; 4.0 KiB with --batch-sizes 1,2 "
    assert report["memory"]["activations"] == f"{said}(for one model: max_batch_size of its config.pbtxt)"


def test_a_model_without_weights_is_checked_in_each_size_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models.export(nn.Softmax(1), {"input": torch.zeros(3, 8)}, tmp_path / "soft" / "1" / "model.pt2")
    command = ["check", str(tmp_path / "soft"), "--cache", str(tmp_path / "cache"), "--batch-sizes", "1"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "not enough" not in shown
    assert "soft can be served" in shown
    assert main([*command, "--memory", "25%,50%,1MiB"]) == 1
    assert capsys.readouterr().out.count("not enough    0 B: ") == 1


def test_a_program_that_cannot_be_served_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Running(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x.sum(0))
            return x + self.total

    program = torch.export.export(Running(), (torch.ones(2, 4),), dynamic_shapes=({0: Dim("batch", max=8)},))
    save_model(program, tmp_path / "running" / "1" / "model.pt2", {})
    assert main(["check", str(tmp_path / "running"), "--cache", str(tmp_path / "cache")]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("running cannot be served: the program changes total from call to call")
    assert "return it as an output instead" in shown


@pytest.mark.parametrize(
    ("layer", "status", "said"),
    [
        (nn.BatchNorm1d(4), 1, "it was exported in training mode: batch_norm takes the mean of each batch"),
        (nn.Dropout(0.5), 0, "numbers are drawn by aten.dropout.default; its dropout is in training mode"),
    ],
)
def test_a_forgotten_eval_is_said(
    layer: nn.Module, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = nn.Sequential(nn.Linear(4, 4), layer).train()
    program = torch.export.export(module, (torch.ones(3, 4),), dynamic_shapes=({0: Dim("batch", max=4)},))
    save_model(program, tmp_path / "trained" / "1" / "model.pt2", {})
    assert (
        main(["check", str(tmp_path / "trained"), "--threads", "1", "--cache", str(tmp_path / "cache")]) == status
    )
    shown = capsys.readouterr().out
    assert said in shown
    assert "call .eval() of the module before torch.export.export" in shown


def test_every_refused_field_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder / "refused"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.pt2").write_bytes((folder / "wide" / "1" / "model.pt2").read_bytes())
    (model / "config.pbtxt").write_text(
        "sequence_batching { iterative_sequence: true } batch_input { } backend: 'python'"
    )
    assert main(["check", str(model), "--cache", str(folder / "cache"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert sorted(report["refused_fields"]) == [
        "backend 'python'",
        "batch_input",
        "sequence_batching.iterative_sequence",
    ]
    assert "is not supported" in report["reason"]


def test_a_path_that_does_not_exist_is_a_wrong_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


class Indexing(nn.Module):
    """Its inputs index tables of 7, 5 and 9 rows: directly, as a part, after arithmetic, twice, and through views."""

    def __init__(self) -> None:
        super().__init__()
        self.seven, self.five, self.nine = nn.Embedding(7, 2), nn.Embedding(5, 2), nn.Embedding(9, 2)

    def forward(
        self,
        direct: torch.Tensor,
        part: torch.Tensor,
        moved: torch.Tensor,
        twice: torch.Tensor,
        viewed: torch.Tensor,
    ) -> torch.Tensor:
        rows = self.seven(direct) + self.seven(part[:, :3]) + self.seven(moved + 1) + self.five(twice)
        return rows + self.nine(twice) + self.nine(viewed.long().unsqueeze(1)).squeeze(1)


def test_values_that_index_a_table_directly_have_its_range(tmp_path: Path) -> None:
    examples = {
        "direct": torch.zeros(2, 3, dtype=torch.int64),
        "part": torch.zeros(2, 4, dtype=torch.int64),
        "moved": torch.zeros(2, 3, dtype=torch.int64),
        "twice": torch.zeros(2, 3, dtype=torch.int64),
        "viewed": torch.zeros(2, 3, dtype=torch.int32),
    }
    models.export(Indexing(), examples, tmp_path / "model.pt2", dynamic=False)
    lowered = lower(tmp_path / "model.pt2", "indexing", [2], tmp_path / "cache")
    rows = {tensor.name: tensor.rows for tensor in describe(lowered, 1, 2).inputs}
    assert rows == {"direct": 7, "part": None, "moved": None, "twice": 5, "viewed": 9}


class Changing(nn.Module):
    """Changes an input, and has a batch norm that is folded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        nn.init.uniform_(self.layers[1].running_var, 0.5, 2.0)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        image[:, 0] = 0
        return self.layers(image)


def test_changed_inputs_and_rewrites_that_are_left_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = rewrite._fold
    monkeypatch.setattr(rewrite, "_fold", lambda *given: (right(*given)[0] * 1.5, right(*given)[1]))
    models.export(Changing(), {"image": torch.zeros(3, 3, 4, 4)}, tmp_path / "model.pt2")
    flags = ["--threads", "1", "--cache", str(tmp_path / "cache"), "--batch-sizes", "1,2"]
    assert main(["check", str(tmp_path / "model.pt2"), *flags]) == 0
    shown = capsys.readouterr().out
    assert "changed       image: the program changes them in place, which callers do not see" in shown
    assert "archive       compared with it on 4 sets of inputs" in shown
    assert re.search(
        r"left out      rewrite fold_batch_norms of batch_norm\w*: output output at batch \d differs by 0\.\d+",
        shown,
    )
