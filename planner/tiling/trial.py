"""Trials of recorded calls: NumPy's own call on samples, against the recorded operators, whole and tile by tile.

Samples have the arrays' types and numbers of axes. Sizes up to a limit are kept, and larger ones are replaced by
smaller ones; equal sizes stay equal."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cohabit.planner.tiling.costs import Form, bounds, index_of
from cohabit.planner.tiling.expressions import (
    Expression,
    Map,
    NewArray,
    Region,
    Shape,
    View,
    combined,
    compute,
    viewed,
)
from cohabit.planner.tiling.graph import TilingGraph, Way

KINDS = ("plain", "signed", "steady", "special", "large")
"""Samples: positive and well conditioned; of all signs; few values; with NaN, infinities, extremes; near overflow."""
EXTREMES = KINDS[-2:]

_WORKERS = 2
_SIZE, _HALF_SIZE = 9, 1000
"""Sizes up to which samples keep them. A sum in half precision goes wrong after hundreds of summands only."""
_EPSILONS = {np.dtype(np.float16): 8, np.dtype(np.float32): 512, np.dtype(np.float64): 512}
"""Allowed differences in units of each type's precision; tiles are summed in another order than by NumPy."""


class Differs(Exception):
    """A tile of a result is not what NumPy computes for that part of the whole."""


def sample_shapes(shapes: Sequence[Shape], in_half: bool) -> list[Shape]:
    limit = _HALF_SIZE if in_half else _SIZE
    larger = sorted({size for shape in shapes for size in shape if size > limit})
    smaller = {size: limit + 1 + number for number, size in enumerate(larger)}
    return [tuple(smaller.get(size, size) for size in shape) for shape in shapes]


