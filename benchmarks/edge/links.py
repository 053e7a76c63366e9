"""ResNet-152 in less and less memory, from this disk and over slower links: overhead over resident, and the bound.

Batch 1, one compute thread, weights packed as they are served. The bound is the planner's lower bound of every plan in
that memory, however it is divided, with op times that add up to the round's resident run, and a link of the bandwidth
alone: no latency, and copies and ops that do not slow each other down. The disk's bandwidth is measured in the
round, with large reads by two threads. Emulated links (`--link-bandwidth`) copy from RAM, so that this disk is not in
them. A round runs resident and every size once; ratios are taken within a round.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from rich.console import Console

from benchmarks.programs import LoadedProgram, loaded
from benchmarks.record import markdown_table, parser_of, publish
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from cohabit.planner.bounds.relaxation import latency_bound
from cohabit.planner.layout.feasible import Footprint, page_aligned
from cohabit.planner.memory import Memory
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Link, Profile
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import split_budget
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import StoreKind
from cohabit.runtime.options import Options
from cohabit.runtime.stores.direct import open_direct, read_fully
from cohabit.runtime.stores.pages import anonymous_memory, use_huge_pages

MODEL = "resnet152"
MEMORY_MIB = (192, 128, 96, 64, 32, 20)
LINKS: tuple[tuple[str, StoreKind, float | None], ...] = (
    # name, where parameters are, bytes per second
    ("this disk", "file", None),
    ("2 GB/s", "ram", 2e9),
    ("400 MB/s", "ram", 400e6),
    ("90 MB/s", "ram", 90e6),
)
GOAL_OF_BOUND = 1.10
PARAMETER_SHARE, GOAL_OF_RESIDENT = 0.035, 1.15
"""Demand Layering (RTSS 2022): 96.5 % less memory for parameters took 14.8 % longer than resident, from an SSD."""
_READ_BYTES, _READERS, _PASSES = 16 << 20, 2, 3
"""The file is read more than once: a disk that is shared may be faster for the first bytes."""
_MIB = 1 << 20


@dataclass(slots=True)
class Case:
    """One memory size, and its seconds in each round."""

    memory_bytes: int
    program: LoadedProgram
    predicted_s: float
    bound_s: list[float] = field(default_factory=list)
    streamed_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rounds of one link."""

    link: str
    cases: Sequence[Case]
    resident_s: Sequence[float]
    bytes_per_s: Sequence[float]

    def of_bound(self, case: Case) -> float:
        return _median_ratio(case.streamed_s, case.bound_s)

    def of_resident(self, case: Case) -> float:
        return _median_ratio(case.streamed_s, self.resident_s)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    torch.set_num_threads(1)
    chosen = recipes(1, [MODEL])
    prepare_visibly(options.folder / "zoo", chosen, force=False, console=console)
    archive = options.folder / "zoo" / MODEL / "1" / "model.pt2"
    kernels = Options(packed=packing.unavailable() is None)  # as served
    lowered = lower(archive, MODEL, [1], options.folder / "lowered", options=kernels)
    found = [_measure(lowered, name, kind, bandwidth, options.rounds, console) for name, kind, bandwidth in LINKS]
    held, sections = _sections(lowered, found, options.rounds)
    publish(options, "ResNet-152 over slow links, in little memory", sections)
    return 0 if held else 1


def sizes(lowered: Lowered) -> list[int]:
    """Memory sizes that work, and that of Demand Layering's share of the parameters or, if it is more, the least."""
    footprint = Footprint.of(lowered.graphs[Bucket(1)])
    share = page_aligned(int(PARAMETER_SHARE * lowered.manifest.segment_bytes) + footprint.activation_bytes)
    fitting = [mib * _MIB for mib in MEMORY_MIB if mib * _MIB >= footprint.least_bytes]
    return [*fitting, max(share, footprint.least_bytes)]


def _measure(
    lowered: Lowered, link: str, kind: StoreKind, bandwidth: float | None, rounds: int, console: Console
) -> Outcome:
    """Profile, plan every size, and run resident and all sizes in turn."""
    console.print(f"{link}: profiling")
    graph, backend = lowered.graphs[Bucket(1)], CpuBackend(bandwidth)
    store = backend.open_store(kind, lowered.weights_path, lowered.manifest)
    profile = backend.measure(lowered, store, None, lambda text: None)[1][Bucket(1)]
    with ExitStack() as stack:
        cases = []
        for memory in sizes(lowered):
            split = split_budget({Bucket(1): graph}, {Bucket(1): profile}, memory)
            plan = search(Problem(graph, profile, split))
            assert plan.provenance is not None
            program = stack.enter_context(loaded(lowered, Bucket(1), plan, profile, store, backend))
            cases.append(Case(memory, program, plan.provenance.latency_s))
        resident = stack.enter_context(loaded(lowered, Bucket(1), resident_plan(graph), None, store, backend))
        for program in (*(case.program for case in cases), resident):
            program.settled_run_s()
        found = Outcome(link, cases, resident_s := [], bandwidths := [])
        for _ in range(rounds):
            bandwidths.append(bandwidth or disk_bytes_per_s(lowered.weights_path))
            resident_s.append(resident.settled_run_s())
            for case in cases:
                case.streamed_s.append(case.program.settled_run_s())
                case.bound_s.append(bound_s(lowered, profile, case.memory_bytes, resident_s[-1], bandwidths[-1]))
    store.close()
    return found


