"""Training loops of small ops under `cohabit.budget`: the CPU time that a step costs over eager PyTorch's.

Ops of 50 to 400 microseconds show the price of Python: that of the main thread is what a step takes longer once copies
are hidden, that of the process has the copies, too. Eager steps run before and after each contestant.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cohabit
from benchmarks.record import markdown_table, record
from cohabit.runtime.training.budget import Budget

WARM_STEPS = 4
"""The first is measured, the second recorded; two more fill the slots."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).reshape(rows, length, width))


class Layer(nn.Module):
    """A transformer's layer, with a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norms = Attention(width, 4), nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.up, self.gate, self.down = (
            nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Mixer(nn.Module):
    """ConvNeXt's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.GroupNorm(1, width)
        self.up, self.down = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(3 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(self.spatial(x)))))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))


class Recurrent(nn.Module):
    """A cell per time step, as taggers and decoders have."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x[:, 0], []
        for number in range(x.shape[1]):
            state = self.cell(x[:, number], state)
            states.append(state)
        return torch.stack(states, 1)


@dataclass(frozen=True)
class Small:
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]


NETS = {
    "llama": Small(lambda: nn.Sequential(*(Layer(128) for _ in range(6))), (4, 64, 128)),
    "convnext": Small(lambda: nn.Sequential(*(Mixer(32) for _ in range(6))), (4, 32, 20, 20)),
    "resnet": Small(lambda: nn.Sequential(*(Residual(32) for _ in range(6))), (4, 32, 20, 20)),
    "tagger": Small(lambda: nn.Sequential(Recurrent(128), nn.ReLU(), Recurrent(128)), (48, 24, 128)),
}


@dataclass(frozen=True)
class Cost:
    """Medians of a step, in seconds, and what the loop came to."""

    thread_s: float
    process_s: float
    wall_s: float
    losses: list[float]
    peak: float = 1.0
    """Over the peak of eager's step."""


def trained(net: Small, memory: str | None, steps: int) -> Cost:
    torch.manual_seed(0)
    model, batch = net.model(), torch.randn(net.shape)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses: list[float] = []
    columns: list[list[float]] = [[], [], []]
    clocks = (time.thread_time, time.process_time, time.perf_counter)

    def train() -> None:
        for _ in range(WARM_STEPS + steps):
            began = [clock() for clock in clocks]
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            for column, clock, start_s in zip(columns, clocks, began, strict=True):
                column.append(clock() - start_s)

    peak = 1.0
    if memory is None:
        train()
    else:
        with cohabit.budget(memory, model, optimizer, store="file") as limits:
            train()
            peak = share_of(limits, memory)
    gc.collect()
    thread_s, process_s, wall_s = (statistics.median(column[WARM_STEPS:]) for column in columns)
    return Cost(thread_s, process_s, wall_s, losses, peak)


def share_of(limits: Budget, memory: str) -> float:
    assert limits.limit_bytes is not None
    return limits.peak_bytes / limits.limit_bytes * float(memory.removesuffix("%")) / 100


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if all losses are eager's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget_small", description=__doc__)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=list(NETS), help="(default: all)")
    parser.add_argument("--steps", type=int, default=12, help="steps that are measured (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write the result file below docs/results, too")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, ratios, equal = [], list[list[float]](), True
    for name in options.nets:
        before = trained(NETS[name], None, options.steps)
        for memory in ("100%", "60%"):
            found = trained(NETS[name], memory, options.steps)
            after = trained(NETS[name], None, options.steps)
            mine = (found.thread_s, found.process_s, found.wall_s)
            theirs = zip(*((c.thread_s, c.process_s, c.wall_s) for c in (before, after)), strict=True)
            row = [2 * m / sum(t) for m, t in zip(mine, theirs, strict=True)]
            same = found.losses == before.losses
            equal &= same
            ratios += [row] if memory == "60%" else []
            cells = [*(f"{ratio:.2f}" for ratio in row), f"{found.peak:.2f}", "yes" if same else "no"]
            rows.append([name, f"{1000 * before.wall_s:.0f}", memory, *cells])
            print("  ".join(rows[-1]), flush=True)
            before = after
    means = [f"{statistics.geometric_mean(column):.2f}" for column in zip(*ratios, strict=True)]
    rows.append(["geometric mean", "", "60%", *means, "", ""])
    heads = ["net", "eager ms", "memory", "main thread's CPU", "process's CPU", "wall", "peak", "eager's losses"]
    table = markdown_table(heads, rows)
    print(table)
    if options.record:
        about = (
            f"Medians of {options.steps} steps after {WARM_STEPS} others, over the mean of eager steps before and after"
            " in the same process; AdamW, one thread, evicted bytes go to a file. *Peak* is over that of eager's first"
            " step, as the budget counts it.\n"
        )
        record("budget-small", "Training loops of small ops", "benchmarks.budget_small", [about, table])
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
