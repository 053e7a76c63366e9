"""Times ops during a model's inferences with every parameter resident."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from cohabit.planner.plan import Span
from cohabit.planner.profile import NOISY
from cohabit.runtime.backend import Executor
from cohabit.runtime.binding.draft import ComputeStep
from cohabit.runtime.binding.program import Program
from cohabit.runtime.lowering.weights import Manifest
from cohabit.runtime.recording import Recording

_MEASURING_S = 0.3
"""Seconds per figure, after the minimum number of runs."""
_FEWEST_RUNS = 3
_MOST_RUNS = 40
_MOST_TRIES = 3
"""Maximum number of tries: ops are timed again while their runs are noisy, and the quietest try counts."""
_TINY_OPS = 200


class ColdCaches:
    """Evicts a model from the processor's caches, as requests for other models would."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = np.zeros(nbytes, np.uint8)

    @staticmethod
    def for_model(manifest: Manifest) -> "ColdCaches":
        """Return an instance for a model; it does nothing if the model is too large for the caches anyway."""
        cache_bytes = last_level_cache_bytes()
        return ColdCaches(0 if manifest.segment_bytes > 2 * cache_bytes else 2 * cache_bytes)

    def __call__(self) -> None:
        self._buffer += 1


def measure_ops(
    program: Program, examples: Callable[[], list[torch.Tensor]], executor: Executor, cold: ColdCaches
) -> "StepTimes":
    """Time the ops, in the quietest of a few tries."""
    executor.run(program, examples())
    tries: list[StepTimes] = []
    while len(tries) < _MOST_TRIES and (not tries or tries[-1].noise > NOISY):
        tries.append(StepTimes(program.computes))
        for _ in repeat():
            cold()
            timeline = executor.run(program, examples(), traced=True).timeline
            assert timeline is not None
            tries[-1].add(timeline.latency_s, timeline.spans)
    return min(tries, key=lambda times: times.noise)


class StepTimes:
    """Seconds of a program's steps, per run."""

    def __init__(self, steps: Sequence[ComputeStep]) -> None:
        self._columns: list[list[float]] = [[] for _ in steps]
        self._latencies: list[float] = []

    def add(self, latency_s: float, spans: Sequence[Span]) -> None:
        self._latencies.append(latency_s)
        for column, span in zip(self._columns, spans, strict=True):
            column.append(span.end_s - span.start_s)

    @property
    def latency_s(self) -> float:
        return statistics.median(self._latencies)

    @property
    def noise(self) -> float:
        """Median latency over the lowest, minus one. A program of views only takes no time, and has no noise."""
        least_s = min(self._latencies)
        return self.latency_s / least_s - 1 if least_s > 0 else 0.0

    def medians(self) -> tuple[float, ...]:
        """Return seconds per step, with the time between steps spread over them."""
        medians = [statistics.median(column) for column in self._columns]
        between_s = max(0.0, self.latency_s - sum(medians)) / max(1, len(medians))
        return tuple(m + between_s for m in medians)


def tiny_op_seconds() -> float:
    """Return the seconds of torch's smallest op in a quiet moment: the minimum of many runs."""
    numbers = torch.zeros(16)

    def seconds() -> float:
        start = time.perf_counter()
        torch.add(numbers, numbers)
        return time.perf_counter() - start

    return min(seconds() for _ in range(_TINY_OPS))


def recorded_latency(program: Program, examples: Sequence[torch.Tensor], executor: Executor) -> float:
    """Run one inference as served. Returns the seconds until its last step ended."""
    recordings: SimpleQueue[Recording] = SimpleQueue()
    start_s = time.perf_counter()
    executor.run(program, examples, on_recording=recordings.put)
    return max((note.end_s for note in recordings.get().notes), default=start_s) - start_s


def repeat() -> Iterator[int]:
    """Yield run numbers until the time is spent, within a minimum and maximum number."""
    start = time.perf_counter()
    for n in range(_MOST_RUNS):
        if n >= _FEWEST_RUNS and time.perf_counter() - start > _MEASURING_S:
            return
        yield n


@contextmanager
def repeating(work: Callable[[], object], name: str) -> Iterator[None]:
    """Call a function repeatedly in a thread of this name, until the block ends."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=loop, name=name)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def last_level_cache_bytes() -> int:
    """Return the size of the last-level cache, at most 128 MiB; 32 MiB if the system does not report it."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
    return min(max(sizes, default=32 << 20), 128 << 20)