def disk_bytes_per_s(path: Path) -> float:
    """Read a file past the page cache, in large pieces, with more than one read under way."""
    fd = open_direct(path, os.O_RDONLY)
    nbytes = os.fstat(fd).st_size // _READ_BYTES * _READ_BYTES
    buffers = np.frombuffer(anonymous_memory(_READERS * _READ_BYTES), np.uint8).reshape(_READERS, -1)
    buffers[:] = 1
    use_huge_pages(buffers)  # like the arena; reads into scattered pages are slower

    def read(reader: int) -> None:
        for _ in range(_PASSES):
            for offset in range(reader * _READ_BYTES, nbytes, _READERS * _READ_BYTES):
                read_fully(fd, buffers[reader], offset)

    start_s = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as readers:
        list(readers.map(read, range(_READERS)))
    seconds = time.perf_counter() - start_s
    os.close(fd)
    return _PASSES * nbytes / seconds


def bound_s(lowered: Lowered, profile: Profile, memory: int, resident_s: float, bytes_per_s: float) -> float:
    """Return the lower bound of every plan, were ops as fast as they were, and the link as fast as it can be."""
    graph, factor = lowered.graphs[Bucket(1)], resident_s / profile.compute_s
    ideal = msgspec.structs.replace(
        profile,
        op_seconds=tuple(seconds * factor for seconds in profile.op_seconds),
        swap_in=Link(0.0, bytes_per_s),
        compute_slowdown=1.0,
        swap_slowdown=1.0,
    )
    activations = Footprint.of(graph).activation_bytes
    return latency_bound(graph, ideal, Memory(activations, memory - activations))


def _median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def _sections(lowered: Lowered, found: Sequence[Outcome], rounds: int) -> tuple[bool, list[str]]:
    footprint = Footprint.of(lowered.graphs[Bucket(1)])
    held, rows = True, []
    for one in found:
        for case in one.cases[:-1]:
            held &= one.of_bound(case) <= GOAL_OF_BOUND
            rows.append([f"{one.link}, {case.memory_bytes // _MIB} MiB", *_cells(one, case)])
        least = [mib for mib in MEMORY_MIB if mib * _MIB < footprint.least_bytes]
        rows += [
            [f"{one.link}, {mib} MiB", f"least: {footprint.least_bytes / _MIB:.1f} MiB", *["-"] * 5]
            for mib in least
        ]
    layered = []
    for one in found:
        case = one.cases[-1]
        held &= one.link != LINKS[0][0] or one.of_resident(case) <= GOAL_OF_RESIDENT
        layered.append([one.link, *_cells(one, case)])
    header = ["resident ms", "bound ms", "predicted ms", "measured ms", "of bound", "over resident"]
    parameters = lowered.manifest.segment_bytes
    smallest = sizes(lowered)[-1]
    held_bytes = smallest - footprint.activation_bytes
    return held, [
        f"Batch 1, one compute thread, weights packed as they are served, medians of {rounds} rounds; ratios"
        f" are taken within a round. Weights have {parameters / _MIB:.1f} MiB, activations"
        f" {footprint.activation_bytes / _MIB:.1f} MiB at their peak; the"
        f" least memory that works without offloading activations is {footprint.least_bytes / _MIB:.1f} MiB. *Bound*:"
        " the planner's lower bound of every plan in that memory, with the round's resident time and the bandwidth, and"
        " nothing else that takes time. *This disk*: the file store; by large reads with two threads, the disk's"
        f" bandwidth was {_bandwidth(found)}. The other links copy from RAM, limited as with `--link-bandwidth`.\n",
        markdown_table(["link, memory", *header], rows),
        f"To hold: {GOAL_OF_BOUND:g} of the bound in every row.\n",
        f"Demand Layering's point: {PARAMETER_SHARE:.1%} of the parameters, or the least that works. That is"
        f" {held_bytes / _MIB:.1f} MiB, {held_bytes / parameters:.1%} of the parameters, beside the activations.\n",
        markdown_table(["link", *header], layered),
        f"To hold: {GOAL_OF_RESIDENT:g} of resident from this disk.\n",
    ]


def _bandwidth(found: Sequence[Outcome]) -> str:
    disk, *_ = found
    return f"{statistics.median(disk.bytes_per_s) / 1e9:.2f} GB/s"


def _cells(one: Outcome, case: Case) -> list[str]:
    seconds = [one.resident_s, case.bound_s, [case.predicted_s], case.streamed_s]
    medians = [f"{statistics.median(column) * 1e3:.1f}" for column in seconds]
    return [*medians, f"{one.of_bound(case):.3f}", f"{one.of_resident(case) - 1:+.1%}"]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.edge.links", __doc__)
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
