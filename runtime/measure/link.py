"""Times copies between host and arena in both directions, and how much copies and ops slow each other down."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from msgspec import UNSET, UnsetType

from cohabit.planner.graph import aligned
from cohabit.planner.profile import Link
from cohabit.runtime.backend import Executor
from cohabit.runtime.binding.program import Program
from cohabit.runtime.lowering.weights import BLOCK_BYTES, Manifest
from cohabit.runtime.measure.stopwatch import ColdCaches, recorded_latency, repeat, repeating
from cohabit.runtime.memory import Copy, DeviceArena, HostStore

ROUNDS = 5
"""Number of times that all segments are copied to measure a link."""
_ACTIVATION_BYTES = (4 << 20, BLOCK_BYTES)
_LEAST_SHARE = 0.05
"""Minimum fraction of a large copy's time that counts as transfer rather than latency."""


def leading(manifest: Manifest, most_bytes: int) -> Manifest:
    """Return a manifest of the first segments, up to `most_bytes`; always includes the first one."""
    ends = manifest.memory_offsets[1:]
    fitting = [
        s for n, (s, end) in enumerate(zip(manifest.segments, ends, strict=True)) if not n or end <= most_bytes
    ]
    return msgspec.structs.replace(manifest, segments=tuple(fitting), tables=())


def measured_bytes(manifest: Manifest, window_bytes: int) -> int:
    """Return the arena bytes that `segment_copies` needs: the segments, then the window for copies."""
    largest = max((s.nbytes for s in manifest.segments if s.is_encoded), default=0)
    return manifest.segment_bytes + max(window_bytes, largest)


def segment_copies(
    manifest: Manifest,
    store: HostStore[Any],
    arena: DeviceArena[Any],
    window_bytes: int,
    most_bytes: int | None = None,
) -> list[Copy]:
    """Return copies of all segments, or of their first bytes, to their own addresses in the arena.

    A copy replaces bytes with the same bytes, so ops may read them meanwhile. With a window, copies go into it, behind
    the segments, one after the other; no copy is larger. Encoded segments always go there, since decoding would expose
    other bytes to ops meanwhile.
    """
    copies = []
    cursor, behind_bytes = 0, measured_bytes(manifest, window_bytes) - manifest.segment_bytes
    for n, (segment, own) in enumerate(zip(manifest.segments, manifest.memory_offsets, strict=False)):
        nbytes = segment.nbytes if most_bytes is None else min(segment.nbytes, most_bytes)
        if cursor + nbytes > behind_bytes:
            cursor = 0
        behind = window_bytes or segment.is_encoded
        copies.append(store.copy(n, arena.bytes(manifest.segment_bytes + cursor if behind else own, nbytes)))
        cursor += aligned(nbytes, BLOCK_BYTES) if behind else 0
    return copies


@dataclass(frozen=True, slots=True)
class SwapInLinks:
    """The link for bytes copied unchanged, and the links for encoded bytes, by codec."""

    plain: Link
    encoded: tuple[tuple[str, Link], ...] | UnsetType


def measure_swap_in(
    manifest: Manifest,
    store: HostStore[Any],
    arena: DeviceArena[Any],
    window_bytes: int,
    cold: ColdCaches,
    rounds: int = ROUNDS,
) -> SwapInLinks:
    """Copy every segment whole, then the first block of each: the difference is bandwidth, the rest latency.

    For a model with encoded segments, the plain link is that of an activation's swap-in.
    """
    whole = segment_copies(manifest, store, arena, window_bytes)
    blocks = segment_copies(manifest, store, arena, window_bytes, BLOCK_BYTES)
    groups: dict[str, list[int]] = defaultdict(list)
    for n, segment in enumerate(manifest.segments):
        groups[segment.codec].append(n)
    _seconds(whole)
    times_s: dict[str, list[float]] = {codec: [] for codec in groups}
    for _ in range(rounds):
        cold()
        for codec, members in groups.items():
            times_s[codec].append(_seconds([whole[n] for n in members]))
    # Latency from the first blocks, then bandwidth from the remaining time of whole copies.
    links: dict[str, Link] = {}
    for codec, members in groups.items():
        own_blocks = [blocks[n] for n in members]
        latency_s = statistics.median(_seconds(own_blocks) for _ in range(rounds)) / len(members)
        nbytes = sum(manifest.segments[n].nbytes for n in members)
        links[codec] = _link(latency_s, nbytes, statistics.median(times_s[codec]), len(members))
    plain = links.pop("plain", None)
    if plain is None or links:  # plain segments among encoded ones are too small to measure
        plain = _measure_activation(store, back=True)
    return SwapInLinks(plain, tuple(links.items()) or UNSET)


def measure_swap_out(store: HostStore[Any]) -> Link:
    """Copy a large activation, and one of a single block, to the store's spill buffers."""
    return _measure_activation(store, back=False)


def _measure_activation(store: HostStore[Any], *, back: bool) -> Link:
    times_s = []
    for buffer, nbytes in zip(store.spill_buffers(_ACTIVATION_BYTES), _ACTIVATION_BYTES, strict=True):
        activation = torch.zeros(nbytes, dtype=torch.uint8)
        buffer.save(activation)  # allocates the buffer's pages
        copy = partial(buffer.load if back else buffer.save, activation)
        times_s.append(statistics.median(_seconds([copy]) for _ in range(ROUNDS)))
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
            latencies.append(recorded_latency(program, examples(), executor))
    copy_s = statistics.median(rounds) if rounds else alone_copy_s
    return max(1.0, statistics.median(latencies) / alone_s), max(1.0, copy_s / alone_copy_s)


def _seconds(copies: Sequence[Copy]) -> float:
    start = time.perf_counter()
    for copy in copies:
        copy()
    return time.perf_counter() - start
