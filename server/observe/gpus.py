"""NVIDIA GPUs as NVML sees them; none where there is no driver or no `nvidia-ml-py`."""

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
        """What the GPU tells, by Triton's metric; what it does not tell is left out."""
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
                _log.debug("a GPU does not tell", extra={"fields": {"metric": name, "reason": str(error)}})
        return found


def open_gpus() -> tuple[Gpu, ...]:
    """Look for GPUs; takes a while where there are some."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(Gpu(str(pynvml.nvmlDeviceGetUUID(handle)), pynvml, handle) for handle in handles)
    except pynvml.NVMLError as error:
        _log.debug("no GPU to be seen", extra={"fields": {"reason": str(error)}})
        return ()
