"""Arithmetic, comparisons, activations, products and reductions."""

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cohabit.server.importing.onnx.known import Known, cast, sym_max, sym_min
from cohabit.server.importing.onnx.registry import OPERATORS, NodeCall, Operator, Value, operator_of


def _operand(value: Value, other: Value) -> Any:
    """Return a value as an operand: a number, if it is a single one that has no influence on the result's type."""
    if not isinstance(value, Known):
        return value
    number = value.number
    same_type = isinstance(other, Tensor) and other.dtype == value.dtype and other.dim() >= value.numbers.ndim
    return number if number is not None and same_type else value.tensor()


def _binary(function: Callable[[Any, Any], Any]) -> Operator:
    def compute(call: NodeCall) -> Value:
        values = [value for value in call.values if value is not None]
        found = values[0]
        for value in values[1:]:
            result: Value = function(_operand(found, value), _operand(value, found))
            found = result
        return found

    return compute


def _unary(function: Callable[[Tensor], Tensor]) -> Operator:
    return lambda call: function(call.tensor())


def _tensor_of(value: Any, other: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=other.dtype)


def _divide(a: Any, b: Any) -> Any:
    if (a if isinstance(a, Tensor) else b).is_floating_point():
        return a / b
    return torch.div(_tensor_of(a, b), b, rounding_mode="trunc")


def _largest(a: Any, b: Any) -> Tensor:
    return torch.maximum(_tensor_of(a, b), _tensor_of(b, a))


def _smallest(a: Any, b: Any) -> Tensor:
    return torch.minimum(_tensor_of(a, b), _tensor_of(b, a))


_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _divide,
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "And": operator.and_,
    "Or": operator.or_,
    "Xor": operator.xor,
    "BitwiseAnd": operator.and_,
    "BitwiseOr": operator.or_,
    "BitwiseXor": operator.xor,
    "Max": _largest,
    "Min": _smallest,
    "Sum": operator.add,
}
_SAME_NAME = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor IsNaN Log Neg Reciprocal Relu Round Sigmoid Sign"
    " Sin Sinh Sqrt Tan Tanh"
)
"""Functions of one tensor that torch calls alike."""
_UNARY: Mapping[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name.lower()) for name in _SAME_NAME.split()},
    "BitwiseNot": torch.bitwise_not,
    "GlobalAveragePool": lambda x: x.mean(list(range(2, x.dim())), keepdim=True),
    "GlobalMaxPool": lambda x: x.amax(list(range(2, x.dim())), keepdim=True),
    "HardSwish": F.hardswish,
    "Mish": F.mish,
    "Not": torch.logical_not,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
}
_WITH_SETTINGS: Mapping[str, tuple[Callable[..., Tensor], Mapping[str, Any]]] = {
    "LeakyRelu": (F.leaky_relu, {"alpha": 0.01}),
    "Elu": (F.elu, {"alpha": 1.0}),
    "Celu": (F.celu, {"alpha": 1.0}),
    "Selu": (
        lambda x, alpha, gamma: F.elu(x, alpha) * gamma,
        {"alpha": 1.6732631921768188, "gamma": 1.0507010221481323},
    ),
    "HardSigmoid": (lambda x, alpha, beta: torch.clamp(x * alpha + beta, 0.0, 1.0), {"alpha": 0.2, "beta": 0.5}),
    "Gelu": (lambda x, approximate: F.gelu(x, approximate=approximate), {"approximate": "none"}),
    "com.microsoft.QuickGelu": (lambda x, alpha: x * torch.sigmoid(alpha * x), {"alpha": 1.702}),
}
"""Functions of a tensor and of attributes, which are given with their defaults."""
_GELUS = {"Gelu": "none", "BiasGelu": "none", "FastGelu": "tanh"}
"""ONNX Runtime's, of the sum of a tensor and a bias, by the approximation."""


def _with_settings(function: Callable[..., Tensor], defaults: Mapping[str, Any]) -> Operator:
    return lambda call: function(call.tensor(), *(call.attr(name, default) for name, default in defaults.items()))


