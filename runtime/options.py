"""A model's kernel options, which trade accuracy for time.

Tolerances are relative to the largest output, compared with eager float32 on the CPU. Each option has a test.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["float32", "float16", "bfloat16"]
Tf32 = Literal["none", "cudnn", "all"]
"""Float32 CUDA kernels that may round operands to 10 bits of mantissa: none; cuDNN's convolutions and recurrent layers
(torch's default); or matrix products, too."""
Weights = Literal["float32", "bfloat16", "int8"]
"""Storage of float32 weights, also when copied: exact in as few bytes as possible, or in 16 or 8 bits."""
STORED_AS: tuple[Weights, ...] = get_args(Weights)

TOLERANCES: dict[Dtype, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
TF32_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one model. Inputs and outputs always keep their types."""

    dtype: Dtype = "float32"
    """Type of parameters and activations that are float32 in the archive."""
    channels_last: bool = False
    """Store the weights of 2-d convolutions channels last; their kernels then use that layout for activations, too."""
    tf32: Tf32 = "none"
    packed: bool = False
    """Pack the weights of convolutions and linear layers for oneDNN's fused kernels on this machine's CPU."""
    fused: bool = False
    """Use cuDNN's fused kernel for a convolution, its bias, a residual sum and a ReLU, if there is one."""
    weights: Weights = "float32"

    @property
    def label(self) -> str:
        """Part of file names: empty for `DEFAULTS`. `tf32` changes no file."""
        dtype = f"-{self.dtype}" if self.dtype != "float32" else ""
        layout = "-channels-last" * self.channels_last + "-packed" * self.packed + "-fused" * self.fused
        return dtype + layout + (f"-weights-{self.weights}" if self.weights != "float32" else "")

    @property
    def tolerance(self) -> float:
        return max(TOLERANCES[self.dtype], TF32_TOLERANCE if self.tf32 != "none" else 0.0)


DEFAULTS = Options()
"""Exact float32 in the exported layout."""
CUDA_DEFAULTS = Options(channels_last=True, tf32="cudnn", fused=True)
"""Server defaults on CUDA; a model's configuration can override them."""
