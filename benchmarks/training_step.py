"""One contestant of `benchmarks.training`, in a process of its own: trains a net for some steps in a memory cgroup.

It prepares, takes a step without a limit (which compiles, and starts threads), sets its cgroup's limit to what it then
uses but for tensors, plus the budget, and goes on. It prints a JSON line when it is prepared, and one at the end.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cohabit
from benchmarks.edge.cgroup import MIB
from benchmarks.training_nets import NETS, TINY, Blocks, eager_step, loss
from cohabit.runtime.heap import keep_freed_memory, release_free_memory
from cohabit.runtime.training.budget import Budget
from cohabit.runtime.training.copies.copying import CopyThread

TORCH = ("eager", "checkpoint", "activation_budget", "saved_to_file")
BUDGETS = ("budget", "budget_size")
"""`cohabit.budget`: the process gets what its cgroup allows, or the tensors get the step's budget."""
LEAST_SAVED_BYTES = 64 << 10
"""Smaller tensors are not worth a read."""

ALLOWANCE_BYTES = 16 << 20
"""Added to each limit, above base and budget, for memory that no budget counts."""
KEPT_BYTES = 256 << 10
"""Freed memory that the C library keeps. Smaller tensors leave holes in the heap: with 1 MiB, an LSTM whose states take
750 KiB took twice its budget."""
WARM_UP = 4
"""Steps with the limit before those that are measured."""

Step = Callable[[], Tensor]


