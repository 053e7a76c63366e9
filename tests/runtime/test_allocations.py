"""Allocations are attributed to the range in which they are made."""

import torch

from cohabit.runtime.allocations import measuring_allocations


def test_the_peak_of_a_range_counts_what_was_freed_again() -> None:
    before = torch.ones(1000)
    with measuring_allocations() as peaks:
        with torch.profiler.record_function("two temporaries"):
            kept = (before + 1) * 2 + before
        with torch.profiler.record_function("nothing"):
            kept.view(10, 100)
        with torch.profiler.record_function("large"):
            torch.ones(1 << 20).sum()
    assert peaks["nothing"] == 0
    assert 2 * 4000 <= peaks["two temporaries"] <= 3 * 4100
    assert 4 << 20 <= peaks["large"] < (4 << 20) + 4096
