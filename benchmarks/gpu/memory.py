"""What of the device's memory goes where: arena, libraries, graphs; and that serving takes no more."""

import sys
from collections.abc import Sequence
from itertools import pairwise

import torch

from benchmarks.gpu.common import Clock, Measured, OutOfTime, open_gpu, planned, resnet
from benchmarks.record import markdown_table, record
from planner.shapes import Bucket
from planner.sizing.fitting import split_budget
from runtime.binding.program import Bases
from runtime.cuda.backend import CudaBackend

SHARES = (0.25, 0.5)
INFERENCES = 10_000


def main(argv: Sequence[str] | None = None, seconds: float = 60.0) -> int:
    clock = Clock.of(seconds)
    torch.cuda.init()
    context = torch.cuda.mem_get_info()
    backend = open_gpu()
    rows: list[list[str]] = []
    notes: list[str] = []
    flat = True
    try:
        model = resnet(backend, [1])
        torch.cuda.empty_cache()
        libraries = backend.driver.memory()
        notes.append(
            f"Libraries (cuBLAS, cuDNN and kernels that were loaded while the model was measured) took"
            f" {_mib(context[0] - libraries.free_bytes)} beyond the bare context; NVML counts"
            f" {_mib(libraries.process_bytes)} for this process before there is an arena.\n"
        )
        for share in SHARES:
            clock.check(15.0)
            row, steady = _row(backend, model, share, clock)
            rows.append(row)
            flat = flat and steady
    except OutOfTime:
        notes.append("The time ran out: rows that are not here were not measured.\n")
    header = (
        "ResNet-152, share of weights",
        "arena",
        "device memory taken by it",
        "graphs and buffers",
        "inferences",
        "growth",
    )
    path = record("gpu-memory", "Memory caps on a GPU", "benchmarks.gpu.memory", [
        f"{torch.cuda.get_device_name()}. Figures are differences of the device's free memory.\n",
        markdown_table(header, rows), *notes,
    ])  # fmt: skip
    print(path.read_text())
    return 0 if rows and flat else 1


def _row(backend: CudaBackend, model: Measured, share: float, clock: Clock) -> tuple[list[str], bool]:
    budget = int(share * model.graph(1).parameter_bytes)
    partition, workspace = split_budget({Bucket(1): model.graph(1)}, {Bucket(1): model.profiles[Bucket(1)]}, budget)
    plan = planned(model, 1, partition, workspace)
    free = [backend.driver.memory().free_bytes]
    arena = backend.arena(partition + workspace)
    free.append(backend.driver.memory().free_bytes)
    program = backend.build(model.lowered, plan, model.profiles[Bucket(1)], arena, Bases(0, partition), model.store)
    backend.executor.load(program)
    free.append(backend.driver.memory().free_bytes)
    inputs, count = program.examples(), 0
    while count < INFERENCES and clock.left_s > 5.0:
        backend.executor.run(program, inputs)
        count += 1
    free.append(backend.driver.memory().free_bytes)
    backend.executor.release(program)
    arena.close()
    torch.cuda.empty_cache()
    figures = [_mib(a - b) for a, b in pairwise(free)]
    return [f"{share:.0%}", _mib(budget), *figures[:2], str(count), figures[2]], free[2] == free[3]


def _mib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
