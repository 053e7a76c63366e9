"""CPUs and memory that this process may use, and memory that it uses."""

import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from cohabit.planner.errors import format_bytes
from cohabit.server.config.config import ServeConfig, cache_of
from cohabit.server.config.sizes import FixedSize
from cohabit.server.errors import ConfigError

_log = logging.getLogger("cohabit.serve")

_COUNTED = ("RssAnon", "RssFile")
_LIMIT_AND_USAGE = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
_LEAST_MARGIN_BYTES, _MARGIN_SHARE = 16 << 20, 16
_LEFT_STEP_BYTES = 16 << 20
"""Rounding unit of free memory, so that two starts with almost the same memory find the same plans."""
_MACHINE = Path("/proc/meminfo")
_OF_PROCESS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_cpus(of_process: Path = _OF_PROCESS, mounted: Path = _MOUNTED) -> int:
    """Return the number of CPUs in the affinity mask, or a cgroup's quota, rounded up, if that is less.

    In a container with a CPU limit, libraries count the machine's CPUs instead.
    """
    quotas = (math.ceil(quota) for quota in _quotas(of_process, mounted))
    return min([len(os.sched_getaffinity(0)), *quotas])


def _quotas(of_process: Path, mounted: Path) -> Iterator[float]:
    """Yield the quotas, in CPUs, of the process's cgroup and its ancestors, under version 1 and 2."""
    for group, version in _groups("cpu", of_process, mounted):
        with suppress(OSError, ValueError):  # no quota, or not visible from a container
            if version == 1:
                quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            else:
                quota, period = (group / "cpu.max").read_text().split()
            if float(quota) > 0:  # "max" and -1 mean no quota
                yield float(quota) / float(period)


def _groups(controller: str, of_process: Path, mounted: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of the process's cgroup and its ancestors, each with its version, 1 or 2."""
    lines = of_process.read_text().splitlines() if of_process.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        root = mounted / controller if controllers else mounted
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            yield group, 1 if controllers else 2
            if group == root:
                break


def available_memory(of_process: Path = _OF_PROCESS, mounted: Path = _MOUNTED) -> tuple[int, str]:
    """Return the maximum RAM of this process in bytes, and the limit's owner: the machine or a cgroup."""
    limits = [(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine")]
    for group, version in _groups("memory", of_process, mounted):
        with suppress(OSError, ValueError):  # "max" means no limit
            limit = (group / _LIMIT_AND_USAGE[version][0]).read_text()
            limits.append((int(limit), "this process's cgroup"))
    return min(limits)


def memory_kills(of_process: Path = _OF_PROCESS, mounted: Path = _MOUNTED) -> int:
    """Return the number of processes in this process's cgroup that the kernel has killed for lack of memory."""
    for group, version in _groups("memory", of_process, mounted):
        with suppress(OSError, ValueError, KeyError):
            events = (group / ("memory.oom_control" if version == 1 else "memory.events")).read_text()
            return int(dict(line.split() for line in events.splitlines())["oom_kill"])
    return 0


def memory_left(
    of_process: Path = _OF_PROCESS, mounted: Path = _MOUNTED, machine: Path = _MACHINE
) -> tuple[int, str]:
    """Return the RAM in bytes that this process and its children can have now, and the limit's owner.

    Subtracts the memory of other processes, and a margin for the kernel and its file cache.
    """
    own = resident_bytes()
    left, where = available_memory(of_process, mounted)[0], "this machine"
    with suppress(OSError, StopIteration):
        available = next(line for line in machine.read_text().splitlines() if line.startswith("MemAvailable:"))
        left = min(left, (int(available.split()[1]) << 10) + own)
    for group, version in _groups("memory", of_process, mounted):
        with suppress(OSError, ValueError):
            limit, usage = _LIMIT_AND_USAGE[version]
            kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / usage).read_text()) - int(kept.get("inactive_file", 0)) - own
            free = int((group / limit).read_text()) - max(0, used)
            left, where = min((left, where), (free, "the cgroup of this process"))
    margin = max(_LEAST_MARGIN_BYTES, left // _MARGIN_SHARE)
    return max(0, left - margin) // _LEFT_STEP_BYTES * _LEFT_STEP_BYTES, where


def resident_bytes() -> int:
    """Return the bytes of this process's anonymous memory and mapped files, such as libraries."""
    with suppress(OSError):
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(line[1]) << 10 for line in lines if line[0].rstrip(":") in _COUNTED)
    return 0


def refuse_impossible(config: ServeConfig, origins: Mapping[str, str]) -> None:
    """Check settings against this machine, before anything is loaded. `origins` says where each was given.

    Raises ConfigError for more memory than available, and for an unwritable cache. Warns of too many threads.
    """
    if config.device == "cpu" and isinstance(config.memory, FixedSize):
        limit, where = available_memory()
        if config.memory.nbytes > limit:
            asked, there = format_bytes(config.memory.nbytes), format_bytes(limit)
            share = ", or a share of the weights such as 25%" if config.process_memory_bytes is None else ""
            raise ConfigError(
                f"{origins['memory']}: {asked} is more than the {there} of RAM that {where} has; give less{share}"
            )
    if config.bundle is None:
        _require_writable(cache_of(config), "--cache" if config.cache is None else origins["cache"])
    threads, cpus = (config.threads or 0) * config.compute_lanes, available_cpus()
    if threads > cpus:
        _log.warning(
            "--threads and --compute-lanes ask for more threads than there are CPUs, which makes inferences slower",
            extra={"fields": {"threads": config.threads, "compute_lanes": config.compute_lanes, "cpus": cpus}},
        )


def _require_writable(folder: Path, origin: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{origin}: {folder} cannot be written: {error.strerror or error}; give a folder that can with --cache"
        ) from error
