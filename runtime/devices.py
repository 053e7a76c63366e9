"""Opens a device by its name: `cpu`, `cuda`, or `cuda:1`."""

from cohabit.runtime.backend import Backend
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.errors import DeviceError


def open_device(
    name: str,
    link_bandwidth_bytes_per_s: float | None = None,
    *,
    verify_reads: bool = False,
    lost_on_change: bool = True,
    host_memory_bytes: int | None = None,
) -> Backend:
    """Open a device. Raises DeviceError if there is none of this name.

    `link_bandwidth_bytes_per_s` is for the CPU only. `verify_reads` compares reads from weights files with checksums.
    `lost_on_change`, also for the CPU only, treats a changed weights file as the loss of the device.
    `host_memory_bytes` is the RAM that this process may use, by default the machine's: CUDA pins a part of it.
    """
    kind, _, index = name.partition(":")
    if name == "cpu":
        return CpuBackend(link_bandwidth_bytes_per_s, verify_reads=verify_reads, lost_on_change=lost_on_change)
    if kind != "cuda" or (index and not index.isdecimal()):
        raise DeviceError(f"there is no device '{name}': devices are cpu, cuda, and cuda:N")
    if link_bandwidth_bytes_per_s is not None:
        raise DeviceError(f"the link of {name} is as fast as it is; --link-bandwidth is for the CPU")
    from cohabit.runtime.cuda.backend import CudaBackend, default_limit_bytes
    from cohabit.runtime.cuda.driver import CudaDriver

    limit_bytes = default_limit_bytes(host_memory_bytes)
    return CudaBackend(CudaDriver.open(int(index or 0)), limit_bytes, verify_reads=verify_reads)
