"""Lazy arrays: NumPy calls on them build a graph of high-level operators (Huang's thesis, sections 2.3.1 and 2.3.2).

A program is plain NumPy. Called with `LazyArray`s, it returns the graph of its operators; called with `ndarray`s, its
result. NumPy's own protocols (`__array_ufunc__`, `__array_function__`) capture the calls.

What a call means is left to NumPy. Workers make the program's own call on their tiles. Shapes of views, axes, types and
errors are NumPy's answers. A table says which operators can express a function; when a call is recorded, each entry is
tried on samples, whole and in tiles, and the first that gives NumPy's results is used."""

import functools
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.lib.stride_tricks import as_strided

from cohabit.planner.tiling.expressions import (
    Call,
    Expression,
    Fold,
    Input,
    Join,
    JoinUpdate,
    Map,
    NewArray,
    Operator,
    Region,
    Scan,
    Shape,
    UnsupportedExpression,
    View,
)
from cohabit.planner.tiling.trial import (
    EXTREMES,
    KINDS,
    Differs,
    agree,
    is_never_split,
    sample,
    sample_shapes,
    tried,
)


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
    def T(self) -> Any:  # noqa: N802
        return np.transpose(self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or not set(options) <= {"dtype", "casting"}:
            called = f"np.{ufunc.__name__}" + (f".{method}" if method != "__call__" else "")
            raise UnsupportedExpression(f"{called} with {sorted(options)}: lazy arrays have no such call")
        inputs = tuple(np.asarray(i) if isinstance(i, list | tuple) else i for i in inputs)
        return _recorded(ufunc, inputs, options)

    def __array_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        return _recorded(function, tuple(args), dict(options))

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedExpression(
            f"the values of {self!r} are needed while the program is captured; control flow may not depend on values"
        )

    __bool__ = __float__ = __int__ = __iter__ = __index__ = __complex__ = __array__

    def __pow__(self, other: Any) -> Any:  # ndarrays have special cases, such as a square root, that np.power lacks
        return _recorded(operator.pow, (self, other), {})

    def __getitem__(self, index: Any) -> "LazyArray":
        items = index if isinstance(index, tuple) else (index,)
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int | np.integer | slice | EllipsisType | None):
                raise UnsupportedExpression(
                    f"{self!r}[{item!r}]: slices with steps of 1, integers and None only; use where"
                )
        whole = items if Ellipsis in items else (*items, Ellipsis)  # a view even if all axes are dropped
        return _view(self, f"{self!r}[{index!r}]", lambda array: array[whole])

    def clip(self, min: Any = None, max: Any = None, **options: Any) -> Any:  # np.clip has no defaults
        return np.clip(self, min, max, **options)

    def __repr__(self) -> str:
        return f"<lazy {self.expression.name or type(self.expression.operator).__name__} {self.shape} {self.dtype}>"

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(
                f"lazy arrays have no {name}; there are {', '.join(METHODS)} and NumPy's functions"
            )
        return lambda *args, **options: _recorded(METHODS[name], (self, *args), options)


def newarray(data: np.ndarray | Shape, dtype: Any = None, name: str = "") -> LazyArray:
    """Make an array from data, which may be memory-mapped, or from a shape, which can be planned but not run.

    Raises UnsupportedExpression for more than two axes, no elements, types without tiles, and subclasses of ndarray.
    """
    if not isinstance(data, np.ndarray):
        return _lazy(NewArray(), [], tuple(data), np.dtype(dtype or np.float32), name)
    if type(data) not in (np.ndarray, np.memmap):
        raise UnsupportedExpression(
            f"newarray takes ndarrays, not {type(data).__name__}; use its data or np.asarray"
        )
    if dtype is not None and data.dtype != dtype:
        raise UnsupportedExpression(f"newarray of {data.dtype} data with dtype={np.dtype(dtype)}; use astype")
    return _lazy(NewArray(data), [], data.shape, data.dtype, name)


def map_tiles(function: Callable[..., Any], *inputs: Any) -> LazyArray:
    """Apply a NumPy or user function to tiles at the same position, with NumPy's broadcasting.

    Raises UnsupportedExpression if the function does not work element by element.
    """
    made: LazyArray = _recorded(function, inputs, {}, [_map])
    return made


