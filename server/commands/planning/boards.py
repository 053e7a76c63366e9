"""Boards whose speed can be predicted before one has them: their store, memory and cores, from public figures.

A prediction scales the op times that were measured on this machine. The factor compares peak rates of float32 per
thread: such a core has two units of 128 bits, which is 16 operations a cycle (Arm's optimization guides of the
Cortex-A76, A77 and A78), a workstation's core with AVX-512 has 64. So a factor is 64 / 16 times the ratio of the
clocks, against 2.4 GHz; with AVX2 on this machine it is half of that. It is an estimate; `cohabit profile` on the
board measures.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from cohabit.planner.profile import Profile

_MB = 1e6
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Board:
    """A board: latency and bandwidth of its store, and how many times as long as here an op takes there."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    compute_factor: float
    memory_bytes: int

    def scaled(self, profile: "Profile") -> "Profile":
        """Return the profile predicted for this board from one of this machine."""
        from cohabit.planner.profile import (
            Link,  # the front end reads the flags, too, and loads nothing of the planner
        )

        store = Link(self.latency_s, self.bandwidth_bytes_per_s)
        return msgspec.structs.replace(
            profile,
            device=f"{self.name}, scaled from a profile of {profile.device}",
            op_seconds=tuple(seconds * self.compute_factor for seconds in profile.op_seconds),
            swap_in=store,
            swap_out=store,
            window_bytes=0,
        )


BOARDS = {
    board.name: board
    for board in (
        # Bandwidth: what a UHS-I card reads (Samsung's announcement of eUFS 3.1, March 2020, compares with 90 MB/s);
        # the bus, SDR104, ends at 104 MB/s. Latency: 5,000 random reads of 4 KiB a second (Raspberry Pi's SD cards, on
        # a Raspberry Pi 5). Four Cortex-A76 at 2.4 GHz; 8 GiB is a common version.
        Board("pi5-sd", 200e-6, 90 * _MB, 4.0, 8 * _GIB),
        # One lane of PCIe 2.0: 5 GT/s with 8 of 10 bits, 500 MB/s (Raspberry Pi's M.2 HAT+), less a tenth for packets'
        # headers. Latency: one random read of an NVMe drive at queue depth 1, an estimate.
        Board("pi5-nvme", 100e-6, 450 * _MB, 4.0, 8 * _GIB),
        # Four lanes of PCIe 3.0 on the developer kit's carrier board, 3,900 MB/s; half of that for a drive without DRAM
        # under sustained reads, an estimate. Six Cortex-A78AE at 1.7 GHz and 8 GB of unified memory (NVIDIA's data
        # sheet of the Jetson Orin Nano Super). Ops are predicted for the CPU, not for the GPU.
        Board("orin-nano-nvme", 100e-6, 2000 * _MB, 5.6, 8 * _GIB),
        # 2,100 MB/s and 100,000 random reads a second with a queue (Samsung's announcement of 512 GB eUFS 3.1, March
        # 2020); the latency of a single read is an estimate. A core of the Cortex-A77 class at 2.4 GHz.
        Board("ufs-phone", 100e-6, 2100 * _MB, 4.0, 8 * _GIB),
    )
}
