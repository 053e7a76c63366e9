"""The benchmark's times of a budget's copies, and that timing them changes nothing."""

import torch
from torch import nn

import cohabit
from benchmarks.training_waits import CopyTimes

STEPS = 3


def trained(memory: str) -> tuple[list[float], dict[str, float]]:
    """Train a small net within a budget; return its losses, and the means of its copies."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x, losses = torch.randn(64, 128), []
    limits = cohabit.budget(memory, model, optimizer)
    copies = CopyTimes(limits)
    with limits:
        for number in range(1 + STEPS):
            if number == 1:
                copies.start()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses, copies.of_step(STEPS)


def test_copies_are_timed_and_losses_stay() -> None:
    roomy_losses, roomy = trained("1GiB")
    tight_losses, tight = trained("700KiB")
    assert tight_losses == roomy_losses
    assert tight["swapped_bytes"] > 0
    assert tight["waited_s"] >= tight["loop_copies_s"]
    assert tight["loop_copies_s"] + tight["thread_copies_s"] > 0
    assert roomy["swapped_bytes"] == roomy["loop_copies_s"] == roomy["thread_copies_s"] == 0