def _gelu_of_sum(approximate: str) -> Operator:
    return lambda call: F.gelu(reduce(operator.add, call.tensors()), approximate=approximate)


OPERATORS.update({name: _binary(function) for name, function in _BINARY.items()})
OPERATORS.update({name: _unary(function) for name, function in _UNARY.items()})
OPERATORS.update({name: _with_settings(*given) for name, given in _WITH_SETTINGS.items()})
OPERATORS.update({f"com.microsoft.{name}": _gelu_of_sum(approximate) for name, approximate in _GELUS.items()})


@operator_of("Pow")
def _pow(call: NodeCall) -> Value:
    exponent = call.value(1)
    number = exponent.number if isinstance(exponent, Known) and exponent.numbers.ndim == 0 else None
    x = call.tensor(0)
    return torch.pow(x, call.tensor(1) if number is None else number).to(x.dtype)


@operator_of("Mod")
def _mod(call: NodeCall) -> Value:
    function = torch.fmod if call.attr("fmod", 0) else torch.remainder
    return function(call.tensor(0), call.tensor(1))


@operator_of("Mean")
def _mean(call: NodeCall) -> Value:
    tensors = call.tensors()
    return reduce(operator.add, tensors) / len(tensors)


@operator_of("Where")
def _where(call: NodeCall) -> Value:
    chosen, other = call.value(1), call.value(2)
    return torch.where(call.tensor(0), _operand(chosen, other), _operand(other, chosen))


@operator_of("Cast", "CastLike")
def _cast(call: NodeCall) -> Value:
    value = call.value(0)
    dtype = call.value(1).dtype if call.node.op == "CastLike" else call.dtype(call.attr("to"))
    if isinstance(value, Known) and (value.weight is None or value.numbers.size == 1):
        numbers = [cast(number, dtype) for number in value.list]
        array = Known.of(numbers, dtype).numbers.reshape(value.numbers.shape)
        return Known(array, dtype)
    return call.tensor().to(dtype)


@operator_of("IsInf")
def _isinf(call: NodeCall) -> Value:
    x = call.tensor()
    found = torch.isinf(x)
    if not call.attr("detect_negative", 1):
        found = found & (x > 0)
    return found if call.attr("detect_positive", 1) else found & (x < 0)


@operator_of("Clip")
def _clip(call: NodeCall) -> Value:
    x = call.tensor()
    for index, (name, bound) in enumerate((("min", torch.maximum), ("max", torch.minimum)), 1):
        if not call.has(index):
            x = torch.clamp(x, **{name: call.attr(name)}) if call.attr(name) is not None else x
            continue
        value = call.value(index)
        number = value.number if isinstance(value, Known) else None
        limits: dict[str, Any] = {name: number}
        x = bound(x, call.tensor(index)) if number is None else torch.clamp(x, **limits)
    return x


@operator_of("PRelu")
def _prelu(call: NodeCall) -> Value:
    x, slope = call.tensor(0), call.tensor(1)
    channels = slope.numel()
    if slope.dim() == x.dim() - 1 and slope.shape[0] == channels and x.dim() > 2 and x.shape[1] == channels:
        return F.prelu(x, slope.flatten())
    return torch.where(x >= 0, x, x * slope)


@operator_of("Softmax", "LogSoftmax")
def _softmax(call: NodeCall) -> Value:
    x = call.tensor()
    axis = call.attr("axis", -1 if call.node.opset >= 13 else 1)
    function: Callable[[Tensor, int], Tensor] = torch.softmax if call.node.op == "Softmax" else torch.log_softmax
    if call.node.opset >= 13 or axis % x.dim() == x.dim() - 1:
        return function(x, axis)
    return function(x.flatten(axis), axis).reshape(x.shape)  # of all the dimensions from `axis` on


@operator_of("MatMul")
def _matmul(call: NodeCall) -> Value:
    a, b = call.tensor(0), call.tensor(1)
    if b.dim() == 2 and a.dim() > 1 and call.constant[1]:
        return F.linear(a, b.t())  # which lowering packs
    return torch.matmul(a, b)


