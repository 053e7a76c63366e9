"""Convolutions, pooling and normalization."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cohabit.server.importing.onnx.known import sym_max
from cohabit.server.importing.onnx.registry import NodeCall, Value, operator_of

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
_MAX_POOLS = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
_AVERAGE_POOLS = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


class KernelWindow:
    """The window of a convolution or a pooling: its attributes, with a number for each dimension of the image."""

    def __init__(self, call: NodeCall, x: Tensor, kernel: Sequence[int]) -> None:
        self.kernel = [int(n) for n in kernel]
        self.dims = len(self.kernel)
        call.require(self.dims <= 3, f"an image of {self.dims} dimensions")
        self.strides: list[int] = list(call.attr("strides") or [1] * self.dims)
        self.dilations: list[int] = list(call.attr("dilations") or [1] * self.dims)
        pads = list(call.attr("pads") or [0] * 2 * self.dims)
        self.before, self.after = pads[: self.dims], pads[self.dims :]
        self.extent = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]
        same = call.attr("auto_pad", "NOTSET")
        if same in ("SAME_UPPER", "SAME_LOWER"):
            total = [
                sym_max((-(-n // s) - 1) * s + extent - n, 0) if s > 1 else extent - 1
                for n, s, extent in zip(x.shape[2:], self.strides, self.extent, strict=True)
            ]
            less = [n // 2 for n in total]
            more = [n - m for n, m in zip(total, less, strict=True)]
            self.before, self.after = (less, more) if same == "SAME_UPPER" else (more, less)
        elif same == "VALID":
            self.before = self.after = [0] * self.dims

    @property
    def is_even(self) -> bool:
        """Whether both sides have the same padding, in numbers."""
        both = [*self.before, *self.after]
        return all(isinstance(n, int) and n >= 0 for n in both) and self.before == self.after

    @property
    def is_poolable(self) -> bool:
        """Whether torch's pooling takes the padding."""
        return self.is_even and all(2 * p <= k for p, k in zip(self.before, self.kernel, strict=True))

    @property
    def padding(self) -> list[Any]:
        """Of both sides, as F.pad takes it."""
        both = list(zip(self.before, self.after, strict=True))
        return [n for pair in reversed(both) for n in pair]

    def cut(self, pooled: Tensor, x: Tensor) -> Tensor:
        """Leave out the windows that begin in the padding after an image, which `ceil_mode` adds to a padded one."""
        for dim, (size, before, stride) in enumerate(zip(x.shape[2:], self.before, self.strides, strict=True), 2):
            pooled = pooled[(*[slice(None)] * dim, slice(0, -(-(size + before) // stride)))]
        return pooled


@operator_of("Conv")
def _conv(call: NodeCall) -> Value:
    return convolution(call, call.tensor(0), call.tensor(1), call.optional(2))


def convolution(call: NodeCall, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    window = KernelWindow(call, x, weight.shape[2:])
    x, padding = (x, window.before) if window.is_even else (F.pad(x, window.padding), [0] * window.dims)
    function = _CONVOLUTIONS[window.dims - 1]
    return function(x, weight, bias, window.strides, padding, window.dilations, call.attr("group", 1))


@operator_of("ConvTranspose")
def _conv_transpose(call: NodeCall) -> Value:
    x, weight, bias = call.tensor(0), call.tensor(1), call.optional(2)
    window = KernelWindow(call, x, weight.shape[2:])
    extra = list(call.attr("output_padding") or [0] * window.dims)
    call.require(call.attr("output_shape") is None, "output_shape")
    call.require(call.attr("auto_pad", "NOTSET") in ("NOTSET", "VALID"), f"auto_pad={call.attr('auto_pad')}")
    function = _TRANSPOSED[window.dims - 1]
    if window.is_even and all(
        e < max(s, d) for e, s, d in zip(extra, window.strides, window.dilations, strict=True)
    ):
        group = call.attr("group", 1)
        return function(x, weight, bias, window.strides, window.before, extra, group, window.dilations)
    whole = function(x, weight, bias, window.strides, 0, 0, call.attr("group", 1), window.dilations)
    sides = list(zip(window.before, window.after, extra, strict=True))
    return F.pad(whole, [n for b, a, e in reversed(sides) for n in (-b, e - a)])


@operator_of("MaxPool")
def _max_pool(call: NodeCall) -> Value:
    call.require(len(call.node.outputs) == 1, "its output Indices")
    x = call.tensor()
    window = KernelWindow(call, x, call.attr("kernel_shape"))
    function, ceil = _MAX_POOLS[window.dims - 1], bool(call.attr("ceil_mode", 0))
    if window.is_poolable:
        return function(x, window.kernel, window.strides, window.before, window.dilations, ceil_mode=ceil)
    padded = F.pad(x, window.padding, value=-math.inf)
    pooled = function(padded, window.kernel, window.strides, 0, window.dilations, ceil_mode=ceil)
    return window.cut(pooled, x) if ceil else pooled


@operator_of("AveragePool")
def _average_pool(call: NodeCall) -> Value:
    x = call.tensor()
    window = KernelWindow(call, x, call.attr("kernel_shape"))
    call.require(window.dilations == [1] * window.dims, "dilations")
    function, ceil = _AVERAGE_POOLS[window.dims - 1], bool(call.attr("ceil_mode", 0))
    counts = bool(call.attr("count_include_pad", 0))
    if window.is_poolable:
        return function(x, window.kernel, window.strides, window.before, ceil, counts)
    call.require(not ceil, "ceil_mode with uneven padding")
    pooled = function(F.pad(x, window.padding), window.kernel, window.strides)
    if counts:
        return pooled
    inside = F.pad(torch.ones_like(x[:1, :1]), window.padding)
    return pooled / function(inside, window.kernel, window.strides)


@operator_of("BatchNormalization")
def _batch_normalization(call: NodeCall) -> Value:
    call.require(not call.attr("training_mode", 0) and len(call.node.outputs) == 1, "training")
    x, scale, bias, mean, variance = (call.tensor(index) for index in range(5))
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, call.attr("epsilon", 1e-5))


@operator_of("InstanceNormalization")
def _instance_normalization(call: NodeCall) -> Value:
    x, scale, bias = (call.tensor(index) for index in range(3))
    # As a group norm with a group for each channel, which takes the same rows at every batch size.
    return F.group_norm(x, scale.shape[0], scale, bias, call.attr("epsilon", 1e-5))


@operator_of("GroupNormalization")
def _group_normalization(call: NodeCall) -> Value:
    x, scale, bias = (call.tensor(index) for index in range(3))
    groups = call.attr("num_groups")
    if call.node.opset < 21:  # a scale for each group
        scale, bias = (t.repeat_interleave(x.shape[1] // groups) for t in (scale, bias))
    return F.group_norm(x, groups, scale, bias, call.attr("epsilon", 1e-5))


@operator_of("LayerNormalization")
def _layer_normalization(call: NodeCall) -> Value | tuple[Value | None, ...]:
    x, scale, bias = call.tensor(0), call.tensor(1), call.optional(2)
    axis, epsilon = call.attr("axis", -1) % x.dim(), call.attr("epsilon", 1e-5)
    shape = list(x.shape[axis:])
    fits = list(scale.shape) == shape and (bias is None or list(bias.shape) == shape)
    found = F.layer_norm(x, shape, scale if fits else None, bias if fits else None, epsilon)
    if not fits:
        found = found * scale if bias is None else found * scale + bias
    if len(call.node.outputs) == 1:
        return found
    variance, mean = torch.var_mean(x, list(range(axis, x.dim())), correction=0, keepdim=True)
    return found, mean, torch.rsqrt(variance + epsilon)


@operator_of("com.microsoft.SkipLayerNormalization")
def _skip_layer_normalization(call: NodeCall) -> Value | tuple[Value | None, ...]:
    call.require(not any(call.node.outputs[1:3]), "its mean as an output")
    x = call.tensor(0) + call.tensor(1)
    x = x + call.tensor(4) if call.has(4) else x
    scale = call.tensor(2)
    found = F.layer_norm(x, [scale.shape[0]], scale, call.optional(3), call.attr("epsilon", 1e-12))
    return (found, None, None, x) if len(call.node.outputs) > 1 else found


@operator_of("LRN")
def _lrn(call: NodeCall) -> Value:
    size = call.attr("size")
    call.require(size % 2 == 1, f"an even size ({size})")
    alpha, beta, bias = call.attr("alpha", 1e-4), call.attr("beta", 0.75), call.attr("bias", 1.0)
    return F.local_response_norm(call.tensor(), size, alpha, beta, bias)


@operator_of("LpNormalization")
def _lp_normalization(call: NodeCall) -> Value:
    x, axis, p = call.tensor(), call.attr("axis", -1), call.attr("p", 2)
    norm: Tensor = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return x / norm


@operator_of("GridSample")
def _grid_sample(call: NodeCall) -> Value:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        call.attr("mode", "linear"), call.attr("mode", "bilinear")
    )
    padding, corners = call.attr("padding_mode", "zeros"), bool(call.attr("align_corners", 0))
    return F.grid_sample(call.tensor(0), call.tensor(1), mode, padding, corners)
