"""What the C library keeps of freed memory, in a process of its own: the setting is the whole process's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PAGES_TAKEN = """
import ctypes, resource
from cohabit.runtime.heap import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)
def use(nbytes):
    block = libc.malloc(ctypes.c_size_t(nbytes))
    libc.memset(ctypes.c_void_p(block), 1, ctypes.c_size_t(nbytes))
    libc.free(block)
for kept_bytes in (0, 8 << 20):
    keep_freed_memory(kept_bytes)
    use(1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        use(1 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_kept_memory_is_used_again_without_page_faults_and_other_memory_is_given_back() -> None:
    """Of twenty blocks of a MiB, one after the other, after a first one."""
    ran = subprocess.run([sys.executable, "-c", _PAGES_TAKEN], capture_output=True, check=True)
    given_back, kept = map(int, ran.stdout.split())
    assert given_back >= 20 * 256
    assert kept < 256


_FAULTS_OF_AN_INFERENCE = """
import resource, sys
from pathlib import Path
import torch
from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering.lower import lower
from cohabit.runtime.measure.profile import resident_plan
from tests.support.runtime.backends import cpu, opened
from tests.support.runtime.models import export

class Large(torch.nn.Module):
    def forward(self, x):
        return (x.repeat(1, 5 << 20) + 1.0).mean(1)

folder = Path(sys.argv[1])
export(Large(), {"x": torch.zeros(3, 1)}, folder / "model.pt2")
lowered = lower(folder / "model.pt2", "large", [2], folder / "cache")
with opened(cpu, lowered, 128 << 20) as bench:
    program = bench.program(resident_plan(bench.graph))
    faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(8):
        bench.executor.run(program, [torch.zeros(2, 1)])
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(min(after - before for before, after in zip(faults, faults[1:])))
"""


@pytest.mark.long
def test_an_inference_finds_the_pages_of_the_one_before_it(tmp_path: Path) -> None:
    """Its activations of 40 MiB are larger than any that the C library keeps unasked."""
    command = [sys.executable, "-c", _FAULTS_OF_AN_INFERENCE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert int(ran.stdout.split()[-1]) < 20
