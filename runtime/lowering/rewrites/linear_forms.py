"""The fastest form of a linear layer on this machine, measured when the first model with such a layer is lowered.

A layer can be computed from its weight as exported, from the transposed weight (a plain product, which needs no
packing), or from a weight packed for oneDNN, in one kernel with the next activation function or sum. The fastest form
depends on the processor, the shape, and the number of rows. Weights are cold in the cache when a layer begins, so each
form is timed over several weights in turns.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Final, Literal

import msgspec
import torch

from cohabit.runtime.choices import chosen
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.fused_ops import (
    INT8_OPS,
    LEAST_BY_COLUMNS,
    activated,
    linear_by_columns,
    linear_int8,
    linear_transposed,
)

Form = Literal["plain", "transposed", "packed", "int8"]
_FLOATS: Final[tuple[Form, ...]] = ("plain", "transposed", "packed")
_IN_INT8: Final[tuple[Form, ...]] = ("int8", "packed", "plain")
_COLD_BYTES: Final = 32 << 20
"""Bytes of different weights that a form is timed with, unless one weight is larger. Fewer stay in large caches."""
_MOST_WEIGHTS: Final = 64
_MOST_MULTIPLICATIONS: Final = 1 << 29
"""Products with more multiplications are not timed: they are compute-bound, which makes all forms alike, and would take
most of a first start."""
_MOST_ROWS: Final = 4
"""Maximum number of row counts that are timed, spread over the given ones."""
_SECONDS: Final = 4e-3
"""Seconds for which each form is timed, per number of rows."""
_LEAST_CALLS: Final = 4
_WORTH: Final = 0.9
"""A form replaces the one before it, in the order packed, plain, transposed, at this fraction of its time or less. A
smaller gain may be noise. The same holds for packed after int8, which takes less memory."""


class LayerShape(msgspec.Struct, frozen=True):
    """What the times of a linear layer's forms depend on."""

    inputs: int
    outputs: int
    rows: tuple[int, ...]
    """Ascending."""
    lengths: tuple[int, ...]
    """Rows of one request, such as its tokens, for each of `rows`."""
    has_bias: bool
    fused: tuple[str, tuple[float, ...], str] | None
    """The activation function that the packed form includes, as oneDNN names it, with its arguments."""
    adds: bool
    """Whether the packed form adds a residual."""
    packs: bool
    """Whether the weight may be packed."""
    threads: int


@cache
def fastest(shape: LayerShape) -> Form:
    """Return the form with the least total time over the rows, which is measured once on a machine.

    Times are divided by the requests' lengths: a text has a step for each token, but one for many of its prompt.
    """
    most = _MOST_MULTIPLICATIONS // (shape.inputs * shape.outputs)
    timed = [(number, length) for number, length in zip(shape.rows, shape.lengths, strict=True) if number <= most]
    if not timed:
        return "packed" if shape.packs else "plain"
    return chosen(packing.machine(), ["linear", shape], _FLOATS, partial(_measured, shape, timed))


