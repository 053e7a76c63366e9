"""Opens a device by its name: `cpu`, `cuda`, or `cuda:1`. The part before the colon is the device's kind."""

from dataclasses import dataclass

from cohabit.planner.parts import Part, PartRegistry
from cohabit.runtime.backend import Backend
from cohabit.runtime.errors import DeviceError


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """How a device is opened; not every option concerns every device."""

    link_bandwidth_bytes_per_s: float | None = None
    """Limit of the bandwidth of copies, to emulate another link; for the CPU only."""
    verify_reads: bool = False
    """Whether to compare reads from weights files with checksums."""
    lost_on_change: bool = True
    """Whether a changed weights file counts as the loss of the device; for the CPU only."""
    unmap_tables: bool = False
    """Whether embedding tables in files leave the process's memory after each gather; for the CPU only."""
    host_memory_bytes: int | None = None
    """The RAM that this process may use, by default the machine's: CUDA pins a part of it."""


DEVICES = PartRegistry(
    "cohabit.devices",
    {"cpu": Part("cohabit.runtime.devices:open_cpu"), "cuda": Part("cohabit.runtime.devices:open_cuda")},
)
"""By kind. Each is called with the device's whole name and its options, and returns a Backend or raises DeviceError."""


def open_device(name: str, options: DeviceOptions | None = None) -> Backend:
    """Open a device. Raises DeviceError if there is none of this name."""
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise _unknown(name)
    backend: Backend = DEVICES[kind](name, options or DeviceOptions())
    return backend


def open_cpu(name: str, options: DeviceOptions) -> Backend:
    from cohabit.runtime.cpu.backend import CpuBackend

    if name != "cpu":
        raise _unknown(name)
    return CpuBackend(
        options.link_bandwidth_bytes_per_s,
        verify_reads=options.verify_reads,
        unmap_tables=options.unmap_tables,
        lost_on_change=options.lost_on_change,
    )


def open_cuda(name: str, options: DeviceOptions) -> Backend:
    index = name.partition(":")[2]
    if name.endswith(":") or (index and not index.isdecimal()):
        raise _unknown(name)
    if options.link_bandwidth_bytes_per_s is not None:
        raise DeviceError(f"the link of {name} is as fast as it is; --link-bandwidth is for the CPU")
    from cohabit.runtime.cuda.backend import CudaBackend
    from cohabit.runtime.cuda.driver import CudaDriver
    from cohabit.runtime.stores.pinned import default_limit_bytes

    limit_bytes = default_limit_bytes(options.host_memory_bytes)
    return CudaBackend(CudaDriver.open(int(index or 0)), limit_bytes, verify_reads=options.verify_reads)


def _unknown(name: str) -> DeviceError:
    others = [kind for kind in DEVICES if kind not in ("cpu", "cuda")]
    return DeviceError(f"there is no device '{name}': devices are {', '.join(('cpu', *others))}, cuda, and cuda:N")
