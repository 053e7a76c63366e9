"""A ranking model: a few large linear layers, so that its parameters outweigh its arithmetic."""

from itertools import pairwise

import torch
from torch import nn

from loadgen.zoo import Inputs
from loadgen.zoo.seeded import EXAMPLE_BATCH, seeded

FEATURES = 256

_SHAPES = tuple((width, layers) for layers in (2, 3, 4) for width in range(640, 1088, 16))
_MIN_PARAMETERS, _MAX_PARAMETERS = 1_300_000, 2_200_000


class Ranker(nn.Module):
    """`features` [batch, FEATURES] float32 in, `score` [batch, 1] out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [FEATURES] + [width] * (layers + 1)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.score = nn.Linear(width, 1)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        x_BF = features
        for layer in self.hidden:
            x_BF = torch.relu(layer(x_BF))
        return {"score": self.score(x_BF)}


def parameter_count(width: int, layers: int) -> int:
    return FEATURES * width + width + layers * (width * width + width) + width + 1


def sizes(seed: int) -> tuple[int, int]:
    """Width and number of square layers: different for any 15 seeds in a row."""
    fitting = [s for s in _SHAPES if _MIN_PARAMETERS <= parameter_count(*s) <= _MAX_PARAMETERS]
    return fitting[seed * 11 % len(fitting)]


def ranker(seed: int) -> tuple[nn.Module, Inputs]:
    with seeded(seed):
        model = Ranker(*sizes(seed)).eval()
        return model, {"features": torch.randn(EXAMPLE_BATCH, FEATURES)}
