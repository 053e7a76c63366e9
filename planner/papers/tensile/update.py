"""Whether a schedule is out of date: TENSILE, section IV-E."""

from collections.abc import Sequence
from typing import Final

WEIGHT: Final = 0.3
"""Of a new measurement in the moving average. The paper names no value."""
THRESHOLD: Final = 0.1
"""Change of the total latency that calls for a new schedule. The paper names no value."""


def corrected(
    op_seconds: Sequence[float], measured_s: Sequence[float], weight: float = WEIGHT
) -> tuple[float, ...]:
    """Each op's latency by exponentially weighted moving average."""
    return tuple((1 - weight) * s + weight * m for s, m in zip(op_seconds, measured_s, strict=True))


def outdated(planned_s: Sequence[float], newest_s: Sequence[float], threshold: float = THRESHOLD) -> bool:
    """Whether |s' - s| / s exceeds the threshold: s is the sum of the latencies that the schedule was made with, s'
    that of the newest ones."""
    return abs(sum(newest_s) - sum(planned_s)) > threshold * sum(planned_s)
