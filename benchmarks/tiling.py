"""Tilings of the thesis' programs (chapter 3): bytes and times, random programs, planning time, DTensor and Dask."""

import functools
import math
import operator
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.record import markdown_table, parser_of, publish, work_of_two
from benchmarks.tiling_programs import SUBJECTS, Subject, random_program
from cohabit.planner.errors import format_bytes
from cohabit.planner.tiling.arrays import newarray
from cohabit.planner.tiling.expressions import (
    Expression,
    Fold,
    Input,
    JoinUpdate,
    Map,
    NewArray,
    Region,
    Scan,
    View,
)
from cohabit.planner.tiling.graph import TilingGraph
from cohabit.planner.tiling.search import BRUTE_FORCE_LIMIT, TilingPlan, plan_tiling
from cohabit.runtime.tiling.counting import CountedCollectives
from cohabit.runtime.tiling.execute import measured
from cohabit.runtime.tiling.worker import Worker, start

SEARCHED = {"smart": "greedy", "best": "exact", "row": "row", "column": "column", "worst": "worst"}
"""The thesis' names: smart is its greedy search, best the least of all combinations."""
PROCESSES = (2, 4)
PEERS = ("linear regression", "logistic regression", "k-means")
ARRAYS = (10, 30, 100, 300, 1000)

Runs = dict[tuple[str, str], tuple[int, int, float] | str]
"""Counted bytes, predicted bytes and median seconds by program and tiling; a message where a peer cannot run it."""


def plan_of(subject: Subject, scale: int, search: str, workers: int) -> TilingPlan:
    inputs = subject.inputs(scale)
    extra = int(subject.copies * sum(i.nbytes for i in inputs) / workers)
    return plan_tiling(TilingGraph.of(subject.program(*map(newarray, inputs)), workers, extra), search)


def run_all(scale: int, repeats: int, worker: Worker) -> Runs:
    """Run every program in every tiling, and with the placements that DTensor chooses per operator."""
    runs: Runs = {}
    for subject in SUBJECTS:
        for search in SEARCHED.values():
            plan = plan_of(subject, scale, search, worker.count)
            _, moved, seconds = measured(plan, worker, repeats + 1)
            runs[subject.name, search] = (moved.wire, plan.moved.wire, statistics.median(seconds[1:]))
        options = [by_dtensor(subject, scale, repeats, worker, small) for small in (Replicate(), Shard(0))]
        worked = [run for run in options if not isinstance(run, str)]
        runs[subject.name, "DTensor"] = min(worked) if worked else options[0]
    return runs


IN_TORCH: dict[str, Any] = {
    # Operators take scalars on both sides, torch's functions on one.
    **{
        name: getattr(operator, short) for name, short in (("add", "add"), ("subtract", "sub"), ("multiply", "mul"))
    },
    **{"divide": operator.truediv, "power": operator.pow, "less": operator.lt, "equal": operator.eq},
    **{"min": torch.amin, "max": torch.amax, "dot": torch.matmul, "astype": lambda tensor, _: tensor},
    **{"cholesky": torch.linalg.cholesky, "inv": torch.linalg.inv},
    "maximum": lambda a, b: torch.maximum(a, b) if isinstance(b, Tensor) else torch.clamp_min(a, b),
}
"""The programs' NumPy functions that torch has not under their name."""


def by_torch(e: Expression, tensors: Sequence[Tensor]) -> Tensor:
    """Make an operator's call on tensors."""
    assert isinstance(e.operator, Map | Fold | Scan | JoinUpdate)
    dtype = torch.from_numpy(np.empty(0, e.dtype)).dtype
    call = e.operator.call
    if dtype.is_floating_point:  # torch computes integers in its default precision
        tensors = [t if t.dtype == torch.bool else t.to(dtype) for t in tensors]
    args = [tensors[a.number] if isinstance(a, Input) else a for a in call.arguments]
    options = {name: value for name, value in call.options if name != "dtype"}
    if isinstance(e.operator, Fold):  # torch has no fold of all axes that keeps them
        axes = e.operator.axes
        args, options = [tensors[0]], {"dim": axes if len(axes) > 1 else axes[0], "keepdim": e.operator.keepdims}
    function = IN_TORCH.get(call.name) or getattr(torch, call.name)
    result: Tensor = function(*args, **options).to(dtype)
    return result


def view_of(tensor: Tensor, axes: Sequence[int | None]) -> Tensor:
    kept = [a for a in axes if a is not None]
    dropped = [a for a in range(tensor.ndim) if a not in kept]
    tensor = tensor.permute(*kept, *dropped).reshape([tensor.shape[a] for a in kept]) if tensor.ndim else tensor
    return tensor[tuple(None if a is None else slice(None) for a in axes)]


