"""Decodes the output of the pitch tracker in the zoo."""

import numpy as np
from numpy.typing import NDArray

CENTS_PER_BIN = 20.0
CENTS_OF_BIN_0 = 1997.3794084376191
"""Above 10 Hz."""


def decode_hz(pitch_activation: NDArray[np.float32], reach: int = 4) -> NDArray[np.float64]:
    """Return the pitch of each row: the mean of the bins within `reach` of the strongest, by activation."""
    peak_B1 = pitch_activation.argmax(axis=1)[:, None]
    bins_N = np.arange(pitch_activation.shape[1])
    weight_BN = np.where(np.abs(bins_N - peak_B1) <= reach, pitch_activation, 0.0)
    bin_B = (weight_BN * bins_N).sum(axis=1) / weight_BN.sum(axis=1)
    return np.asarray(10.0 * 2.0 ** ((CENTS_OF_BIN_0 + CENTS_PER_BIN * bin_B) / 1200), dtype=np.float64)
