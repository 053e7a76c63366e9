"""Measures what torch's CPU allocator allocates inside named ranges (`torch.profiler.record_function`)."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch

_ERROR = b"External init callback must run in same thread"
_PIPE_BYTES = 64 << 10


@contextmanager
def _without_its_error() -> Iterator[None]:
    """Leave out of stderr what the profiler's library writes where another thread has imported torch.

    It says that it does not listen to external tools, which nothing here is. What others write meanwhile is kept.
    """
    read, write, own = *os.pipe(), os.dup(2)
    os.set_blocking(read, False)
    os.dup2(write, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        with suppress(BlockingIOError):
            for line in os.read(read, _PIPE_BYTES).splitlines(keepends=True):
                if _ERROR not in line:
                    os.write(own, line)
        for descriptor in (read, write, own):
            os.close(descriptor)


@contextmanager
def measuring_allocations() -> Iterator[dict[str, int]]:
    """Yield a dictionary that, when the block has ended, has each range's most bytes beyond those at its start.

    Of ranges with the same name, the one with the most counts. Memory that libraries take elsewhere is not seen.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library announces itself on stderr otherwise
    peaks: dict[str, int] = {}
    activities = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True)
    with _without_its_error():
        profiler.prepare_trace()
    profiler.start_trace()
    try:
        yield peaks
    finally:
        profiler.stop_trace()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), int(e.nbytes())) for e in events if e.name() == "[memory]")
    for event in events:
        if event.is_user_annotation():
            first = bisect_left(changes, event.start_ns(), key=itemgetter(0))
            end = bisect_right(changes, event.end_ns(), key=itemgetter(0))
            held = accumulate((nbytes for _, nbytes in changes[first:end]), initial=0)
            peaks[event.name()] = max(peaks.get(event.name(), 0), *held)
