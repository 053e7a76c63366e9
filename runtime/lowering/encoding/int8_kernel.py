"""Linear layers with a weight in int8, in which each output has a scale of its own.

Each row of the input is rounded to integers when the layer runs, with as many bits as sums of 32 bits allow: 15 for up
to 516 inputs, and 11 for 8,192. Sums are exact, so a row's result depends neither on the rows beside it nor on the
processor.
"""

from collections.abc import Callable
from functools import cache
from typing import Final

import torch

MOST: Final = 127
"""Largest absolute value of a weight in int8."""
MOST_INPUTS: Final = 1 << 16
"""Maximum inputs of a layer: with more, a row would have less than 8 bits."""
_INPUTS, _OUTPUTS = 16, 4
"""What a layer's inputs and outputs are multiples of."""
_BLOCK_NUMBERS: Final = 1 << 15
"""Numbers of the rows that are rounded at a time, on the stack: they stay in the processor's L2 cache."""
_LEAST_BLOCK: Final = 2


def takes(outputs: int, inputs: int) -> bool:
    """Whether the kernel can compute a layer of this size."""
    return outputs > 0 and 0 < inputs <= MOST_INPUTS and inputs % _INPUTS == 0 and outputs % _OUTPUTS == 0


def product(x: torch.Tensor, weight: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Return `x @ weight.T * terms[0] + terms[1]` [rows, outputs] in float32.

    `x` is float32 [rows, inputs], `weight` int8 [outputs, inputs], and `terms` float32 [2, outputs]; all are
    contiguous. A row with a NaN or an infinity gives a row of NaN.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    result = torch.empty(rows, outputs)
    block = min(rows, max(_LEAST_BLOCK, _BLOCK_NUMBERS // inputs))
    most = min(2**15 - 1, (2**31 - 1) // (MOST * inputs))
    x_at, weight_at, terms_at, result_at = x.data_ptr(), weight.data_ptr(), terms.data_ptr(), result.data_ptr()
    kernel()(rows, outputs, inputs, block, most, x_at, weight_at, terms_at, result_at)
    return result


@cache
def kernel() -> Callable[..., None]:
    """Return the compiled kernel. The first call takes a fifth of a second."""
    # Imported here: LLVM takes tens of MiB, which a process without such layers need not have.
    from cohabit.runtime.lowering.encoding.int8_code import compiled

    return compiled()
