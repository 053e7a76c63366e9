"""NVIDIA GPUs through NVML; none without a driver or without `nvidia-ml-py`."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_log = logging.getLogger("cohabit.gpus")


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    _nvml: ModuleType
    _handle: Any

    def read(self) -> dict[str, float]:
        """Return the GPU's readings by Triton's metric names, without unsupported ones."""
        nvml, handle = self._nvml, self._handle
        readers: dict[str, Callable[[], float]] = {
            "nv_gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "nv_gpu_memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "nv_gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "nv_gpu_power_usage": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "nv_gpu_power_limit": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            "nv_energy_consumption": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
        }
        found = {}
        for name, reader in readers.items():
            try:
                found[name] = reader()
            except nvml.NVMLError as error:
                _log.debug(
                    "a GPU does not report a figure", extra={"fields": {"metric": name, "reason": str(error)}}
                )
        return found


def open_gpus() -> tuple[Gpu, ...]:
    """Return this machine's GPUs. Blocks for a while if there are any."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(Gpu(str(pynvml.nvmlDeviceGetUUID(handle)), pynvml, handle) for handle in handles)
    except pynvml.NVMLError as error:
        _log.debug("no GPU found", extra={"fields": {"reason": str(error)}})
        return ()
