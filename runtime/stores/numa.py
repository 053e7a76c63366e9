"""CPUs on a device's NUMA node: memory that they touch first lies on that node."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PCI_DEVICES = Path("/sys/bus/pci/devices")


def local_cpus(domain: int, bus: int, device: int, devices: Path = _PCI_DEVICES) -> frozenset[int]:
    """Return the CPUs near a PCI device; empty if unknown."""
    with suppress(OSError, ValueError):  # hidden in some containers
        return _parsed((devices / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "local_cpulist").read_text())
    return frozenset()


def _parsed(text: str) -> frozenset[int]:
    """Parse a CPU list such as `0-3,8`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))


@contextmanager
def running_on(cpus: frozenset[int]) -> Iterator[None]:
    """Run the calling thread on these CPUs inside the block, as far as its affinity allows."""
    allowed = os.sched_getaffinity(0)
    near = cpus & allowed
    if not near or near == allowed:
        yield
        return
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
