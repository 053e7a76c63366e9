"""Fused ops: convolution, bias, residual sum and ReLU as cuDNN's fused kernel on CUDA, as plain ops elsewhere.

The kernel sums in another order than the plain ops do, so it is an option of the model. Both read and write the same
tensors: a model's graph and plans do not depend on which one runs.
"""

from collections.abc import Callable, Sequence

import torch


def conv_relu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """`relu(conv2d(x))` in one kernel. Raises RuntimeError where cuDNN has none for these operands."""
    if not on_cudnn(x):
        return plain_conv_relu(x, weight, bias, stride, padding, dilation, groups)
    return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)


def conv_add_relu(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """`relu(conv2d(x) + residual)` in one kernel; the residual has the result's shape. Raises as `conv_relu` does."""
    if not on_cudnn(x):
        return plain_conv_add_relu(x, weight, residual, bias, stride, padding, dilation, groups)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, stride, padding, dilation, groups)


def plain_conv_relu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """What `conv_relu` stands for, kernel by kernel."""
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups).relu_()


def plain_conv_add_relu(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """What `conv_add_relu` stands for, kernel by kernel."""
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups).add_(residual).relu_()


def on_cudnn(x: torch.Tensor) -> bool:
    """Whether this is where fused kernels are looked for."""
    return x.is_cuda


PLAIN: dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = {
    conv_relu: plain_conv_relu,
    conv_add_relu: plain_conv_add_relu,
}
"""The fused ops, with what each stands for."""
