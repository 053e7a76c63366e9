"""What of the device's memory goes where: arena, libraries, graphs; and that serving takes no more."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.gpu import steps
from benchmarks.gpu.common import described, open_gpu, planned, resnet
from benchmarks.record import markdown_table
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import split_budget
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.options import CUDA_DEFAULTS

SHARES = (0.25, 0.5)
INFERENCES = 10_000


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes, as differences of the device's free memory."""

    share: float
    arena: int
    taken: int
    graphs: int
    inferences: int
    growth: int


def cells() -> list[str]:
    return [f"{share:.0%}" for share in SHARES]


def measure(cell: str) -> Iterator[Row | str]:
    share = next(share for share in SHARES if f"{share:.0%}" == cell)
    torch.cuda.init()
    context = torch.cuda.mem_get_info()
    backend = open_gpu()
    model = resnet(backend, 1)
    torch.cuda.empty_cache()
    libraries = backend.driver.memory()
    yield (
        f"{cell}: libraries (cuBLAS, cuDNN and kernels that were loaded until there is an arena) took"
        f" {_mib(context[0] - libraries.free_bytes)} beyond the bare context; NVML counts"
        f" {_mib(libraries.process_bytes)} for this process."
    )
    budget = int(share * model.graph(1).parameter_bytes)
    memory = split_budget({Bucket(1): model.graph(1)}, {Bucket(1): model.profiles[Bucket(1)]}, budget)
    plan = planned(model, 1, memory)
    free = [backend.driver.memory().free_bytes]
    arena = backend.arena(memory.nbytes)
    free.append(backend.driver.memory().free_bytes)
    program = backend.build(
        model.lowered, plan, model.profiles[Bucket(1)], arena, Bases(0, memory.partition_bytes), model.store
    )
    backend.executor.load(program)
    free.append(backend.driver.memory().free_bytes)
    inputs = program.examples()
    for _ in range(INFERENCES):
        backend.executor.run(program, inputs)
    free.append(backend.driver.memory().free_bytes)
    taken, graphs, growth = (a - b for a, b in pairwise(free))
    yield Row(share, memory.nbytes, taken, graphs, INFERENCES, growth)


def _sections(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    header = ("ResNet-152, share of weights", "arena", "taken by it", "graphs and buffers", "inferences", "growth")
    table = [
        [f"{r.share:.0%}", *map(_mib, (r.arena, r.taken, r.graphs)), str(r.inferences), _mib(r.growth)]
        for r in rows
    ]
    about = f"As served ({described(CUDA_DEFAULTS)}). Figures are differences of the device's free memory.\n"
    return [about, markdown_table(header, table), *(f"{note}\n" for note in notes)]


def _mib(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"{nbytes / 2**20:.1f} MiB"


STEP = steps.Step("benchmarks.gpu.memory", "Memory caps on a GPU", Row, cells, measure, _sections, cell_s=240.0)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))
