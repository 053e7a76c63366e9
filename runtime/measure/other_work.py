"""Other work on the machine while a model is measured."""

import os
import time
from pathlib import Path
from typing import NamedTuple

_STAT = Path("/proc/stat")
_IDLE = (3, 4)
"""Columns of /proc/stat: idle, and waiting for disks."""
_COUNTED = 8
"""Columns of /proc/stat before those of guests, which are part of user time."""
_LOOK_S = 0.2


class CpuTimes(NamedTuple):
    """Seconds since the start of the machine, and of this process."""

    total: float
    idle: float
    own: float


def cpu_times(stat: Path = _STAT) -> CpuTimes | None:
    """Return the times of the CPUs that this process may use; None if the system does not report them."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
        names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    columns = [[int(ticks) / ticks_per_s for ticks in line[1 : 1 + _COUNTED]] for line in lines if line[0] in names]
    if not columns:
        return None
    used = os.times()
    idle_s = sum(own[column] for own in columns for column in _IDLE)
    return CpuTimes(sum(map(sum, columns)), idle_s, used.user + used.system)


def share_between(before: CpuTimes | None, after: CpuTimes | None) -> float:
    """Return the fraction of the CPUs that other processes and other virtual machines used; 0 if it is unknown."""
    if before is None or after is None or after.total <= before.total:
        return 0.0
    total_s, idle_s, own_s = (later - earlier for earlier, later in zip(before, after, strict=True))
    return min(1.0, max(0.0, (total_s - idle_s - own_s) / total_s))


def current_share() -> float:
    """Watch the machine for a moment. Returns the fraction of the CPUs that other work uses."""
    before = cpu_times()
    time.sleep(_LOOK_S)
    return share_between(before, cpu_times())
