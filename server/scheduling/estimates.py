"""Execution time estimates: the plans' predictions, corrected by measurements.

A bucket is a planned batch size, with maximum sizes of the other dynamic dimensions.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate

from cohabit.planner.shapes import Bucket, smallest_holding

_MEAN_STEP, _DEVIATION_STEP = 1 / 8, 1 / 4
"""Weights of one measurement in the mean and the deviation, as for TCP's round-trip times (RFC 6298)."""
_DEVIATIONS = 3.0
"""Mean deviations above the mean for an upper estimate, which few executions exceed."""
_FIRST_DEVIATION = 0.1
_LEAST_S = 1e-6
_LARGEST_STEP = 3.0
"""Limit of a measurement in multiples of the mean, so that one outlier does not cause mass shedding."""
_FORGET_S = 5.0
"""Time constant by which corrections decay while nothing is measured, so that shedding ends."""


class Delay:
    """A running estimate of a duration without a prediction, such as the event loop's delay per answer."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._deviation_s = 0.0

    @property
    def upper_estimate_s(self) -> float:
        """A duration that is rarely exceeded."""
        return self._mean_s + _DEVIATIONS * self._deviation_s

    def measured(self, seconds: float) -> None:
        self._deviation_s += _DEVIATION_STEP * (abs(seconds - self._mean_s) - self._deviation_s)
        self._mean_s += _MEAN_STEP * (seconds - self._mean_s)


class Estimate:
    """Execution times in one bucket of sizes. Without predictions, one measured mean serves all batch sizes."""

    def __init__(self, seconds_by_batch: Mapping[int, float]) -> None:
        self.replan(seconds_by_batch)
        self._mean = 1.0 if self._known else 0.0
        self._deviation = _FIRST_DEVIATION if self._known else 0.0
        self._was_measured = False
        self._measured_s = 0.0

    def replan(self, seconds_by_batch: Mapping[int, float]) -> None:
        """Replace the predictions; keeps the learned correction."""
        self._predicted = {b: max(s, _LEAST_S) for b, s in sorted(seconds_by_batch.items())}
        self._batches = list(self._predicted)
        self._per_row_s = list(accumulate((s / b for b, s in self._predicted.items()), min))
        """Minimum time per row in batches up to each size."""
        self._known = bool(self._predicted)

    @property
    def correction(self) -> float:
        """Measured over predicted time, on average."""
        return self._mean

    def predicted_s(self, rows: int) -> float:
        """Return the plan's time for `rows`, padded to a planned batch; 1 without plans."""
        if not self._known:
            return 1.0
        place = bisect_left(self._batches, rows)
        if place < len(self._batches):
            return self._predicted[self._batches[place]]
        most = self._batches[-1]
        return self._predicted[most] * rows / most

    def planned(self, max_rows: int) -> list[int]:
        """Return the planned batch sizes up to `max_rows`."""
        return [batch for batch in self._predicted if batch <= max_rows]

    def seconds(self, rows: int) -> float:
        return self.predicted_s(rows) * self._mean

    def upper_estimate_s(self, rows: int, now_s: float) -> float:
        """Return a time that few executions exceed."""
        upper = self._mean + _DEVIATIONS * self._deviation
        uncorrected = min(1.0 if self._known else 0.0, upper)
        fading = math.exp(min(self._measured_s - now_s, 0.0) / _FORGET_S) if self._was_measured else 1.0
        return self.predicted_s(rows) * (uncorrected + (upper - uncorrected) * fading)

    def drain_estimate_s(self, rows: int) -> float:
        """Return the expected time for many rows, executed in the batches with the least time per row."""
        if rows == 0:
            return 0.0
        if not self._known:
            return rows * self._mean
        per_row_s = self._per_row_s[max(bisect_right(self._batches, rows) - 1, 0)]
        least_s = self._predicted[self._batches[0]] if rows < self._batches[-1] else 0.0
        return max(rows * per_row_s, least_s) * self._mean

    def measured(self, rows: int, seconds: float, now_s: float) -> None:
        """Update the correction with a measured execution."""
        ratio = seconds / self.predicted_s(rows)
        self._was_measured, self._measured_s = True, now_s
        if self._mean == 0.0:
            self._mean, self._deviation = ratio, ratio / 2
            return
        ratio = min(ratio, _LARGEST_STEP * self._mean)
        self._deviation += _DEVIATION_STEP * (abs(ratio - self._mean) - self._deviation)
        self._mean += _MEAN_STEP * (ratio - self._mean)


class ModelEstimates:
    """A model's execution times: one `Estimate` per bucket of sizes, for all its batch sizes."""

    def __init__(self, predicted_s: Mapping[Bucket, float]) -> None:
        self._estimates: dict[tuple[int, ...], Estimate] = {}
        self.replan(predicted_s)
        self._newest = next(iter(self._estimates.values()))

    def replan(self, predicted_s: Mapping[Bucket, float]) -> None:
        """Replace the predictions; keeps the learned corrections."""
        by_sizes: dict[tuple[int, ...], dict[int, float]] = {}
        for bucket, seconds in predicted_s.items():
            by_sizes.setdefault(bucket.sizes, {})[bucket.batch] = seconds
        for sizes, seconds_by_batch in (by_sizes or {(): {}}).items():
            if sizes in self._estimates:
                self._estimates[sizes].replan(seconds_by_batch)
            else:
                self._estimates[sizes] = Estimate(seconds_by_batch)

    def of(self, sizes: tuple[int, ...]) -> Estimate:
        """Return the estimate of the smallest bucket that holds these sizes."""
        return self._estimates[smallest_holding(self._estimates, sizes)]

    @property
    def correction(self) -> float:
        """Measured over predicted time, on average, in the most recently measured bucket."""
        return self._newest.correction

    def measured(self, sizes: tuple[int, ...], rows: int, seconds: float, now_s: float) -> None:
        """Update a correction with a measured execution."""
        self._newest = self.of(sizes)
        self._newest.measured(rows, seconds, now_s)
