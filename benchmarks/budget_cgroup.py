"""Training in a memory cgroup of 60 % of eager PyTorch's peak: `cohabit.budget` beside what a user would pick instead.

Every contestant trains a net in a process of its own, from the same weights, batches and random numbers, on one thread.
Eager PyTorch runs without a limit at first, in the middle and at the end; its peak of resident memory sets the limit of
the others. Needs root and cgroups of version 1.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import cohabit
from benchmarks.edge.cgroup import EXIT_UNAVAILABLE, MIB, end_of, is_possible, running
from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.unseen_training_nets import NETS, Net

WARM_STEPS = 3
Context = Callable[[nn.Module, torch.optim.Optimizer, int], AbstractContextManager[Any]]


class _SavedFile:
    """A saved tensor's file, removed with the last reference (torch's tutorial on saved tensor hooks)."""

    def __init__(self, folder: str, tensor: Tensor) -> None:
        handle, self.name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        torch.save(tensor, self.name)

    def __del__(self) -> None:
        Path(self.name).unlink(missing_ok=True)


@contextmanager
def _saved_to_files() -> Iterator[None]:
    """Keep activations of 1,000 elements and more in files."""
    with tempfile.TemporaryDirectory() as folder:

        def pack(tensor: Tensor) -> Any:
            return tensor if tensor.numel() < 1000 else _SavedFile(folder, tensor)

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else torch.load(packed.name)

        with saved_tensors_hooks(pack, unpack):
            yield


@dataclass(frozen=True, slots=True)
class Way:
    """How a contestant trains. The context gets the model, the optimizer and the limit in bytes."""

    name: str
    around: Context = lambda model, optimizer, limit: nullcontext()
    is_checkpointed: bool = False
    is_compiled: bool = False


EAGER = Way("eager")
WAYS = (
    Way("cohabit.budget", lambda model, opt, limit: cohabit.budget(f"{limit} total", model, opt, store="file")),
    Way("checkpoint per block", is_checkpointed=True),
    Way("hooks to files", lambda model, opt, limit: _saved_to_files()),
    Way("save_on_cpu", lambda model, opt, limit: save_on_cpu()),
    Way("activation budget 0.5", is_compiled=True),
    EAGER,
)
BY_NAME = {way.name: way for way in WAYS}
ABOUT_COMPILED = (
    " *activation budget*: `torch.compile` with `activation_memory_budget=0.5` and the backend"
    " `aot_eager_decomp_partition`."
)


@dataclass(frozen=True, slots=True)
class Trained:
    """A process's training: seconds of a step, losses and its peak of resident memory, or why it ended early."""

    step_s: float = 0.0
    losses: tuple[float, ...] = ()
    peak_bytes: int = 0
    reason: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if the budget's losses are eager's."""
    parser = parser_of("benchmarks.budget_cgroup", __doc__, has_folder=False)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=list(NETS), help="(default: all)")
    parser.add_argument("--ways", nargs="+", choices=tuple(BY_NAME), default=list(BY_NAME), help="(default: all)")
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.6, help="limit over eager's peak (default: %(default)s)")
    parser.add_argument("--train", nargs=3, metavar=("NET", "WAY", "BYTES"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.train:
        net, way, limit_bytes = options.train
        print(json.dumps(trained(NETS[net], BY_NAME[way], int(limit_bytes), options.steps)))
        return 0
    console = Console()
    if not is_possible(console):
        return EXIT_UNAVAILABLE

    ways = [BY_NAME[name] for name in options.ways]
    rows, throughputs, equal = [], list[float](), True
    for name in options.nets:
        before = in_process(name, EAGER, None, options.steps)
        limit_bytes = int(options.share * before.peak_bytes)
        outcomes = {way: in_process(name, way, limit_bytes, options.steps) for way in ways[: len(ways) // 2]}
        middle = in_process(name, EAGER, None, options.steps)
        outcomes |= {way: in_process(name, way, limit_bytes, options.steps) for way in ways[len(ways) // 2 :]}
        after = in_process(name, EAGER, None, options.steps)
        eager_s = statistics.median(one.step_s for one in (before, middle, after))
        cells = [cell(outcome, before, eager_s, limit_bytes) for outcome in outcomes.values()]
        rows.append([name, f"{eager_s:.2f}", f"{before.peak_bytes / MIB:.0f}", f"{limit_bytes / MIB:.0f}", *cells])
        console.print("  ".join(rows[-1]))
        ours = outcomes.get(WAYS[0])
        if ours is not None:
            equal &= ours.losses == before.losses
            throughputs.append(0.0 if ours.reason else eager_s / ours.step_s)
    table = markdown_table(["net", "eager s", "peak MiB", "limit MiB", *(way.name for way in ways)], rows)
    mean = statistics.geometric_mean(throughputs) if throughputs and all(throughputs) else 0.0
    about = (
        f"Throughput over that of eager PyTorch without a limit, in a memory cgroup of {options.share:.0%} of eager's"
        f" peak of resident memory: medians of {options.steps} steps, one thread; {WARM_STEPS} steps come before."
        " Behind it, the peak of resident memory, sampled every 10 ms, over the limit. *=*: all losses are eager's, bit"
        " for bit; *other*: they are not. The nets were written for this record, by somebody who had not seen the code;"
        " totals were then made faster with the first four."
        f"{ABOUT_COMPILED if BY_NAME['activation budget 0.5'] in ways else ''}"
        f"\n\n`cohabit.budget`: {mean:.2f} in the geometric mean.\n"
    )
    publish(options, "Training below eager's peak of memory", [about, table])
    return 0 if equal else 1


def cell(outcome: Trained, eager: Trained, eager_s: float, limit_bytes: int) -> str:
    if outcome.reason:
        return outcome.reason
    same = "=" if outcome.losses == eager.losses else "other"
    return f"{eager_s / outcome.step_s:.2f} {same}, {outcome.peak_bytes / limit_bytes:.2f}"


def in_process(name: str, way: Way, limit_bytes: int | None, steps: int) -> Trained:
    """Train in a process of its own, in a cgroup with a limit or without one."""
    arguments = ["--train", name, way.name, str(limit_bytes or 0), "--steps", str(steps)]
    command = [sys.executable, "-m", "benchmarks.budget_cgroup", *arguments]
    with running(command, limit_bytes, libraries_counted=True) as (process, _, log):
        peak_bytes = 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, _peak_bytes(process.pid))
            time.sleep(0.01)
        if process.returncode:
            return Trained(reason=end_of(process, log))
        assert process.stdout is not None
        step_s, losses = json.loads(process.stdout.read().splitlines()[-1])
    return Trained(step_s, tuple(losses), peak_bytes)


def trained(net: Net, way: Way, limit_bytes: int, steps: int) -> tuple[float, list[float]]:
    """Return the median of a step's seconds, and all losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = net.build()
    model.checkpointing = way.is_checkpointed  # type: ignore[assignment]
    optimizer = net.optimizer(model)
    generator = torch.Generator().manual_seed(1)
    loss_of: Callable[[nn.Module, tuple[Tensor, ...]], Tensor] = net.loss
    if way.is_compiled:
        torch._functorch.config.activation_memory_budget = 0.5
        loss_of = torch.compile(net.loss, backend="aot_eager_decomp_partition")
    losses, seconds = [], []
    with way.around(model, optimizer, limit_bytes):
        for number in range(WARM_STEPS + steps):
            torch.manual_seed(number)
            batch = net.batch(generator)
            began_s = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, batch)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - began_s)
            del loss, batch
            gc.collect()
    return statistics.median(seconds[WARM_STEPS:]), losses


def _peak_bytes(pid: int) -> int:
    """Return a process's peak of resident memory. A total budget resets it every few ops."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    sys.exit(main())
