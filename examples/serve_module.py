"""Serve a PyTorch module: export it into a model repository, then start the server.

    python examples/serve_module.py --memory 1MiB

Arguments go to `cohabit serve`. `cohabit import MODULE:FUNCTION` also checks the model and writes its configuration.
"""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        return {"score": self.layers(features)}


def main() -> None:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", max=8)
    program = torch.export.export(Scorer().eval(), (torch.zeros(2, 256),), dynamic_shapes=({0: batch},))
    archive = Path("models/scorer/1/model.pt2")
    archive.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, archive)
    serve = ["-m", "cohabit.server.cli", "serve", "models", *sys.argv[1:]]  # the command `cohabit serve models`
    os.execv(sys.executable, [sys.executable, *serve])


if __name__ == "__main__":
    main()
