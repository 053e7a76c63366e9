"""Operators of tiled programs as torch calls, on tiles or on DTensors."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohabit.planner.tiling.arrays import Expression, Fold, Function, JoinUpdate, Map, Scan, UnsupportedExpression

_MAPS: dict[str, Callable[..., Any]] = {
    "astype": lambda tile: tile,
    # Operators accept scalars on both sides, torch's functions on one.
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "power": operator.pow,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "less": operator.lt,
    "less_equal": operator.le,
    "equal": operator.eq,
    "not_equal": operator.ne,
    "maximum": lambda a, b: _with_scalar(torch.maximum, torch.clamp_min, a, b),
    "minimum": lambda a, b: _with_scalar(torch.minimum, torch.clamp_max, a, b),
}
_FOLDS = {"min": torch.amin, "max": torch.amax}
_JOINS = {"cholesky": torch.linalg.cholesky, "inv": torch.linalg.inv, "solve": torch.linalg.solve}


def compute(expression: Expression, tiles: Sequence[Any]) -> Tensor:
    """Apply a map, fold, scan or join_update to tiles of its inputs, of at most two axes: [rows, columns]."""
    dtype = torch_dtype(expression.dtype)
    match expression.operator:
        case Map(function, arguments):
            if dtype.is_floating_point:  # torch computes integers in its default precision
                tiles = [t if t.dtype == torch.bool else t.to(dtype) for t in tiles]
            given = iter(tiles)
            inputs = [next(given) if argument is None else argument for argument in arguments]
            result = _call(function, _MAPS)(*inputs)
        case Fold(function, axes, keepdims, _):
            if function in ("argmin", "argmax", "prod"):
                result = getattr(torch, function)(tiles[0], dim=axes[0] if axes else None, keepdim=keepdims)
            else:
                result = _FOLDS.get(function, torch.sum)(tiles[0], dim=axes, keepdim=keepdims)
        case Scan(function, axis):
            result = getattr(torch, function)(tiles[0], dim=axis)
        case JoinUpdate(function, _, _):
            result = _call(function, _JOINS)(*[t.to(dtype) for t in tiles])
        case other:
            raise TypeError(f"{other} computes nothing")
    computed: Tensor = result.to(dtype)
    return computed


def _call(function: Function, known: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    if callable(function):
        return function
    call: Callable[..., Any] | None = known.get(function) or getattr(torch, function, None)
    if call is None:
        raise UnsupportedExpression(f"np.{function}: torch has no function of that name; give map_tiles your own")
    return call


def _with_scalar(both: Callable[..., Any], one: Callable[..., Any], a: Any, b: Any) -> Any:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return both(a, b)
    return one(a, b) if isinstance(a, Tensor) else one(b, a)


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
