"""SwapAdvisor's Figure 8 on this GPU: sixteen ResNet-152, Poisson requests, several layouts of the same memory.

The engine's loop without its front end: requests are drawn beforehand and served first come first served, one at a
time; latency counts from the intended arrival. The sixteen share one host copy of the weights; their device memory
is their own. In fewer bits, weights are stored and copied in fewer bytes, and decoded on the device.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import torch

from benchmarks.gpu import steps
from benchmarks.gpu.common import Measured, described, open_gpu, resnet
from benchmarks.record import markdown_table
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.library import Library
from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.division import divide
from cohabit.planner.sizing.fitting import plan_model
from cohabit.planner.sizing.problem import Division, LayoutName, ModelDemand
from cohabit.runtime.backend import Result, Runner
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.memory import DeviceArena
from cohabit.runtime.options import CUDA_DEFAULTS, STORED_AS, Weights
from cohabit.runtime.shared_region.sharing import SHARINGS, SharedRegion, Sharing

MODELS = 16
SHARES = (0.25, 0.5, 1.0)
LAYOUTS = get_args(LayoutName)
LOADS = (0.2, 0.4, 0.6, 0.8)
"""Request rates, as shares of what the device would serve if all models were resident."""
SATURATION = 100.0
"""The load at which the device is always busy."""
POINT_S = 1.5
WARM_UP_ROUNDS = 3
"""Every model in turn, in orders that differ: places in a shared region are prepared when they are first used."""
_IN, _MEMORY = " in ", ", memory "


@dataclass(frozen=True, slots=True)
class Layout:
    """Sixteen programs in one memory, and what runs them."""

    programs: Sequence[Program]
    runner: Runner


@dataclass(frozen=True, slots=True)
class Point:
    layout: str
    """And what weights are stored in, if that is not what ops compute with."""
    share: float
    load: float
    rate_per_s: float
    served_per_s: float
    p50_s: float
    p99_s: float


def cells() -> list[str]:
    """What there is to measure, least memory first: that is where layouts differ most."""
    names = [*LAYOUTS, *(f"partitioned{_IN}{weights}" for weights in STORED_AS if weights != "float32")]
    others = [f"{name}{_MEMORY}{share:.0%}" for share in SHARES for name in names if name != "resident"]
    return [f"resident{_MEMORY}100%", *others]


def measure(cell: str) -> Iterator[Point | str]:
    text, _, percent = cell.partition(_MEMORY)
    layout, _, stored_as = text.partition(_IN)
    name = next(name for name in LAYOUTS if name == layout)
    weights: Weights = next((weights for weights in STORED_AS if weights == stored_as), "float32")
    share = int(percent.removesuffix("%")) / 100
    backend = open_gpu()
    model = resnet(backend, 1, replace(CUDA_DEFAULTS, weights=weights))
    memory = int(share * MODELS * model.graph(1).parameter_bytes)
    try:
        for point in _measure(backend, model, name, share, memory):
            yield replace(point, layout=text)
    except (InfeasibleBudget, MemoryExceeded) as error:
        yield f"{cell}: {error}"


def _measure(
    backend: CudaBackend,
    model: Measured,
    name: LayoutName,
    share: float,
    memory_bytes: int,
) -> Iterator[Point]:
    # Resident needs the activations beside the weights: it is what the others are compared with, in enough memory.
    room = memory_bytes if name != "resident" else memory_bytes + model.graph(1).parameter_bytes
    profile = model.profiles[Bucket(1)]
    resident_per_s = 1 / (profile.compute_s + profile.host_s)
    with _placed(backend, model, name, room) as layout:
        for load in (*LOADS, SATURATION):
            yield _serve(backend, layout, name, share, load, load * resident_per_s)


@contextmanager
def _placed(backend: CudaBackend, model: Measured, name: LayoutName, memory_bytes: int) -> Iterator[Layout]:
    demands = [
        ModelDemand(f"resnet152-{n}", {Bucket(1): model.graph(1)}, {Bucket(1): model.profiles[Bucket(1)]})
        for n in range(MODELS)
    ]
    division = divide(demands, memory_bytes, name)
    with TemporaryDirectory() as folder:  # the models share their plans
        library = Library(Path(folder))
        pairs = zip(demands, division.memories, strict=True)
        plans = {demand.name: plan_model(demand, memory, library)[Bucket(1)] for demand, memory in pairs}
    arena = backend.arena(memory_bytes)
    try:
        if name in SHARINGS:
            placed = _in_one_region(backend, model, SHARINGS[name], division, plans, arena)
        else:
            placed = _in_partitions(backend, model, division, plans, arena)
        with placed as layout:
            _warm_up(layout)
            yield layout
    finally:
        arena.close()


@contextmanager
def _in_partitions(
    backend: CudaBackend,
    model: Measured,
    division: Division,
    plans: Mapping[str, Plan],
    arena: DeviceArena[torch.Tensor],
) -> Iterator[Layout]:
    """Partitions from the arena's top down; the workspace is at its bottom."""
    programs: list[CudaProgram] = []
    top = division.memory_bytes
    try:
        for (name, plan), partition_bytes in zip(plans.items(), division.partition_bytes, strict=True):
            top -= partition_bytes
            own, profile = replace(model.lowered, name=name), model.profiles[Bucket(1)]
            programs.append(backend.build(own, plan, profile, arena, Bases(top, 0), model.store))
            backend.executor.load(programs[-1])
        yield Layout(programs, backend.executor)
    finally:
        for program in programs:
            backend.executor.release(program)


