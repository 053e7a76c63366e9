"""Run a module in half of the memory of its weights, and compare its outputs with the module's own.

    python examples/module_in_budget.py

Served models are planned and executed in the same way. The terminal shows the plan; a notebook draws `small.plan`.
"""

import torch
from torch import nn

import cohabit

LAYERS, WIDTH = 12, 768


def main() -> int:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).eval()
    example = torch.randn(8, WIDTH)

    # Exports, measures and plans, which takes seconds. The other half of the weights is copied in while layers compute.
    with cohabit.load(module, example, "50%") as small:
        small.plan.show()
        batch = torch.randn(8, WIDTH)
        with torch.no_grad():
            error = (small(batch) - module(batch)).abs().max().item()

    weights = sum(parameter.nbytes for parameter in module.parameters())
    print(f"in {small.plan.memory_bytes / weights:.0%} of the weights' memory, largest difference {error:.1e}")
    return 0 if error < 1e-5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
