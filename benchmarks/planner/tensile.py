"""TENSILE's Figure 7, in kind: how much memory its schedule saves of a training step, by batch size.

    python -m benchmarks.planner.tensile --record

Simulated, on a V100's roofline.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from torch import nn

from benchmarks.planner.cache import cached, graph_parser_of
from benchmarks.planner.chains import NETWORKS as CHAINS
from benchmarks.planner.profiles import v100_pcie3
from benchmarks.planner.training import Classified, Training, _labelled, capture_training, peak_bytes
from benchmarks.record import markdown_table, publish
from cohabit.planner.memory import single_budget
from cohabit.planner.papers.tensile.schedule import TensileSchedule
from cohabit.planner.problem import Problem
from cohabit.planner.search.driver import search

WIDTHS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""VGG-16's convolutions by their channels, and 0 for a maximum over 2 by 2."""


def vgg16() -> nn.Module:
    """VGG-16 (Simonyan and Zisserman, 2014, configuration D), without dropout."""
    parts: list[nn.Module] = []
    channels = 3
    for width in WIDTHS:
        parts += [nn.Conv2d(channels, width, 3, 1, 1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
        channels = width or channels
    wide = nn.Linear(channels * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)
    return nn.Sequential(*parts, nn.Flatten(), *wide)


NETWORKS: Mapping[str, Training] = {
    "vgg16": Training(lambda: Classified(vgg16()), _labelled(224), 32),
    "resnet50": CHAINS["resnet50"],
    "resnet152": CHAINS["resnet152"],
    "inception_v4": CHAINS["inception_v4"],
}
BATCHES = (4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Saving:
    """What a step needs if nothing leaves memory, and with TENSILE's schedule, in bytes and seconds."""

    peak_bytes: int
    lowered_bytes: int
    resident_s: float
    period_s: float

    @property
    def memory_saving(self) -> float:
        """MSR: the share of the peak that is saved."""
        return 1 - self.lowered_bytes / self.peak_bytes

    @property
    def overhead(self) -> float:
        """EOR: the time over that of a step in full memory."""
        return self.period_s / self.resident_s

    @property
    def benefit(self) -> float:
        """CBR: what is saved over what it costs."""
        return self.memory_saving / self.overhead


def saving_of(name: str, batch: int, cache: Path | None) -> Saving:
    """Lower the peak as far as the schedule goes; then simulate the searcher's plan for that much memory."""
    training = NETWORKS[name]._replace(batch=batch)
    graph, work = cached(f"chain-{name}-b{batch}", cache, lambda: capture_training(name, training))
    profile = v100_pcie3(graph, work)
    schedule = TensileSchedule(graph, profile)
    schedule.lower()
    lowered_bytes = schedule.usage.peak().nbytes
    problem = Problem(graph, profile, single_budget(lowered_bytes), objective="period")
    provenance = search(problem, "interval").provenance
    assert provenance is not None
    return Saving(peak_bytes(graph), lowered_bytes, profile.compute_s, provenance.period_s)


def main(argv: Sequence[str] | None = None) -> int:
    parser = graph_parser_of("benchmarks.planner.tensile", __doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="sizes (default: %(default)s)")
    options = parser.parse_args(argv)
    jobs = [(name, batch) for name in options.networks for batch in options.batches]
    savings = {
        (name, batch): saving_of(name, batch, options.cache)
        for name, batch in track(jobs, "planning", console=Console(stderr=True))
    }
    rows = [
        [f"{name}, {batch}", f"{s.peak_bytes / 2**20:.0f}", f"{s.lowered_bytes / 2**20:.0f}",
         f"{s.memory_saving:.3f}", f"{s.overhead:.3f}", f"{s.benefit:.3f}"]
        for (name, batch), s in savings.items()
    ]  # fmt: skip
    header = ["network, batch", "peak, MiB", "lowered to, MiB", "MSR", "EOR", "CBR"]
    publish(options, "Memory saving by batch size: TENSILE, Figure 7", [ABOUT, markdown_table(header, rows)])
    return 0


ABOUT = """**Simulated**, on `v100_pcie3` (unscaled roofline). One step with SGD. TENSILE's schedule alone lowers the
peak as far as it goes: by swaps that nothing waits for, and then by recomputation. MSR is the share of the peak that
is saved, EOR the time of a step over that in full memory, by the plan of `interval` for the lowered peak, CBR their
ratio. Theirs, on an RTX A6000: MSR rises with the batch size, but for DenseNet at 32 and 64; VGG-16's EOR falls.
"""


if __name__ == "__main__":
    sys.exit(main())
