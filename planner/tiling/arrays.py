"""Lazy arrays: NumPy calls on them build a graph of high-level operators (Huang's thesis, sections 2.3.1 and 2.3.2).

A program is plain NumPy. Called with `LazyArray`s, it returns the graph of its operators; called with `ndarray`s, its
result. NumPy's own protocols (`__array_ufunc__`, `__array_function__`) capture the calls."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from cohabit.planner.errors import CohabitError

Shape = tuple[int, ...]
Function = str | Callable[..., Any]
"""Name of a NumPy function, or a user function, which must accept NumPy arrays and torch tensors."""


class UnsupportedExpression(CohabitError):
    """A program makes a call that lazy arrays do not support; the message names the call and an alternative."""


@dataclass(frozen=True, slots=True)
class NewArray:
    """An input array. Without data, it can be planned but not run."""

    data: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Map:
    """A function of tiles at the same position. `arguments` are scalars; None stands for the next input."""

    function: Function
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Fold:
    """An aggregate over axes. `partial` combines the results of tiles; without it, these axes must not be split."""

    function: str
    axes: tuple[int, ...]
    keepdims: bool
    partial: Literal["sum", "min", "max"] | None


@dataclass(frozen=True, slots=True)
class Scan:
    """A cumulative aggregate along one axis."""

    function: str
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

    function: Function
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


class LazyArray(NDArrayOperatorsMixin):
    """An array with at most two axes that is computed later."""

    __hash__ = object.__hash__

    def __init__(self, expression: Expression) -> None:
        self.expression = expression

    @property
    def shape(self) -> Shape:
        return self.expression.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.expression.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def T(self) -> "LazyArray":  # noqa: N802
        return transpose(self)

    def __len__(self) -> int:
        return self.shape[0]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> "LazyArray":
        if method == "__call__" and not options:
            return dot(*inputs) if ufunc is np.matmul else map_tiles(ufunc, *inputs)
        raise UnsupportedExpression(
            f"np.{ufunc.__name__}.{method} with {sorted(options)}: lazy arrays have no such call"
        )

    def __array_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        if function not in FUNCTIONS:
            known = ", ".join(sorted(known.__name__ for known in FUNCTIONS))
            raise UnsupportedExpression(
                f"np.{function.__name__}: lazy arrays have ufuncs and {known}; or use join_update"
            )
        try:
            return FUNCTIONS[function](*args, **options)
        except TypeError as error:  # an unsupported or a missing argument
            raise UnsupportedExpression(f"np.{function.__name__} of a lazy array: {error}") from error

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise UnsupportedExpression(
            f"the values of {self!r} are needed while the program is captured; control flow may not depend on values"
        )

    __bool__ = __float__ = __int__ = __iter__ = __array__

    def __getitem__(self, index: Any) -> "LazyArray":
        return _index(self, index if isinstance(index, tuple) else (index,))

    def __repr__(self) -> str:
        return f"<lazy {self.expression.name or type(self.expression.operator).__name__} {self.shape} {self.dtype}>"

    def astype(self, dtype: Any) -> "LazyArray":
        return _lazy(Map("astype", (None,)), [self], self.shape, np.dtype(dtype))

    def sum(self, axis: Any = None, keepdims: bool = False) -> "LazyArray":
        return fold("sum", self, axis, keepdims, "sum")

    def mean(self, axis: Any = None, keepdims: bool = False) -> "LazyArray":
        total = self.sum(axis, keepdims)
        return map_tiles(np.divide, total, self.size // max(total.size, 1))


def newarray(data: np.ndarray | Shape, dtype: Any = None, name: str = "") -> LazyArray:
    """Make an array from data, which may be memory-mapped, or from a shape, which can be planned but not run.

    Raises UnsupportedExpression for more than two axes.
    """
    if isinstance(data, np.ndarray):
        return _lazy(NewArray(data), [], data.shape, data.dtype, name)
    return _lazy(NewArray(), [], data, np.dtype(dtype or np.float32), name)


def map_tiles(function: Callable[..., Any], *inputs: Any) -> LazyArray:
    """Apply a NumPy or user function to tiles at the same position, with NumPy's broadcasting."""
    # Constants become arrays, but scalars stay in the call: they need no tile.
    inputs = tuple(newarray(i) if isinstance(i, np.ndarray) and i.ndim else i for i in inputs)
    arrays = [i for i in inputs if isinstance(i, LazyArray)]
    dtype = np.asarray(function(*[np.ones((), i.dtype) if isinstance(i, LazyArray) else i for i in inputs])).dtype
    arguments = tuple(None if isinstance(i, LazyArray) else i for i in inputs)
    known = function.__name__ if isinstance(function, np.ufunc) or function is np.where else function
    return _lazy(Map(known, arguments), arrays, np.broadcast_shapes(*[a.shape for a in arrays]), dtype)


