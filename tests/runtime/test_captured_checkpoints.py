"""Checkpoints of captured steps: training goes on from them to the same losses, also after a kill."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.captured.checkpoint import read_checkpoint
from benchmarks.captured.trainer import TrainingLost
from cohabit.planner.errors import FormatError
from cohabit.runtime.errors import UnsupportedModel
from tests.support.runtime.captured_steps import (
    adamw,
    assert_same,
    batches,
    eager,
    loss_of,
    net,
    sgd,
    tensors_of,
    trainer_of,
)

pytestmark = pytest.mark.slow  # benchmarks alone capture steps


def test_state_that_is_loaded_between_steps_is_trained_on() -> None:
    """`load_state_dict` of an optimizer makes new tensors, and `data` may be given another."""
    model, other = net(), net()
    optimizer, begun = adamw(model), adamw(other)
    with trainer_of(other, begun) as trainer:
        for batch in batches(3):
            trainer.step(*batch)
    torch.manual_seed(2)
    with trainer_of(model, optimizer) as trainer:
        trainer.step(*batches(1)[0])
        trainer.sync()
        optimizer.load_state_dict(begun.state_dict())
        for own, given in zip(model.parameters(), other.parameters(), strict=True):
            own.data = given.detach().clone()
        for own, given in zip(model.buffers(), other.buffers(), strict=True):
            own.copy_(given)
        torch.manual_seed(3)
        found = trainer.step(*batches(1)[0]).item()
        trainer.sync()
        assert optimizer.state[model.classes.weight]["step"].item() == 4
        model.classes.bias.data = torch.zeros(3)
        with pytest.raises(UnsupportedModel, match=r"is now torch.float32 \[3\], .* for torch.float32 \[10\]"):
            trainer.step(*batches(1)[0])
        model.classes.bias.data = torch.zeros(10)
    torch.manual_seed(3)
    assert loss_of(other, *batches(1)[0]).item() == found


def test_a_checkpoint_goes_on_to_the_same_losses(tmp_path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    torch.manual_seed(2)
    with trainer_of(model, optimizer, "50%", store="file", folder=tmp_path) as trainer:
        for batch in batches()[:5]:
            trainer.step(*batch)
        trainer.save_checkpoint(tmp_path / "last.safetensors")
    torch.manual_seed(3)
    model = net()
    optimizer = adamw(model)
    with trainer_of(model, optimizer, "80%") as trainer:
        trainer.resume(tmp_path / "last.safetensors")
        assert trainer.steps == 5
        losses = [trainer.step(*batch).item() for batch in batches()[5:]]
    expected = eager(adamw)
    assert_same((losses, tensors_of(model, optimizer)), (expected[0][5:], expected[1]))


def test_a_damaged_checkpoint_and_another_model_s_are_refused(tmp_path: Path) -> None:
    model, path = net(), tmp_path / "last.safetensors"
    trainer_of(model, sgd(model)).save_checkpoint(path)
    whole = path.read_bytes()
    model = net()
    with trainer_of(model, sgd(model)) as trainer:
        for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[: len(whole) // 2], b""):
            path.write_bytes(damaged)
            with pytest.raises(FormatError, match=r"last\.safetensors: "):
                read_checkpoint(path, trainer._state, trainer._buffers, trainer._device.random_state())
        with pytest.raises(FormatError, match=r"last\.safetensors: "):
            trainer.resume(path)
        with pytest.raises(TrainingLost, match="make a new trainer"):
            trainer.step(*batches(1)[0])
        path.write_bytes(whole)
    model = net()
    with pytest.raises(FormatError, match=r"optimizer\..* is in the (step|checkpoint) only"):
        trainer_of(model, adamw(model)).resume(path)


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = net(), tmp_path / "last.safetensors"
    trainer = trainer_of(model, sgd(model))
    trainer.save_checkpoint(path)
    whole = path.read_bytes()
    trainer.step(*batches(1)[0])

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.save_checkpoint(path)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_an_optimizer_of_another_kind_goes_on_after_its_first_step() -> None:
    def stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net()
        optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
        torch.manual_seed(2)
        loss_of(model, *batches(1)[0]).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = stepped()
    losses = []
    for batch in batches(3):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    other, other_optimizer = stepped()
    with trainer_of(other, other_optimizer) as trainer:
        assert [trainer.step(*batch).item() for batch in batches(3)] == losses
    assert all(map(torch.equal, tensors_of(other, other_optimizer), tensors_of(model, optimizer)))


FORKS = multiprocessing.get_context("forkserver")
"""Processes that begin with everything imported: of fifty, each would take seconds for that."""
FORKS.set_forkserver_preload([__name__])


def train_with_checkpoints(path: Path, losses: Connection) -> None:
    """Go on from the checkpoint, if there is one, write one after every step, and say each step's loss; never end."""
    torch.set_num_threads(1)
    model = net()
    trainer = trainer_of(model, sgd(model), "60%")
    if path.exists():
        trainer.resume(path)
    else:
        torch.manual_seed(2)
    while True:
        loss = trainer.step(*batches()[trainer.steps % 10])
        losses.send((trainer.steps, loss.item()))
        trainer.save_checkpoint(path)


def losses_until_killed(path: Path, steps: int, after_s: float) -> Iterator[tuple[int, float]]:
    """Losses of a process that is killed so long after so many steps."""
    losses, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=train_with_checkpoints, args=(path, sender), daemon=True)
    process.start()
    sender.close()
    yield from [losses.recv() for _ in range(steps)]
    time.sleep(after_s)
    process.kill()
    with suppress(EOFError, OSError):  # the end, also in the middle of a loss
        while True:
            yield losses.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def steps_of_killed_processes(path: Path, kills: int, rng: random.Random) -> dict[int, float]:
    """Losses by step, of processes that train one after another and are killed at random moments."""
    known: dict[int, float] = {}
    for _ in range(kills):
        # 50 ms reach into any moment of a step or a checkpoint
        for step, loss in losses_until_killed(path, rng.randint(2, 6), rng.uniform(0, 0.05)):
            assert known.setdefault(step, loss) == loss, f"step {step} was repeated with another loss"
    return known


def assert_losses_of_one_process(losses: dict[int, float], path: Path) -> None:
    alone = dict(losses_until_killed(path, max(losses), 0.0))
    assert losses == {step: alone[step] for step in losses}


def test_a_kill_at_any_moment_leaves_a_checkpoint_that_training_goes_on_from(tmp_path: Path) -> None:
    losses = steps_of_killed_processes(tmp_path / "last.safetensors", 3, random.Random(0))
    assert len(losses) > 4
    assert_losses_of_one_process(losses, tmp_path / "other.safetensors")


@pytest.mark.slow
def test_fifty_kills_leave_the_losses_of_one_process(tmp_path: Path) -> None:
    losses = steps_of_killed_processes(tmp_path / "last.safetensors", 50, random.Random(1))
    assert len(losses) >= 50
    assert_losses_of_one_process(losses, tmp_path / "other.safetensors")
