"""The fastest form of a linear layer on this machine, measured when the first model with such a layer is lowered.

A layer can be computed from its weight as exported, from the transposed weight (a plain product, which needs no
packing), or from a weight packed for oneDNN, in one kernel with the next activation function or sum. The fastest form
depends on the processor, the shape, and the number of rows. Weights are cold in the cache when a layer begins, so each
form is timed over several weights in turns.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Final, Literal, get_args

import msgspec
import torch

from cohabit.runtime.choices import chosen
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.fused_ops import LEAST_BY_COLUMNS, linear_by_columns, linear_transposed

Form = Literal["plain", "transposed", "packed"]
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
smaller gain may be noise."""

Tail = Callable[[torch.Tensor], torch.Tensor]
"""Applies the op after a layer to the layer's result, which may be changed in place."""


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
    return chosen(packing.machine(), ["linear", shape], get_args(Form), partial(_measured, shape, timed))


def _measured(shape: LayerShape, timed: Sequence[tuple[int, int]]) -> Form:
    """`timed` are row counts, each with the length of a request."""
    inputs, outputs, fused = shape.inputs, shape.outputs, shape.fused
    # Few row counts, and enough weights that none stays in the cache.
    timed = timed[:: -(-len(timed) // _MOST_ROWS)]
    count = max(1, min(_MOST_WEIGHTS, _COLD_BYTES // (4 * inputs * outputs)))
    generator = torch.Generator().manual_seed(0)
    weights = list(torch.full((count, outputs, inputs), 1 / inputs))
    bias = torch.zeros(outputs) if shape.has_bias else None
    packed = [packing.pack_linear(weight, shape.rows) for weight in weights] if shape.packs else []
    transposed = [weight.view(inputs, outputs) for weight in weights]
    name, scalars, algorithm = fused or ("none", (), "")
    seconds: dict[Form, float] = dict.fromkeys(get_args(Form), 0.0)
    for number, length in timed:
        x, other = torch.randn(number, inputs, generator=generator), torch.zeros(number, outputs)
        tail = _tail(fused, other if shape.adds else None)

        def by_plain(weight: torch.Tensor, x: torch.Tensor = x, tail: Tail = tail) -> torch.Tensor:
            layer = linear_by_columns if weight.numel() >= LEAST_BY_COLUMNS else torch.nn.functional.linear
            return tail(layer(x, weight, bias))

        def by_transposed(weight: torch.Tensor, x: torch.Tensor = x, tail: Tail = tail) -> torch.Tensor:
            return tail(linear_transposed(x, weight, bias))

        def by_onednn(weight: torch.Tensor, x: torch.Tensor = x, other: torch.Tensor = other) -> torch.Tensor:
            if shape.adds:
                result: torch.Tensor = packing.LINEAR_SUM(x, other, weight, bias, "add")
            else:
                result = packing.LINEAR(x, weight, bias, name, list(scalars), algorithm)
            return result

        calls: dict[Form, list[Callable[[], object]]] = {
            "plain": [partial(by_plain, weight) for weight in weights],
            "transposed": [partial(by_transposed, weight) for weight in transposed],
            "packed": [partial(by_onednn, weight) for weight in packed],
        }
        for form, own in calls.items():
            seconds[form] += cold_seconds(own) / length if own else math.inf
    # Each form must clearly beat the one before it.
    best: Form = "transposed" if seconds["transposed"] <= _WORTH * seconds["plain"] else "plain"
    return best if seconds[best] <= _WORTH * seconds["packed"] else "packed"


def _tail(fused: tuple[str, tuple[float, ...], str] | None, other: torch.Tensor | None) -> Tail:
    if other is not None:
        return lambda y: y.add_(other)
    if fused is None:
        return lambda y: y
    name, scalars, algorithm = fused
    if name == "gelu":
        return partial(torch.nn.functional.gelu, approximate=algorithm)
    if name == "leaky_relu":
        return partial(torch.nn.functional.leaky_relu, negative_slope=scalars[0], inplace=True)
    in_place = {"sigmoid": torch.sigmoid_, "tanh": torch.tanh_}
    if name in in_place:
        return in_place[name]
    functions = {"swish": torch.nn.functional.silu, "hardswish": torch.nn.functional.hardswish}
    return partial(functions[name], inplace=True)


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
    }
    return dict(Counter(forms[target] for target in targets if target in forms))
