"""Drawn NumPy calls in tiles: equal to NumPy's, or refused when they are recorded."""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch.multiprocessing.spawn import start_processes

from cohabit.planner.errors import CohabitError
from cohabit.planner.tiling.arrays import newarray
from cohabit.planner.tiling.graph import TilingGraph
from cohabit.planner.tiling.search import TilingPlan
from cohabit.runtime.tiling import worker
from cohabit.runtime.tiling.execute import measured
from cohabit.runtime.tiling.worker import Worker, start

PROCESSES = 4
DTYPES = "?bBhHiIlLefdFD"
SIZES = (0, 1, 2, 3, 5, 16, 37)
AXES = (None, None, 0, 0, 1, 1, -1, -2, (0, 1), (1, 0), (), 2, -3, 1.5, "0")
UFUNCS = [
    "add",
    "subtract",
    "multiply",
    "divide",
    "floor_divide",
    "remainder",
    "power",
    "arctan2",
    "hypot",
    "maximum",
    "minimum",
    "fmax",
    "logaddexp",
    "copysign",
    "greater",
    "less_equal",
    "equal",
    "not_equal",
    "logical_and",
    "logical_xor",
    "bitwise_and",
    "left_shift",
    "ldexp",
    "gcd",
    "heaviside",
    "nextafter",
    "exp",
    "log",
    "sqrt",
    "square",
    "sign",
    "abs",
    "negative",
    "floor",
    "rint",
    "cbrt",
    "reciprocal",
    "isnan",
    "signbit",
    "conjugate",
    "invert",
    "sinh",
    "arcsin",
    "tanh",
]
FOLDS = [
    "sum",
    "prod",
    "min",
    "max",
    "any",
    "all",
    "count_nonzero",
    "argmin",
    "argmax",
    "ptp",
    "median",
    "mean",
    "var",
    "std",
]
SCALARS = (2, 0, -1, 0.5, -1.5, 1e300, 300, True, 1j, np.float32(1.5), np.uint8(3), np.int64(-2), np.nan, np.inf)
ORDERS = (None, 1, 2, -1, 3, 0, np.inf, -np.inf, "fro", "nuc", "odd")

Program = Callable[..., Any]


def drawn_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = rng.normal(0, 3, shape)
    if rng.random() < 0.3 and dtype in "efdFD":
        values = np.where(rng.random(shape) < 0.1, rng.choice([np.nan, np.inf, -np.inf, -0.0], shape), values)
    if dtype in "FD":
        values = values + 1j * rng.normal(0, 3, shape)
    if dtype in "BHIL":
        values = np.abs(values)
    if dtype not in "efdFD?":
        values = values * (40 if dtype in "bB" and rng.random() < 0.2 else 1)
    with np.errstate(all="ignore"):
        return np.asarray(values % 2 > 1 if dtype == "?" else values).astype(dtype)


def drawn_call(rng: np.random.Generator) -> tuple[str, Program, tuple[np.ndarray, ...]]:
    """Draw a call by name, and the arrays that it takes."""

    def pick(options: Any) -> Any:
        return options[int(rng.integers(len(options)))]

    def array(*shape: int) -> np.ndarray:
        return drawn_array(rng, shape, pick(DTYPES))

    def shape(axes: int) -> tuple[int, ...]:
        return tuple(pick(SIZES if rng.random() < 0.3 else SIZES[2:]) for _ in range(axes))

    size = shape(pick((0, 1, 1, 2, 2, 2)))
    x, axis = array(*size), pick(AXES)
    kind = pick(("ufunc", "ufunc", "fold", "fold", "fold", "norm", "dot", "scan", "view", "index", "join", "map"))
    if kind == "ufunc":
        name = pick(UFUNCS)
        ufunc = getattr(np, name)
        if ufunc.nin == 1:
            return name, ufunc, (x,)
        if rng.random() < 0.4:
            scalar, is_first = pick(SCALARS), rng.random() < 0.3
            return f"{name} {scalar!r}", lambda x: ufunc(scalar, x) if is_first else ufunc(x, scalar), (x,)
        if rng.random() < 0.2:
            exponent = pick((2, 3, 0.5, -1, -2, 0, 1, 2.0))
            return f"x ** {exponent}", lambda x: x**exponent, (x,)
        other = pick((size, size[-1:], (1, *size[1:]), (*size[:1], 1), shape(2)))
        return name, ufunc, (x, array(*other))
    if kind == "fold":
        name, options = pick(FOLDS), {}
        if rng.random() < 0.4:
            options["keepdims"] = True
        if rng.random() < 0.2:
            options[pick(("dtype", "initial", "ddof", "out"))] = pick(("f", "e", "d", "B", 3, 0, None))
        if rng.random() < 0.2:
            return f"x.{name} {axis} {options}", lambda x: getattr(x, name)(axis=axis, **options), (x,)
        return f"{name} {axis} {options}", lambda x: getattr(np, name)(x, axis=axis, **options), (x,)
    if kind == "norm":
        order, keepdims = pick(ORDERS), rng.random() < 0.3
        return f"norm {order} {axis}", lambda x: np.linalg.norm(x, order, axis, keepdims), (x,)
    if kind == "dot":
        name = pick(("dot", "matmul", "outer"))
        inner = x.shape[-1:] if rng.random() < 0.9 else shape(1)
        other = (*inner, *shape(pick((0, 1)))) if name != "outer" else shape(1)
        return name, getattr(np, name), (x, array(*other))
    if kind == "scan":
        name = pick(("cumsum", "cumprod"))
        return f"{name} {axis}", lambda x: getattr(np, name)(x, axis), (x,)
    if kind == "view":
        name, axes = pick(("swapaxes", "moveaxis", "expand_dims", "squeeze", "transpose")), (pick(AXES), pick(AXES))
        args = {"squeeze": axes[:1], "expand_dims": axes[:1], "transpose": axes[:1]}.get(name, axes)
        return f"{name} {args}", lambda x: getattr(np, name)(x, *args), (x,)
    if kind == "index":
        items = (0, 1, -1, 4, -38, slice(None), slice(1, None), slice(-3, -1), slice(2, 40), slice(3, 1), ..., None)
        items = (*items, slice(None, None, 2), slice(None, None, -1), True, [0, 1], np.int64(1))
        index = tuple(pick(items) for _ in range(pick((1, 2, 2, 3))))
        return f"x[{index}]", lambda x: x[index], (x,)
    if kind == "join":
        others = [array(*(size if rng.random() < 0.6 else (*shape(1), *size[1:]))) for _ in range(pick((1, 2)))]
        return f"concatenate {axis}", lambda *parts: np.concatenate(parts, axis), (x, *others)
    low, high, dtype = pick((*SCALARS, None)), pick((*SCALARS, None)), pick(DTYPES)
    return pick(
        (
            (f"clip {low} {high}", lambda x: np.clip(x, low, high), (x,)),
            (f"where {low} {high}", lambda x: np.where(x > 0, low, high), (x,)),
            ("where", lambda x, y: np.where(x > 0, x, y), (x, array(*size))),
            # Of values that the type cannot hold, NumPy makes one number or another, by their place.
            (f"astype {dtype}", lambda x: np.where(np.abs(x) < 100, np.abs(x), 1).astype(dtype), (x,)),
            ("round", lambda x: np.round(x, 1), (x,)),
            ("nan_to_num", np.nan_to_num, (x,)),
            ("real", np.real, (x,)),
        )
    )


