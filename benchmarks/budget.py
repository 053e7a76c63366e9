"""Training loops under `cohabit.budget` and with torch's own ways: a step's time over eager PyTorch's.

Every contestant trains a net of its own from the same weights with SGD; all losses must be eager's.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu

import cohabit
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.training_nets import NETS, loss
from cohabit.runtime.training.budget import Budget

WARM_STEPS = 3
"""A share is measured in the first, and the others teach what comes next."""


@dataclass(frozen=True)
class Way:
    """How a contestant's loop is run."""

    name: str
    around: Callable[[torch.nn.Module, torch.optim.Optimizer], AbstractContextManager[Any]]
    is_checkpointed: bool = False


WAYS = (
    Way("eager", lambda model, optimizer: nullcontext()),
    Way("budget 100%, ram", lambda *owners: cohabit.budget("100%", *owners)),
    Way("budget 60%, ram", lambda *owners: cohabit.budget("60%", *owners)),
    Way("budget 40%, ram", lambda *owners: cohabit.budget("40%", *owners)),
    Way("budget 60%, file", lambda *owners: cohabit.budget("60%", *owners, store="file")),
    Way("checkpoint per block", lambda model, optimizer: nullcontext(), is_checkpointed=True),
    Way("save_on_cpu", lambda model, optimizer: save_on_cpu()),
)


@dataclass(frozen=True)
class Trained:
    """What a net's training came to."""

    losses: list[float]
    step_s: float
    peak: str
    """The most that tensors took of the budget."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if all losses are eager's."""
    parser = parser_of("benchmarks.budget", __doc__, has_folder=False)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=list(NETS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="steps that are measured (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, equal = [], True
    for name in options.nets:
        cells, same = measured(name, options.rounds)
        rows.append([name, *cells])
        equal &= same
        print("  ".join(rows[-1]), flush=True)
    table = markdown_table(["net", "eager s", *(way.name for way in WAYS[1:])], rows)
    about = (
        f"Seconds of a step over those of eager PyTorch, which runs before and after each: medians of"
        f" {options.rounds} steps, one thread; {WARM_STEPS} steps come before. Behind it, for budgets, the most"
        " that tensors took, and the budget. *=*: all losses are eager's, bit for bit; *other*: they are not.\n"
    )
    publish(options, "Training loops within a byte budget", [about, table])
    return 0 if equal else 1


def measured(name: str, rounds: int) -> tuple[list[str], bool]:
    """Return a row's cells, and whether every budget's losses are eager's."""
    before = trained(name, WAYS[0], rounds)
    cells = [f"{before.step_s:.2f}"]
    equal = True
    for way in WAYS[1:]:
        contestant = trained(name, way, rounds)
        after = trained(name, WAYS[0], rounds)
        same = contestant.losses == before.losses
        ratio = 2 * contestant.step_s / (before.step_s + after.step_s)
        cells.append(f"{ratio:.2f} {'=' if same else 'other'}{contestant.peak}")
        equal &= same or not way.name.startswith("budget")
        before = after
    return cells, equal


def trained(name: str, way: Way, rounds: int) -> Trained:
    """Train a net one way. The batch and the random numbers of each step are the same for all ways."""
    net = NETS[name]
    torch.manual_seed(0)
    batch = net.batch()
    model = net.model()
    model.is_checkpointed = way.is_checkpointed
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    losses, seconds, peak = [], [], ""
    with way.around(model, optimizer) as limits:
        for _ in range(WARM_STEPS + rounds):
            began_s = time.perf_counter()
            optimizer.zero_grad()
            value = loss(model, *batch)
            torch.autograd.backward(value)
            optimizer.step()
            losses.append(value.item())
            seconds.append(time.perf_counter() - began_s)
        if isinstance(limits, Budget) and limits.limit_bytes:
            peak = f", {limits.peak_bytes / limits.limit_bytes:.2f} of {limits.limit_bytes >> 20} MiB"
    del model, optimizer, batch
    gc.collect()
    return Trained(losses, statistics.median(seconds[WARM_STEPS:]), peak)


if __name__ == "__main__":
    sys.exit(main())