def slowest(seconds: float) -> float:
    value = torch.tensor(seconds)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def by_dtensor(
    subject: Subject, scale: int, repeats: int, worker: Worker, small: Replicate | Shard
) -> tuple[int, int, float] | str:
    """Run a program on DTensors: the largest input by rows, `small` for the others, the rest as DTensor decides."""
    graph = TilingGraph.of(subject.program(*map(newarray, subject.inputs(scale))), worker.count)
    inputs = [e for e in graph.expressions if isinstance(e.operator, NewArray)]
    longest = max(e.shape[0] for e in inputs)
    given, mesh = {}, init_device_mesh("cpu", (worker.count,))
    for e in inputs:
        assert isinstance(e.operator, NewArray)
        placement = Shard(0) if e.shape[0] == longest else small
        given[id(e)] = distribute_tensor(torch.from_numpy(e.operator.data), mesh, [placement])

    def once() -> None:
        held: dict[int, Any] = dict(given)
        for e in graph.expressions:
            tensors = [held[id(source)] for source in e.inputs]
            if isinstance(e.operator, View):
                held[id(e)] = view_of(tensors[0], e.operator.axes)
            elif isinstance(e.operator, Region):
                raise NotImplementedError("slices and concatenations are not tried")
            elif e.inputs:
                held[id(e)] = by_torch(e, tensors)
        for output in graph.outputs:  # a result that is still a sum is no result
            tensor = held[id(output)]
            if any(p.is_partial() for p in tensor.placements):
                tensor.redistribute(mesh, [Replicate()])

    try:
        seconds, wire = [], 0
        for _ in range(repeats + 1):
            dist.barrier()
            begin = time.perf_counter()
            with CountedCollectives() as counted:
                once()
            seconds.append(slowest(time.perf_counter() - begin))
            wire = counted.moved.wire
        total = torch.tensor(wire)
        dist.all_reduce(total)
        return int(total), int(total), statistics.median(seconds[1:])
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def applications(runs: dict[int, Runs]) -> tuple[str, str]:
    """Return tables of bytes on the wire and of times."""
    header = ["program", *SEARCHED, "DTensor", "best / smart", "best / DTensor"]
    rows = []
    for subject in SUBJECTS:
        found = [runs[4][subject.name, search] for search in (*SEARCHED.values(), "DTensor")]
        nbytes = [math.nan if isinstance(run, str) else run[0] for run in found]
        for run in found[:-1]:
            assert run[0] == run[1], f"{subject.name}: counted {run[0]} bytes, predicted {run[1]}"
        assert all(not nbytes[1] > other for other in nbytes), f"{subject.name}: exact moves more than another"
        shares = [ratio(nbytes[1], nbytes[0]), ratio(nbytes[1], nbytes[-1])]
        rows.append([subject.name, *["-" if math.isnan(n) else format_bytes(n) for n in nbytes], *shares])
    moved = markdown_table(header, rows)
    times = []
    for subject in SUBJECTS:
        row = [subject.name]
        for processes in PROCESSES:
            for search in (*SEARCHED.values(), "DTensor"):
                run = runs[processes][subject.name, search]
                row.append("-" if isinstance(run, str) else f"{run[2] * 1e3:.1f}")
        times.append(row)
    columns = [f"{name}, {n}" for n in PROCESSES for name in (*SEARCHED, "DTensor")]
    return moved, markdown_table(["program", *columns], times, shown=False)


def ratio(a: float, b: float) -> str:
    return "-" if math.isnan(b) else "1.00" if a == b else f"{a / b:.2f}"


def random_programs(count: int, *, thesis: bool) -> str:
    """Compare searches on random programs of 2 to 15 operators, as in Figure 3.2; returns a row per search."""
    found: dict[str, list[int]] = {search: [] for search in ("greedy", "recursive", "row", "column", "exact")}
    forced = 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(128, 513)) * 1024
        inputs = [newarray((size, size)) for _ in range(int(rng.integers(1, 5)))]
        graph = TilingGraph.of(random_program(rng, inputs, int(rng.integers(2, 16))), 4, 0, thesis=thesis)
        for search, nbytes in found.items():
            nbytes.append(plan_tiling(graph, search).nbytes)
        if math.prod(len(g.choices) for g in graph.groups) <= BRUTE_FORCE_LIMIT >> 4:
            assert plan_tiling(graph, "brute-force").nbytes == found["exact"][-1]
            forced += 1
    rows = []
    best = found["exact"]
    for search, nbytes in found.items():
        excess = [a / b if b else math.inf for a, b in zip(nbytes, best, strict=True) if a > b]
        worst = "-" if not excess else f"{max(excess):,.2f}" if math.isfinite(max(excess)) else "exact moves none"
        equal = sum(a == b for a, b in zip(nbytes, best, strict=True))
        rows.append([search, f"{equal} of {count}", f"{sum(nbytes) / sum(best):.3f}", worst])
    rows[-1][0] = f"exact (equals brute force on all {forced} small enough)"
    return markdown_table(["search", "as few bytes as exact", "bytes of all, over exact's", "worst"], rows)