class Cgroup:
    """The memory cgroup (version 1) that this process is in."""

    def __init__(self) -> None:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        (path,) = (line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory")
        self._folder = Path("/sys/fs/cgroup/memory") / path.lstrip("/")

    def used_bytes(self) -> int:
        """Anonymous memory, mapped pages and the kernel's own; not pages that can be read again."""
        stat = dict(line.split() for line in self._read("memory.stat").splitlines())
        return int(self._read("memory.usage_in_bytes")) - int(stat["cache"]) + int(stat["mapped_file"])

    def limit(self, nbytes: int) -> None:
        (self._folder / "memory.limit_in_bytes").write_text(str(nbytes))
        (self._folder / "memory.max_usage_in_bytes").write_text("0")

    def peak_bytes(self) -> int:
        """The most since the limit was set, page cache included."""
        return int(self._read("memory.max_usage_in_bytes"))

    def _read(self, name: str) -> str:
        return (self._folder / name).read_text()


class CopyTimes:
    """Seconds of a budget's copies since it was made, in the thread of the loop and in that of the copies."""

    def __init__(self, limits: Budget) -> None:
        self._limits, self._moved_bytes = limits, limits.moved_bytes
        self._copier = limits._residency.copier
        self._copied_s = self._all_copies_s()
        self._depth = 0
        self.waited_s = 0.0
        """In which the loop's ops could not run: their own copies, waits for the copy thread, choosing evictions."""
        self.loop_copies_s = 0.0
        """Of copies that the loop's ops made: a part of `waited_s`."""
        for name in ("make_room", "bring_in", "finish_oldest"):
            setattr(limits._residency, name, self._waited(getattr(limits._residency, name)))
        self._copier.make = self._made(self._copier.make)  # type: ignore[method-assign]

    def of_step(self, steps: int) -> dict[str, float]:
        """Return the means of a number of steps."""
        return {
            "swapped_bytes": (self._limits.moved_bytes - self._moved_bytes) / steps,
            "waited_s": self.waited_s / steps,
            "loop_copies_s": self.loop_copies_s / steps,
            "thread_copies_s": (self._all_copies_s() - self._copied_s - self.loop_copies_s) / steps,
        }

    def _all_copies_s(self) -> float:
        assert isinstance(self._copier, CopyThread)
        return sum(seconds for _, seconds in self._copier._made.values())

    def _made(self, make: Callable[..., None]) -> Callable[..., None]:
        def timed(copy: Any) -> None:
            began_s = time.perf_counter()
            make(copy)
            self.loop_copies_s += time.perf_counter() - began_s

        return timed

    def _waited(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the residency that counts as waiting, once where one calls another."""

        def timed(*args: Any) -> Any:
            self._depth += 1
            began_s = time.perf_counter()
            try:
                return method(*args)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.waited_s += time.perf_counter() - began_s

        return timed


class SavedToFile:
    """Saved activations go to a file, and come back in the backward pass (`saved_tensors_hooks`)."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 # it is closed with the process
        self._end = 0

    def __call__(self, model: nn.Module, *batch: Tensor) -> Tensor:
        self._end = 0
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return loss(model, *batch)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self._weights or tensor.nbytes < LEAST_SAVED_BYTES:
            return tensor
        start, self._end = self._end, self._end + tensor.nbytes
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        os.pwrite(self._file.fileno(), flat.data, start)
        return start, tensor.dtype, tensor.shape

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        start, dtype, shape = packed
        tensor: Tensor = torch.empty(shape, dtype=dtype)
        os.preadv(self._file.fileno(), [tensor.view(-1).view(torch.uint8).numpy().data], start)
        return tensor


def torch_step(
    contestant: str, setting: float, model: Blocks, optimizer: torch.optim.Optimizer, batch: Sequence[Tensor]
) -> Step:
    """Return a step of one of torch's own ways. `setting` is the share of activations for `activation_budget`."""
    model.is_checkpointed = contestant == "checkpoint"
    if contestant == "saved_to_file":
        return partial(eager_step, model, optimizer, SavedToFile(model), batch)
    if contestant == "activation_budget":
        import torch._functorch.config as config

        config.activation_memory_budget = setting
        compiled = torch.compile(loss, backend="aot_eager_decomp_partition")
        return partial(eager_step, model, optimizer, compiled, batch)
    return partial(eager_step, model, optimizer, loss, batch)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def run(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    keep_freed_memory(KEPT_BYTES)
    cgroup = Cgroup()
    net = (TINY if arguments.tiny else NETS)[arguments.net]
    torch.manual_seed(0)
    model, batch = net.model(), net.batch(arguments.batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    started_s = time.perf_counter()
    step = torch_step(arguments.contestant, arguments.setting, model, optimizer, batch)
    prepared_s = time.perf_counter() - started_s
    losses = [step().item()]
    gc.collect()
    release_free_memory()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    held = tensor_bytes(chain(model.parameters(), model.buffers(), state, batch))
    base = cgroup.used_bytes() - held
    budget = int(arguments.share * arguments.peak) if arguments.budget is None else arguments.budget
    if not arguments.unlimited:
        cgroup.limit(base + budget + ALLOWANCE_BYTES)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS") - held
    print(json.dumps({"base": base, "held": held, "prepared_s": prepared_s}), flush=True)
    limits = None
    if arguments.contestant in BUDGETS:
        total_bytes = before + budget + ALLOWANCE_BYTES
        memory = f"{total_bytes} total" if arguments.contestant == "budget" else budget
        limits = cohabit.budget(memory, model, optimizer, batch, store="file")
    with nullcontext() if limits is None else limits:
        timed_steps(step, arguments.warm_up, losses)
        copies = None if limits is None else CopyTimes(limits)
        seconds = timed_steps(step, arguments.steps, losses)
        copied = {} if copies is None else copies.of_step(arguments.steps)
    found: dict[str, Any] = {
        "seconds": seconds,
        "step_s": statistics.median(seconds),
        "losses": losses,
        "peak_over_budget": (_status("VmHWM") - before) / budget,
        "cgroup_mib": (cgroup.peak_bytes() - base) / MIB,
        "budget_mib": budget / MIB,
        **copied,
    }
    print(json.dumps(found), flush=True)


def timed_steps(step: Step, count: int, losses: list[float]) -> list[float]:
    """Return the seconds of each step; losses are appended."""
    seconds = []
    for _ in range(count):
        began_s = time.perf_counter()
        losses.append(step().item())
        seconds.append(time.perf_counter() - began_s)
    return seconds


def _status(name: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name + ":"))
    return int(line.split()[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("net")
    parser.add_argument("contestant")
    parser.add_argument("--batch", type=int, help="samples, if not the net's own batch")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--budget", type=int, help="bytes, instead of a share")
    parser.add_argument("--setting", type=float, default=1.0)
    parser.add_argument("--peak", type=int, default=1 << 30)
    parser.add_argument("--unlimited", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before those that are measured")
    parser.add_argument("--steps", type=int, default=3)
    run(parser.parse_args())
    os._exit(0)  # nothing is to be written back


if __name__ == "__main__":
    main()