@operator_of("Gemm")
def _gemm(call: NodeCall) -> Value:
    a, b, bias = call.tensor(0), call.tensor(1), call.optional(2)
    alpha, beta = call.attr("alpha", 1.0), call.attr("beta", 1.0)
    a = a.t() if call.attr("transA", 0) else a
    b = b if call.attr("transB", 0) else b.t()
    if bias is not None and bias.dim() == 1 and alpha == beta == 1.0:
        return F.linear(a, b, bias.expand(b.shape[0]))
    found = F.linear(a, b)
    found = found if alpha == 1.0 else found * alpha
    return found if bias is None else found + (bias if beta == 1.0 else bias * beta)


@operator_of("com.microsoft.FusedMatMul")
def _fused_matmul(call: NodeCall) -> Value:
    call.require(not call.attr("transBatchA", 0) and not call.attr("transBatchB", 0), "a transposed batch")
    a, b = call.tensor(0), call.tensor(1)
    a = a.transpose(-1, -2) if call.attr("transA", 0) else a
    b = b.transpose(-1, -2) if call.attr("transB", 0) else b
    found = torch.matmul(a, b)
    return found if call.attr("alpha", 1.0) == 1.0 else found * call.attr("alpha", 1.0)


@operator_of("Einsum")
def _einsum(call: NodeCall) -> Value:
    return torch.einsum(call.attr("equation"), *call.tensors())


@operator_of("CumSum")
def _cumsum(call: NodeCall) -> Value:
    x, axis = call.tensor(), int(call.number("axis", 1, 0))
    backwards = call.attr("reverse", 0)
    x = x.flip(axis) if backwards else x
    found = torch.cumsum(x, axis).to(x.dtype)
    if call.attr("exclusive", 0):
        found = found - x
    return found.flip(axis) if backwards else found


_REDUCTIONS: Mapping[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceMean": lambda x, axes, keep: torch.mean(x, axes, keep),
    "ReduceSum": lambda x, axes, keep: torch.sum(x, axes, keep).to(x.dtype),
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keep),
    "ReduceL1": lambda x, axes, keep: torch.sum(x.abs(), axes, keep).to(x.dtype),
    "ReduceL2": lambda x, axes, keep: torch.sqrt(torch.sum(x * x, axes, keep)),
    "ReduceSumSquare": lambda x, axes, keep: torch.sum(x * x, axes, keep).to(x.dtype),
    "ReduceLogSum": lambda x, axes, keep: torch.log(torch.sum(x, axes, keep)),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keep),
    "ReduceProd": lambda x, axes, keep: _product(x, axes, keep),
}
_OF_NUMBERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "ReduceProd": operator.mul,
    "ReduceSum": operator.add,
    "ReduceMax": sym_max,
    "ReduceMin": sym_min,
}


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = torch.prod(x, axis, keep).to(x.dtype)
    return x


@operator_of(*_REDUCTIONS)
def _reduce(call: NodeCall) -> Value:
    value, axes, keep = call.value(0), call.sizes("axes", 1), bool(call.attr("keepdims", 1))
    if not axes and call.attr("noop_with_empty_axes", 0):
        return value
    if isinstance(value, Known) and value.numbers.ndim == 1 and call.node.op in _OF_NUMBERS:
        found = reduce(_OF_NUMBERS[call.node.op], value.list)
        return Known.of([found] if keep else found, value.dtype)
    x = call.tensor()
    return _REDUCTIONS[call.node.op](x, axes or list(range(x.dim())), keep)


@operator_of("ArgMax", "ArgMin")
def _arg(call: NodeCall) -> Value:
    x, keep = call.tensor(), bool(call.attr("keepdims", 1))
    axis: int = call.attr("axis", 0)
    function: Callable[..., Tensor] = torch.argmax if call.node.op == "ArgMax" else torch.argmin
    if not call.attr("select_last_index", 0):
        return function(x, axis, keepdim=keep)
    return x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim=keep)


@operator_of("TopK")
def _top_k(call: NodeCall) -> Value | tuple[Value | None, ...]:
    (k,) = call.sizes("k", 1) or [0]
    return torch.topk(call.tensor(), k, call.attr("axis", -1), bool(call.attr("largest", 1)))
