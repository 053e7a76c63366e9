"""A small net, its optimizers and its steps: trained by eager PyTorch, and by a trainer of captured steps."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from benchmarks.captured.trainer import Trainer

Batch = tuple[torch.Tensor, torch.Tensor]

STEPS = 10


class Net(nn.Module):
    """Convolutions with batch norm and dropout, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Dropout(0.3)
        self.others = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.hidden, self.classes = nn.Linear(16 * 16, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        for layer in self.others:
            x = torch.relu(layer(x)) + x
        x = functional.avg_pool2d(self.drop(x), 2)
        return self.classes(torch.relu(self.hidden(x.flatten(1))))


def loss_of(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), labels)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batches(count: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 10, (16,), generator=generator))
        for _ in range(count)
    ]


def trainer_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    memory: int | str = "60%",
    searcher: str = "on_demand",
    **options,
) -> Trainer:
    return Trainer(
        model, optimizer, loss_of, batches(1)[0], memory, searcher=searcher, **{"search_seconds": 0.2, **options}
    )


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in (*model.state_dict().values(), *state)]


def eager(make: Callable[[nn.Module], torch.optim.Optimizer], step: Callable[..., torch.Tensor] | None = None):
    """Losses of ten eager steps, and what is then in the model and its optimizer."""
    model = net()
    optimizer = make(model)
    torch.manual_seed(2)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        if step is None:
            loss = loss_of(model, *batch)
            loss.backward()
        else:
            loss = step(model, *batch)
        optimizer.step()
        losses.append(loss.item())
    return losses, tensors_of(model, optimizer)


def trained(trainer: Trainer, model: nn.Module, optimizer: torch.optim.Optimizer):
    """The same of a trainer's steps."""
    torch.manual_seed(2)
    with trainer:
        losses = [trainer.step(*batch).item() for batch in batches()]
    return losses, tensors_of(model, optimizer)


def assert_same(found, expected) -> None:
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