@cache
def computes_in_int8(shape: LayerShape) -> bool:
    """Whether a layer is faster with its weight in int8 than as it is, packed or plain; measured once on a machine.

    Large products are measured with fewer rows.
    """
    most = max(1, _MOST_MULTIPLICATIONS // (4 * shape.inputs * shape.outputs))
    timed = sorted({(min(number, most), length) for number, length in zip(shape.rows, shape.lengths, strict=True)})
    return chosen(packing.machine(), ["int8", shape], _IN_INT8, partial(_measured_in_int8, shape, timed)) == "int8"


def _measured(shape: LayerShape, timed: Sequence[tuple[int, int]]) -> Form:
    seconds = _seconds_of(shape, timed, _FLOATS if shape.packs else _FLOATS[:2])
    # Each form must clearly beat the one before it.
    best: Form = "transposed" if seconds["transposed"] <= _WORTH * seconds["plain"] else "plain"
    return best if not shape.packs or seconds[best] <= _WORTH * seconds["packed"] else "packed"


def _measured_in_int8(shape: LayerShape, timed: Sequence[tuple[int, int]]) -> Form:
    other: Form = "packed" if shape.packs else "plain"
    seconds = _seconds_of(shape, timed, ("int8", other))
    return other if seconds[other] <= _WORTH * seconds["int8"] else "int8"


def _seconds_of(shape: LayerShape, timed: Sequence[tuple[int, int]], forms: Sequence[Form]) -> dict[Form, float]:
    """Return the total time of each form. `timed` are row counts, each with the length of a request."""
    inputs, outputs, fused = shape.inputs, shape.outputs, shape.fused
    # Few row counts, and enough weights that none stays in the cache.
    timed = timed[:: -(-len(timed) // _MOST_ROWS)]
    count = max(1, min(_MOST_WEIGHTS, _COLD_BYTES // (4 * inputs * outputs)))
    generator = torch.Generator().manual_seed(0)
    weights = list(torch.full((count, outputs, inputs), 1 / inputs))
    seconds = dict.fromkeys(forms, 0.0)
    for form in forms:
        bias = torch.zeros(outputs) if shape.has_bias else None
        terms = torch.zeros(2, outputs) if form == "int8" else bias
        operands = [_stored(form, weight, shape.rows) for weight in weights]
        for number, length in timed:
            x = torch.randn(number, inputs, generator=generator)
            other = torch.zeros(number, outputs) if shape.adds else None
            own = [
                partial(_compute, form, x, weight, terms, other, fused or ("none", (), "")) for weight in operands
            ]
            seconds[form] += cold_seconds(own) / length
    return seconds


def _stored(form: Form, weight: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return a weight as a form reads it; in int8 without its scale, which takes no time."""
    if form == "packed":
        return packing.pack_linear(weight, rows)
    if form == "int8":
        return weight.to(torch.int8)
    return weight.view(weight.shape[1], weight.shape[0]) if form == "transposed" else weight


def _compute(
    form: Form,
    x: torch.Tensor,
    weight: torch.Tensor,
    terms: torch.Tensor | None,
    other: torch.Tensor | None,
    activation: tuple[str, tuple[float, ...], str],
) -> torch.Tensor:
    """Compute a layer, and the sum or activation function after it. `terms` is the bias; see `linear_int8` for int8."""
    if form == "packed":
        name, scalars, algorithm = activation
        result: torch.Tensor
        if other is None:
            result = packing.LINEAR(x, weight, terms, name, list(scalars), algorithm)
        else:
            result = packing.LINEAR_SUM(x, other, weight, terms, "add")
        return result
    if form == "int8":
        assert terms is not None
        y = linear_int8(x, weight, terms)
    elif form == "transposed":
        y = linear_transposed(x, weight, terms)
    else:
        plain = linear_by_columns if weight.numel() >= LEAST_BY_COLUMNS else torch.nn.functional.linear
        y = plain(x, weight, terms)
    return activated(y, *activation) if other is None else y.add_(other)


def cold_seconds(calls: Sequence[Callable[[], object]], seconds: float = _SECONDS) -> float:
    """Return the lower quartile of the times of calls, made in turns for `seconds`, but at least `_LEAST_CALLS`."""
    calls[0]()  # prepares the kernel
    times: list[float] = []
    end = time.perf_counter() + seconds
    for call in itertools.cycle([*calls[1:], calls[0]]):
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        times.append(now - start)
        if now >= end and len(times) >= _LEAST_CALLS:
            break
    return sorted(times)[len(times) // 4]


def forms_of(targets: Iterable[Callable[..., object]]) -> dict[Form, int]:
    """Count the calls of linear layers per form."""
    forms: dict[object, Form] = {
        packing.LINEAR: "packed",
        packing.LINEAR_SUM: "packed",
        linear_by_columns: "plain",
        linear_transposed: "transposed",
        torch.ops.aten.linear.default: "plain",
        **dict.fromkeys(INT8_OPS, "int8"),
    }
    return dict(Counter(forms[target] for target in targets if target in forms))
