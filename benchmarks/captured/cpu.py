"""Trains on the CPU: programs use the user's own tensors, whose storages are emptied and filled."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.captured.capture import OpCall
from benchmarks.captured.measure import longest, stand_ins
from benchmarks.captured.state import StateTensor
from benchmarks.captured.store import StateStore
from cohabit.planner.profile import Link
from cohabit.runtime.allocations import measuring_allocations
from cohabit.runtime.binding.build import bind
from cohabit.runtime.binding.draft import Draft
from cohabit.runtime.binding.offloaded import OffloadedTensor
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.cpu.arena import CpuArena
from cohabit.runtime.cpu.executor import CpuExecutor
from cohabit.runtime.heap import keep_freed_memory
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.stopwatch import repeating
from cohabit.runtime.memory import StoreKind
from cohabit.runtime.stores.spill_buffers import file_spill_buffers, ram_spill_buffers

KEPT_BYTES: Final = 256 << 10
"""Of freed memory, where it is to be had by others. Smaller tensors leave holes in the heap: with 1 MiB, an LSTM whose
states take 750 KiB took twice its budget."""
_LINK_BYTES: Final = (4096, 4 << 20)
_LINK_TENSORS: Final = 8
_CONTENDED_S: Final = 0.02
"""The longest ops are timed with copies at the same time for so many seconds each."""


class CpuTraining:
    """See `TrainingDevice`. With a store in a file, in `folder`, the process gives freed memory back at once."""

    name = "cpu"
    device = torch.device("cpu")
    shares_memory = True

    def __init__(self, kind: StoreKind, folder: Path) -> None:
        if kind == "file":
            keep_freed_memory(KEPT_BYTES)
        self.store = StateStore(kind, ram_spill_buffers if kind == "ram" else partial(file_spill_buffers, folder))
        self.executor = CpuExecutor()

    def start(self) -> None:
        self.executor.start()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        with torch.inference_mode(), torch.random.fork_rng([]):
            yield

    def peaks(self) -> AbstractContextManager[dict[str, int]]:
        return measuring_allocations()

    def allocating(self, name: str, call: Callable[[], Any]) -> Any:
        with torch.profiler.record_function(name):
            return call()

    def seconds(self, call: Callable[[], Any]) -> float:
        return _seconds(call)

    def links(self) -> tuple[Link, Link]:
        return measure_link(self.store)

    def slowdowns(self, calls: Sequence[OpCall], seconds: Sequence[float]) -> tuple[float, float]:
        with self.measuring():
            return measure_contention(calls, seconds, self.store)

    def budget_of(self, tensor_bytes: int) -> int:
        return tensor_bytes

    def tensor_bytes_in(self, budget_bytes: int) -> int:
        return budget_bytes

    def bind(
        self, lowered: Lowered, drafted: Draft, of_tensor: Mapping[int, OffloadedTensor], budget_bytes: int
    ) -> Program:
        return bind(drafted, of_tensor, CpuArena(0), Bases(0, 0), self.store)

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def close(self) -> None:
        self.executor.close()


def measure_link(store: StateStore) -> tuple[Link, Link]:
    """Time tensors that come back into memory, and that leave it: the link in, and the link out.

    Memory is allocated, and released, as it is in a step.
    """
    came_s, left_s = [], []
    for size in _LINK_BYTES:
        tensors = [StateTensor(torch.zeros(size, dtype=torch.uint8)) for _ in range(_LINK_TENSORS)]
        buffers = store.spill_buffers([size] * _LINK_TENSORS)
        left_s.append(
            statistics.median(_seconds(partial(t.save, b)) for t, b in zip(tensors, buffers, strict=True))
        )
        came_s.append(
            statistics.median(_seconds(partial(t.load, b)) for t, b in zip(tensors, buffers, strict=True))
        )
    return _link(came_s), _link(left_s)


def measure_contention(calls: Sequence[OpCall], seconds: Sequence[float], store: StateStore) -> tuple[float, float]:
    """Return the factors by which ops take longer while copies are made, and copies while ops run: at least 1.

    The longest ops run by themselves, and while a thread has a tensor leave memory and come back, again and again.
    """
    tensor = StateTensor(torch.zeros(_LINK_BYTES[1], dtype=torch.uint8))
    (buffer,) = store.spill_buffers(_LINK_BYTES[1:])
    rounds_s: list[float] = []

    def copy() -> None:
        rounds_s.append(_seconds(partial(tensor.save, buffer)) + _seconds(partial(tensor.load, buffer)))

    for _ in range(_LINK_TENSORS):
        copy()
    copy_alone_s = statistics.median(rounds_s)
    rounds_s.clear()
    alone_s, contended_s = 0.0, 0.0
    for call, count, op_s in longest(calls, seconds):
        args, kwargs = stand_ins(call, CpuTraining.device)
        run = partial(call.target, *args, **kwargs)
        times = math.ceil(_CONTENDED_S / max(op_s, 1e-6))
        try:
            op_alone_s = statistics.median(_seconds(run) for _ in range(times))
        except RuntimeError:
            continue  # stand-ins do not do
        with repeating(copy, "busy-link"):
            contended_s += count * statistics.median(_seconds(run) for _ in range(times))
        alone_s += count * op_alone_s
    if not rounds_s or not alone_s:
        return 1.0, 1.0
    return max(1.0, contended_s / alone_s), max(1.0, statistics.median(rounds_s) / copy_alone_s)


def _link(seconds: Sequence[float]) -> Link:
    (small, large), (small_s, large_s) = _LINK_BYTES, seconds
    return Link(small_s, (large - small) / max(large_s - small_s, 0.05 * large_s, 1e-9))


def _seconds(run: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
