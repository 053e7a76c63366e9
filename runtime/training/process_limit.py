"""A budget of the whole process: tensors may take what everything else in it leaves.

Most of the rest is there all the time: Python, libraries, small tensors. The scratch of kernels is not: it is measured
per op, and reserved while such an op runs.
"""

import os
from typing import Final

from cohabit.planner.errors import format_bytes
from cohabit.runtime.errors import MemoryExceeded, UnsupportedModel
from cohabit.runtime.heap import keep_freed_memory, release_free_memory

_RESERVE: Final = 16
"""The total divided by this is reserved for what grows between two measurements, and for unusual scratch."""
_FORGOTTEN: Final = 64
"""The untracked memory divided by this is forgotten per measurement, so that a peak does not count forever."""
_STATUS: Final = "/proc/self/status"
_CLEAR_PEAK: Final = "/proc/self/clear_refs"
"""Writing 5 resets the peak of resident memory, VmHWM (proc(5))."""


class ProcessLimit:
    """Measures what a process takes beside tracked tensors."""

    def __init__(self, total_bytes: int) -> None:
        """Also has the C library return freed memory to the system, for the rest of the process's life.

        Otherwise evicted tensors would stay in its heap and count as the rest of the process. Raises UnsupportedModel
        where the system does not tell the peak of resident memory.
        """
        self.total_bytes = total_bytes
        self._untracked_bytes = 0
        self._status = self._clear_refs = -1
        try:
            self._status = os.open(_STATUS, os.O_RDONLY | os.O_CLOEXEC)
            self._clear_refs = os.open(_CLEAR_PEAK, os.O_WRONLY | os.O_CLOEXEC)
            self._resident_and_peak()
            self._clear_peak()
        except (OSError, KeyError) as error:
            self.close()
            raise UnsupportedModel(
                f"budget: a total needs the peak of resident memory from {_STATUS} and {_CLEAR_PEAK}, which this system"
                f" does not offer ({error}); give a size for the tensors, such as '2GiB'"
            ) from error
        keep_freed_memory(0)

    def close(self) -> None:
        for descriptor in (self._status, self._clear_refs):
            if descriptor >= 0:
                os.close(descriptor)

    def tensor_bytes(self, arrived_bytes: int) -> int:
        """Return the bytes left for tensors, from what they take now."""
        release_free_memory()  # small storages that were freed amid the heap would count as untracked
        resident_bytes, _ = self._resident_and_peak()
        measured_bytes = resident_bytes - arrived_bytes
        remembered_bytes = self._untracked_bytes - self._untracked_bytes // _FORGOTTEN
        self._untracked_bytes = max(measured_bytes, remembered_bytes)
        return max(0, self.total_bytes - self.total_bytes // _RESERVE - self._untracked_bytes)

    def start_peak(self) -> int:
        """Start measuring an op. Returns the resident memory in bytes."""
        self._clear_peak()
        return self._resident_and_peak()[0]

    def scratch_bytes(self, before_bytes: int) -> int:
        """Return the memory that an op took on top of what was there before it and what it left."""
        after_bytes, highest_bytes = self._resident_and_peak()
        return highest_bytes - max(before_bytes, after_bytes)

    def exceeded(self, what: str = "") -> MemoryExceeded:
        """Return the error for tensors that get too little; `what` says which."""
        return MemoryExceeded(
            f"{what}the process takes {format_bytes(self._untracked_bytes)} beside the tensors, and a sixteenth"
            f" of {format_bytes(self.total_bytes)} is kept for kernels; raise the total, or train with smaller batches"
        )

    def _resident_and_peak(self) -> tuple[int, int]:
        """Return the process's resident memory in bytes, now and at most since the peak was cleared."""
        lines = (line.split() for line in os.pread(self._status, 1 << 14, 0).splitlines())
        kib = {line[0]: int(line[1]) for line in lines if line[0] in (b"VmRSS:", b"VmHWM:")}
        return kib[b"VmRSS:"] << 10, kib[b"VmHWM:"] << 10

    def _clear_peak(self) -> None:
        os.pwrite(self._clear_refs, b"5", 0)
