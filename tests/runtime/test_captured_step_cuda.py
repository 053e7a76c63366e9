"""Training on a CUDA device: eager's bits in every order of its streams, within the pool, and state that comes back."""

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.captured import cuda
from benchmarks.captured.trainer import PLACED_SHARE, Trainer, TrainingLost
from cohabit.planner.errors import InfeasibleBudget
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.profiling import link
from cohabit.runtime.errors import DeviceError, MemoryExceeded
from tests.support.runtime.captured_steps import (
    adamw,
    assert_same,
    batches,
    eager,
    loss_of,
    net,
    sgd,
    tensors_of,
    trained,
    trainer_of,
)
from tests.support.runtime.cuda_fake import FakeDriver, FakePool

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> list[FakeDriver]:
    """The fake devices that trainers open, the last one last; their seeds count up."""
    opened: list[FakeDriver] = []

    def open_fake(name: str) -> CudaBackend:
        opened.append(FakeDriver(len(opened)))
        return CudaBackend(opened[-1])

    monkeypatch.setattr(cuda, "open_device", open_fake)
    monkeypatch.setattr(link, "_COPY_BYTES", 64 << 10)
    monkeypatch.setattr(link, "_ROUNDS", 1)
    return opened


def small() -> nn.Module:
    """Much sooner captured than a net of convolutions."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))


@pytest.mark.parametrize("memory", ["100%", "60%"])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_steps_have_eager_s_bits_in_every_order_of_the_streams(
    make: Callable[[nn.Module], torch.optim.Optimizer], memory: str, drivers: list[FakeDriver]
) -> None:
    model = net()
    optimizer = make(model)
    trainer = trainer_of(model, optimizer, memory, device="cuda")
    assert (trainer.swapped_bytes > 0) == (memory != "100%")
    assert_same(trained(trainer, model, optimizer), eager(make))


def losses_on(trainer: Trainer, count: int, first: int = 0) -> list[float]:
    return [trainer.step(*batch).item() for batch in batches()[first : first + count]]


def test_state_comes_back_to_the_user_and_goes_on_from_a_checkpoint(
    drivers: list[FakeDriver], tmp_path: Path
) -> None:
    model = net()
    optimizer = adamw(model)
    torch.manual_seed(2)
    with trainer_of(model, optimizer, "60%", device="cuda") as trainer:
        losses = losses_on(trainer, 2)
        trainer.sync()
        assert model.classes.weight.shape == (10, 32)
        losses += losses_on(trainer, 1, 2)
        trainer.save_checkpoint(tmp_path / "last.safetensors")
    torch.manual_seed(3)
    model = net()
    optimizer = adamw(model)
    with trainer_of(model, optimizer, "100%", device="cuda") as trainer:
        trainer.resume(tmp_path / "last.safetensors")
        losses += losses_on(trainer, 7, 3)
    assert_same((losses, tensors_of(model, optimizer)), eager(adamw))
    assert [d.allocated_bytes + d.open_pools + d.pinned_bytes for d in drivers] == [0, 0], "all is released"


def test_trial_runs_change_neither_state_nor_random_numbers(drivers: list[FakeDriver]) -> None:
    """The pool looks as before only after the third run."""
    model = net()
    optimizer = sgd(model)
    torch.manual_seed(2)
    with mock.patch.object(FakeDriver, "layouts", ("a", "b", "c", "b")):
        trainer = trainer_of(model, optimizer, "60%", device="cuda")
    assert drivers[0]._pools[-1].layouts == []
    assert_same(trained(trainer, model, optimizer), eager(sgd))


def test_a_plan_that_the_allocator_cannot_place_is_followed_by_one_for_less(drivers: list[FakeDriver]) -> None:
    refused: list[int] = []

    def refuse(pool: FakePool) -> str:
        refused.append(pool.nbytes)
        if len(refused) < 3:
            raise MemoryExceeded("gaps")
        return ""

    model = net()
    optimizer = sgd(model)
    with mock.patch.object(FakePool, "layout", property(refuse)):
        trainer = trainer_of(model, optimizer, "80%", device="cuda")
    share = trainer.plan.memory.nbytes / trainer.memory_bytes
    assert share == pytest.approx((1 - cuda.ALLOCATOR_SHARE) * PLACED_SHARE**2, rel=1e-3)
    assert_same(trained(trainer, model, optimizer), eager(sgd))


def test_a_trainer_that_is_not_made_leaves_the_user_s_tensors_as_they_were(drivers: list[FakeDriver]) -> None:
    def refuse(pool: FakePool) -> str:
        raise MemoryExceeded("gaps")

    model = small()
    optimizer = sgd(model)
    before = [t.clone() for t in model.state_dict().values()]
    refused = pytest.raises(MemoryExceeded, match=r"cannot place a plan for .* raise the memory")
    with mock.patch.object(FakePool, "layout", property(refuse)), refused:
        trainer_of(model, optimizer, "100%", device="cuda")
    assert all(map(torch.equal, model.state_dict().values(), before))
    assert not optimizer.state
    assert drivers[0].allocated_bytes == drivers[0].open_pools == drivers[0].pinned_bytes == 0


def test_too_little_memory_is_refused_with_the_least_that_would_do(drivers: list[FakeDriver]) -> None:
    model = small()
    with pytest.raises(InfeasibleBudget, match=r"the budget is 9\.8 KiB") as refusal:
        trainer_of(model, sgd(model), 10_000, device="cuda")
    with trainer_of(model, sgd(model), refusal.value.least_bytes, device="cuda") as trainer:
        assert losses_on(trainer, 1) == [loss_of(small(), *batches(1)[0]).item()]


def test_a_step_that_fails_on_the_device_loses_the_training(drivers: list[FakeDriver]) -> None:
    model = small()
    trainer = trainer_of(model, sgd(model), "100%", device="cuda")
    trainer.step(*batches(1)[0])
    drivers[0].kernel_bytes = 1 << 40
    with pytest.raises(TrainingLost, match=r"step 2 failed: .* resume from a checkpoint"):
        trainer.step(*batches(1)[0])
    with pytest.raises(TrainingLost, match="step 2 failed"):
        trainer.sync()
    trainer.close()


def test_steps_teach_the_profile_by_the_device_s_events(drivers: list[FakeDriver]) -> None:
    model = small()
    with trainer_of(model, sgd(model), "100%", device="cuda") as trainer:
        first = trainer.profile
        losses_on(trainer, 2)
        assert trainer.profile.op_seconds != first.op_seconds
        assert trainer.profile.device == "fake"


def test_a_store_in_a_file_is_refused_on_a_gpu() -> None:
    model = small()
    with pytest.raises(DeviceError, match="store='file' is for the CPU"):
        trainer_of(model, sgd(model), device="cuda", store="file")
    with pytest.raises(DeviceError, match="there is no device 'tpu'"):
        trainer_of(model, sgd(model), device="tpu")
    assert model[1].weight.shape == (64, 192)
