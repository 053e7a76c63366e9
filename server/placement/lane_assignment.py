"""Assigns models to compute lanes by expected load."""

from collections.abc import Sequence


def assign_lanes(loads: Sequence[float], lanes: int) -> list[int]:
    """Return a lane for each model: longest processing time first, each to the least busy lane so far."""
    chosen, sums = [0] * len(loads), [0.0] * lanes
    for model in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        lane = sums.index(min(sums))
        chosen[model] = lane
        sums[lane] += loads[model]
    return chosen