def sample(kind: str, shape: Shape, dtype: np.dtype[Any], seed: int) -> np.ndarray:
    """Return an array of a kind of sample."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        real, imaginary = (sample(kind, shape, part, seed + by) for by in (0, 1000))
        made = np.empty(shape, dtype)
        made.real, made.imag = real, imaginary
        return made
    if dtype.kind == "b":
        return np.asarray(rng.random(shape) < {"plain": 0.9, "steady": 2}.get(kind, 0.5))
    limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    least, most = limits.min, limits.max
    if kind == "plain":
        values: np.ndarray = rng.integers(1, 4, shape) if dtype.kind in "iu" else rng.uniform(0.5, 1.5, shape)
        if len(shape) == 2 and shape[0] == shape[1]:  # matrices of linear systems
            values = values + 30 * np.eye(shape[0], dtype=values.dtype)
    elif kind == "steady":
        values = (
            np.where(rng.random(shape) < 0.2, 3, 1)
            if dtype.kind in "iu"
            else rng.choice([0.1, 0.55, 0.6, 0.6], shape)
        )
    elif dtype.kind in "iu":
        values = rng.integers(least, most, shape, dtype, endpoint=True)
        if kind == "special":
            values = rng.choice(np.array([least, most, 0, 1, most // 2], dtype), shape)
    elif kind == "large":
        values = rng.uniform(0.2, 0.3, shape) * most
    else:
        values = rng.uniform(-2, 2, shape)
        if kind == "special":
            extremes = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], shape)
            values = np.where(rng.random(shape) < 0.15, extremes, values)
    return np.asarray(values).astype(dtype)


def agree(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether two results have equal shapes and types, and equal values but for the rounding of sums.

    Of complex numbers with an infinite or undefined part, NumPy's other part depends on the order in memory.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if found.dtype.kind not in "fc":
        return bool((found == wanted).all())
    real = found.real.dtype
    tolerance = _EPSILONS[real] * float(np.finfo(real).eps)
    with np.errstate(all="ignore"):
        sizes = np.abs(wanted[np.isfinite(wanted)]).astype(np.float64)
        scale = min(float(sizes.max(initial=0)), float(np.finfo(np.float64).max) / 2)
        if found.dtype.kind == "c":
            found, wanted = (np.where(np.isfinite(a), a, np.nan) for a in (found, wanted))
        return bool(np.isclose(found, wanted, tolerance, tolerance * scale, equal_nan=True).all())


def tried(output: Expression) -> np.ndarray:
    """Compute an expression from its inputs' data, every operator in all ways to tile it.

    Raises Differs if a way gives another result than the operator on whole arrays, in any order in memory.
    """
    graph, values = TilingGraph((output,), _WORKERS), dict[int, np.ndarray]()
    for expression in graph.expressions:
        operator = expression.operator
        inputs = [values[id(source)] for source in expression.inputs]
        if isinstance(operator, NewArray):
            assert operator.data is not None
            result = operator.data
        elif isinstance(operator, View):
            result = viewed(inputs[0], operator.axes)
        elif isinstance(operator, Region):
            result = _placed(expression, inputs)
        else:
            result = compute(expression, inputs)
            for way in _ways(graph, expression):
                if not agree(_tiled(graph, expression, inputs, way), result):
                    raise Differs(f"the tiles of {operator.call.name} are not what NumPy makes of the whole")
        if result.shape != expression.shape:
            raise Differs(f"{result.shape} computed, {expression.shape} recorded")
        values[id(expression)] = result
    return values[id(output)]


def is_never_split(output: Expression) -> bool:
    """Whether an operator reads its inputs whole in every way to compute it."""
    if isinstance(output.operator, Map | NewArray | View | Region):
        return False
    return all(set(form) == {None} for way in TilingGraph((output,), _WORKERS).ways(output) for form in way.inputs)


def _ways(graph: TilingGraph, by: Expression) -> Iterator[Way | None]:
    """Yield the ways to try; None stands for whole arrays in another order in memory."""
    function = by.operator.call.function if isinstance(by.operator, Map) else None
    # These are element by element by definition. A cast of NaN to integers gives any number, even to NumPy itself.
    if isinstance(function, np.ufunc) or function is np.ndarray.astype:
        return
    yield None
    if not isinstance(by.operator, Map):
        yield from graph.ways(by)
        return
    for axis, size in enumerate(by.shape):
        if size >= _WORKERS:
            yield from graph.ways(by, (axis,))


def _tiled(graph: TilingGraph, by: Expression, inputs: Sequence[np.ndarray], way: Way | None) -> np.ndarray:
    """Compute an operator tile by tile; without a way, whole from copies in the other order in memory."""
    if way is None:
        return compute(by, [i.copy("F" if i.flags.c_contiguous else "C") for i in inputs])

    def tiles(array: np.ndarray, form: Form) -> list[np.ndarray]:
        places = bounds(array.shape, form, graph.mesh)
        return [array[index_of(place)] for place in places]

    cut = [tiles(array, form) for array, form in zip(inputs, way.inputs, strict=True)]
    results = [compute(by, [t.copy() for t in given]) for given in zip(*cut, strict=True)]
    if "partial" in way.output:
        return combined(by, np.stack(results))
    whole = np.empty(by.shape, by.dtype)
    for place, result in zip(tiles(whole, way.output), results, strict=True):
        if place.shape != result.shape:
            raise Differs(f"a tile of shape {result.shape} where {place.shape} is wanted")
        place[...] = result
    return whole


def _placed(expression: Expression, inputs: Sequence[np.ndarray]) -> np.ndarray:
    assert isinstance(expression.operator, Region)
    result = np.empty(expression.shape, expression.dtype)
    for array, offset in zip(inputs, expression.operator.offsets, strict=True):
        if len(inputs) == 1:
            result[...] = array[tuple(slice(o, o + n) for o, n in zip(offset, result.shape, strict=True))]
        else:
            result[tuple(slice(-o, n - o) for o, n in zip(offset, array.shape, strict=True))] = array
    return result
