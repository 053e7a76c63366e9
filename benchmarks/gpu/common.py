"""What the GPU benchmarks share: the device, a lowered ResNet-152, timing of programs and of eager PyTorch."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu import resnet as net
from benchmarks.gpu.resnet import export_resnet152, resnet152
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.driver import CudaDriver
from cohabit.runtime.cuda.pools import CarvedPool
from cohabit.runtime.cuda.profiling import measure
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.memory import HostStore
from cohabit.runtime.options import CUDA_DEFAULTS, Options, Tf32

FOLDER = Path(".gpu")
BATCHES = (1, 16, 32, 64)
PLAN_S = 3.0
RUNS, WARM_UP, REPLAYS = 30, 5, 7
_QUEUE_S = 0.004
"""How long the stream is kept busy while a graph is launched."""
_TF32: dict[Tf32, str] = {"none": "without TF32", "cudnn": "TF32 in cuDNN alone", "all": "TF32"}


@dataclass(frozen=True, slots=True)
class Measured:
    """A lowered model in its store, with what this device makes of it."""

    lowered: Lowered
    store: HostStore[torch.Tensor]
    profiles: dict[Bucket, Profile]

    def graph(self, batch: int) -> Graph:
        return self.lowered.graphs[Bucket(batch)]


def open_gpu() -> CudaBackend:
    return CudaBackend(CudaDriver.open())


def described(options: Options) -> str:
    """What stands beside a figure: what was computed with."""
    tf32 = f" {_TF32[options.tf32]}" if options.dtype == "float32" else ""
    layout, fused = "channels last" if options.channels_last else "NCHW", "fused" if options.fused else "not fused"
    stored = f", weights stored and copied in {options.weights}" if options.weights != "float32" else ""
    return f"{options.dtype}{tf32}, {layout}, convolutions {fused}{stored}"


def resnet(
    backend: CudaBackend, batch: int, options: Options = CUDA_DEFAULTS, batches: Sequence[int] = BATCHES
) -> Measured:
    """ResNet-152, lowered at `batches` at once and measured at one of them; both are kept in the folder."""
    path = export_resnet152(FOLDER / "resnet152" / "1" / "model.pt2")
    lowered = lower(path, "resnet152", batches, FOLDER / "lowered", print, options)
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    lowered = replace(lowered, traces={Bucket(batch): lowered.traces[Bucket(batch)]})
    lowered, profiles = backend.measure(lowered, store, FOLDER / "profiles", print)
    return Measured(lowered, store, profiles)


@contextmanager
def loaded(backend: CudaBackend, model: Measured, plan: Plan, batch: int) -> Iterator[CudaProgram]:
    """A plan's program in memory of exactly its size."""
    arena = backend.arena(plan.memory.nbytes)
    profile = model.profiles[Bucket(batch)] if plan.profile else None
    program = backend.build(model.lowered, plan, profile, arena, Bases(0, plan.memory.partition_bytes), model.store)
    backend.executor.load(program)
    try:
        yield program
    finally:
        backend.executor.release(program)
        arena.close()


@contextmanager
def resident(backend: CudaBackend, model: Measured, batch: int) -> Iterator[CudaProgram]:
    """The model with everything in memory: one captured graph, the ideal."""
    plan = measure.resident(model.graph(batch))
    with measure.loaded(backend, backend.executors(1)[0], model.lowered, model.store, plan) as program:
        yield program


def planned(model: Measured, batch: int, memory: Memory) -> Plan:
    problem = Problem(model.graph(batch), model.profiles[Bucket(batch)], memory)
    return search(problem, limit=Limit(seconds=PLAN_S))


def latencies_s(backend: CudaBackend, program: CudaProgram) -> list[float]:
    """Latencies of inferences that each start on an idle device."""
    inputs = program.examples()
    times = []
    for _ in range(WARM_UP + RUNS):
        times.append(backend.executor.run(program, inputs).latency_s)
        backend.executor.settle()
    return times[WARM_UP:]


def eager_s(backend: CudaBackend, batch: int, options: Options, layout: torch.memory_format) -> float:
    """Median latency of eager PyTorch in this layout, with an option's types and TF32."""
    dtype = getattr(torch, options.dtype)
    model = resnet152(layout).to("cuda", dtype)
    with backend.driver.tf32(options.tf32):
        return seconds_of(lambda x: model(x.to(dtype)).float(), batch)


def seconds_of(run: Callable[[torch.Tensor], torch.Tensor], batch: int, runs: int = RUNS) -> float:
    """Median from inputs in pinned host memory to outputs in host memory."""
    given, times = torch.rand(batch, *net.INPUT).pin_memory(), []
    with torch.inference_mode():
        for _ in range(WARM_UP + runs):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            run(given.to("cuda", non_blocking=True)).cpu()
            times.append(time.perf_counter() - start_s)
    return statistics.median(times[WARM_UP:])


def plain_sources(backend: CudaBackend, nbytes: int) -> Iterator[torch.Tensor]:
    """Yield pinned memory for a plain copy, of each kind that there is, for as long as the caller uses it.

    Ours is registered, in huge pages; torch allocates its own.
    """
    host = backend.pinned_memory.take(nbytes, "a plain copy")
    yield torch.from_numpy(host)
    backend.pinned_memory.release(host)
    yield torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def replay_s(backend: CudaBackend, pool: CarvedPool, issue: Callable[[], None]) -> float:
    """Median device time of copies in a graph of their own: issued from Python, there would be gaps between them."""
    driver, times = backend.driver, []
    with driver.on(backend.streams.swap_in):
        graph = driver.capture(pool, issue)
        for _ in range(REPLAYS):
            start, end = driver.event(timed=True), driver.event(timed=True)
            driver.hold(_QUEUE_S)
            driver.record(start)
            graph.replay()
            driver.record(end)
            driver.synchronize(end)
            times.append(driver.seconds(start, end))
    driver.release([graph])
    return statistics.median(times)