def graph_of(seed: int) -> TilingGraph:
    _, program, arrays = drawn_call(np.random.default_rng(seed))
    graph = TilingGraph.of(program(*map(newarray, arrays)), PROCESSES)
    return TilingGraph(graph.outputs, PROCESSES, graph.input_bytes)


def run_all(picks: dict[int, tuple[int, ...]], own: Worker) -> dict[int, np.ndarray | str]:
    found: dict[int, np.ndarray | str] = {}
    for seed, pick in picks.items():
        try:
            (output,), _, _ = measured(TilingPlan(graph_of(seed), pick), own)
            found[seed] = output.full_tensor().numpy()
        except Exception as error:
            found[seed] = f"{type(error).__name__}: {error}"
    return found


def difference(found: np.ndarray | str, wanted: np.ndarray | Exception) -> str | None:
    """Say how a result differs from NumPy's; sums of tiles may be rounded otherwise."""
    if isinstance(wanted, Exception) or isinstance(found, str):
        return (
            None if isinstance(wanted, Exception) and isinstance(found, str) else f"{found} instead of {wanted!r}"
        )
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return f"{found.dtype} {found.shape} instead of {wanted.dtype} {wanted.shape}"
    if found.dtype.kind in "biu":
        return None if (found == wanted).all() else f"{found} instead of {wanted}"
    tolerance = 1e-2 if found.real.dtype == np.float16 else 1e-5
    if found.dtype.kind == "c":  # where a part is not finite, NumPy's other part depends on the order in memory
        found, wanted = (np.where(np.isfinite(a), a, np.nan) for a in (found, wanted))
    scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-9)
    is_equal = np.isclose(found, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True).all()
    return None if is_equal else f"{found} instead of {wanted}"


def check(seeds: range, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Run drawn calls in 4 processes, tiled at random, and count those that were equal, refused, and NumPy's errors."""
    warnings.simplefilter("ignore")
    picks, refused, counts = dict[int, tuple[int, ...]](), dict[int, str](), Counter[str]()
    for seed in seeds:
        rng = np.random.default_rng(seed + 10**6)
        try:
            picks[seed] = tuple(int(rng.integers(len(group.choices))) for group in graph_of(seed).groups)
        except (CohabitError, AttributeError, TypeError) as error:  # NumPy binds arguments, and raises its own
            refused[seed] = str(error)
    monkeypatch.setattr(worker, "spawn", partial(start_processes, start_method="fork"))
    found = start(partial(run_all, picks), PROCESSES)
    different = [
        f"{seed}: refused in several lines: {reason}" for seed, reason in refused.items() if "\n" in reason
    ]
    for seed in seeds:
        name, program, arrays = drawn_call(np.random.default_rng(seed))
        wanted: np.ndarray | Exception
        try:
            with np.errstate(all="ignore"):
                wanted = np.asarray(program(*arrays))
        except Exception as error:
            wanted = error
        if seed in refused:
            counts["error" if isinstance(wanted, Exception) else "refused"] += 1
        elif says := difference(found[seed], wanted):
            different.append(f"{seed}: {name} of {[f'{a.dtype} {a.shape}' for a in arrays]}: {says}")
        else:
            counts["equal"] += 1
    assert not different, "\n".join(different)
    return counts


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 3300), marks=pytest.mark.slow)], ids=str)
def test_drawn_calls_give_what_numpy_gives_or_are_refused_when_recorded(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = check(seeds, monkeypatch)
    assert counts["equal"] > 0.4 * len(seeds), counts
