"""Training steps on this GPU in 60 % of their memory: `cohabit.budget`, eager, checkpoints."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

import cohabit
from benchmarks.gpu import steps
from benchmarks.record import markdown_table
from benchmarks.training_nets import NETS, Gpt, Net, WideResNet, eager_step, loss
from cohabit.runtime.training.budget import Budget

NETS_OF_A_GPU = {
    "wide_resnet": Net(lambda: WideResNet(8, 4), NETS["wide_resnet"].inputs, 512),
    "gpt": Net(lambda: Gpt(768, 12, 128, 1000), NETS["gpt"].inputs, 128),
}
"""As on the CPU, but larger: steps of some hundred milliseconds."""
EAGER, CHECKPOINT, BUDGET = "eager", "checkpoint per block", "cohabit.budget"
WAYS = (EAGER, CHECKPOINT, BUDGET)
SHARE = 0.6
STEPS, WARM_UP = 10, 6
DEVICE = "cuda"
_OF = " of "


@dataclass(frozen=True, slots=True)
class Row:
    net: str
    way: str
    seconds: float
    """Of a step, its loss on the host: the median."""
    memory_bytes: int
    """The most that torch's allocator gave out after the warm-up."""
    first_loss: float
    last_loss: float
    swapped_bytes: int | None = None


def cells() -> list[str]:
    return [f"{way}{_OF}{net}" for net in NETS_OF_A_GPU for way in WAYS]


def measure(cell: str) -> Iterator[Row | str]:
    way, _, net = cell.partition(_OF)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    model = NETS_OF_A_GPU[net].model().to(DEVICE)
    batch = [t.to(DEVICE) for t in NETS_OF_A_GPU[net].batch()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.is_checkpointed = way == CHECKPOINT
    limits = cohabit.budget(f"{SHARE:.0%}", model, optimizer) if way == BUDGET else nullcontext()
    with limits:
        seconds, losses = _timed(lambda: eager_step(model, optimizer, loss, batch))
        moved_bytes = limits.moved_bytes // (WARM_UP + STEPS) if isinstance(limits, Budget) else None
    memory_bytes = torch.cuda.max_memory_allocated()
    yield Row(net, way, seconds, memory_bytes, losses[0], losses[-1], swapped_bytes=moved_bytes)


def _timed(step: Callable[[], Tensor]) -> tuple[float, list[float]]:
    """Return the seconds of the median step, and all losses."""
    seconds, losses = [], []
    for n in range(WARM_UP + STEPS):
        if n == WARM_UP:
            torch.cuda.reset_peak_memory_stats()
        start_s = time.perf_counter()
        losses.append(step().item())
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[WARM_UP:]), losses


def _sections(rows: Sequence[Row], notes: Sequence[str]) -> list[str]:
    eager_s = {r.net: r.seconds for r in rows if r.way == EAGER}
    eager_bytes = {r.net: r.memory_bytes for r in rows if r.way == EAGER}
    table = [
        [
            f"{r.net}, {r.way}",
            f"{r.seconds * 1e3:.1f}",
            f"{eager_s[r.net] / r.seconds:.2f}" if r.net in eager_s else "",
            f"{r.memory_bytes / 2**20:.0f}",
            f"{r.memory_bytes / eager_bytes[r.net]:.2f}" if r.net in eager_bytes else "",
            "" if r.swapped_bytes is None else f"{r.swapped_bytes / 1e6:.0f}",
            f"{r.first_loss:.4f}, {r.last_loss:.4f}",
        ]
        for r in rows
    ]
    header = (
        "net, way", "ms per step", "eager's throughput", "MiB", "of eager's", "MB swapped", "first and last loss",
    )  # fmt: skip
    return [
        f"Medians of {STEPS} steps, each with its loss on the host; float32, TF32 off, SGD with momentum. Memory is the"
        f" most that torch's allocator gave out in them. `cohabit.budget` has {SHARE:.0%} of the first step's peak for"
        " tensors; the scratch of kernels comes on top.\n",
        markdown_table(header, table),
        *(f"{note}\n" for note in notes),
    ]


TITLE = "Training steps in little memory on a GPU"
STEP = steps.Step("benchmarks.gpu.training", TITLE, Row, cells, measure, _sections, cell_s=180.0)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))
