"""Measures the allocations of torch's CPU allocator inside named ranges (`torch.profiler.record_function`)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import (  # type: ignore[attr-defined]
    ProfilerConfig,
    ProfilerState,
    _disable_profiler_legacy,
    _enable_profiler_legacy,
)

_USER_SCOPE = 7
"""Scope of `record_function`, in torch's enumeration `RecordScope`."""


@contextmanager
def measuring_allocations() -> Iterator[dict[str, int]]:
    """Yield a dictionary that gets each range's peak bytes, relative to its start, when the block ends.

    Of ranges with the same name, the largest peak counts. Memory that libraries allocate elsewhere is not measured.
    """
    peaks: dict[str, int] = {}
    # Not `torch.profiler`: its library prints an error if a thread other than this one has loaded torch.
    experimental = torch._C._profiler._ExperimentalConfig()
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, experimental))
    try:
        yield peaks
    finally:
        threads = _disable_profiler_legacy()
    for events in threads:
        for name, nbytes in _peaks(events):
            peaks[name] = max(peaks.get(name, 0), nbytes)


def _peaks(events: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """Yield the name and the peak of each range of a thread, from its events in order."""
    held = 0
    open_ranges: list[tuple[str | None, int, int]] = []
    """(name, bytes at the start, peak so far); the name is None for torch's own ranges."""
    for event in events:
        match event.kind():
            case "push":
                name = event.name() if event.scope() == _USER_SCOPE else None
                open_ranges.append((name, held, held))
            case "memory_alloc":
                held += event.cpu_memory_usage()
                if open_ranges:
                    name, start, most = open_ranges[-1]
                    open_ranges[-1] = name, start, max(most, held)
            case "pop":
                name, start, most = open_ranges.pop()
                if open_ranges:
                    outer, outer_start, outer_most = open_ranges[-1]
                    open_ranges[-1] = outer, outer_start, max(outer_most, most)
                if name is not None:
                    yield name, most - start
