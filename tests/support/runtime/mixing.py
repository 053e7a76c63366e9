"""Models in which the rows of a batch may influence one another: any function, looked-up vectors, experts."""

from collections.abc import Callable

import torch
from torch import nn


class Computed(nn.Module):
    """A function of its input."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


class Lookup(nn.Module):
    """A function of an embedding."""

    def __init__(self, size: int, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table = nn.Embedding(size, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.table(x))


class Experts(nn.Module):
    """A layer of four experts, each token to one of them. BSD to BSD.

    With a capacity, an expert takes that share of all tokens, in order, and others pass by. Without, all experts
    compute all tokens.
    """

    def __init__(self, capacity: float | None, width: int = 16, experts: int = 4) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 32) / 4)
        self.down = nn.Parameter(torch.randn(experts, 32, width) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TD = x.flatten(0, 1)
        gate_T, chosen_T = self.router(x_TD).softmax(-1).max(-1)
        chosen_TE = nn.functional.one_hot(chosen_T, self.router.out_features)
        if self.capacity is None:
            h_ETD = torch.relu(x_TD @ self.up) @ self.down
            y_TD = h_ETD[chosen_T, torch.arange(x_TD.shape[0])] * gate_T[:, None]
            return x + y_TD.reshape(x.shape)
        place_T = (chosen_TE.cumsum(0) * chosen_TE).sum(-1) - 1
        gate_T = gate_T * (place_T < x_TD.shape[0] * self.capacity)
        slot_T = (
            chosen_T * x_TD.shape[0] + place_T
        )  # every token has one, and those past the capacity count nothing
        buffer = torch.zeros(self.router.out_features * x_TD.shape[0], x.shape[-1])
        buffer = buffer.index_put((slot_T,), x_TD, accumulate=True)
        h_EPD = torch.relu(buffer.unflatten(0, (self.router.out_features, -1)) @ self.up) @ self.down
        y_TD = h_EPD.flatten(0, 1)[slot_T] * gate_T[:, None]
        return x + y_TD.reshape(x.shape)
