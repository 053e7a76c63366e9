"""Profiles of graphs without a measurement: a roofline with launches, and links as measured by the papers and here.

An op takes a launch, and then as long as its arithmetic or its memory traffic, whichever is longer:

    launch_s + max(flops / (peak * efficiency), bytes / bandwidth)

Rooflines rank ops well and predict totals badly, so `total_s` scales all ops to a measured total.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.planner.capture import Work
from cohabit.planner.graph import Graph
from cohabit.planner.profile import Link, Profile

RESNET152_S: Final = {1: 0.017, 16: 0.040, 32: 0.067, 64: 0.121}
"""ResNet-152 with everything resident on a V100, by batch size (SwapAdvisor, Table 2, its full-memory row)."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a roofline needs to know. `flops_per_s` and `bytes_per_s` are what kernels reach, not the data sheet's."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    swap_in: Link
    swap_out: Link


V100_PCIE3: Final = Device(
    "V100 (roofline), PCIe 3",
    flops_per_s=15.7e12 * 0.85,
    bytes_per_s=900e9 * 0.75,
    launch_s=5e-6,
    swap_in=Link(10e-6, 12e9),
    swap_out=Link(10e-6, 12e9),
)
"""The SwapAdvisor testbed. 15.7 TFLOP/s (float32) and 900 GB/s are NVIDIA's data sheet for the V100 SXM2. 85 % of the
former, because the paper's ResNet-152 at batch 64 does 1476 GFLOP in 121 ms, which is 78 % with all else included
(Winograd helps). 75 % of the latter is what streaming kernels commonly reach and 5 us what a launch takes;
both are assumed. The link is "12GB/s unidirectional" (section 6.1); 10 us per transfer is assumed. Both directions
together get 20 GB/s in the paper; a profile's directions are independent, and so have 24."""

H100_PCIE5: Final = Device(
    "H100 (roofline), PCIe 5",
    flops_per_s=67e12 * 0.6,
    bytes_per_s=3.35e12 * 0.75,
    launch_s=4e-6,
    swap_in=Link(10e-6, 55e9),
    swap_out=Link(10e-6, 55e9),
)
"""67 TFLOP/s (float32 without tensor cores) and 3.35 TB/s are NVIDIA's data sheet for the H100 SXM; 60 %, 75 %, launch
and latency are assumed. Pinned host-to-device copies are reported to reach 55.6 GB/s; 55 is used in both directions."""

CPU_FILE: Final = Device(
    "one CPU core (roofline), file store",
    flops_per_s=90e9,
    bytes_per_s=10.8e9,
    launch_s=5e-6,
    swap_in=Link(100e-6, 1.6e9),
    swap_out=Link(100e-6, 1.6e9),
)
"""This project's machines, one compute thread (docs/results/streaming.md). ResNet-152's 23.1 GFLOP take 280 to 296 ms
and BERT's 22.4 take 253, all else included: 78 to 88 GFLOP/s, so 90 for the kernels alone. Copies run at 5.4 GB/s,
which reads and writes and so moves 10.8. The file store's copies run at 1.6 GB/s; 100 us each, writing as fast as
reading, and 5 us for issuing an op are assumed."""


def roofline(device: Device, graph: Graph, work: Sequence[Work], total_s: float | None = None) -> Profile:
    """A profile by a device's roofline, all ops scaled by one factor if `total_s` says what they take together."""
    seconds = [
        device.launch_s + max(w.flops / device.flops_per_s, w.nbytes / device.bytes_per_s)
        for _, w in zip(graph.ops, work, strict=True)
    ]
    scale = 1.0 if total_s is None else total_s / sum(seconds)
    return Profile(
        graph.fingerprint, device.name, tuple(s * scale for s in seconds), device.swap_in, device.swap_out
    )


v100_pcie3: Final = partial(roofline, V100_PCIE3)
"""Costs as on SwapAdvisor's testbed; for ResNet-152 pass one of `RESNET152_S` as the total."""
h100_pcie5: Final = partial(roofline, H100_PCIE5)
cpu_file: Final = partial(roofline, CPU_FILE)
