"""`cohabit train` as a user meets it: what it prints, its checkpoints, messages and exit statuses."""

import re
from pathlib import Path

import pytest

from cohabit.server.cli import main

pytestmark = pytest.mark.process

SCRIPT = """
import os
import signal

import torch
from torch import nn
from torch.nn import functional


def loss(model, x, labels):
    return functional.cross_entropy(model(x), labels)


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def make_step():
    model, optimizer = parts()
    data = torch.utils.data.TensorDataset(torch.randn(24, 16), torch.randint(0, 4, (24,)))
    batches = torch.utils.data.DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1))
    return model, optimizer, loss, batches, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def batches_of(sizes):
    for size in sizes:
        if size == 0:
            os.kill(os.getpid(), signal.SIGINT)
        yield torch.randn(size or 8, 16), torch.randint(0, 4, (size or 8,))


def with_a_smaller_batch():
    return *parts(), loss, batches_of([8, 8, 5, 8])


def with_an_interrupt():
    return *parts(), loss, batches_of([8, 8, 0, 8, 8])


def with_an_error():
    return *parts(), loss, (1 / (8 - n) and (torch.zeros(n, 16), torch.zeros(n, dtype=torch.long)) for n in (7, 7, 8))


def without_enough_batches():
    return *parts(), loss, batches_of([8, 8])


def without_batches():
    return *parts(), loss, []


def wrong():
    return parts()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def status(arguments: list[str]) -> object:
    """Run a command, also one that the parser of the command line refuses."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


def train(*more: str, function: str = "make_step") -> int:
    return main(["train", f"script.py:{function}", *more])


def to_folder(name: str, steps: int, *more: str, function: str = "make_step") -> int:
    return train("--steps", str(steps), "--checkpoint", name, "--every", "1", *more, function=function)


def losses(printed: str) -> list[str]:
    return re.findall(r"^step \d+: loss \S+,", printed, re.MULTILINE)


def names(folder: str) -> list[str]:
    return sorted(p.name for p in Path(folder).iterdir())


def test_a_resumed_training_has_the_losses_of_an_uninterrupted_one(capsys: pytest.CaptureFixture[str]) -> None:
    """With dropout, a scheduler and shuffled batches, over two epochs and into the third."""
    assert to_folder("whole", 8) == 0
    whole = losses(capsys.readouterr().out)
    assert len(whole) == 8
    assert to_folder("parts", 4, "--memory", "100%") == 0
    first = losses(capsys.readouterr().out)
    assert to_folder("parts", 8, "--resume", "--store", "file") == 0
    shown = capsys.readouterr().out
    assert first + losses(shown) == whole
    assert "going on from parts/step-000000004.safetensors" in shown
    assert "the last checkpoint is parts/step-000000008.safetensors" in shown
    assert names("parts") == [f"step-{n:09}.safetensors" for n in range(1, 9)]


def test_each_checkpoint_says_what_tensors_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert to_folder("run", 1, "--memory", "64KiB") == 0
    shown = capsys.readouterr().out
    assert re.search(r"step 1: loss \S+, \S+ steps/s, tensors took up to \S+ \S+ of 64.0 KiB, \S+ \S+ moved", shown)


def test_a_resumed_checkpoint_must_be_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Two tensors that exchange their places in the header are found, too."""
    assert to_folder("run", 1) == 0
    path = Path("run/step-000000001.safetensors")
    whole = path.read_bytes()
    first, second = b'"model.0.bias"', b'"model.3.bias"'  # of one shape
    exchanged = second.join(part.replace(second, first) for part in whole.split(first))
    for damaged in (
        exchanged,
        whole[:-1] + bytes([whole[-1] ^ 1]),
        whole[: len(whole) // 2],
    ):
        assert damaged != whole
        path.write_bytes(damaged)
        assert to_folder("run", 2, "--resume") != 0
        assert re.search("is damaged|no checkpoint can be read", capsys.readouterr().err)


def test_checkpoints_that_are_there_are_not_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert to_folder("run", 2) == 0
    before = [(p.name, p.read_bytes()) for p in sorted(Path("run").iterdir())]
    assert to_folder("run", 3) == 2
    assert "run/step-000000002.safetensors is there; give --resume to go on from it" in capsys.readouterr().err
    assert [(p.name, p.read_bytes()) for p in sorted(Path("run").iterdir())] == before


def test_too_little_memory_is_refused_with_op_bytes_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert to_folder("run", 1, "--memory", "1KiB") == 1
    refused = re.search(
        r"the op needs \S+ \S+ \(\d+ bytes\) at once, the budget is 1.0 KiB", capsys.readouterr().err
    )
    assert refused is not None


def test_an_interrupt_ends_after_the_step_with_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert to_folder("run", 5, "--every", "100", function="with_an_interrupt") == 130
    shown = capsys.readouterr()
    assert "stopping after this step" in shown.err
    assert "the last checkpoint is run/step-000000003.safetensors" in shown.out
    assert names("run") == ["step-000000003.safetensors"]


def test_batches_that_end_too_soon_end_the_training_with_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert to_folder("run", 5, "--every", "100", function="without_enough_batches") == 1
    shown = capsys.readouterr().err
    assert "the batches ended after 2, and cannot be begun again" in shown
    assert "the last checkpoint is run/step-000000002.safetensors" in shown


def test_batches_may_have_different_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert to_folder("run", 4, "--memory", "64KiB", function="with_a_smaller_batch") == 0
    assert "the last checkpoint is run/step-000000004.safetensors" in capsys.readouterr().out


def test_an_error_of_the_script_s_own_batches_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        to_folder("run", 5, "--every", "100", function="with_an_error")
    assert "the last checkpoint is run/step-000000002.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["script.py:make_step"], "the following arguments are required: --steps, --checkpoint"),
        (["script.py:make_step", "--memory", "150%"], "--memory: '150%' is out of range"),
        (["script.py:make_step", "--memory", "much"], "--memory: 'much' is not a size"),
        (["nowhere.py:make_step", "--steps", "1", "--checkpoint", "x"], "there is no file 'nowhere.py'"),
        (["script.py:nothing", "--steps", "1", "--checkpoint", "x"], "script.py defines no function 'nothing'"),
        (
            ["script.py:wrong", "--steps", "1", "--checkpoint", "x"],
            "it must return (model, optimizer, loss, batches)",
        ),
        (
            ["script.py:make_step", "--steps", "1", "--checkpoint", "script.py"],
            "--checkpoint: script.py: File exists",
        ),
    ],
)
def test_wrong_commands_say_what_is_wrong(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["train", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_script_without_batches_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert to_folder("run", 1, function="without_batches") == 1
    assert "there are no batches" in capsys.readouterr().err
