"""Training on a CUDA device: eager's bits in every order of its streams, within the pool, and state that comes back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.profiling import link
from cohabit.runtime.training import cuda
from cohabit.runtime.training.trainer import Trainer
from tests.runtime.cuda_fake import FakeDriver
from tests.runtime.test_training import adamw, assert_same, batches, eager, net, sgd, tensors_of, trained, trainer_of

pytestmark = pytest.mark.usefixtures("one_thread")


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