def join_update(
    function: Callable[..., Any],
    arrays: Sequence[Any],
    axes: Sequence[int | None],
    shape: Shape,
    output: int | Literal["partial"] | None = "partial",
) -> Any:
    """Apply a function to tiles joined along `axes` (None, -1 in the thesis: the input is read whole).

    The results are the output's tiles along axis `output`, or are summed; their type is NumPy's common type of the
    arrays. NumPy arrays are one tile each.
    """
    if not any(isinstance(x, LazyArray) for x in arrays):
        return function(*arrays)
    lazy = [newarray(x) if isinstance(x, np.ndarray) else x for x in arrays]
    ways = (Join(tuple(axes), output), Join((None,) * len(lazy), None))
    call = Call(function, tuple(map(Input, range(len(lazy)))))
    return _lazy(JoinUpdate(call, ways), lazy, shape, np.result_type(*[x.dtype for x in lazy]))


@dataclass(frozen=True)
class _Request:
    """A call with lazy arrays, and the type of NumPy's result."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]
    dtype: np.dtype[Any]

    @functools.cached_property
    def arrays(self) -> list[LazyArray]:
        """Arrays in the order of the arguments; those in a list as well."""
        return list(_arrays_in((*self.args, *self.options.values())))

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """Arguments by NumPy's own names, without those that were not given."""
        return dict(inspect.signature(self.function).bind(*self.args, **self.options).arguments)

    @property
    def array(self) -> LazyArray:
        """The only array. Raises TypeError if other arguments are arrays, too."""
        if len(self.arrays) > 1:
            raise TypeError("arguments beside the first that are arrays have no tiles")
        return self.arrays[0]

    @property
    def call(self) -> Call:
        args, options = _replaced(self, map(Input, range(len(self.arrays))))
        return Call(self.function, args, tuple(options.items()))

    def repeated(self, arrays: Sequence[LazyArray]) -> "_Request":
        """The same call with other arrays."""
        args, options = _replaced(self, iter(arrays))
        return _Request(self.function, args, options, self.dtype)


_Rule = Callable[[_Request], Any]
"""Records a call by operators. Raises TypeError, ValueError or UnsupportedExpression if it cannot."""


def _arrays_in(values: Iterable[Any]) -> Iterator[LazyArray]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _arrays_in(value)
        elif isinstance(value, LazyArray):
            yield value


