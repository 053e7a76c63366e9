"""Types of the arrays that searches work on."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def ints(values: Iterable[int]) -> Ints:
    """Return the values as an array, [values]."""
    return np.fromiter(values, np.int64)
