"""A deep LSTM classifier: many parameters, each used at every step."""

import torch
from torch import nn

from cohabit.loadgen.zoo import Inputs
from cohabit.loadgen.zoo.seeded import seeded, token_ids

VOCABULARY = 128
"""Small, so that nearly all parameters belong to the recurrent layers."""

LENGTH = 16


class TokenClassifier(nn.Module):
    """`input_ids` [batch, LENGTH] int64 below VOCABULARY in, `logits` [batch, classes] out."""

    def __init__(self, hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        states_BTH, _ = self.lstm(self.embedding(input_ids))
        return {"logits": self.head(states_BTH[:, -1])}


def lstm(seed: int) -> tuple[nn.Module, Inputs]:
    with seeded(seed):
        model = TokenClassifier(hidden=768, layers=12, classes=100).eval()
        return model, {"input_ids": token_ids(VOCABULARY, LENGTH)}
