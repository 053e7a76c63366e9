"""Times copies between host and arena, in both directions, and how much copies and ops slow each other down."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from cohabit.planner.graph import aligned
from cohabit.planner.profile import Link
from cohabit.runtime.backend import Executor
from cohabit.runtime.binding.program import Program
from cohabit.runtime.lowering.weights import BLOCK_BYTES, Manifest
from cohabit.runtime.memory import Copy, DeviceArena, HostStore
from cohabit.runtime.profiling.stopwatch import ColdCaches, followed, repeat, repeating

ROUNDS = 5
"""Copies of all segments that a link is measured with."""
_ACTIVATION_BYTES = (4 << 20, BLOCK_BYTES)
_LEAST_SHARE = 0.05
"""The least share of a large copy's time that counts as transfer rather than latency."""


def leading(manifest: Manifest, most_bytes: int) -> Manifest:
    """Return a manifest of the first segments, of so many bytes at most; the first one always."""
    fitting = [s for n, s in enumerate(manifest.segments) if not n or s.offset + s.nbytes <= most_bytes]
    return msgspec.structs.replace(manifest, segments=tuple(fitting), tables=())


def segment_copies(
    manifest: Manifest,
    store: HostStore[Any],
    arena: DeviceArena[Any],
    window_bytes: int,
    most_bytes: int | None = None,
) -> list[Copy]:
    """Return copies of all segments, or of their first bytes, to where they lie in the arena.

    Ops that read them meanwhile read the same bytes: they are replaced by themselves. With a window they go there,
    behind the segments, one after the other; none is larger.
    """
    copies = []
    cursor = 0
    for n, segment in enumerate(manifest.segments):
        nbytes = segment.nbytes if most_bytes is None else min(segment.nbytes, most_bytes)
        if cursor + nbytes > window_bytes:
            cursor = 0
        offset = manifest.segment_bytes + cursor if window_bytes else segment.offset
        if nbytes:
            copies.append(store.copy(n, arena.bytes(offset, nbytes)))
        cursor += aligned(nbytes, BLOCK_BYTES)
    return copies


def measure_swap_in(
    manifest: Manifest,
    store: HostStore[Any],
    arena: DeviceArena[Any],
    window_bytes: int,
    cold: ColdCaches,
    rounds: int = ROUNDS,
) -> Link:
    """Copy every segment whole, then the first block of each: the difference is bandwidth, the rest latency."""
    whole = segment_copies(manifest, store, arena, window_bytes)
    blocks = segment_copies(manifest, store, arena, window_bytes, BLOCK_BYTES)
    if not whole:
        return Link(1e-5, 1e10)
    _seconds(whole)
    times_s = []
    for _ in range(rounds):
        cold()
        times_s.append(_seconds(whole))
    latency_s = statistics.median(_seconds(blocks) for _ in range(rounds)) / len(blocks)
    return _link(latency_s, manifest.segment_bytes, statistics.median(times_s), len(whole))


def measure_swap_out(store: HostStore[Any]) -> Link:
    """Copy a large activation and one of a block to the store's spill buffers."""
    times_s = []
    for buffer, nbytes in zip(store.spill_buffers(_ACTIVATION_BYTES), _ACTIVATION_BYTES, strict=True):
        save = partial(buffer.save, torch.zeros(nbytes, dtype=torch.uint8))
        save()  # the buffer's pages are taken now
        times_s.append(statistics.median(_seconds([save]) for _ in range(ROUNDS)))
        buffer.close()
    whole_s, latency_s = times_s
    return _link(latency_s, _ACTIVATION_BYTES[0], whole_s, 1)


def _link(latency_s: float, nbytes: int, whole_s: float, copies: int) -> Link:
    return Link(latency_s, nbytes / max(whole_s - latency_s * copies, whole_s * _LEAST_SHARE))


def measure_contention(
    program: Program,
    examples: Callable[[], list[torch.Tensor]],
    executor: Executor,
    copies: Sequence[Copy],
    cold: ColdCaches,
    alone_s: float,
) -> tuple[float, float]:
    """Return the factors by which ops and copies slow each other down: (compute, swap), both at least 1."""
    if not copies or alone_s == 0:
        return 1.0, 1.0
    alone_copy_s = statistics.median(_seconds(copies) for _ in range(3))
    rounds: list[float] = []
    with repeating(lambda: rounds.append(_seconds(copies)), "busy-link"):
        latencies = []
        for _ in repeat():
            cold()
            latencies.append(followed(program, examples(), executor))
    copy_s = statistics.median(rounds) if rounds else alone_copy_s
    return max(1.0, statistics.median(latencies) / alone_s), max(1.0, copy_s / alone_copy_s)


def _seconds(copies: Sequence[Copy]) -> float:
    start = time.perf_counter()
    for copy in copies:
        copy()
    return time.perf_counter() - start
