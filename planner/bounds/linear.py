"""Linear programs built row by row, with bounds on the value that hold at any accuracy of the solver.

Branching trusts the solver where it finds that a branch has no solution.
"""

import math
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Final

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints

SAFETY: Final = 1e-9
"""Relative error of adding up the bound in floating point, with a margin."""
_INFEASIBLE: Final = 2
"""Status of scipy's solvers."""
WHOLE: Final = 1e-6
"""Distance from 0 or 1 up to which a value counts as whole."""
MOST_ENTRIES: Final = 4_000
"""Maximum number of matrix entries in all linear programs that are solved for one bound, besides the first. Each takes
milliseconds, and every search has a bound."""


class LinearProgram:
    """A linear program built row by row; all variables are bounded."""

    def __init__(self, most: float) -> None:
        self.most = most
        """Values of the objective from this on need not be distinguished."""
        self.fixed_cost = 0.0
        self._low: list[Floats] = []
        self._high: list[Floats] = []
        self._cost: list[Floats] = []
        self._right: list[Floats] = []
        self._equal: list[Bools] = []
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self._constants: list[tuple[Ints, Floats]] = []
        self._columns = self._rows = 0

    def variables(self, count: int, low: Floats | float, high: Floats | float, cost: Floats | float = 0) -> Ints:
        self._low.append(np.broadcast_to(np.asarray(low, float), (count,)))
        self._high.append(np.broadcast_to(np.asarray(high, float), (count,)))
        self._cost.append(np.broadcast_to(np.asarray(cost, float), (count,)))
        self._columns += count
        return np.arange(self._columns - count, self._columns)

    def at_most(self, right: Floats) -> Ints:
        return self._add(right, False)

    def equal(self, right: Floats) -> Ints:
        return self._add(right, True)

    def put(self, rows: Ints, columns: Ints, factor: Floats | float) -> None:
        """Add factor times variable to the left side of each row."""
        self._entries.append((rows, columns, np.broadcast_to(np.asarray(factor, float), rows.shape)))

    def add_constant(self, rows: Ints, value: Floats) -> None:
        """Add a constant to the left side of each row."""
        self._constants.append((rows, value))

    def least_whole(self, whole: Ints) -> tuple[float, Floats] | None:
        """Return a lower bound on all solutions in which the variables `whole` are 0 or 1, and the solution in which
        they may be fractions; None if the solver finds none.

        Branches on the node with the least bound, so that the least of all open nodes is a bound at any time. Stops
        after MOST_ENTRIES.
        """
        root = self.solve()
        if root is None or math.isinf(root[0]):
            return None
        entries = max(sum(len(rows) for rows, _, _ in self._entries), 1)
        nodes, count, left = [(root[0], 0, root[1], dict[int, float]())], 1, MOST_ENTRIES // (2 * entries)
        while left > 0:
            bound, _, values, fixed = nodes[0]
            fraction = np.abs(values[whole] - np.rint(values[whole]))
            if not len(whole) or fraction.max() <= WHOLE:
                break
            column = int(whole[fraction.argmax()])
            solved = [(value, self.solve({**fixed, column: value})) for value in (0.0, 1.0)]
            if any(found is None for _, found in solved):
                break
            heappop(nodes)
            for value, found in solved:
                if found is not None and math.isfinite(found[0]):
                    heappush(nodes, (max(bound, found[0]), count, found[1], {**fixed, column: value}))
                    count += 1
            if not nodes:
                return None
            left -= 1
        return nodes[0][0], root[1]

    def solve(self, fixed: Mapping[int, float] | None = None) -> tuple[float, Floats] | None:
        """Return a lower bound on the value of all solutions with these values of variables, and the best solution.

        The bound is infinite if there is no solution. Returns None if the solver gives up.

        The bound comes from the dual solution and holds even if that is inaccurate: any factors (nonnegative for
        inequalities) prove a bound if every variable is bounded (Neumaier and Shcherbina 2004).
        """
        from scipy.optimize import linprog  # slower to import than everything else that serving needs
        from scipy.sparse import csr_array

        low, high, cost = (np.concatenate(parts) for parts in (self._low, self._high, self._cost))
        for column, value in (fixed or {}).items():
            low[column] = high[column] = value
        right, equal = np.concatenate(self._right), np.concatenate(self._equal)
        for rows, constants in self._constants:
            np.subtract.at(right, rows, constants)
        row, columns, factor = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        matrix = csr_array((factor, (row, columns)), shape=(self._rows, self._columns))
        scale = len(cost) / self.most if self.most else 1.0  # the solver treats costs below 1e-7 as zero
        result = linprog(
            cost * scale,
            A_ub=matrix[~equal],
            b_ub=right[~equal],
            A_eq=matrix[equal],
            b_eq=right[equal],
            bounds=np.stack([low, high], axis=1),
            method="highs",
        )
        if result.status == _INFEASIBLE:
            return math.inf, result.x
        if result.status != 0:
            return None
        price = np.empty(self._rows)
        price[~equal] = np.maximum(-result.ineqlin.marginals, 0) / scale
        price[equal] = -result.eqlin.marginals / scale
        reduced = cost + matrix.T @ price
        least = float(np.minimum(reduced * low, reduced * high).sum() - price @ right)
        return min(least + self.fixed_cost - SAFETY * self.most, self.most), result.x

    def _add(self, right: Floats, equal: bool) -> Ints:
        self._right.append(np.asarray(right, float))
        self._equal.append(np.full(len(right), equal))
        self._rows += len(right)
        return np.arange(self._rows - len(right), self._rows)
