"""Allocations are attributed to the range in which they are made."""

import subprocess
import sys

import pytest
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


@pytest.mark.long
def test_measuring_on_another_thread_than_torchs_prints_nothing() -> None:
    """Import's and the engine's threads are others than the one that has loaded torch."""
    program = (
        "import threading, torch\n"
        "from cohabit.runtime.allocations import measuring_allocations\n"
        "def measure():\n"
        "    with measuring_allocations() as peaks, torch.profiler.record_function('range'):\n"
        "        torch.ones(1000)\n"
        "    assert peaks == {'range': 4000}, peaks\n"
        "thread = threading.Thread(target=measure); thread.start(); thread.join()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout + ended.stderr == ""