def fold(
    function: str, x: LazyArray, axis: Any, keepdims: bool, partial: Literal["sum", "min", "max"] | None
) -> LazyArray:
    """Aggregate along one axis, several or all.

    The thesis (2.3.1) says that a fold costs nothing "if S is tiled along the axis dimension". That is a misprint:
    each tile then has a part of every sum. It costs nothing if S is tiled along the other axis.
    """
    chosen = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    axes = tuple(sorted(a % x.ndim for a in chosen))
    dtype = getattr(np, function)(np.ones((1,), x.dtype)).dtype
    shape = tuple(1 if a in axes else n for a, n in enumerate(x.shape) if keepdims or a not in axes)
    return _lazy(Fold(function, axes, keepdims, partial), [x], shape, dtype)


def scan(function: str, x: LazyArray, axis: int) -> LazyArray:
    dtype = getattr(np, function)(np.ones((1,), x.dtype)).dtype
    return _lazy(Scan(function, axis % x.ndim), [x], x.shape, dtype)


def dot(a: Any, b: Any) -> LazyArray:
    """Multiply matrices or vectors by join_update, in one of the ways of Figure 2.2, by columns of b, or by blocks.

    Section 2.2.1 ends with "if n > k ... (a) whose preferred tiling for X is column-wise" and "if n < k ... (b) ...
    row-wise". That is a misprint: the same section says before that (a) reads X by rows and (b) by columns, as do
    the captions, and Figure 2.5, lines 18 to 24, joins by columns of X if n <= k.
    """
    a, b = (newarray(x) if isinstance(x, np.ndarray) else x for x in (a, b))
    if a.shape[-1:] != b.shape[:1]:
        raise UnsupportedExpression(f"dot of {a!r} and {b!r}: {a.shape[-1:]} against {b.shape[:1]}")
    ways = [Join((a.ndim - 1, 0), "partial")]
    if a.ndim == 2:
        ways.append(Join((0, None), 0))
    if b.ndim == 2:
        ways.append(Join((None, 1), a.ndim - 1))
    operator = JoinUpdate("matmul", (*ways, Join((None, None), None)), is_dot=a.ndim == b.ndim == 2)
    return _lazy(operator, [a, b], a.shape[:-1] + b.shape[1:], np.result_type(a.dtype, b.dtype))


def join_update(
    function: Callable[..., Any],
    arrays: Sequence[Any],
    axes: Sequence[int | None],
    shape: Shape,
    output: int | Literal["partial"] | None = "partial",
) -> Any:
    """Apply a function to tiles joined along `axes` (None, -1 in the thesis: the input is read whole).

    The results are the output's tiles along axis `output`, or are summed. NumPy arrays are one tile each.
    """
    if not any(isinstance(x, LazyArray) for x in arrays):
        return function(*arrays)
    lazy = [newarray(x) if isinstance(x, np.ndarray) else x for x in arrays]
    ways = (Join(tuple(axes), output), Join((None,) * len(lazy), None))
    return _lazy(JoinUpdate(function, ways), lazy, shape, np.result_type(*[x.dtype for x in lazy]))


def transpose(x: LazyArray) -> LazyArray:
    """Swap the axes (the thesis' swapaxis): a row-tiled array is a column-tiled view."""
    return _lazy(View(tuple(reversed(range(x.ndim)))), [x], x.shape[::-1], x.dtype)


def _whole(function: str, x: LazyArray, *others: LazyArray) -> LazyArray:
    """Make a function of small arrays, which every worker reads whole; its last input may be split by columns."""
    ways = [Join((None,) * (1 + len(others)), None)]
    if others and others[-1].ndim == 2:
        ways.insert(0, Join((*[None] * len(others), 1), 1))
    shape = (others[-1] if others else x).shape
    return _lazy(JoinUpdate(function, tuple(ways)), [x, *others], shape, np.result_type(x.dtype, np.float32))


