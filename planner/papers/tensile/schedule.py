"""Swaps, then recomputes, until the jobs fit in memory or nothing helps any more.

TENSILE, section IV-F, algorithm 3. Tensors are released after their last access (activity analysis) throughout.
The paper goes on swapping until nothing can be swapped; with a memory to fit into, this stops there.
"""

from collections.abc import Sequence
from typing import Final

from planner.papers.tensile.job import Job
from planner.papers.tensile.recompute import recompute_best
from planner.papers.tensile.swaps import swap_largest
from planner.papers.tensile.system import System

PATIENCE: Final = 100
"""Iterations before the schedule is given up for improving too little."""
LEAST_GAIN: Final = 0.0005
"""What the peak must lose in three iterations then, as a share."""


def schedule(jobs: Sequence[Job], memory_bytes: int = 0, *, duplex: bool = False, thorough: bool = True) -> System:
    """Lower the peak of all jobs together to `memory_bytes`, or as far as it goes."""
    system = System(jobs, duplex)
    swapping, peaks = True, list[int]()
    while True:
        peak = system.usage.peak()
        peaks.append(peak.nbytes)
        stuck = len(peaks) > PATIENCE and peaks[-4] - peaks[-1] < LEAST_GAIN * peaks[-4]
        if peak.nbytes <= memory_bytes or stuck:
            return system
        if swapping:
            swapping = swap_largest(system, peak, thorough)
        elif not recompute_best(system, peak):
            return system
