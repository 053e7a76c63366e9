"""Which compute lane a model belongs to: the one that its requests are expected to keep busy least."""

from collections.abc import Sequence


def assign_lanes(loads: Sequence[float], lanes: int) -> list[int]:
    """A lane for each of the models that come together: the heaviest first, each where least is to do so far."""
    chosen, sums = [0] * len(loads), [0.0] * lanes
    for model in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        lane = least_busy(sums)
        chosen[model] = lane
        sums[lane] += loads[model]
    return chosen


def least_busy(sums: Sequence[float]) -> int:
    """The lane with the least to do; of equals the first."""
    return min(range(len(sums)), key=lambda lane: (sums[lane], lane))
