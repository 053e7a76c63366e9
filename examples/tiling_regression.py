"""Logistic regression by gradient descent, on arrays distributed over several processes.

cohabit tile examples/tiling_regression.py:program --workers 4 --run
"""

import numpy as np

from cohabit.planner.tiling import LazyArray, newarray


def program() -> LazyArray:
    """Build the program without computing it. For data from disk, use `newarray(np.load(path, mmap_mode="r"))`."""
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((20_000, 32), dtype=np.float32)
    x = newarray(samples)
    y = newarray((samples.sum(axis=1) > 0).astype(np.float32))
    w = newarray(np.zeros(32, np.float32))
    for _ in range(3):
        guess = 1 / (1 + np.exp(-np.dot(x, w)))
        w = w - np.dot(x.T, guess - y) * (0.1 / len(x))
    return w
