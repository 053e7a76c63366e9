"""Graphs of array operators (Huang's thesis, section 2.3.1), and their computation on tiles by NumPy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal

import numpy as np

from cohabit.planner.errors import CohabitError

Shape = tuple[int, ...]


class UnsupportedExpression(CohabitError):
    """A program makes a call that lazy arrays do not support; the message names the call and an alternative."""


@dataclass(frozen=True, slots=True)
class Input:
    """Placeholder for an operator's input in the arguments of its call."""

    number: int


@dataclass(frozen=True, slots=True)
class Call:
    """A call of NumPy, or of a user function, as the program made it, with an `Input` in place of each array."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", str(self.function))

    def __call__(self, tiles: Sequence[np.ndarray]) -> Any:
        """Make the call on tiles; those without axes are passed as NumPy's scalars, as its reductions return them."""

        def filled(argument: Any) -> Any:
            return tiles[argument.number][()] if isinstance(argument, Input) else argument

        return self.function(*map(filled, self.arguments), **{name: filled(a) for name, a in self.options})


@dataclass(frozen=True, slots=True)
class NewArray:
    """An input array. Without data, it can be planned but not run."""

    data: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Map:
    """A function of tiles at the same position."""

    call: Call


@dataclass(frozen=True, slots=True)
class Fold:
    """An aggregate over axes. `combine` merges the results of tiles; without it, these axes must not be split."""

    call: Call
    axes: tuple[int, ...]
    keepdims: bool
    combine: np.ufunc | None


@dataclass(frozen=True, slots=True)
class Scan:
    """A cumulative aggregate along one axis."""

    call: Call
    axis: int


@dataclass(frozen=True, slots=True)
class Join:
    """One way to compute a join_update: the axis along which each input is split, None if it is read whole.

    `output` is the axis along which the result is split; None if it is whole, "partial" if its tiles are summed.
    """

    axes: tuple[int | None, ...]
    output: int | Literal["partial"] | None


@dataclass(frozen=True, slots=True)
class JoinUpdate:
    """A function of joined tiles (2.3.1), with all ways to split its inputs. `is_dot` also allows block tiles."""

    call: Call
    ways: tuple[Join, ...]
    is_dot: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """A view without a copy. `axes` has the input's axis for each axis, None for a new one of length 1."""

    axes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """Inputs placed at offsets. A slice has one input and offsets >= 0, a concatenation several and offsets <= 0."""

    offsets: tuple[Shape, ...]


Operator = NewArray | Map | Fold | Scan | JoinUpdate | View | Region


@dataclass(eq=False, slots=True)
class Expression:
    """One operator with its inputs; immutable except for its name."""

    operator: Operator
    inputs: tuple["Expression", ...]
    shape: Shape
    dtype: np.dtype[Any]
    name: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def compute(expression: Expression, tiles: Sequence[np.ndarray]) -> np.ndarray:
    """Apply a map, fold, scan or join_update to tiles of its inputs, of at most two axes: [rows, columns].

    Raises TypeError if a user function returns a type that the recorded one cannot hold.
    """
    operator = expression.operator
    assert isinstance(operator, Map | Fold | Scan | JoinUpdate)
    with np.errstate(all="ignore"):
        result = np.asarray(operator.call(tiles))
    return result.astype(expression.dtype, casting="same_kind", copy=False)


def combined(expression: Expression, partial: np.ndarray) -> np.ndarray:
    """Merge partial results, which are stacked along the first axis."""
    operator = expression.operator
    combine = operator.combine if isinstance(operator, Fold) and operator.combine else np.add
    with np.errstate(all="ignore"):
        return np.asarray(combine.reduce(partial, axis=0, dtype=partial.dtype))


def viewed(tile: np.ndarray, axes: tuple[int | None, ...]) -> np.ndarray:
    """Return a view of a tile with these axes; axes that are left out have length 1."""
    kept = [a for a in axes if a is not None]
    tile = tile.transpose(*kept, *[a for a in range(tile.ndim) if a not in kept])
    tile = tile.reshape(tile.shape[: len(kept)])
    index: tuple[slice | EllipsisType | None, ...] = (*[None if a is None else slice(None) for a in axes], ...)
    return tile[index]
