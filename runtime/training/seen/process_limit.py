"""A budget of the whole process: tensors may take what everything else in it leaves.

Most of the rest is there all the time: Python, libraries, small tensors. The scratch of kernels is not: it is measured
per op, and reserved while such an op runs.
"""

import os
from typing import Final

from cohabit.planner.errors import format_bytes
from cohabit.runtime.errors import MemoryExceeded, UnsupportedModel
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.training.residency import Residency

_RESERVE: Final = 16
"""The total divided by this is reserved for freed memory that the C library keeps, and for unusual scratch."""
_MARGIN: Final = 64
"""The total divided by this is never allocated."""
_FORGOTTEN: Final = 8
"""The rest of the process divided by this is forgotten per division, so that a peak does not count forever."""
_STATUS: Final = "/proc/self/status"
_STATM: Final = "/proc/self/statm"
_CLEAR_PEAK: Final = "/proc/self/clear_refs"
"""Writing 5 resets the peak of resident memory, VmHWM (proc(5))."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class ProcessLimit:
    """Measures what a process takes beside tracked tensors."""

    def __init__(self, total_bytes: int) -> None:
        """Raises UnsupportedModel where the system does not tell resident memory and its peak."""
        self.total_bytes = total_bytes
        self._rest_bytes = 0
        self._files: list[int] = []
        try:
            for path, flags in ((_STATUS, os.O_RDONLY), (_STATM, os.O_RDONLY), (_CLEAR_PEAK, os.O_WRONLY)):
                self._files.append(os.open(path, flags | os.O_CLOEXEC))
            self._status, self._statm, self._clear_refs = self._files
            self.start_peak()
            self.peak_bytes()
        except (OSError, StopIteration) as error:
            self.close()
            raise UnsupportedModel(
                f"budget: a total needs the peak of resident memory from {_STATUS} and {_CLEAR_PEAK}, which this system"
                f" does not offer ({error}); give a size for the tensors, such as '2GiB'"
            ) from error

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def tensor_bytes(self, arrived_bytes: int) -> int:
        """Return the bytes left for tensors, from what they take now. Call it after freed memory was released."""
        remembered_bytes = self._rest_bytes - self._rest_bytes // _FORGOTTEN
        self._rest_bytes = max(self._resident_bytes() - arrived_bytes, remembered_bytes)
        return max(0, self.total_bytes - self.total_bytes // _RESERVE - self._rest_bytes)

    def headroom_bytes(self, arriving_bytes: int) -> int:
        """Return the bytes that the process may allocate now, beside tensors that are being copied in."""
        return self.total_bytes - self.total_bytes // _MARGIN - self._resident_bytes() - arriving_bytes

    def measure(self, residency: Residency, nbytes: int) -> None:
        """Make sure that `nbytes` may be allocated, beside what running ops may, without exceeding the total.

        Freed memory that the C library keeps counts as the process's, but is mostly used again, without page faults. So
        it is returned to the system only if it is in the way.
        """
        residency.headroom_bytes = self.headroom_bytes(residency.arriving_bytes)
        if residency.headroom_bytes < nbytes + residency.reserved_bytes:
            self.divide(residency, nbytes)

    def divide(self, residency: Residency, nbytes: int = 0) -> None:
        """Limit tensors to the part of the total that the rest of the process leaves, and make room for `nbytes`."""
        release_free_memory()  # otherwise it would count as the rest
        residency.limit_bytes = self.tensor_bytes(residency.used_bytes - residency.arriving_bytes)
        before = residency.used_bytes
        residency.make_room(nbytes)
        if residency.used_bytes < before:
            release_free_memory()
        residency.headroom_bytes = self.headroom_bytes(residency.arriving_bytes)

    def start_peak(self) -> int:
        """Start a new peak of resident memory. Returns the resident memory in bytes."""
        os.pwrite(self._clear_refs, b"5", 0)
        return self._resident_bytes()

    def peak_bytes(self) -> int:
        """Return the peak of resident memory since `start_peak`."""
        lines = os.pread(self._status, 1 << 14, 0).splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(b"VmHWM:"))

    def exceeded(self, what: str = "") -> MemoryExceeded:
        """Return the error for tensors that get too little; `what` says which."""
        return MemoryExceeded(
            f"{what}the process takes {format_bytes(self._rest_bytes)} beside the tensors, and a sixteenth"
            f" of {format_bytes(self.total_bytes)} is kept free; raise the total, or train with smaller batches"
        )

    def _resident_bytes(self) -> int:
        return int(os.pread(self._statm, 256, 0).split()[1]) * _PAGE_BYTES
