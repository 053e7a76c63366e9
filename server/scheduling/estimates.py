"""How long an execution will take: the plans' predictions, corrected by what is measured."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

_MEAN_STEP, _DEVIATION_STEP = 1 / 8, 1 / 4
"""How far one measurement moves the mean and the deviation: TCP's, for round-trip times (RFC 6298)."""
_CAREFUL = 3.0
"""Mean deviations above the mean, which few executions exceed."""
_FIRST_DEVIATION = 0.1
_LEAST_S = 1e-6
_LARGEST_STEP = 3.0
"""A measurement counts as at most this many times the mean: one hiccup must not refuse everything."""
_FORGET_S = 5.0
"""Without measurements corrections fade: a model whose requests are refused as hopeless is tried again."""


@dataclass(frozen=True, slots=True)
class SwapTiming:
    """How the order of executions changes what a model's swaps cost. Zero for one that is all resident."""

    prefix_s: float = 0.0
    """Saved where the first copies were made during the execution before."""
    recovery_s: float = 0.0
    """Lost right after an execution of the same model, while its residents are still being copied back."""


class Delay:
    """How long something takes that nobody predicts: what the event loop needs to get at an answer."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._deviation_s = 0.0

    @property
    def careful_s(self) -> float:
        """A time that it rarely exceeds."""
        return self._mean_s + _CAREFUL * self._deviation_s

    def measured(self, seconds: float) -> None:
        self._deviation_s += _DEVIATION_STEP * (abs(seconds - self._mean_s) - self._deviation_s)
        self._mean_s += _MEAN_STEP * (seconds - self._mean_s)


class Estimate:
    """One model's times. Without any prediction all batches are taken to last as long as what was measured."""

    def __init__(self, seconds_by_batch: Mapping[int, float]) -> None:
        self.replan(seconds_by_batch)
        self._mean = 1.0 if self._known else 0.0
        self._deviation = _FIRST_DEVIATION if self._known else 0.0
        self._was_measured = False
        self._measured_s = 0.0

    def replan(self, seconds_by_batch: Mapping[int, float]) -> None:
        """Hear other predictions; what was learned about how true they are is kept."""
        self._predicted = {b: max(s, _LEAST_S) for b, s in sorted(seconds_by_batch.items())}
        self._batches = list(self._predicted)
        self._per_row_s = list(accumulate((s / b for b, s in self._predicted.items()), min))
        """The least time per row in batches up to each size."""
        self._known = bool(self._predicted)

    @property
    def correction(self) -> float:
        """Measured over predicted time, on average."""
        return self._mean

    def predicted_s(self, rows: int) -> float:
        """The plan's time for the batch that so many rows are padded to; 1 if there are no plans."""
        if not self._known:
            return 1.0
        place = bisect_left(self._batches, rows)
        if place < len(self._batches):
            return self._predicted[self._batches[place]]
        most = self._batches[-1]
        return self._predicted[most] * rows / most

    def planned(self, most_rows: int) -> list[int]:
        """Batch sizes that there are plans for, up to so many rows."""
        return [batch for batch in self._predicted if batch <= most_rows]

    def seconds(self, rows: int) -> float:
        """The time to expect."""
        return self.predicted_s(rows) * self._mean

    def careful_s(self, rows: int, now_s: float) -> float:
        """A time that few executions exceed."""
        careful = self._mean + _CAREFUL * self._deviation
        uncorrected = min(1.0 if self._known else 0.0, careful)
        fading = math.exp(min(self._measured_s - now_s, 0.0) / _FORGET_S) if self._was_measured else 1.0
        return self.predicted_s(rows) * (uncorrected + (careful - uncorrected) * fading)

    def drain_s(self, rows: int) -> float:
        """The time to expect for many rows, in the batches that take least time per row."""
        if rows == 0:
            return 0.0
        if not self._known:
            return rows * self._mean
        per_row_s = self._per_row_s[max(bisect_right(self._batches, rows) - 1, 0)]
        least_s = self._predicted[self._batches[0]] if rows < self._batches[-1] else 0.0
        return max(rows * per_row_s, least_s) * self._mean

    def measured(self, rows: int, seconds: float, now_s: float) -> None:
        """Learn from an execution."""
        ratio = seconds / self.predicted_s(rows)
        self._was_measured, self._measured_s = True, now_s
        if self._mean == 0.0:
            self._mean, self._deviation = ratio, ratio / 2
            return
        ratio = min(ratio, _LARGEST_STEP * self._mean)
        self._deviation += _DEVIATION_STEP * (abs(ratio - self._mean) - self._deviation)
        self._mean += _MEAN_STEP * (ratio - self._mean)
