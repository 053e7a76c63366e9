"""Measures what torch's CPU allocator allocates inside named ranges (`torch.profiler.record_function`)."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from operator import itemgetter

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
    changes = sorted((e.start_ns(), int(e.nbytes())) for e in events if e.name() == "[memory]")
    for event in events:
        if event.is_user_annotation():
            first = bisect_left(changes, event.start_ns(), key=itemgetter(0))
            end = bisect_right(changes, event.end_ns(), key=itemgetter(0))
            held = accumulate((nbytes for _, nbytes in changes[first:end]), initial=0)
            peaks[event.name()] = max(peaks.get(event.name(), 0), *held)
