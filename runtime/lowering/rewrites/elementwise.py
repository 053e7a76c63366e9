"""Replaces functions that models spell out in several elementwise passes by one op."""

import math
from typing import Any

import torch
from torch import fx

from cohabit.runtime.lowering.fused_ops import rms_norm
from cohabit.runtime.lowering.model import FxModel

aten = torch.ops.aten

_EXACT = 1e-6
"""Relative tolerance for the constants of a formula: models write them with few digits or many."""


_CASTS = frozenset({aten.to.dtype, aten.to.dtype_layout, aten.to.device})


def drop_casts(model: FxModel) -> None:
    """Remove casts to a tensor's own type, which return it unchanged and hide formulas."""
    for node in list(model.graph.nodes):
        given = node.args[0] if node.target in _CASTS else None
        if isinstance(given, fx.Node) and _is_same(node.meta.get("val"), given.meta.get("val")):
            node.replace_all_uses_with(given)
            model.graph.erase_node(node)


def _is_same(result: Any, given: Any) -> bool:
    """Whether a cast returns its operand, by export's metadata."""
    if not isinstance(result, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    alike = result.dtype is given.dtype and result.device == given.device and result.layout is given.layout
    return alike and [str(s) for s in result.stride()] == [str(s) for s in given.stride()]


def use_gelu(model: FxModel) -> None:
    """Replace 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) by GELU with its tanh approximation."""
    for node in list(model.graph.nodes):
        if node.target is aten.tanh.default and (found := _gelu_of(node)) is not None:
            x, last = found
            with model.graph.inserting_before(last):
                gelu = model.graph.call_function(aten.gelu.default, (x,), {"approximate": "tanh"})
            gelu.meta = dict(last.meta)
            last.replace_all_uses_with(gelu)
    model.graph.eliminate_dead_code()


def _gelu_of(tanh: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return GELU's operand and the op that has its result, if this is the tanh in its formula."""
    inner = _factor(tanh.args[0], math.sqrt(2 / math.pi))
    if inner is None or inner.target is not aten.add.Tensor or inner.kwargs:
        return None
    for x, cubic in (inner.args, inner.args[::-1]):
        cube = _factor(cubic, 0.044715)
        if not isinstance(x, fx.Node) or cube is None or not _is_cube(cube, x):
            continue
        plus_one = next((user for user in tanh.users if _summand(user, 1.0) is tanh), None)
        for last in () if plus_one is None else plus_one.users:
            if last.target is not aten.mul.Tensor or last.kwargs:
                continue
            if any(_factor(half, 0.5) is x and other is plus_one for half, other in (last.args, last.args[::-1])):
                return x, last
    return None


def use_rms_norm(model: FxModel) -> None:
    """Replace w (x rsqrt(mean(x^2) + eps)), with the mean over the last dimension, by one op."""
    for node in list(model.graph.nodes):
        if node.target is not aten.rsqrt.default or (norm := _rms_norm_of(node)) is None:
            continue
        x, weight, eps, last = norm
        with model.graph.inserting_before(last):
            fused = model.graph.call_function(rms_norm, (x, weight, eps))
        fused.meta = dict(last.meta)
        last.replace_all_uses_with(fused)
    model.graph.eliminate_dead_code()


def _rms_norm_of(rsqrt: fx.Node) -> tuple[fx.Node, fx.Node, float, fx.Node] | None:
    """Return x, the weight, eps, and the op that has the result; None for any other rsqrt."""
    total = rsqrt.args[0]
    if not isinstance(total, fx.Node) or total.target is not aten.add.Tensor or total.kwargs:
        return None
    mean, eps = total.args[:2]
    if not isinstance(mean, fx.Node) or mean.target is not aten.mean.dim or not isinstance(eps, float):
        return None
    square, dims, *keep = mean.args
    if list(dims) != [-1] or not any(keep) or mean.kwargs:  # type: ignore[arg-type]
        return None
    x = _base_of_power(square, 2)
    if x is None or len(rsqrt.users) != 1:
        return None
    (scaled,) = rsqrt.users
    if scaled.target is not aten.mul.Tensor or _other(scaled, rsqrt) is not x or len(scaled.users) != 1:
        return None
    (last,) = scaled.users
    weight = _other(last, scaled) if last.target is aten.mul.Tensor else None
    if not isinstance(weight, fx.Node) or not _is_float32(x) or not _is_float32(weight):
        return None
    return (x, weight, eps, last) if weight.meta["val"].dim() == 1 else None


def _is_float32(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _other(node: fx.Node, one: fx.Node) -> Any:
    """Return the other operand of a two-operand op; None for any other op."""
    if node.kwargs or len(node.args) != 2:
        return None
    return node.args[1] if node.args[0] is one else node.args[0] if node.args[1] is one else None


def _factor(node: Any, number: float) -> fx.Node | None:
    """Return x for `x * number`."""
    return _operand(node, aten.mul.Tensor, number)


def _summand(node: Any, number: float) -> fx.Node | None:
    """Return x for `x + number`."""
    return _operand(node, aten.add.Tensor, number)


def _operand(node: Any, target: Any, number: float) -> fx.Node | None:
    if not isinstance(node, fx.Node) or node.target is not target or node.kwargs or len(node.args) != 2:
        return None
    for x, other in (node.args, node.args[::-1]):
        if (
            isinstance(x, fx.Node)
            and isinstance(other, int | float)
            and math.isclose(other, number, rel_tol=_EXACT)
        ):
            return x
    return None


def _is_cube(node: fx.Node, x: fx.Node) -> bool:
    """Whether a node is x^3, as a power or as two products."""
    if _base_of_power(node, 3) is x:
        return True
    if node.target is not aten.mul.Tensor or node.kwargs:
        return False
    return any(one is x and _base_of_power(other, 2) is x for one, other in (node.args, node.args[::-1]))


def _base_of_power(node: Any, exponent: int) -> fx.Node | None:
    """Return x for x^exponent, or for x * x."""
    if not isinstance(node, fx.Node) or node.kwargs:
        return None
    if node.target is aten.pow.Tensor_Scalar and node.args[1] == exponent:
        return node.args[0]  # type: ignore[return-value]
    is_square = exponent == 2 and node.target is aten.mul.Tensor and node.args[0] is node.args[1]
    return node.args[0] if is_square else None  # type: ignore[return-value]
