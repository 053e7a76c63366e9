"""Opens a device by its name: `cpu`, `cuda`, or `cuda:1`."""

import torch

from runtime.backend import Backend
from runtime.cpu.backend import CpuBackend
from runtime.cpu.segments import unavailable
from runtime.errors import DeviceError


def open_device(
    name: str, link_bandwidth_bytes_per_s: float | None = None, *, scripted: bool | None = None
) -> Backend:
    """Open a device. Raises DeviceError where there is none of that name.

    `link_bandwidth_bytes_per_s` and `scripted` are for the CPU, which runs script segments by default where torch can.
    """
    kind, _, index = name.partition(":")
    if name == "cpu":
        reason = unavailable() if scripted is not False else None
        if scripted and reason is not None:
            raise DeviceError(
                f"torch {torch.__version__} cannot run script segments ({reason}); leave out --scripted"
            )
        return CpuBackend(link_bandwidth_bytes_per_s, scripted=scripted is not False and reason is None)
    if kind != "cuda" or (index and not index.isdecimal()):
        raise DeviceError(f"there is no device '{name}': devices are cpu, cuda, and cuda:N")
    if link_bandwidth_bytes_per_s is not None:
        raise DeviceError(f"the link of {name} is as fast as it is; --link-bandwidth is for the CPU")
    if scripted:
        raise DeviceError(f"{name} replays graphs, which need no Python between ops; --scripted is for the CPU")
    from runtime.cuda.backend import CudaBackend
    from runtime.cuda.driver import CudaDriver

    return CudaBackend(CudaDriver.open(int(index or 0)))
