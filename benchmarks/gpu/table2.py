"""SwapAdvisor's Table 2 on this GPU: ResNet-152 in the paper's budgets, measured beside predicted, resident and bound.

*Resident* stands beside eager PyTorch, which is what a user would run. Also: the rate of a program's copies, in a graph
of them alone, beside that of one plain pinned copy of the same bytes, and the time that a launch takes the host.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu import steps
from benchmarks.gpu.common import (
    BATCHES,
    Measured,
    described,
    eager_s,
    latencies_s,
    loaded,
    open_gpu,
    plain_sources,
    planned,
    replay_s,
    resident,
    resnet,
)
from benchmarks.record import markdown_table
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import split_budget
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.options import CUDA_DEFAULTS, DEFAULTS

BUDGETS_MB = {1: (64, 128, 192, 256), 16: (128, 192, 256, 320), 32: (256, 320, 512), 64: (512, 640, 1024)}
SETTINGS = (
    ("as served", CUDA_DEFAULTS, BATCHES),
    ("exact", DEFAULTS, BATCHES),
    ("TF32", replace(CUDA_DEFAULTS, tf32="all"), BATCHES),
    ("as served in int8", replace(CUDA_DEFAULTS, weights="int8"), BATCHES),
    ("float16", replace(CUDA_DEFAULTS, dtype="float16"), (1, 16)),
)
"""What users run; the paper's, for its own numbers; and what a configuration may ask for."""
_BATCH = ", batch "


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    eager_s: float
    eager_channels_last_s: float
    resident_s: float
    streamed_s: float
    predicted_s: float
    bound_s: float
    link_bytes: int
    copy_bytes_per_s: float
    plain_bytes_per_s: float
    launch_s: float | None


def cells() -> list[str]:
    """A setting and a batch size each; what users run first."""
    return [f"{name}{_BATCH}{batch}" for name, _, batches in SETTINGS for batch in batches]


def measure(cell: str) -> Iterator[Row | str]:
    """Yield a row for each of the paper's budgets."""
    setting, _, text = cell.rpartition(_BATCH)
    batch = int(text)
    options, batches = next((own, batches) for name, own, batches in SETTINGS if name == setting)
    backend = open_gpu()
    model = resnet(backend, batch, options, batches)
    with resident(backend, model, batch) as program:
        resident_s = statistics.median(latencies_s(backend, program))
    layouts = (torch.contiguous_format, torch.channels_last)
    eager = [eager_s(backend, batch, options, layout) for layout in layouts]
    for megabytes in BUDGETS_MB[batch]:
        name = f"{cell}, {megabytes} MB"
        try:
            yield _cell(backend, model, name, batch, megabytes * 10**6, eager, resident_s)
        except (InfeasibleBudget, MemoryExceeded) as error:
            yield f"{name}: {error}"


def _cell(
    backend: CudaBackend,
    model: Measured,
    name: str,
    batch: int,
    budget_bytes: int,
    eager: Sequence[float],
    resident_s: float,
) -> Row:
    graphs, profiles = {Bucket(batch): model.graph(batch)}, {Bucket(batch): model.profiles[Bucket(batch)]}
    plan = planned(model, batch, split_budget(graphs, profiles, budget_bytes))
    assert plan.provenance is not None
    with loaded(backend, model, plan, batch) as program:
        times = latencies_s(backend, program)
        return Row(
            name=name,
            eager_s=eager[0],
            eager_channels_last_s=eager[1],
            resident_s=resident_s,
            streamed_s=statistics.median(times),
            predicted_s=plan.provenance.latency_s + profiles[Bucket(batch)].host_s,
            bound_s=plan.provenance.bound_s,
            link_bytes=program.link_bytes,
            copy_bytes_per_s=_copy_rate(backend, program),
            plain_bytes_per_s=_plain_rate(backend, program.link_bytes),
            launch_s=_launch_s(backend, program),
        )


def _copy_rate(backend: CudaBackend, program: CudaProgram) -> float:
    """Bytes per second of a program's copies by themselves, one behind the other."""
    copies = [c.index for c in program.schedule.inference if c.verb == "copy"]
    if not copies or program.admission.graph is None:
        return 0.0

    def issue() -> None:
        for copy in copies:
            program.copies[copy]()

    nbytes = sum(program.schedule.copies[copy].nbytes for copy in copies)
    return nbytes / replay_s(backend, program.pool, issue)


def _plain_rate(backend: CudaBackend, nbytes: int) -> float:
    """Bytes per second of one copy of the same bytes on an idle device, from the fastest kind of pinned memory."""
    if not nbytes:
        return 0.0
    driver, medians = backend.driver, list[float]()
    device = driver.allocate(nbytes)
    for source in plain_sources(backend, nbytes):
        times = []
        for _ in range(5):
            start, end = driver.event(timed=True), driver.event(timed=True)
            with driver.on(backend.streams.swap_in):
                driver.record(start)
                driver.copy(device, source)
                driver.record(end)
            driver.synchronize(end)
            times.append(driver.seconds(start, end))
        medians.append(statistics.median(times))
    driver.free(device)
    return nbytes / min(medians)


def _launch_s(backend: CudaBackend, program: CudaProgram) -> float | None:
    """Host time of one replay; None for a program that is not a graph."""
    graph, times = program.admission.graph, []
    if graph is None:
        return None
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
        "setting, batch, memory", "eager ms", "eager channels last ms", "resident ms", "resident over the faster eager",
        "bound ms", "predicted ms", "measured ms", "over resident",
        "bound over resident", "predicted / measured", "MB copied", "copies GB/s", "plain copy GB/s", "launch us",
    )  # fmt: skip
    cells = [
        [
            r.name,
            f"{r.eager_s * 1e3:.2f}",
            f"{r.eager_channels_last_s * 1e3:.2f}",
            f"{r.resident_s * 1e3:.2f}",
            f"{r.resident_s / min(r.eager_s, r.eager_channels_last_s):.2f}x",
            f"{r.bound_s * 1e3:.2f}",
            f"{r.predicted_s * 1e3:.2f}",
            f"{r.streamed_s * 1e3:.2f}",
            f"{r.streamed_s / r.resident_s - 1:+.1%}",
            f"{max(r.bound_s / r.resident_s - 1, 0):+.1%}",
            f"{r.predicted_s / r.streamed_s:.3f}",
            f"{r.link_bytes / 1e6:.0f}",
            f"{r.copy_bytes_per_s / 1e9:.1f}",
            f"{r.plain_bytes_per_s / 1e9:.1f}",
            "" if r.launch_s is None else f"{r.launch_s * 1e6:.0f}",
        ]
        for r in rows
    ]
    settings = "".join(f"- *{name}*: {described(options)}\n" for name, options, _ in SETTINGS)
    return [
        "Medians; every inference starts on an idle device and ends with its outputs in host memory. *Predicted* is the"
        " plan's time and what the host adds. *Resident* is the"
        " same program with everything in memory, as one captured graph. *Eager* is PyTorch with the setting's type and"
        " TF32, in the exported layout and channels last. Settings, with which all of a row was measured:\n",
        settings,
        markdown_table(header, cells),
        *(f"{note}\n" for note in notes),
    ]


TITLE = "SwapAdvisor's Table 2 on a GPU"
STEP = steps.Step("benchmarks.gpu.table2", TITLE, Row, cells, measure, _sections, cell_s=150.0)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))
