"""Measures what torch's CPU allocator allocates inside named ranges (`torch.profiler.record_function`)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def measuring_allocations() -> Iterator[dict[str, int]]:
    """Yield a dictionary that, when the block has ended, has each range's most bytes beyond those at its start.

    Of ranges with the same name, the one with the most counts. Memory that libraries take elsewhere is not seen.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library announces itself on stderr otherwise
    peaks: dict[str, int] = {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        yield peaks
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    ranges = sorted((e.start_ns(), e.end_ns(), e.name()) for e in events if e.is_user_annotation())
    position = 0
    for start, end, name in ranges:
        while position < len(changes) and changes[position][0] < start:
            position += 1
        peaks[name] = max(peaks.get(name, 0), _peak(changes, position, end))


def _peak(changes: list[tuple[int, Any]], position: int, end: int) -> int:
    """The highest running sum of the changes from a position up to a time."""
    held = most = 0
    while position < len(changes) and changes[position][0] <= end:
        held += int(changes[position][1])
        most = max(most, held)
        position += 1
    return most
