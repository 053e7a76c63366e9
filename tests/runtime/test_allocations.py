"""Allocations are attributed to the range in which they are made."""

import subprocess
import sys
from pathlib import Path

import torch

from cohabit.runtime.allocations import measuring_allocations

ROOT = Path(__file__).parents[2]


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


def test_a_thread_that_has_not_imported_torch_measures_without_a_word_on_stderr() -> None:
    program = """
import sys, threading
from cohabit.runtime.allocations import _without_its_error, measuring_allocations
import torch

def measure():
    for _ in range(2):
        with measuring_allocations() as peaks, torch.profiler.record_function("ones"):
            torch.ones(1000)
        print(peaks["ones"] >= 4000)

thread = threading.Thread(target=measure)
thread.start()
thread.join()
with _without_its_error():
    print("what others say", file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert (ran.stdout, ran.stderr) == ("True\nTrue\n", "what others say\n")