def _replaced(request: _Request, others: Iterator[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the arrays replaced in order."""

    def other(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(other, value))
        return next(others) if isinstance(value, LazyArray) else value

    return tuple(map(other, request.args)), {name: other(value) for name, value in request.options.items()}


class _ChangesArguments(UnsupportedExpression):
    """A call writes to the arrays that it is given."""


def _called(request: _Request, arrays: Sequence[np.ndarray]) -> Any:
    """Make a call on NumPy's arrays instead of lazy ones."""
    args, options = _replaced(request, iter(arrays))
    with np.errstate(all="ignore"):
        return request.function(*args, **options)


def _called_on_samples(request: _Request, samples: Sequence[np.ndarray]) -> Any:
    """The same, on arrays with data. Raises _ChangesArguments if the call writes to them."""
    before = [array.tobytes() for array in samples]
    result = _called(request, samples)
    if [array.tobytes() for array in samples] != before:
        raise _ChangesArguments("it changes its arguments; lazy arrays cannot be written to")
    return result


def _recorded(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
    rules: Sequence[_Rule] | None = None,
) -> Any:
    """Record a call by the first rule that gives NumPy's results on samples.

    Raises UnsupportedExpression for a function without rules, for a call that NumPy refuses, and if no rule will do.
    """
    name = getattr(function, "__name__", str(function))
    if rules is None:
        rules = FUNCTIONS.get(function) or (
            [_map] if isinstance(function, np.ufunc) and not function.signature else []
        )
    if not rules and function not in VIEWS:
        known = ", ".join(sorted(f.__name__ for f in (*FUNCTIONS, *VIEWS)))
        raise UnsupportedExpression(f"np.{name}: lazy arrays have ufuncs and {known}; or use join_update")

    def lazy(value: Any) -> Any:  # constants become arrays, but scalars stay in the call: they need no tile
        if isinstance(value, np.ndarray) and (value.ndim or type(value) is not np.ndarray):
            return newarray(value)
        return type(value)(map(lazy, value)) if isinstance(value, list | tuple) else value

    request = _Request(function, tuple(map(lazy, args)), {k: lazy(v) for k, v in options.items()}, np.dtype(bool))
    described = f"np.{name} of {', '.join(map(repr, request.arrays))}"
    if options.get("out") is not None:
        raise UnsupportedExpression(f"{described} with out: lazy arrays cannot be written to")
    if function in VIEWS:
        return _view(request.arrays[0], described, lambda array: _called(request, [array]))
    template = _replaced(request, map(Input, range(len(request.arrays))))
    shapes = sample_shapes([a.shape for a in request.arrays], in_half=True)  # the larger ones
    key = (function, repr(template), tuple((s, a.dtype) for s, a in zip(shapes, request.arrays, strict=True)))
    if key not in _TRIALS:
        _TRIALS[key] = _trial(request, rules)
    trial = _TRIALS[key]
    if isinstance(trial, str):
        raise UnsupportedExpression(f"{described}: {trial}")
    rule, dtype = trial
    return rule(_Request(function, request.args, request.options, dtype))


_TRIALS: dict[tuple[Any, ...], tuple[_Rule, np.dtype[Any]] | str] = {}
"""By function, arguments, sample shapes and types: the rule that gives NumPy's results, or the reason for refusal."""


def _trial(request: _Request, rules: Sequence[_Rule]) -> tuple[_Rule, np.dtype[Any]] | str:
    """Return the first rule whose operators give what NumPy's own call gives, and the type of the result."""
    true_shapes, dtypes = [a.shape for a in request.arrays], [a.dtype for a in request.arrays]

    def samples(kind: str, in_half: bool) -> list[np.ndarray]:
        shapes = sample_shapes(true_shapes, in_half)
        return [sample(kind, *given, seed) for seed, given in enumerate(zip(shapes, dtypes, strict=True))]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = samples("plain", in_half=False)
        try:
            result = _called_on_samples(request, plain)
        except _ChangesArguments as error:
            return str(error)
        except Exception as error:
            if type(error) is ValueError and [p.shape for p in plain] != true_shapes:
                return "NumPy refuses these shapes"  # its message has the samples'
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if not isinstance(result, np.ndarray | np.generic):
            return f"the result is not an array, but {type(result).__name__}"
        in_half = np.float16 in (result.dtype, *dtypes)
        reason = "lazy arrays have no such call"
        for rule in rules:
            try:
                for kind in KINDS[:1] if rule is _whole else KINDS:
                    arrays = samples(kind, in_half)
                    asked = request.repeated([newarray(a) for a in arrays])
                    found = rule(_Request(asked.function, asked.args, asked.options, result.dtype)).expression
                    if kind in EXTREMES and is_never_split(found):  # NumPy's own call in any case
                        continue
                    try:
                        wanted = np.asarray(_called_on_samples(request, arrays))
                    except (ValueError, ArithmeticError):  # these values, but not the call
                        continue
                    if not agree(tried(found), wanted):
                        raise Differs("tiles do not give what NumPy gives")
                return rule, result.dtype
            except (Differs, TypeError, ValueError, UnsupportedExpression) as error:
                reason = str(error)
        return reason


def _map(request: _Request) -> LazyArray:
    if any(isinstance(value, list | tuple) for value in (*request.args, *request.options.values())):
        raise TypeError("lists are not split into tiles; give an array")
    shape = np.broadcast_shapes(*[a.shape for a in request.arrays])
    return _lazy(Map(request.call), request.arrays, shape, request.dtype)


def _folded(request: _Request, combine: np.ufunc | None) -> LazyArray:
    """Aggregate along one axis, several or all.

    The thesis (2.3.1) says that a fold costs nothing "if S is tiled along the axis dimension". That is a misprint:
    each tile then has a part of every sum. It costs nothing if S is tiled along the other axis.
    """
    x, arguments = request.array, request.arguments
    axis, keepdims = arguments.get("axis"), arguments.get("keepdims", False)
    axes = tuple(range(x.ndim)) if axis is None else normalize_axis_tuple(axis, x.ndim)
    is_kept = keepdims is not np._NoValue and bool(keepdims)
    shape = tuple(1 if a in axes else n for a, n in enumerate(x.shape) if is_kept or a not in axes)
    return _lazy(Fold(request.call, axes, is_kept, combine), [x], shape, request.dtype)


def _fold(combine: np.ufunc | None = None) -> list[_Rule]:
    """Return rules for tiles whose results are combined, and for tiles along other axes only."""
    return [functools.partial(_folded, combine=c) for c in dict.fromkeys((combine, None))]


def _scan(request: _Request) -> LazyArray:
    x, axis = request.array, request.arguments.get("axis")
    if axis is None and x.ndim != 1:
        raise TypeError("name the axis")
    return _lazy(Scan(request.call, normalize_axis_index(axis or 0, x.ndim)), [x], x.shape, request.dtype)


def _dot(request: _Request) -> LazyArray:
    """Multiply matrices or vectors by join_update, in one of the ways of Figure 2.2, by columns of b, or by blocks.

    Section 2.2.1 ends with "if n > k ... (a) whose preferred tiling for X is column-wise" and "if n < k ... (b) ...
    row-wise". That is a misprint: the same section says before that (a) reads X by rows and (b) by columns, as do
    the captions, and Figure 2.5, lines 18 to 24, joins by columns of X if n <= k.
    """
    a, b = request.arrays
    if not (a.ndim and b.ndim):
        raise TypeError("it multiplies by a number; use *")
    ways = [Join((a.ndim - 1, 0), "partial")]
    if a.ndim == 2:
        ways.append(Join((0, None), 0))
    if b.ndim == 2:
        ways.append(Join((None, 1), a.ndim - 1))
    operator = JoinUpdate(request.call, (*ways, Join((None, None), None)), is_dot=a.ndim == b.ndim == 2)
    return _lazy(operator, [a, b], a.shape[:-1] + b.shape[1:], request.dtype)


def _whole(request: _Request) -> LazyArray:
    """Make a function of small arrays, which every worker reads whole; its last input may be split by columns."""
    x, *others = request.arrays
    ways = [Join((None,) * (1 + len(others)), None)]
    if others and others[-1].ndim == 2:
        ways.insert(0, Join((*[None] * len(others), 1), 1))
    shape = (others[-1] if others else x).shape
    return _lazy(JoinUpdate(request.call, tuple(ways)), [x, *others], shape, request.dtype)


def _concatenate(request: _Request) -> LazyArray:
    arrays, given = request.arrays, request.arguments.get("axis", 0)
    if given is None:
        raise TypeError("name the axis")
    axis = normalize_axis_index(given, arrays[0].ndim)
    offsets, start = [], 0
    for array in arrays:
        offsets.append(tuple(-start if a == axis else 0 for a in range(array.ndim)))
        start += array.shape[axis]
    shape = tuple(start if a == axis else n for a, n in enumerate(arrays[0].shape))
    return _lazy(Region(tuple(offsets)), arrays, shape, request.dtype)


def _view(x: LazyArray, described: str, function: Callable[[np.ndarray], np.ndarray]) -> LazyArray:
    """Record a view: NumPy makes it of an array with a stride per axis and without memory, which is not read."""
    strides = (1, x.shape[0] + 1)[: x.ndim] if x.ndim else ()
    base = as_strided(np.zeros(1, np.int8), x.shape, strides)
    try:
        view = function(base)
    except (TypeError, ValueError, IndexError) as error:
        raise UnsupportedExpression(f"{described}: {type(error).__name__}: {error}") from error
    axes: list[int | None] = [None] * view.ndim
    for place in sorted(range(view.ndim), key=lambda place: -view.shape[place]):  # a new axis may have any stride
        stride, length = view.strides[place], view.shape[place]
        axis = strides.index(stride) if stride in strides else None
        if length > 1 and axis is None:
            raise UnsupportedExpression(f"{described}: slices with steps of 1 only")
        axes[place] = axis if length > 1 or axis not in axes else None
    lengths = tuple(view.shape[axes.index(axis)] if axis in axes else 1 for axis in range(x.ndim))
    if lengths != x.shape:
        start = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        starts = tuple(reversed(divmod(start, strides[1]))) if x.ndim == 2 else (start,)
        x = _lazy(Region((starts,)), [x], lengths, x.dtype)
    return x if axes == [*range(x.ndim)] else _lazy(View(tuple(axes)), [x], view.shape, x.dtype)


def _lazy(operator: Operator, inputs: Sequence[LazyArray], shape: Shape, dtype: Any, name: str = "") -> LazyArray:
    if len(shape) > 2:
        raise UnsupportedExpression(f"an array of shape {shape}: tiled arrays have at most two axes")
    if 0 in shape:
        raise UnsupportedExpression(f"an array of shape {shape}: tiled arrays have elements")
    if dtype.kind not in "biufc" or dtype.itemsize > (16 if dtype.kind == "c" else 8) or not dtype.isnative:
        raise UnsupportedExpression(
            f"an array of {dtype}: tiled arrays have booleans, integers, and real or complex numbers of at most 64 bits"
            " a part, in this machine's byte order"
        )
    return LazyArray(Expression(operator, tuple(x.expression for x in inputs), shape, np.dtype(dtype), name))


def _options(request: _Request, *without: str) -> dict[str, Any]:
    """The call's options without its array, and without those named."""
    first, *_ = inspect.signature(request.function).parameters
    return {name: value for name, value in request.arguments.items() if name not in (first, *without)}


def _mean(request: _Request) -> Any:
    """Divide a sum; half precision and integers are summed in wider types, as NumPy does."""
    x = request.array
    wide = np.float64 if x.dtype.kind in "biu" else np.float32 if x.dtype == np.float16 else x.dtype
    dtype = request.arguments.get("dtype") or wide
    total: Any = np.sum(x, dtype=dtype, **_options(request, "dtype"))
    return (total / (x.size // total.size)).astype(request.dtype)


def _variance(request: _Request) -> Any:
    x, options = request.array, _options(request, "dtype", "ddof", "correction")
    dtype = request.arguments.get("dtype") or (np.float64 if x.dtype.kind in "biu" else x.dtype)
    deviation = x - np.mean(x, dtype=dtype, **{**options, "keepdims": True})
    total: Any = np.sum(np.square(np.abs(deviation)), **options)
    ddof = request.arguments.get("correction", request.arguments.get("ddof", 0))
    return total / (x.size // total.size - ddof)


def _deviation(request: _Request) -> Any:
    return np.sqrt(_variance(request))


def _sizes(request: _Request) -> Any:
    x = request.array
    return np.abs(x.astype(np.float64) if x.dtype.kind in "biu" else x)


def _euclidean_norm(request: _Request) -> Any:
    return np.sqrt(np.sum(np.square(_sizes(request)), **_options(request, "ord")))


def _absolute_norm(request: _Request) -> Any:
    return np.sum(_sizes(request), **_options(request, "ord"))


def _maximum_norm(request: _Request) -> Any:
    return np.max(_sizes(request), **_options(request, "ord"))


def _outer(request: _Request) -> Any:
    a, b = request.arrays
    return a[:, None] * b[None, :]


FUNCTIONS: dict[Callable[..., Any], Sequence[_Rule]] = {
    **{f: [_map] for f in (np.where, np.clip, np.round, np.real, np.imag, np.nan_to_num)},
    **{f: [_map] for f in (np.ndarray.astype, operator.pow)},
    np.sum: _fold(np.add),
    np.min: _fold(np.minimum),
    np.max: _fold(np.maximum),
    np.any: _fold(np.logical_or),
    np.all: _fold(np.logical_and),
    np.count_nonzero: _fold(np.add),
    **{f: _fold() for f in (np.prod, np.argmin, np.argmax, np.ptp, np.median)},
    np.mean: [_mean, *_fold()],
    np.var: [_variance, *_fold()],
    np.std: [_deviation, *_fold()],
    np.linalg.norm: [_euclidean_norm, _absolute_norm, _maximum_norm, *_fold()],
    **{f: [_scan] for f in (np.cumsum, np.cumprod)},
    **{f: [_dot] for f in (np.dot, np.matmul)},
    np.outer: [_outer],
    np.concatenate: [_concatenate],
    **{f: [_whole] for f in (np.linalg.cholesky, np.linalg.inv, np.linalg.solve)},
}
"""The rules by which functions are recorded, in the order in which they are tried. Ufuncs are maps."""

VIEWS = (np.transpose, np.swapaxes, np.moveaxis, np.expand_dims, np.squeeze)
"""Functions that NumPy answers with a view of their first argument."""

METHODS: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in ("all", "any", "argmax", "argmin", "cumprod", "cumsum", "dot")},
    **{
        name: getattr(np, name) for name in ("max", "mean", "min", "prod", "round", "std", "sum", "swapaxes", "var")
    },
    "astype": np.ndarray.astype,
}
"""Methods of arrays that take what the function takes."""