def planning_times() -> str:
    rows = []
    for count in ARRAYS:
        rng = np.random.default_rng(count)
        inputs = [newarray((512, 512)) for _ in range(max(2, count // 10))]
        outputs = random_program(rng, inputs, count - len(inputs))
        begin = time.perf_counter()
        graph = TilingGraph.of(outputs, 4)
        edges = len(graph.edges)
        cells = [f"{time.perf_counter() - begin:.2f}"]
        nbytes = []
        for search in ("exact", "greedy", "recursive"):
            begin = time.perf_counter()
            nbytes.append(plan_tiling(graph, search).nbytes)
            cells.append(f"{time.perf_counter() - begin:.3f}")
        rows.append([str(count), str(edges), *cells, f"{nbytes[1] / nbytes[0]:.2f}"])
    header = ["arrays", "edges", "graph, s", "exact, s", "greedy, s", "recursive, s", "greedy's bytes / exact's"]
    return markdown_table(header, rows, shown=False)


def dask_seconds(subject: Subject, scale: int, workers: int, repeats: int) -> float:
    """Run a program on Dask's arrays, the longest ones in `workers` chunks of rows, by as many threads."""
    import dask.array
    import dask.base

    inputs = subject.inputs(scale)
    longest = max(len(i) for i in inputs)
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        chunked = [
            dask.array.from_array(i, chunks=(-(-len(i) // workers) if len(i) == longest else -1, *i.shape[1:]))
            for i in inputs
        ]
        result = subject.program(*chunked)
        with dask.config.set(scheduler="threads", num_workers=workers):
            dask.base.compute(result)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def peers(runs: dict[int, Runs], scale: int, repeats: int) -> str:
    rows = []
    for subject in (s for s in SUBJECTS if s.name in PEERS):
        for processes in PROCESSES:
            best, dtensor = (runs[processes][subject.name, search] for search in ("exact", "DTensor"))
            cells = ["-", "-", "-", "-"]
            for at, run in ((0, best), (2, dtensor)):
                if not isinstance(run, str):
                    cells[at : at + 2] = format_bytes(run[0]), f"{run[2] * 1e3:.1f}"
            seconds = dask_seconds(subject, scale, processes, repeats)
            rows.append([f"{subject.name}, {processes}", *cells, f"{seconds * 1e3:.1f}"])
    return markdown_table(
        ["program, workers", "best, bytes", "best, ms", "DTensor, bytes", "DTensor, ms", "Dask (threads), ms"], rows
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.tiling", __doc__, has_folder=False)
    parser.add_argument("--scale", type=int, default=8, help="size of the programs' inputs (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each (default: %(default)s)")
    options = parser.parse_args(argv)
    task = functools.partial(run_all, options.scale, options.repeats)
    runs: dict[int, Runs] = {processes: start(task, processes) for processes in PROCESSES}
    for run in (run for found in runs.values() for run in found.items()):
        if isinstance(run[1], str):
            print(run)
    moved, times = applications(runs)
    sections = [
        "## Bytes between four workers (Figure 3.1)\n",
        "Counted while the programs ran, and equal to the prediction, but for DTensor's, which is only counted. *Smart*"
        " is the thesis' greedy search, *best* the exact one, *DTensor* what it chooses operator by operator: the"
        " longest inputs by rows, the others by rows or replicated, whichever moved less. `-`: not tried (slices).\n",
        moved,
        "## Milliseconds with two and with four processes (Figure 3.1)\n",
        f"Medians of {options.repeats} runs, gloo, one thread a process, on two CPUs that do {work_of_two():.2f} times"
        " the work of one. Inputs are small: the number of collectives, about 1 ms each, counts more than bytes.\n",
        times,
        "## A hundred random programs (Figure 3.2)\n",
        "Of 2 to 15 operators on square arrays of 128K to 512K rows, four workers, no copies. The thesis found its"
        " greedy search as good as the best in 95 of 100 programs of its own. A quarter of the operators here read"
        " transposes, the pattern of Figure 3.3. First the thesis' model: rows and columns, one way to compute each"
        " dot, its count of bytes.\n",
        random_programs(100, thesis=True),
        "All tilings and ways, bytes on the wire:\n",
        random_programs(100, thesis=False),
        "## Planning time\n",
        "One random program each, four workers, copies in a tenth of the inputs' share.\n",
        planning_times(),
        "## DTensor and Dask\n",
        f"Dask {version('dask')} computes in threads of one process, which share memory: it moves nothing.\n",
        peers(runs, options.scale, options.repeats),
    ]
    publish(options, "Tilings of distributed arrays", sections)
    return 0


if __name__ == "__main__":
    sys.exit(main())
