"""Fused ops: convolution, bias, residual sum and ReLU as cuDNN's fused kernel on CUDA, as plain ops elsewhere.

The kernel sums in another order than the plain ops do, so it is an option of the model. Both read and write the same
tensors: a model's graph and plans do not depend on which one runs. `window` is stride, padding, dilation and groups.
"""

from collections.abc import Callable
from typing import Any

import torch


def conv_relu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *window: Any) -> torch.Tensor:
    """Return `relu(conv2d(x))` from one kernel. Raises RuntimeError where cuDNN has none for these operands."""
    if not on_cudnn(x):
        return plain_conv_relu(x, weight, bias, *window)
    return torch.cudnn_convolution_relu(x, weight, bias, *window)


def conv_add_relu(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, *window: Any
) -> torch.Tensor:
    """Return `relu(conv2d(x) + residual)` from one kernel; both summands have one shape. Raises as `conv_relu`."""
    if not on_cudnn(x):
        return plain_conv_add_relu(x, weight, residual, bias, *window)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *window)


def plain_conv_relu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *window: Any) -> torch.Tensor:
    """Do what `conv_relu` does, kernel by kernel."""
    return torch.conv2d(x, weight, bias, *window).relu_()


def plain_conv_add_relu(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, *window: Any
) -> torch.Tensor:
    """Do what `conv_add_relu` does, kernel by kernel."""
    return torch.conv2d(x, weight, bias, *window).add_(residual).relu_()


def on_cudnn(x: torch.Tensor) -> bool:
    """Whether fused kernels are used for this operand."""
    return x.is_cuda


PLAIN: dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = {
    conv_relu: plain_conv_relu,
    conv_add_relu: plain_conv_add_relu,
}
"""The plain version of each fused op."""
