"""ResNet-152 in plain torch.nn with seeded weights, exported: the papers' model, without a package that has it."""

from pathlib import Path

import torch
from torch import nn
from torch.export import Dim

BLOCKS = (3, 8, 36, 3)
WIDTH = 64
INPUT = (3, 224, 224)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x if self.shortcut is None else self.shortcut(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return torch.relu(self.bn3(self.conv3(x)) + kept)


class ResNet152(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stem = nn.Sequential(
            nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        layers: list[nn.Module] = [stem]
        channels = WIDTH
        for stage, count in enumerate(BLOCKS):
            width = WIDTH << stage
            for block in range(count):
                layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
                channels = 4 * width
        layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def resnet152(layout: torch.memory_format = torch.contiguous_format) -> ResNet152:
    """Seeded; batch norms scaled so that activations keep their size through fifty blocks."""
    torch.manual_seed(0)
    model = ResNet152().eval()
    for module in model.modules():
        if isinstance(module, Bottleneck):
            nn.init.constant_(module.bn3.weight, 0.2)
    turned: ResNet152 = model.to(memory_format=layout)  # type: ignore[call-overload]
    return turned


def export_resnet152(path: Path) -> Path:
    """Write the archive, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shapes = {"x": {0: Dim("batch", min=1, max=64)}}
        program = torch.export.export(resnet152(), (), kwargs={"x": torch.zeros(2, *INPUT)}, dynamic_shapes=shapes)
        torch.export.save(program, path)
    return path
