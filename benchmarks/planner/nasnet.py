"""NASNet-A (Zoph et al. 2018, "Learning Transferable Architectures for Scalable Image Recognition", Figure 4).

Six normal cells per stage and 4032 features before the classifier make the "6 @ 4032" network, called large.
"""

import torch
from torch import nn


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, 1e-3)


def _project(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.Conv2d(inputs, outputs, 1, bias=False), _norm(outputs))


class Separable(nn.Sequential):
    """ReLU, depthwise and pointwise convolution, norm: all of it twice, as the search space has it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        layers: list[nn.Module] = []
        for width, step in ((inputs, stride), (outputs, 1)):
            layers += [
                nn.ReLU(),
                nn.Conv2d(width, width, kernel, step, kernel // 2, groups=width, bias=False),
                nn.Conv2d(width, outputs, 1, bias=False),
                _norm(outputs),
            ]
        super().__init__(*layers)


class Halved(nn.Module):
    """Factorised reduction: two 1 x 1 convolutions on grids shifted by a pixel, concatenated and normed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, bias=False)
        self.norm = _norm(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(x)
        shifted = nn.functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        halved: torch.Tensor = self.norm(
            torch.cat([self.even(x[:, :, ::2, ::2]), self.odd(shifted[:, :, ::2, ::2])], 1)
        )
        return halved


def _average(stride: int = 1) -> nn.AvgPool2d:
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


def _most() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, 1)


class NormalCell(nn.Module):
    """Five sums of what `left` (two cells ago) and `right` (the last cell) become; six times `width` channels."""

    def __init__(self, left: nn.Module, right: nn.Module, width: int) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.sum0 = nn.ModuleList([Separable(width, width, 5), Separable(width, width, 3)])
        self.sum1 = nn.ModuleList([Separable(width, width, 5), Separable(width, width, 3)])
        self.sum4 = Separable(width, width, 3)
        self.average = _average()

    def forward(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        left, right = self.left(before), self.right(last)
        sums = [
            self.sum0[0](right) + self.sum0[1](left),
            self.sum1[0](left) + self.sum1[1](left),
            self.average(right) + left,
            self.average(left) + self.average(left),
            self.sum4(right) + right,
        ]
        return torch.cat([left, *sums], 1)


class ReductionCell(nn.Module):
    """Halves the size; four times `width` channels. The first cell leaves `left` as wide as it is."""

    def __init__(self, left: nn.Module, right: nn.Module, width: int, left_width: int | None = None) -> None:
        super().__init__()
        inputs = width if left_width is None else left_width
        self.left, self.right = left, right
        self.sum0 = nn.ModuleList([Separable(width, width, 5, 2), Separable(inputs, width, 7, 2)])
        self.sum1 = nn.ModuleList([_most(), Separable(inputs, width, 7, 2)])
        self.sum2 = nn.ModuleList([_average(2), Separable(inputs, width, 5, 2)])
        self.sum3 = _average()
        self.sum4 = nn.ModuleList([Separable(width, width, 3), _most()])

    def forward(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        left, right = self.left(before), self.right(last)
        first = self.sum0[0](right) + self.sum0[1](left)
        second = self.sum1[0](right) + self.sum1[1](left)
        third = self.sum2[0](right) + self.sum2[1](left)
        fourth = self.sum3(first) + second
        fifth = self.sum4[0](first) + self.sum4[1](right)
        return torch.cat([second, third, fourth, fifth], 1)


class NasNetA(nn.Module):
    """`image` [batch, 3, 331, 331] in, logits out.

    Two stem cells reduce at a quarter and half of the first width; between the three stages of normal cells stand
    reduction cells that double the width.
    """

    def __init__(self, repeats: int = 6, width: int = 168, stem_width: int = 96, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, stem_width, 3, 2, bias=False), _norm(stem_width))
        quarter, half = width // 4, width // 2
        cells: list[nn.Module] = [
            ReductionCell(nn.Identity(), _project(stem_width, quarter), quarter, left_width=stem_width),
            ReductionCell(Halved(stem_width, half), _project(4 * quarter, half), half),
        ]
        before, last = 4 * quarter, 4 * half
        halve = True  # what came two cells ago is twice the size
        for stage in range(3):
            wide = width << stage
            if stage:
                cells.append(ReductionCell(_project(before, wide), _project(last, wide), wide))
                before, last, halve = last, 4 * wide, True
            for _ in range(repeats):
                left = Halved(before, wide) if halve else _project(before, wide)
                cells.append(NormalCell(left, _project(last, wide), wide))
                before, last, halve = last, 6 * wide, False
        self.cells = nn.ModuleList(cells)
        self.head = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        last = self.stem(image)
        before = last
        for cell in self.cells:
            before, last = last, cell(before, last)
        logits: torch.Tensor = self.head(last)
        return logits
