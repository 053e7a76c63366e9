"""Ranking model: embedded categories and dense features into large linear layers. Many parameters, little compute."""

from itertools import pairwise

import torch
from torch import nn

from cohabit.loadgen.zoo import Inputs
from cohabit.loadgen.zoo.seeded import EXAMPLE_BATCH, seeded

FEATURES = 256
FIELDS, CATEGORIES, EMBEDDING = 4, 10_240, 64

_SHAPES = tuple((width, layers) for layers in (2, 3, 4) for width in range(448, 800, 16))
_MIN_PARAMETERS, _MAX_PARAMETERS = 1_400_000, 2_100_000


class Ranker(nn.Module):
    """`features` [batch, FEATURES] float32 and `categories` [batch, FIELDS] int64 in, `score` [batch, 1] out."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        widths = [FEATURES + FIELDS * EMBEDDING] + [width] * (layers + 1)
        self.embedding = nn.Embedding(CATEGORIES, EMBEDDING)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.score = nn.Linear(width, 1)

    def forward(self, features: torch.Tensor, categories: torch.Tensor) -> dict[str, torch.Tensor]:
        x_BF = torch.cat([features, self.embedding(categories).flatten(1)], dim=1)
        for layer in self.hidden:
            x_BF = torch.relu(layer(x_BF))
        return {"score": self.score(x_BF)}


def parameter_count(width: int, layers: int) -> int:
    inputs = FEATURES + FIELDS * EMBEDDING
    return CATEGORIES * EMBEDDING + inputs * width + width + layers * (width * width + width) + width + 1


def sizes(seed: int) -> tuple[int, int]:
    """Return the width and the number of square layers; they differ for any 15 consecutive seeds."""
    fitting = [s for s in _SHAPES if _MIN_PARAMETERS <= parameter_count(*s) <= _MAX_PARAMETERS]
    return fitting[seed * 11 % len(fitting)]


def ranker(seed: int) -> tuple[nn.Module, Inputs]:
    with seeded(seed):
        model = Ranker(*sizes(seed)).eval()
        categories = torch.randint(0, CATEGORIES, (EXAMPLE_BATCH, FIELDS))
        return model, {"features": torch.randn(EXAMPLE_BATCH, FEATURES), "categories": categories}
