"""Seeded weights and example inputs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

EXAMPLE_BATCH = 2
"""Batch of the example inputs; above 1, because export would take 1 for a constant."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make torch's default generator start from `seed`, and leave the caller's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def token_ids(vocabulary: int, length: int) -> torch.Tensor:
    """Example token ids, [EXAMPLE_BATCH, length] int64."""
    return torch.randint(0, vocabulary, (EXAMPLE_BATCH, length))


@torch.no_grad()
def calibrate_batch_norms(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Set the running statistics from `inputs`.

    A deep network with random weights and the default statistics (mean 0, variance 1) would square its
    activations' scale over and over, and folding its normalisation would be trivial.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    model(**inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum
