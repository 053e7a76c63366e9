"""Custom ops composed of torch's operators. Their results are new bytes.

On the CPU, 1x1 convolutions are computed as linear layers where that is faster. On CUDA, convolution, bias, residual
sum and ReLU are cuDNN's fused kernel; elsewhere they are plain ops. That kernel sums in another order, so it is an
option of the model. Both read and write the same tensors: a model's graph and plans do not depend on which one runs.
`window` is stride, padding, dilation and groups.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cohabit.runtime.lowering.encoding import int8_kernel
from cohabit.runtime.lowering.packing import CONVOLUTION, CONVOLUTION_SUM, LINEAR, LINEAR_SUM

LEAST_BY_COLUMNS, _MOST_COLUMNS = 1 << 18, 8
"""Elements of a weight from which on `linear_by_columns` pays, and the largest number of rows that are columns."""
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
"""Returns the attention, and the logarithm of each query's sum of exponentials."""


def conv1x1(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *activation: Any) -> torch.Tensor:
    """Return `activation(conv2d(x))`, channels last, given a weight packed for a linear layer."""
    result: torch.Tensor = LINEAR(x.permute(0, 2, 3, 1), weight, bias, *activation)
    return result.permute(0, 3, 1, 2)


def conv1x1_add(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operation: str
) -> torch.Tensor:
    """Return `conv2d(x) + other`, channels last, given a weight packed for a linear layer."""
    result: torch.Tensor = LINEAR_SUM(x.permute(0, 2, 3, 1), other.permute(0, 2, 3, 1), weight, bias, operation)
    return result.permute(0, 3, 1, 2)


def conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    """Return `activation(conv1d(x))`, channels last, given a weight packed for images of one row."""
    result: torch.Tensor = CONVOLUTION(x.unsqueeze(2), weight, bias, *rest)
    return result.squeeze(2)


def conv1d_add(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    """Return `conv1d(x) + other` or its ReLU, channels last, given a weight packed as for `conv1d`."""
    result: torch.Tensor = CONVOLUTION_SUM(x.unsqueeze(2), other.unsqueeze(2), weight, bias, *rest)
    return result.squeeze(2)


def conv_pixel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `conv2d(x)` of one-pixel images by a 1x1 kernel: a matrix product without oneDNN's operator."""
    return torch.nn.functional.linear(x.flatten(1), weight.flatten(1), bias)[:, :, None, None]


def linear_transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `linear(x)`, given the weight as [in, out]."""
    rows = x.reshape(-1, x.shape[-1])
    result = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
    return result if x.dim() == 2 else result.view(*x.shape[:-1], weight.shape[1])


def linear_by_columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `linear(x)`. A few rows are columns of the product: MKL then reads the weight [out, in] once for all."""
    count = x.numel() // x.shape[-1]
    if count > _MOST_COLUMNS:
        return torch.nn.functional.linear(x, weight, bias)
    result = torch.mm(weight, x.reshape(count, -1).t()).t().contiguous()
    if bias is not None:
        result.add_(bias)
    return result.view(*x.shape[:-1], weight.shape[0])


def linear_int8(x: torch.Tensor, weight: torch.Tensor, terms: torch.Tensor, *activation: Any) -> torch.Tensor:
    """Return `activation(linear(x))`, given the weight in int8, and outputs' scales and biases in `terms` [2, out]."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    result = activated(int8_kernel.product(rows, weight, terms), *activation)
    return result if x.dim() == 2 else result.view(*x.shape[:-1], weight.shape[0])


def linear_int8_add(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, terms: torch.Tensor, operation: str
) -> torch.Tensor:
    """Return `linear(x) + other`, given operands as for `linear_int8`."""
    return linear_int8(x, weight, terms).add_(other)


def conv1x1_int8(x: torch.Tensor, weight: torch.Tensor, terms: torch.Tensor, *activation: Any) -> torch.Tensor:
    """Return `activation(conv2d(x))`, channels last, given operands as for `linear_int8`."""
    return linear_int8(x.permute(0, 2, 3, 1), weight, terms, *activation).permute(0, 3, 1, 2)


def conv1x1_int8_add(
    x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, terms: torch.Tensor, operation: str
) -> torch.Tensor:
    """Return `conv2d(x) + other`, channels last, given operands as for `linear_int8`."""
    result = linear_int8(x.permute(0, 2, 3, 1), weight, terms).add_(other.permute(0, 2, 3, 1))
    return result.permute(0, 3, 1, 2)


def activated(
    y: torch.Tensor, name: str = "none", scalars: Sequence[float] = (), algorithm: str = ""
) -> torch.Tensor:
    """Apply an activation function, as oneDNN names it, to a tensor, which may be changed."""
    if name == "none":
        return y
    if name == "gelu":
        return torch.nn.functional.gelu(y, approximate=algorithm)
    if name == "leaky_relu":
        return torch.nn.functional.leaky_relu_(y, scalars[0])
    return _IN_PLACE[name](y)


_IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "swish": partial(torch.nn.functional.silu, inplace=True),
    "hardswish": partial(torch.nn.functional.hardswish, inplace=True),
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x [..., width] divided by each row's root mean square, times the weight [width]."""
    scale = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
    scale = scale.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, scale).mul_(weight)


def short_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Return attention computed as whole matrix products: [batch, heads, length, size]."""
    query3, key3, value3 = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    scores = torch.bmm(query3, key3.mT).mul_(scale)
    return torch.bmm(torch.softmax(scores, -1), value3).view(query.shape)


def joined_attention(
    query: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Return attention to past and new keys as if they were joined, without a copy of them.

    Queries are [batch, heads, length, size]; keys and values may have fewer heads, each for consecutive queries' heads.
    The mask is added to scores: [batch, 1 or heads, length, past + new].
    """
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    if groups > 1:  # queries that share a head of keys are rows of one head
        query = query.reshape(batch, key.shape[1], groups * length, size)
        mask = mask.expand(-1, -1, groups, -1) if length == 1 else mask.repeat(1, 1, groups, 1)
    past = past_key.shape[2]
    result: torch.Tensor
    result, weight = _FLASH(query, past_key, past_value, attn_mask=mask[..., :past], scale=scale)
    own, own_weight = _FLASH(query, key, value, attn_mask=mask[..., past:], scale=scale)
    # Both are means of values. Their weights are sums of exponentials, given as logarithms.
    share = torch.sigmoid(own_weight - weight).unsqueeze(-1).to(result.dtype)
    result = result.lerp_(own, share)
    if groups > 1:
        parts = result.view(batch, -1, groups, length, size).permute(0, 3, 1, 2, 4)
        result = parts.reshape(batch, length, heads, size).transpose(1, 2)
    return result


def rows_of_tables(ids: torch.Tensor, offsets: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return each column's ids as rows of tables stored one after the other. Raises IndexError as a table would."""
    if bool(((ids < 0) | (ids >= sizes)).any()):
        raise IndexError("index out of range in self")
    return ids + offsets


def conv_relu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *window: Any) -> torch.Tensor:
    """Return `relu(conv2d(x))` from one kernel. Raises RuntimeError if cuDNN has none for these operands."""
    if not on_cudnn(x):
        return plain_conv_relu(x, weight, bias, *window)
    return torch.cudnn_convolution_relu(x, weight, bias, *window)


def conv_add_relu(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, *window: Any
) -> torch.Tensor:
    """Return `relu(conv2d(x) + residual)` from one kernel; both summands have the same shape. Raises as `conv_relu`."""
    if not on_cudnn(x):
        return plain_conv_add_relu(x, weight, residual, bias, *window)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, *window)


def plain_conv_relu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *window: Any) -> torch.Tensor:
    """Compute `conv_relu` kernel by kernel."""
    return torch.conv2d(x, weight, bias, *window).relu_()


def plain_conv_add_relu(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None, *window: Any
) -> torch.Tensor:
    """Compute `conv_add_relu` kernel by kernel."""
    return torch.conv2d(x, weight, bias, *window).add_(residual).relu_()


def on_cudnn(x: torch.Tensor) -> bool:
    """Whether fused kernels are used for this operand."""
    return x.is_cuda


PLAIN: dict[Callable[..., torch.Tensor], Callable[..., torch.Tensor]] = {
    conv_relu: plain_conv_relu,
    conv_add_relu: plain_conv_add_relu,
}
"""The plain version of each fused op."""
INT8_OPS: tuple[Callable[..., torch.Tensor], ...] = (
    *(linear_int8, linear_int8_add),
    *(conv1x1_int8, conv1x1_int8_add),
)
FUSED_OPS: tuple[Callable[..., torch.Tensor], ...] = (
    *(conv1x1, conv1x1_add, conv1d, conv1d_add, conv_pixel),
    *INT8_OPS,
    *(linear_transposed, linear_by_columns, rms_norm, short_attention, joined_attention, rows_of_tables),
    *PLAIN,
)
