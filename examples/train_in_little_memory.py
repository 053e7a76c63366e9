"""Train a model in 60 % of a step's peak memory, and compare its losses with eager PyTorch's.

    python examples/train_in_little_memory.py

`cohabit train` calls `make_step` and trains the same model with checkpoints:

    cohabit train examples/train_in_little_memory.py:make_step --memory 60% --steps 20 --checkpoint run
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cohabit

STEPS = 5
Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(x), labels)


def make_step() -> tuple[nn.Module, torch.optim.Optimizer, object, list[Batch]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    batches = [(torch.randn(64, 128), torch.randint(0, 10, (64,))) for _ in range(STEPS)]
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loss, batches


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, *batch)
        torch.autograd.backward(value)
        optimizer.step()
        losses.append(value.item())
    return losses


def main() -> None:
    model, optimizer, _, batches = make_step()
    with cohabit.budget("60%", model, optimizer, store="file") as budget:
        losses = train(model, optimizer, batches)
        print(
            f"tensors took up to {budget.peak_bytes} of {budget.limit_bytes} bytes, {budget.moved_bytes} were moved"
        )
    print("losses", losses)
    model, optimizer, _, batches = make_step()
    print("the same as PyTorch's" if losses == train(model, optimizer, batches) else "other than PyTorch's")


if __name__ == "__main__":
    main()
