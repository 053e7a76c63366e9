"""What the C library keeps of freed memory, in a process of its own: the setting is the whole process's."""

import subprocess
import sys

_PAGES_TAKEN = """
import ctypes, resource, sys
from cohabit.runtime.heap import keep_freed_memory
keep_freed_memory(int(sys.argv[1]))
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)
def use(nbytes):
    block = libc.malloc(ctypes.c_size_t(nbytes))
    libc.memset(ctypes.c_void_p(block), 1, ctypes.c_size_t(nbytes))
    libc.free(block)
use(1 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    use(1 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _pages_taken(kept_bytes: int) -> int:
    """Return the page faults of twenty blocks of a MiB, one after the other, after a first one."""
    ran = subprocess.run([sys.executable, "-c", _PAGES_TAKEN, str(kept_bytes)], capture_output=True, check=True)
    return int(ran.stdout)


def test_kept_memory_is_used_again_without_page_faults():
    assert _pages_taken(8 << 20) < 256


def test_memory_that_is_not_kept_is_given_back_each_time():
    assert _pages_taken(0) >= 20 * 256
