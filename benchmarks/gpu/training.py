"""Training steps on this GPU in 60 % of their memory: `cohabit.budget` and captured plans, eager, checkpoints."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

import cohabit
from benchmarks.captured.trainer import MEASURED_FIRST, Trainer
from benchmarks.gpu import steps
from benchmarks.record import markdown_table
from benchmarks.training_nets import NETS, Gpt, Net, WideResNet, eager_step, loss
from cohabit.runtime.training.budget import Budget

NETS_OF_A_GPU = {
    "wide_resnet": Net(lambda: WideResNet(8, 4), NETS["wide_resnet"].inputs, 512),
    "gpt": Net(lambda: Gpt(768, 12, 128, 1000), NETS["gpt"].inputs, 128),
}
"""As on the CPU, but larger: steps of some hundred milliseconds."""
EAGER, CHECKPOINT, BUDGET, OURS = "eager", "checkpoint per block", "cohabit.budget", "best"
WAYS = (EAGER, CHECKPOINT, BUDGET, OURS)
SHARE = 0.6
SEARCH_S = 20.0
STEPS, WARM_UP = 10, MEASURED_FIRST + 2
DEVICE = "cuda"
"""Of torch's own ways."""
_OF = " of "


@dataclass(frozen=True, slots=True)
class Row:
    net: str
    way: str
    seconds: float
    """Of a step, its loss on the host: the median."""
    memory_bytes: int
    """For the captured plan, its budget; else the most that torch's allocator gave out after the warm-up."""
    first_loss: float
    last_loss: float
    predicted_s: float | None = None
    bound_s: float | None = None
    resident_s: float | None = None
    swapped_bytes: int | None = None


def cells() -> list[str]:
    return [f"{way}{_OF}{net}" for net in NETS_OF_A_GPU for way in WAYS]


def measure(cell: str) -> Iterator[Row | str]:
    way, _, net = cell.partition(_OF)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    model, batch = NETS_OF_A_GPU[net].model(), NETS_OF_A_GPU[net].batch()
    if way != OURS:
        model, batch = model.to(DEVICE), [t.to(DEVICE) for t in batch]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if way != OURS:
        model.is_checkpointed = way == CHECKPOINT
        limits = cohabit.budget(f"{SHARE:.0%}", model, optimizer) if way == BUDGET else nullcontext()
        with limits:
            seconds, losses = _timed(lambda: eager_step(model, optimizer, loss, batch))
            moved_bytes = limits.moved_bytes // (WARM_UP + STEPS) if isinstance(limits, Budget) else None
        yield Row(net, way, seconds, _most_bytes(), losses[0], losses[-1], swapped_bytes=moved_bytes)
        return
    with Trainer(
        model, optimizer, loss, batch, f"{SHARE:.0%}", device="cuda", search_seconds=SEARCH_S, on_progress=_note
    ) as trainer:
        seconds, losses = _timed(lambda: trainer.step(*batch))
        promise = trainer.prediction
        yield Row(
            net,
            way,
            seconds,
            trainer.memory_bytes,
            losses[0],
            losses[-1],
            promise.period_s,
            promise.bound_s,
            promise.resident_s,
            trainer.swapped_bytes,
        )
        share = trainer.plan.memory.nbytes / trainer.memory_bytes
        yield f"{net}: the plan has tensors in {share:.0%} of the memory; its searcher is {promise.searcher}."


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


def _most_bytes() -> int:
    return torch.cuda.max_memory_allocated()


def _note(what: str, done: int, total: int) -> None:
    if not total:
        print(what, done or "", flush=True)


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
            *(_ms(s) for s in (r.predicted_s, r.bound_s, r.resident_s)),
            "" if r.swapped_bytes is None else f"{r.swapped_bytes / 1e6:.0f}",
            f"{r.first_loss:.4f}, {r.last_loss:.4f}",
        ]
        for r in rows
    ]
    header = (
        "net, way", "ms per step", "eager's throughput", "MiB", "of eager's", "predicted ms", "bound ms",
        "resident ms", "MB swapped", "first and last loss",
    )  # fmt: skip
    return [
        f"Medians of {STEPS} steps, each with its loss on the host; float32, TF32 off, SGD with momentum. Memory is the"
        f" most that torch's allocator gave out in them; for captured plans it is the budget, {SHARE:.0%} of what a"
        f" step takes if nothing leaves memory. `cohabit.budget` has {SHARE:.0%} of the first step's peak for tensors;"
        " the scratch of kernels comes on top.\n",
        markdown_table(header, table),
        *(f"{note}\n" for note in notes),
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


TITLE = "Training steps in little memory on a GPU"
STEP = steps.Step("benchmarks.gpu.training", TITLE, Row, cells, measure, _sections, cell_s=180.0)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))