def concatenate(parts: Sequence[Any], axis: int = 0) -> LazyArray:
    arrays = [newarray(p) if isinstance(p, np.ndarray) else p for p in parts]
    axis %= arrays[0].ndim
    offsets, start = [], 0
    for array in arrays:
        offsets.append(tuple(-start if a == axis else 0 for a in range(array.ndim)))
        start += array.shape[axis]
    shape = tuple(start if a == axis else n for a, n in enumerate(arrays[0].shape))
    return _lazy(Region(tuple(offsets)), arrays, shape, np.result_type(*[a.dtype for a in arrays]))


def _index(x: LazyArray, index: tuple[Any, ...]) -> LazyArray:
    """Slice with steps of 1, drop axes by integers, add axes by None."""
    starts, ends, axes = [0] * x.ndim, list(x.shape), list[int | None]()
    axis = 0
    for item in (*index, *[slice(None)] * (x.ndim - sum(i is not None for i in index))):
        if item is None:
            axes.append(None)
            continue
        if isinstance(item, slice) and item.step in (None, 1):
            starts[axis], ends[axis], _ = item.indices(x.shape[axis])
            axes.append(axis)
        elif isinstance(item, int):
            starts[axis] = item % x.shape[axis]
            ends[axis] = starts[axis] + 1
        else:
            raise UnsupportedExpression(f"{x!r}[{item}]: slices with steps of 1, integers and None only; use where")
        axis += 1
    if tuple(ends) != x.shape or any(starts):
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        x = _lazy(Region((tuple(starts),)), [x], shape, x.dtype)
    if axes == list(range(x.ndim)):
        return x
    shape = tuple(1 if a is None else x.shape[a] for a in axes)
    return _lazy(View(tuple(axes)), [x], shape, x.dtype)


def _lazy(operator: Operator, inputs: Sequence[LazyArray], shape: Shape, dtype: Any, name: str = "") -> LazyArray:
    if len(shape) > 2:
        raise UnsupportedExpression(f"an array of shape {shape}: tiled arrays have at most two axes")
    return LazyArray(Expression(operator, tuple(x.expression for x in inputs), shape, np.dtype(dtype), name))


def _variance(x: LazyArray, axis: Any = None) -> LazyArray:
    deviation = map_tiles(np.subtract, x, x.mean(axis, keepdims=True))
    return map_tiles(np.square, deviation).mean(axis)


FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.sum: LazyArray.sum,
    np.mean: LazyArray.mean,
    np.min: lambda x, axis=None: fold("min", x, axis, False, "min"),
    np.max: lambda x, axis=None: fold("max", x, axis, False, "max"),
    np.var: _variance,
    np.std: lambda x, axis=None: np.sqrt(_variance(x, axis)),
    np.prod: lambda x, axis: fold("prod", x, axis, False, None),
    np.argmin: lambda x, axis: fold("argmin", x, axis, False, None),
    np.argmax: lambda x, axis: fold("argmax", x, axis, False, None),
    np.linalg.norm: lambda x, axis=None, keepdims=False: np.sqrt(np.square(x).sum(axis, keepdims)),
    np.cumsum: lambda x, axis: scan("cumsum", x, axis),
    np.cumprod: lambda x, axis: scan("cumprod", x, axis),
    np.dot: dot,
    np.outer: lambda a, b: a[:, None] * b[None, :],
    np.where: lambda *inputs: map_tiles(np.where, *inputs),
    np.clip: lambda x, low, high: np.minimum(np.maximum(x, low), high),
    np.transpose: transpose,
    np.swapaxes: lambda x, a, b: x if a % x.ndim == b % x.ndim else transpose(x),
    np.expand_dims: lambda x, axis: x[None] if axis == 0 else x[:, None],
    np.concatenate: concatenate,
    np.linalg.cholesky: lambda x: _whole("cholesky", x),
    np.linalg.inv: lambda x: _whole("inv", x),
    np.linalg.solve: lambda a, b: _whole("solve", a, b),
}
"""NumPy functions other than ufuncs, expressed in the five operators."""
