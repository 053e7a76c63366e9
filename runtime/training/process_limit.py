"""A budget of the whole process: tensors may take what everything else in it leaves."""

from pathlib import Path
from typing import Final

from cohabit.planner.errors import format_bytes
from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.heap import KEPT_BYTES, keep_freed_memory, release_free_memory

_RESERVE: Final = 16
"""Part of the total that is kept for the scratch of kernels that have not run yet."""
_FORGOTTEN: Final = 64
"""Part of the untracked memory that is forgotten per measurement, so that a peak does not count forever."""
_STATUS, _CLEAR_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class ProcessLimit:
    """Measures what a process takes beside tracked tensors: Python, libraries, kernels' scratch, small tensors."""

    def __init__(self, total_bytes: int) -> None:
        """Also has the C library return freed memory to the system, which by default keeps tens of MiB."""
        self.total_bytes = total_bytes
        self._untracked_bytes = 0
        keep_freed_memory(KEPT_BYTES)
        release_free_memory()
        _clear_peak()

    def tensor_bytes(self, used_bytes: int, peak_bytes: int) -> int:
        """Return the bytes left for tensors, from what they take now and took at most since the last call."""
        resident_bytes, highest_bytes = _resident_and_peak()
        _clear_peak()
        measured_bytes = max(resident_bytes - used_bytes, highest_bytes - peak_bytes)
        remembered_bytes = self._untracked_bytes - self._untracked_bytes // _FORGOTTEN
        self._untracked_bytes = max(measured_bytes, remembered_bytes)
        return max(0, self.total_bytes - self.total_bytes // _RESERVE - self._untracked_bytes)

    def nothing_left(self) -> MemoryExceeded:
        """Return the error for a process that leaves tensors nothing."""
        return MemoryExceeded(
            f"the process takes {format_bytes(self._untracked_bytes)} beside the budget's tensors, and a sixteenth of"
            f" the total of {format_bytes(self.total_bytes)} is kept for kernels; raise the total"
        )


def _resident_and_peak() -> tuple[int, int]:
    """Return the process's resident memory in bytes, now and at most since the peak was cleared."""
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    kib = {line[0]: int(line[1]) for line in lines if line[0] in ("VmRSS:", "VmHWM:")}
    return kib["VmRSS:"] << 10, kib["VmHWM:"] << 10


def _clear_peak() -> None:
    _CLEAR_PEAK.write_text("5")  # see proc(5)
