"""What a stopwatch says of a model on this CPU: its ops, the link, and what they do to each other."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from planner.profile import Link
from planner.timeline import Span
from runtime.binding.program import ComputeStep, Program, SwapInStep
from runtime.cpu.arena import Arena
from runtime.cpu.executor import Executor
from runtime.cpu.store import Store
from runtime.lowering.lower import Lowered
from runtime.lowering.weights import BLOCK_BYTES, Manifest
from runtime.profiling.repeating import repeating
from runtime.recording import Note, Recording

_MEASURING_S = 0.3
"""Time to spend on each figure, beyond the fewest runs."""
_FEWEST_RUNS = 7
_MOST_RUNS = 200
_ACTIVATION_BYTES = (4 << 20, BLOCK_BYTES)


class Cold:
    """Makes the processor's caches forget a model, as the requests for other models between two of its own do."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = np.zeros(nbytes, np.uint8)

    @staticmethod
    def beside(manifest: Manifest) -> "Cold":
        """A model that no cache can hold forgets itself."""
        cache_bytes = _largest_cache_bytes()
        return Cold(0 if manifest.segment_bytes > 2 * cache_bytes else 2 * cache_bytes)

    def __call__(self) -> None:
        self._buffer += 1


def measure_ops(
    lowered: Lowered, program: Program, executor: Executor, cold: Cold
) -> tuple[float, tuple[float, ...]]:
    """Median latency as served, and seconds per op, with what lies between ops spread over them."""
    executor.run(program, lowered.examples(program.batch))
    by_op, as_served = _Times(program.computes), _Times(program.stretched)
    for _ in repeat():
        cold()
        timeline = executor.run(program, lowered.examples(program.batch), traced=True).timeline
        assert timeline is not None
        by_op.add(timeline.latency_s, timeline.spans)
        if program.stretched:
            cold()
            as_served.add(*followed(program, lowered.examples(program.batch), executor))
    op_seconds = by_op.medians()
    if not program.stretched:
        return by_op.latency_s, op_seconds
    return as_served.latency_s, shared_out(program.stretched, as_served.medians(), op_seconds)


class _Times:
    """Durations of a program's steps, run by run."""

    def __init__(self, steps: Sequence[ComputeStep]) -> None:
        self._columns: list[list[float]] = [[] for _ in steps]
        self._latencies: list[float] = []

    def add(self, latency_s: float, spans: Sequence[Span | Note]) -> None:
        self._latencies.append(latency_s)
        for column, span in zip(self._columns, spans, strict=True):
            column.append(span.end_s - span.start_s)

    @property
    def latency_s(self) -> float:
        return statistics.median(self._latencies)

    def medians(self) -> tuple[float, ...]:
        """By step, with what lies between steps spread over them."""
        medians = [statistics.median(column) for column in self._columns]
        between_s = max(0.0, self.latency_s - sum(medians)) / max(1, len(medians))
        return tuple(m + between_s for m in medians)


def followed(
    program: Program, examples: Sequence[torch.Tensor], executor: Executor
) -> tuple[float, Sequence[Note]]:
    """Run one inference as served; the seconds until its last step ended, and when its steps ran."""
    told: SimpleQueue[Recording] = SimpleQueue()
    start_s = time.perf_counter()
    executor.run(program, examples, follow=told.put)
    notes = told.get().notes
    return max((note.end_s for note in notes), default=start_s) - start_s, notes


def shared_out(
    stretched: Sequence[ComputeStep], seconds: Sequence[float], op_seconds: Sequence[float]
) -> tuple[float, ...]:
    """Seconds per op: those of each step of `stretched`, shared out to its ops by what they take when run alone."""
    scaled: list[float] = []
    for step, step_s in zip(stretched, seconds, strict=True):
        own = op_seconds[len(scaled) : len(scaled) + step.length]
        factor = step_s / sum(own)
        scaled += [op_s * factor for op_s in own]
    return tuple(scaled)


def measure_link(manifest: Manifest, store: Store, arena: Arena, executor: Executor, cold: Cold) -> Link:
    """Copy every segment whole, then the first block of each: the difference is bandwidth, the rest latency."""
    whole = copies_of(manifest, store, arena, None)
    blocks = copies_of(manifest, store, arena, BLOCK_BYTES)
    if not whole:
        return Link(1e-5, 1e10)
    executor.copy(whole)
    whole_times = []
    for _ in range(5):
        cold()
        whole_times.append(executor.copy(whole))
    whole_s = statistics.median(whole_times)
    latency_s = statistics.median(executor.copy(blocks) for _ in range(5)) / len(blocks)
    streaming_s = max(whole_s - latency_s * len(whole), whole_s * 0.05)
    return Link(latency_s, sum(step.nbytes for step in whole) / streaming_s)


def measure_way_out(store: Store) -> Link:
    """Copy an activation of some size out, then one of a block, to places of the store."""
    times_s = []
    for place, nbytes in zip(store.places(_ACTIVATION_BYTES), _ACTIVATION_BYTES, strict=True):
        source = torch.zeros(nbytes, dtype=torch.uint8)
        place.save(source)  # its pages are taken now
        times_s.append(statistics.median(_timed(partial(place.save, source)) for _ in range(5)))
        place.close()
    whole_s, latency_s = times_s
    return Link(latency_s, _ACTIVATION_BYTES[0] / max(whole_s - latency_s, whole_s * 0.05))


def _timed(copy: Callable[[], None]) -> float:
    start = time.perf_counter()
    copy()
    return time.perf_counter() - start


def copies_of(manifest: Manifest, store: Store, arena: Arena, most: int | None) -> list[SwapInStep]:
    """Copies of all segments to the arena's second half."""
    steps = []
    for n, segment in enumerate(manifest.segments):
        nbytes = segment.nbytes if most is None else min(segment.nbytes, most)
        if nbytes:
            destination = arena.bytes(manifest.segment_bytes + segment.offset, nbytes)
            steps.append(SwapInStep(-1, n, store.copy(n, destination), nbytes, 0))
    return steps


def measure_contention(
    program: Program,
    examples: Sequence[torch.Tensor],
    executor: Executor,
    copies: Sequence[SwapInStep],
    cold: Cold,
    alone_s: float,
) -> tuple[float, float]:
    """How much ops and copies slow each other down: `(compute, swap)`, both at least 1."""
    if not copies:
        return 1.0, 1.0
    alone_copy_s = statistics.median(_seconds(copies) for _ in range(3))
    rounds: list[float] = []
    with repeating(lambda: rounds.append(_seconds(copies)), "busy-link"):
        latencies = []
        for _ in repeat():
            cold()
            latencies.append(followed(program, examples, executor)[0])
    beside_s = statistics.median(latencies)
    beside_copy_s = statistics.median(rounds) if rounds else alone_copy_s
    return max(1.0, beside_s / alone_s), max(1.0, beside_copy_s / alone_copy_s)


def _seconds(copies: Sequence[SwapInStep]) -> float:
    start = time.perf_counter()
    for step in copies:
        step.copy()
    return time.perf_counter() - start


def repeat() -> Iterator[int]:
    """Count runs until the time is spent, with a least and a greatest number."""
    start = time.perf_counter()
    for n in range(_MOST_RUNS):
        if n >= _FEWEST_RUNS and time.perf_counter() - start > _MEASURING_S:
            return
        yield n


def _largest_cache_bytes() -> int:
    """Size of the last-level cache, within reason; 32 MiB where the system does not say."""
    sizes = [32 << 20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
    return min(max(sizes), 128 << 20)
