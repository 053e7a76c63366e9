"""What this process may use of the machine, and what it uses: CPUs and memory."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_COUNTED = ("RssAnon", "RssFile")
_OF_PROCESS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_cpus(of_process: Path = _OF_PROCESS, mounted: Path = _MOUNTED) -> int:
    """Return the number of CPUs in the affinity mask, or that a cgroup's quota gives, rounded up, if that is less.

    In a container with a CPU limit, libraries count those of the machine.
    """
    quotas = (math.ceil(quota) for quota in _quotas(of_process, mounted))
    return min([len(os.sched_getaffinity(0)), *quotas])


def _quotas(of_process: Path, mounted: Path) -> Iterator[float]:
    """The quotas of the process's cgroup and of those around it, in CPUs, under version 1 and 2."""
    lines = of_process.read_text().splitlines() if of_process.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mounted / "cpu" if controllers else mounted
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            with suppress(OSError, ValueError):  # no quota, or not visible from a container
                if controllers:
                    quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, period = (group / "cpu.max").read_text().split()
                if float(quota) > 0:  # "max" is none, and so is -1
                    yield float(quota) / float(period)
            if group == root:
                break


def resident_bytes() -> int:
    """Return this process's anonymous memory and its pages of files, such as libraries."""
    with suppress(OSError):
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(line[1]) << 10 for line in lines if line[0].rstrip(":") in _COUNTED)
    return 0