@contextmanager
def _in_one_region(
    backend: CudaBackend,
    model: Measured,
    sharing: Sharing,
    division: Division,
    plans: Mapping[str, Plan],
    arena: DeviceArena[torch.Tensor],
) -> Iterator[Layout]:
    workspace_bytes = division.workspace_bytes
    shared = SharedRegion(backend, sharing, arena, workspace_bytes, arena.nbytes - workspace_bytes)
    try:
        programs = [
            shared.add(replace(model.lowered, name=name), plan, model.profiles[Bucket(1)], model.store)
            for name, plan in plans.items()
        ]
        yield Layout(programs, shared)
    finally:
        shared.close()


def _warm_up(layout: Layout) -> None:
    order = list(layout.programs)
    inputs = model_inputs(order[0])
    rng = random.Random(0)
    for _ in range(WARM_UP_ROUNDS):
        rng.shuffle(order)
        for program in order:
            layout.runner.run(program, inputs)


def model_inputs(program: Program) -> list[torch.Tensor]:
    assert isinstance(program, CudaProgram)
    return program.examples()


def _serve(backend: CudaBackend, layout: Layout, name: str, share: float, load: float, rate_per_s: float) -> Point:
    arrivals = _arrivals(load, rate_per_s)
    inputs = model_inputs(layout.programs[0])
    latencies: list[float] = []
    start_s = time.perf_counter()
    running: tuple[Result | Callable[[], Result], float] | None = None

    def end(begun: Result | Callable[[], Result], at_s: float) -> None:
        if not isinstance(begun, Result):
            begun()
        latencies.append(time.perf_counter() - start_s - at_s)

    for index, (at_s, number) in enumerate(arrivals):
        now_s = time.perf_counter() - start_s
        if now_s > 1.5 * POINT_S:  # saturated: what is served is what counts
            break
        if at_s > now_s:
            time.sleep(at_s - now_s)
        program = layout.programs[number]
        if running is not None and not layout.runner.launches_ahead(program):
            end(*running)
            running = None
        # As a compute lane does it: this graph is launched before the one ahead of it is waited for.
        begun = layout.runner.begin(program, inputs)
        if running is not None:
            end(*running)
        running = (begun, at_s)
        following_s = arrivals[index + 1][0] if index + 1 < len(arrivals) else inf
        if isinstance(begun, Result) or following_s > time.perf_counter() - start_s:
            end(*running)
            running = None
    if running is not None:
        end(*running)
    served_per_s = len(latencies) / (time.perf_counter() - start_s)
    backend.executor.settle()
    ordered = sorted(latencies)
    p99_s = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return Point(name, share, load, rate_per_s, served_per_s, statistics.median(ordered), p99_s)


def _arrivals(load: float, rate_per_s: float) -> list[tuple[float, int]]:
    """Intended times and models, the same for every layout."""
    rng = random.Random(load)
    now_s = 0.0
    arrivals: list[tuple[float, int]] = []
    while now_s < POINT_S and len(arrivals) < 20_000:
        arrivals.append((now_s, rng.randrange(MODELS)))
        now_s += rng.expovariate(rate_per_s)
    return arrivals


def _sections(points: Sequence[Point], notes: Sequence[str]) -> list[str]:
    header = ("layout, memory, load", "requests/s", "served/s", "p50 ms", "p99 ms", "p99 / resident's")
    base = {p.load: p.p99_s for p in points if p.layout == "resident"}
    cells = [
        [
            f"{p.layout}, {p.share:.0%}, {'saturation' if p.load == SATURATION else format(p.load, '.0%')}",
            "" if p.load == SATURATION else f"{p.rate_per_s:.0f}",
            f"{p.served_per_s:.0f}",
            f"{p.p50_s * 1e3:.1f}",
            f"{p.p99_s * 1e3:.1f}",
            f"{p.p99_s / base[p.load]:.2f}" if p.load in base else "",
        ]
        for p in points
    ]
    return [
        f"Batch 1, as served ({described(CUDA_DEFAULTS)}), {POINT_S:.0f} s per point. *Load* is a share of the rate at"
        " which resident models would keep the device busy. Memory is a share of the sixteen models' weights;"
        " *resident* has a workspace on top. What the layouts with one region do is said in docs/architecture.md;"
        " *on_demand* is issued kernel by kernel, because its parameters move.\n",
        markdown_table(header, cells),
        *(f"{note}\n" for note in notes),
    ]


TITLE = "SwapAdvisor's Figure 8 on a GPU"
STEP = steps.Step("benchmarks.gpu.figure8", TITLE, Point, cells, measure, _sections, cell_s=60.0)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))
