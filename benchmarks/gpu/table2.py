"""SwapAdvisor's Table 2 on this GPU: ResNet-152 in the paper's budgets, measured beside predicted, resident and bound.

Also: the rate of a program's copies beside that of one plain pinned copy of the same bytes, and the time that a
launch takes the host.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.common import (
    Clock,
    Measured,
    OutOfTime,
    latencies_s,
    loaded,
    open_gpu,
    planned,
    resident,
    resnet,
)
from benchmarks.record import markdown_table, record
from planner.errors import InfeasibleBudget
from planner.shapes import Bucket
from planner.sizing.fitting import split_budget
from runtime.cuda.backend import CudaBackend
from runtime.cuda.program import CudaProgram
from runtime.errors import MemoryExceeded
from runtime.options import DEFAULTS, Options

BUDGETS_MB = {1: (64, 128, 192, 256), 16: (128, 192, 256, 320), 32: (256, 320, 512), 64: (512, 640, 1024)}
PRECISIONS = (
    ("float32", DEFAULTS, (1, 16, 32, 64)),
    ("TF32", Options(tf32=True), (1, 16, 32, 64)),
    ("float16, channels last", Options("float16", channels_last=True), (1, 16)),
    ("float16, channels last, fused", Options("float16", channels_last=True, fused=True), (1, 16)),
)
CELL_S = 8.0
"""What a cell may take, planning included: without it, no cell is begun."""


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    resident_s: float
    streamed_s: float
    predicted_s: float
    bound_s: float
    link_bytes: int
    copy_bytes_per_s: float
    plain_bytes_per_s: float
    launch_s: float


def main(argv: Sequence[str] | None = None, seconds: float = 240.0) -> int:
    clock, backend = Clock.of(seconds), open_gpu()
    rows: list[Row] = []
    notes: list[str] = []
    try:
        for precision, options, batches in PRECISIONS:
            clock.check(4 * CELL_S)
            model = resnet(backend, list(batches), options)
            for batch in batches:
                rows += _batch(backend, model, precision, batch, clock, notes)
    except OutOfTime:
        notes.append("The time ran out: cells that are not here were not measured.")
    print(
        record(
            "gpu-table2", "SwapAdvisor's Table 2 on a GPU", "benchmarks.gpu.table2", _sections(rows, notes)
        ).read_text()
    )
    return 0 if rows else 1


def _batch(
    backend: CudaBackend, model: Measured, precision: str, batch: int, clock: Clock, notes: list[str]
) -> list[Row]:
    rows = []
    with resident(backend, model, batch) as program:
        resident_s = statistics.median(latencies_s(backend, program))
    for megabytes in BUDGETS_MB[batch]:
        clock.check(CELL_S)
        name = f"{precision}, batch {batch}, {megabytes} MB"
        try:
            rows.append(_cell(backend, model, name, batch, megabytes * 10**6, resident_s))
        except (InfeasibleBudget, MemoryExceeded) as error:
            notes.append(f"{name}: {error}")
        print(rows[-1] if rows else notes[-1], flush=True)
    return rows


def _cell(
    backend: CudaBackend, model: Measured, name: str, batch: int, budget_bytes: int, resident_s: float
) -> Row:
    graphs, profiles = {Bucket(batch): model.graph(batch)}, {Bucket(batch): model.profiles[Bucket(batch)]}
    plan = planned(model, batch, *split_budget(graphs, profiles, budget_bytes))
    assert plan.provenance is not None
    with loaded(backend, model, plan, batch) as program:
        times = latencies_s(backend, program)
        return Row(
            name=name,
            resident_s=resident_s,
            streamed_s=statistics.median(times),
            predicted_s=plan.provenance.latency_s,
            bound_s=plan.provenance.bound_s,
            link_bytes=program.link_bytes,
            copy_bytes_per_s=_copy_rate(backend, program),
            plain_bytes_per_s=_plain_rate(backend, program.link_bytes),
            launch_s=_launch_s(backend, program),
        )


def _copy_rate(backend: CudaBackend, program: CudaProgram) -> float:
    """Bytes per second of a program's copies while they run, beside its kernels."""
    rates = []
    for _ in range(5):
        timeline = backend.executor.run(program, program.examples(), traced=True).timeline
        assert timeline is not None
        copying_s = sum(s.end_s - s.start_s for s in timeline.spans if s.lane == "swap_in")
        rates.append(program.link_bytes / copying_s if copying_s else 0.0)
    return statistics.median(rates)


def _plain_rate(backend: CudaBackend, nbytes: int) -> float:
    """Bytes per second of one copy of the same bytes, from pinned memory, on an idle device."""
    if not nbytes:
        return 0.0
    driver, host = backend.driver, backend.pinned_memory.take(nbytes, "a plain copy")
    device, source, times = driver.allocate(nbytes), torch.from_numpy(host), []
    for _ in range(5):
        start, end = driver.event(timed=True), driver.event(timed=True)
        with driver.on(backend.streams.swap_in):
            driver.record(start)
            driver.copy(device, source)
            driver.record(end)
        driver.synchronize(end)
        times.append(driver.seconds(start, end))
    backend.pinned_memory.release(host)
    return nbytes / statistics.median(times)


def _launch_s(backend: CudaBackend, program: CudaProgram) -> float:
    """Host time of one replay."""
    graph, times = program.admission.whole, []
    if graph is None:
        return float("nan")
    for _ in range(20):
        backend.driver.drain()
        with backend.driver.on(backend.streams.compute):
            start_s = time.perf_counter()
            graph.replay()
            times.append(time.perf_counter() - start_s)
    backend.driver.drain()
    return statistics.median(times)


def _sections(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    header = (
        "precision, batch, memory", "resident ms", "bound ms", "predicted ms", "measured ms", "over resident",
        "bound over resident", "predicted / measured", "MB copied", "copies GB/s", "plain copy GB/s", "launch us",
    )  # fmt: skip
    cells = [
        [
            r.name,
            f"{r.resident_s * 1e3:.2f}",
            f"{r.bound_s * 1e3:.2f}",
            f"{r.predicted_s * 1e3:.2f}",
            f"{r.streamed_s * 1e3:.2f}",
            f"{r.streamed_s / r.resident_s - 1:+.1%}",
            f"{max(r.bound_s / r.resident_s - 1, 0):+.1%}",
            f"{r.predicted_s / r.streamed_s:.3f}",
            f"{r.link_bytes / 1e6:.0f}",
            f"{r.copy_bytes_per_s / 1e9:.1f}",
            f"{r.plain_bytes_per_s / 1e9:.1f}",
            f"{r.launch_s * 1e6:.0f}",
        ]
        for r in rows
    ]
    return [
        f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}. Medians; every inference starts on an idle device"
        " and ends with its outputs in host memory. *Resident* is the same program with everything in memory, as one"
        " captured graph.\n",
        markdown_table(header, cells),
        *(f"{note}\n" for note in notes),
    ]


if __name__ == "__main__":
    sys.exit(main())
