"""Operators of 8-bit models. Weights stay 8-bit in the archive; products are computed in floats."""

import torch
from torch import Tensor

from cohabit.server.importing.onnx.operators.layers import convolution
from cohabit.server.importing.onnx.registry import NodeCall, Value, operator_of


def _along(parameter: Tensor, x: Tensor, axis: int) -> Tensor:
    """Shape a scale or zero point, one for all or one for each element of a dimension, so that it broadcasts."""
    if parameter.dim() != 1 or parameter.numel() == 1:
        return parameter.reshape(()) if parameter.numel() == 1 else parameter
    return parameter.reshape([-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())])


def _quantize(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    limits = torch.iinfo(zero.dtype)
    return torch.clamp(torch.round(x / scale) + zero, limits.min, limits.max).to(zero.dtype)


def _without_zero(x: Tensor, zero: Tensor | None, axis: int, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if zero is None else x.to(dtype) - _along(zero, x, axis).to(dtype)


@operator_of("DequantizeLinear")
def _dequantize(call: NodeCall) -> Value:
    call.require(not call.attr("block_size", 0), "block_size")
    x, scale, axis = call.tensor(0), call.tensor(1), call.attr("axis", 1)
    return _without_zero(x, call.optional(2), axis, scale.dtype) * _along(scale, x, axis)


@operator_of("QuantizeLinear")
def _quantize_linear(call: NodeCall) -> Value:
    call.require(not call.attr("block_size", 0), "block_size")
    x, scale, zero, axis = call.tensor(0), call.tensor(1), call.optional(2), call.attr("axis", 1)
    if zero is None:
        given = call.attr("output_dtype", 0)
        zero = torch.zeros((), dtype=call.dtype(given) if given else torch.uint8)
    return _quantize(x, _along(scale, x, axis), _along(zero, x, axis))


@operator_of("DynamicQuantizeLinear")
def _dynamic_quantize(call: NodeCall) -> Value | tuple[Value | None, ...]:
    x = call.tensor()
    least, most = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (most - least) / 255
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    zero = torch.clamp(torch.round(-least / scale), 0, 255).to(torch.uint8)
    return _quantize(x, scale, zero), scale, zero


@operator_of("MatMulInteger")
def _matmul_integer(call: NodeCall) -> Value:
    a = _without_zero(call.tensor(0), call.optional(2), -2, torch.float32)
    b = _without_zero(call.tensor(1), call.optional(3), -1, torch.float32)
    return torch.matmul(a, b).to(torch.int32)  # exact up to 2**24


@operator_of("ConvInteger")
def _conv_integer(call: NodeCall) -> Value:
    x = _without_zero(call.tensor(0), call.optional(2), 1, torch.float32)
    weight = _without_zero(call.tensor(1), call.optional(3), 0, torch.float32)
    return convolution(call, x, weight, None).to(torch.int32)


@operator_of("QLinearMatMul")
def _q_linear_matmul(call: NodeCall) -> Value:
    a = _without_zero(call.tensor(0), call.tensor(2), -2, torch.float32) * _along(
        call.tensor(1), call.tensor(0), -2
    )
    b = _without_zero(call.tensor(3), call.tensor(5), -1, torch.float32) * _along(
        call.tensor(4), call.tensor(3), -1
    )
    return _quantize(torch.matmul(a, b), _along(call.tensor(6), a, -2), _along(call.tensor(7), a, -2))


@operator_of("QLinearConv")
def _q_linear_conv(call: NodeCall) -> Value:
    x = _without_zero(call.tensor(0), call.tensor(2), 1, torch.float32)
    weight = _without_zero(call.tensor(3), call.tensor(5), 0, torch.float32)
    bias = call.optional(8)
    products = convolution(call, x, weight, None if bias is None else bias.to(torch.float32))
    scale = call.tensor(1) * _along(call.tensor(4), products, 1)
    return _quantize(products * scale, call.tensor(6).reshape(()), call.tensor(7).reshape(()))
