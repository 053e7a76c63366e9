"""A model's options for its kernels. They trade accuracy for time, so all of them are off by default.

Tolerances are relative to the largest output, against eager float32 on the CPU; a test per option holds them.
"""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "float16", "bfloat16"]

TOLERANCES: dict[Dtype, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
TF32_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of one model. Inputs and outputs keep their types whatever is chosen."""

    dtype: Dtype = "float32"
    """Type of parameters and activations that are float32 in the archive."""
    channels_last: bool = False
    """Store the weights of 2-d convolutions channels last; their kernels then use that layout for activations, too."""
    tf32: bool = False
    """Let CUDA round float32 operands of matrix products and convolutions to 10 bits of mantissa."""
    packed: bool = False
    """Pack the weights of convolutions and linear layers for oneDNN's fused kernels on this machine's CPU."""
    fused: bool = False
    """Use cuDNN's fused kernel for a convolution, its bias, a residual sum and a ReLU, where there is one."""

    @property
    def label(self) -> str:
        """Part of file names: empty for the defaults. `tf32` changes no file."""
        dtype = f"-{self.dtype}" if self.dtype != "float32" else ""
        return dtype + "-channels-last" * self.channels_last + "-packed" * self.packed + "-fused" * self.fused

    @property
    def tolerance(self) -> float:
        return max(TOLERANCES[self.dtype], TF32_TOLERANCE if self.tf32 else 0.0)


DEFAULTS = Options()
