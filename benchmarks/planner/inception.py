"""Inception-V4 (Szegedy et al. 2016, "Inception-v4, Inception-ResNet and the Impact of Residual Connections").

Widths are those of the paper's Figures 3 to 9, times `scale`: SwapAdvisor's Inception-X has them X times as wide
(section 6.1).
"""

import torch
from torch import nn

Kernel = int | tuple[int, int]


def conv(inputs: int, outputs: int, kernel: Kernel, stride: int = 1, valid: bool = False) -> nn.Sequential:
    """Convolution, batch norm, ReLU; padded to keep the size unless `valid`."""
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (0, 0) if valid else (sides[0] // 2, sides[1] // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, sides, stride, padding, bias=False), nn.BatchNorm2d(outputs, 1e-3), nn.ReLU()
    )


def chain(inputs: int, *layers: tuple[int, Kernel]) -> nn.Sequential:
    """Convolutions one after the other, given by their widths and kernels."""
    widths = [inputs, *(width for width, _ in layers)]
    return nn.Sequential(*(conv(widths[i], w, k) for i, (w, k) in enumerate(layers)))


def shrinking(before: nn.Sequential, inputs: int, outputs: int) -> nn.Sequential:
    """`before`, and a convolution that halves the size."""
    return nn.Sequential(*before, conv(inputs, outputs, 3, 2, valid=True))


class Branches(nn.Module):
    """Several ways through a cell, concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _average(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), conv(inputs, outputs, 1))


def stem(s: int) -> nn.Sequential:
    """299 x 299 x 3 to 35 x 35 x 384 (Figure 3)."""
    return nn.Sequential(
        conv(3, 32 * s, 3, 2, valid=True),
        conv(32 * s, 32 * s, 3, valid=True),
        conv(32 * s, 64 * s, 3),
        Branches(nn.MaxPool2d(3, 2), conv(64 * s, 96 * s, 3, 2, valid=True)),
        Branches(
            nn.Sequential(conv(160 * s, 64 * s, 1), conv(64 * s, 96 * s, 3, valid=True)),
            nn.Sequential(
                *chain(160 * s, (64 * s, 1), (64 * s, (1, 7)), (64 * s, (7, 1))),
                conv(64 * s, 96 * s, 3, valid=True),
            ),
        ),
        Branches(conv(192 * s, 192 * s, 3, 2, valid=True), nn.MaxPool2d(3, 2)),
    )


def cell_a(s: int) -> Branches:
    """35 x 35 (Figure 4)."""
    return Branches(
        conv(384 * s, 96 * s, 1),
        chain(384 * s, (64 * s, 1), (96 * s, 3)),
        chain(384 * s, (64 * s, 1), (96 * s, 3), (96 * s, 3)),
        _average(384 * s, 96 * s),
    )


def reduction_a(s: int) -> Branches:
    """35 x 35 to 17 x 17 (Figure 7, with k, l, m, n = 192, 224, 256, 384)."""
    return Branches(
        conv(384 * s, 384 * s, 3, 2, valid=True),
        shrinking(chain(384 * s, (192 * s, 1), (224 * s, 3)), 224 * s, 256 * s),
        nn.MaxPool2d(3, 2),
    )


def cell_b(s: int) -> Branches:
    """17 x 17 (Figure 5)."""
    return Branches(
        conv(1024 * s, 384 * s, 1),
        chain(1024 * s, (192 * s, 1), (224 * s, (1, 7)), (256 * s, (7, 1))),
        chain(1024 * s, (192 * s, 1), (192 * s, (7, 1)), (224 * s, (1, 7)), (224 * s, (7, 1)), (256 * s, (1, 7))),
        _average(1024 * s, 128 * s),
    )


def reduction_b(s: int) -> Branches:
    """17 x 17 to 8 x 8 (Figure 8)."""
    return Branches(
        shrinking(chain(1024 * s, (192 * s, 1)), 192 * s, 192 * s),
        shrinking(chain(1024 * s, (256 * s, 1), (256 * s, (1, 7)), (320 * s, (7, 1))), 320 * s, 320 * s),
        nn.MaxPool2d(3, 2),
    )


def cell_c(s: int) -> Branches:
    """8 x 8 (Figure 6)."""

    def fork(inputs: int) -> Branches:
        return Branches(conv(inputs, 256 * s, (1, 3)), conv(inputs, 256 * s, (3, 1)))

    return Branches(
        conv(1536 * s, 256 * s, 1),
        nn.Sequential(conv(1536 * s, 384 * s, 1), fork(384 * s)),
        nn.Sequential(*chain(1536 * s, (384 * s, 1), (448 * s, (3, 1)), (512 * s, (1, 3))), fork(512 * s)),
        _average(1536 * s, 256 * s),
    )


def inception_v4(scale: int = 1, classes: int = 1000) -> nn.Sequential:
    """`image` [batch, 3, 299, 299] in, logits out (Figure 9). Dropout is left out: it does nothing at inference."""
    return nn.Sequential(
        stem(scale),
        *(cell_a(scale) for _ in range(4)),
        reduction_a(scale),
        *(cell_b(scale) for _ in range(7)),
        reduction_b(scale),
        *(cell_c(scale) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1536 * scale, classes),
    )
