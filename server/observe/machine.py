"""Metrics of the machine and the device: processors, memory, GPUs, lanes, use of the arena."""

import threading
from collections.abc import Callable, Iterator, Mapping

import psutil

from cohabit.server.ipc.model import DeviceUse
from cohabit.server.observe.gpus import Gpu, open_gpus
from cohabit.server.observe.prometheus import Family, Kind, Sample, single


class Machine:
    """Reads the metrics at each call. Any thread."""

    def __init__(self, refused: Mapping[str, int], gpus: Callable[[], tuple[Gpu, ...]] = open_gpus) -> None:
        """`refused` counts rejected calls by reason; it is read at each call."""
        self._refused = refused
        self._open_gpus = gpus
        self._gpus: tuple[Gpu, ...] | None = None
        self._lock = threading.Lock()
        psutil.cpu_percent()  # the first reading counts from here

    def families(self, use: DeviceUse) -> Iterator[Family]:
        yield from _processors()
        yield from _device(use)
        yield Family(
            "cohabit_refused_calls_total",
            "counter",
            "Calls rejected: missing or insufficient token",
            [({"reason": reason}, count) for reason, count in self._refused.items()],
        )
        yield from self._gpu_families()

    def _gpu_families(self) -> Iterator[Family]:
        with self._lock:
            if self._gpus is None:
                self._gpus = self._open_gpus()
            readings = [(gpu.uuid, gpu.read()) for gpu in self._gpus]
        for name, text in _GPU_METRICS.items():
            samples: list[Sample] = [({"gpu_uuid": uuid}, value[name]) for uuid, value in readings if name in value]
            if samples:
                kind: Kind = "counter" if name == "nv_energy_consumption" else "gauge"
                yield Family(name, kind, text, samples)


_GPU_METRICS = {
    "nv_gpu_utilization": "GPU utilization rate, 0 to 1",
    "nv_gpu_memory_total_bytes": "GPU memory, in bytes",
    "nv_gpu_memory_used_bytes": "GPU memory in use, in bytes",
    "nv_gpu_power_usage": "GPU power, in watts",
    "nv_gpu_power_limit": "GPU power limit, in watts",
    "nv_energy_consumption": "GPU energy since the driver was loaded, in joules",
}


def _processors() -> Iterator[Family]:
    memory = psutil.virtual_memory()
    yield single("nv_cpu_utilization", "gauge", "CPU utilization rate, 0 to 1", psutil.cpu_percent() / 100)
    yield single("nv_cpu_memory_total_bytes", "gauge", "Memory of the machine, in bytes", memory.total)
    yield single("nv_cpu_memory_used_bytes", "gauge", "Memory of the machine in use, in bytes", memory.used)


def _device(use: DeviceUse) -> Iterator[Family]:
    sizes = {"workspace": use.workspace_bytes, "partitions": use.partition_bytes, "free": use.free_bytes}
    yield Family(
        "cohabit_memory_bytes",
        "gauge",
        "Device memory by use",
        [({"use": name}, nbytes) for name, nbytes in sizes.items()],
    )
    yield Family(
        "cohabit_lane_busy_seconds_total",
        "counter",
        "Seconds that a lane was busy",
        [({"lane": lane}, seconds) for lane, seconds in use.lane_busy_s.items()],
    )
    if use.divisions is not None:
        meaning = "Times that memory was divided again by measured request rates"
        yield single("cohabit_memory_divisions_total", "counter", meaning, use.divisions)
    if use.outside_bytes is not None:
        meaning = "Device memory outside of the arena: context, libraries' workspaces, constants, graphs"
        yield single("cohabit_outside_arena_bytes", "gauge", meaning, use.outside_bytes)
    if use.pinned_total_bytes is not None:
        total, used = use.pinned_total_bytes, use.pinned_used_bytes
        yield single("nv_pinned_memory_pool_total_bytes", "gauge", "Limit of pinned host memory, in bytes", total)
        yield single("nv_pinned_memory_pool_used_bytes", "gauge", "Pinned host memory, in bytes", used)
