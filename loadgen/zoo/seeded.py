"""Seeded weights and example inputs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

EXAMPLE_BATCH = 2
"""Batch of the example inputs; above 1, because export treats 1 as a constant."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator inside the block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def token_ids(vocabulary: int, length: int) -> torch.Tensor:
    """Return example token ids, [EXAMPLE_BATCH, length] int64."""
    return torch.randint(0, vocabulary, (EXAMPLE_BATCH, length))


@torch.no_grad()
def calibrate_batch_norms(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Set the running statistics from `inputs`.

    With random weights and the default statistics (mean 0, variance 1), each layer of a deep network would square its
    activations' scale, and folding the normalisation would be trivial.
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
