"""Values that are known as Python numbers: constants, and sizes that torch.export follows as symbols.

Shape arithmetic (Shape, Gather, Concat, Mul, ...) is done with these numbers, because a size that is read back from a
tensor would depend on values.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch

from cohabit.server.errors import ImportFailed

sym_float: Callable[[Any], Any] = torch.sym_float
sym_int: Callable[[Any], Any] = torch.sym_int
sym_max: Callable[[Any, Any], Any] = torch.sym_max
sym_min: Callable[[Any, Any], Any] = torch.sym_min
MOST_NUMBERS = 256
"""Larger constants are tensors only."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """An array of numbers, symbolic sizes among them."""

    numbers: np.ndarray[Any, np.dtype[np.object_]]
    dtype: torch.dtype
    weight: torch.Tensor | None = None
    """The initializer with these values, if it is a parameter or buffer of the module."""

    @staticmethod
    def of(values: Any, dtype: torch.dtype = torch.int64, weight: torch.Tensor | None = None) -> "Known":
        return Known(np.array(values, dtype=object), dtype, weight)

    @property
    def list(self) -> list[Any]:
        """The numbers in order, without their shape."""
        return list(self.numbers.flat)

    @property
    def is_concrete(self) -> bool:
        """Whether no number is a symbol."""
        return all(isinstance(number, int | float) for number in self.numbers.flat)

    @property
    def number(self) -> int | float | None:
        """The only number, if it is not a symbol; None otherwise."""
        return self.list[0] if self.numbers.size == 1 and self.is_concrete else None

    def tensor(self) -> torch.Tensor:
        if self.weight is not None:
            return self.weight
        if self.is_concrete:
            return torch.tensor(self.numbers.tolist(), dtype=self.dtype)
        parts = [torch.full((), number, dtype=self.dtype) for number in self.list]
        return torch.stack(parts).reshape(self.numbers.shape)


def _rounded(number: Any, dtype: torch.dtype) -> Any:
    """Return a float as the type has it."""
    return float(np.float32(number)) if dtype is torch.float32 and isinstance(number, float) else number


def _elementwise(function: Callable[..., Any], dtype: torch.dtype, values: Sequence[Known]) -> Known:
    arrays = [value.numbers for value in values]
    found = np.frompyfunc(lambda *given: _rounded(function(*given), dtype), len(arrays), 1)(*arrays)
    return Known(np.asarray(found, dtype=object), dtype)


def _divided(a: Any, b: Any) -> Any:
    """Divide; integers are truncated towards zero, as ONNX has it."""
    if isinstance(a, float | torch.SymFloat) or isinstance(b, float | torch.SymFloat):
        return a / b
    if isinstance(a, int) and isinstance(b, int):
        return int(math.copysign(abs(a) // abs(b), a * b))
    return a // b  # sizes are positive


def cast(number: Any, dtype: torch.dtype) -> Any:
    """Convert a number, which may be a symbol, to a type."""
    if dtype is torch.bool:
        return number != 0
    if dtype.is_floating_point:
        return sym_float(number)
    return sym_int(number)


_NUMERIC: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Mod": operator.mod,
    "Div": _divided,
    "Neg": operator.neg,
    "Abs": abs,
    "Pow": operator.pow,
    "Min": sym_min,
    "Max": sym_max,
    "Floor": lambda n: sym_float(math.floor(n)),
    "Ceil": lambda n: sym_float(math.ceil(n)),
    "Round": lambda n: sym_float(round(n)),
    "Sqrt": lambda n: math.sqrt(n) if isinstance(n, int | float) else torch.sym_sqrt(n),
    "Reciprocal": lambda n: 1.0 / n,
}
_LOGICAL: Mapping[str, Callable[..., Any]] = {
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Not": operator.not_,
    "And": lambda a, b: bool(a) and bool(b),
    "Or": lambda a, b: bool(a) or bool(b),
}
_VARIADIC = ("Min", "Max")


def evaluate(op: str, values: Sequence[Known]) -> Known | None:
    """Compute an elementwise operator without attributes; None for other operators, and for large results."""
    if op not in ("Where", *_NUMERIC, *_LOGICAL):
        return None
    if math.prod(np.broadcast_shapes(*(value.numbers.shape for value in values))) > MOST_NUMBERS:
        return None
    dtype = values[0].dtype
    if op in _VARIADIC:
        return reduce(lambda a, b: _elementwise(_NUMERIC[op], dtype, (a, b)), values)
    if op in _NUMERIC:
        return _elementwise(_NUMERIC[op], dtype, values)
    if op in _LOGICAL:
        return _elementwise(_LOGICAL[op], torch.bool, values)
    return _elementwise(lambda condition, a, b: a if condition else b, values[1].dtype, values)


def sizes(value: Any, what: str) -> list[Any]:
    """Return a value's numbers. Raises ImportFailed if they depend on the values of inputs."""
    if isinstance(value, Known):
        return value.list
    raise ImportFailed(f"its {what} depends on values of the inputs, not only on their sizes")
