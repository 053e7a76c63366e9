"""Opens a device by its name: `cpu`, `cuda`, or `cuda:1`."""

from runtime.backend import Backend
from runtime.cpu import CpuBackend
from runtime.errors import DeviceError


def open_device(name: str, link_bandwidth_bytes_per_s: float | None = None, *, scripted: bool = False) -> Backend:
    """Take a device into use. Raises DeviceError where there is none of that name.

    Only a CPU's link can be slowed down, and only a CPU's calls be `scripted`.
    """
    kind, _, index = name.partition(":")
    if name == "cpu":
        return CpuBackend(link_bandwidth_bytes_per_s, scripted=scripted)
    if kind != "cuda" or (index and not index.isdecimal()):
        raise DeviceError(f"there is no device '{name}': devices are cpu, cuda, and cuda:N")
    if link_bandwidth_bytes_per_s is not None:
        raise DeviceError(f"the link of {name} is as fast as it is; --link-bandwidth is for the CPU")
    if scripted:
        raise DeviceError(f"{name} replays graphs, which need no Python between ops; --scripted is for the CPU")
    from runtime.cuda.backend import CudaBackend
    from runtime.cuda.driver import CudaDriver

    return CudaBackend(CudaDriver.open(int(index or 0)))
