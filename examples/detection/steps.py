"""Steps of an ensemble that finds objects and tells their classes: two networks, and three functions of tensors.

`cohabit import` takes both: steps.py:detector returns a module, and steps.py:select is a step itself.
"""

import torch
from torch import Tensor, nn

SIDE = 256
"""Pixels of a side of the prepared image."""
LEAST = 0.63
"""Scores of boxes are above it."""
TRIED, MOST = 24, 8
"""Boxes that are compared with one another, and the most that are returned."""


CHANNELS = 512
"""Of the networks, which have random weights: 9 MiB per layer."""


class Network(nn.Module):
    """Tells the same numbers of each patch of 16 x 16 pixels, or the means of all patches."""

    def __init__(self, outputs: int, is_mean: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, CHANNELS, 16, 16)]
        for _ in range(12):
            layers += [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.GroupNorm(1, CHANNELS), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(CHANNELS, outputs, 1))
        self.is_mean = is_mean

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        found = self.layers(pixels)
        return {"found": found.mean((2, 3)) if self.is_mean else found}


def detector() -> nn.Module:
    torch.manual_seed(0)
    return Network(3, is_mean=False).eval()


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return Network(5, is_mean=True).eval()


def prepare(image: Tensor) -> dict[str, Tensor]:
    """Resize and normalize an image, [480, 640, 3]."""
    planes = image.permute(2, 0, 1)[None].float()
    pixels = nn.functional.interpolate(planes, (SIDE, SIDE), mode="bilinear")
    return {"pixels": (pixels / 255 - 0.45) / 0.225}


def select(raw: Tensor) -> dict[str, Tensor]:
    """Return the best boxes that overlap no better one, and how many there are: non-maximum suppression.

    `raw` has a height, a width and a score for each patch, [1, 3, 16, 16]. Boxes are top, left, bottom, right, from 0
    to 1, [MOST, 4]; those after the last one are zeros.
    """
    best, order = raw[0, 2].flatten().sigmoid().topk(TRIED)
    center = (torch.stack([order // 16, order % 16], 1) + 0.5) / 16
    half = 0.05 + raw[0, :2].flatten(1).mT.sigmoid()[order] / 10
    low, high, area = center - half, center + half, half.prod(1) * 4
    shared = (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).relu().prod(2)
    overlaps = shared > 0.3 * (area[:, None] + area - shared)
    kept = best > LEAST
    for n in range(TRIED - 1):  # a loop of fixed length is exported step by step
        kept = torch.cat([kept[: n + 1], kept[n + 1 :] & ~(kept[n] & overlaps[n, n + 1 :])])
    first = torch.sort(kept.long(), descending=True, stable=True).indices[:MOST]
    boxes = torch.cat([low, high], 1)[first] * kept[first, None]
    return {"boxes": boxes, "count": kept.sum()[None].clamp(max=MOST)}


def crop(pixels: Tensor, boxes: Tensor) -> dict[str, Tensor]:
    """Sample boxes bilinearly, [MOST, 3, 64, 64]."""
    at = boxes[:, :2, None] + (boxes[:, 2:] - boxes[:, :2])[..., None] * (torch.arange(64) + 0.5) / 64
    weights = torch.relu(1 - (at[..., None] * SIDE - 0.5 - torch.arange(SIDE)).abs())
    return {"crops": weights[:, 0, None] @ pixels @ weights[:, 1, None].mT}
