"""Train with Lightning in 60 % of the memory that a step needs, and compare its losses with Lightning's own.

    pip install lightning && python examples/train_with_lightning.py

Lightning makes the optimizer when it begins, so a callback enters the budget there.
"""

from contextlib import ExitStack

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import cohabit


class Budget(lightning.Callback):
    """Trains in 60 % of a step's memory, and leaves everything whole, also after an error."""

    def __init__(self) -> None:
        self._entered = ExitStack()

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        budget = cohabit.budget("60%", module, trainer.optimizers, store="file")
        self._entered.enter_context(budget)

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._entered.close()

    def on_exception(self, trainer: lightning.Trainer, module: lightning.LightningModule, error: object) -> None:
        self._entered.close()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(128, 10))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(*callbacks: lightning.Callback) -> list[float]:
    torch.manual_seed(0)
    model, data = Classifier(), TensorDataset(torch.randn(320, 128), torch.randint(0, 10, (320,)))
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=64))
    return model.losses


if __name__ == "__main__":
    print("the same as Lightning's" if train(Budget()) == train() else "other than Lightning's")
