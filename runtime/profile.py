"""Measures a lowered model on this machine: seconds per op, the link's latency and bandwidth, and their contention."""

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch

from planner import profile as profile_format
from planner.errors import FormatError
from planner.graph import Graph, fingerprint
from planner.plan import Address, Compute, Placement, Plan
from planner.profile import Link, Profile
from planner.timeline import Span
from runtime.arena import Arena
from runtime.executor import Executor
from runtime.lower import Lowered
from runtime.program import Bases, ComputeStep, Program, SwapInStep, build, in_pieces
from runtime.recording import Note, Recording
from runtime.repeating import repeating
from runtime.store import Store
from runtime.stretches import between
from runtime.weights import BLOCK_BYTES, Manifest

_MEASURING_S = 0.3
"""Time to spend on each figure, beyond the fewest runs."""
_FEWEST_RUNS = 7
_MOST_RUNS = 200
_ACTIVATION_BYTES = (4 << 20, BLOCK_BYTES)
_OPS_IN_A_PIECE = 4
"""About as many as are between two waits of a plan that has to stream."""


def device_name(threads: int, store: Store, limit: str = "", *, scripted: bool = False) -> str:
    """What a profile is valid for: processor, threads, torch, store, and whether ops run in stretches."""
    way = ", scripted" if scripted else ""
    return f"{_processor()}, {threads} threads, torch {torch.__version__}, {store.kind} store{limit}{way}"


def profile(
    lowered: Lowered,
    store: Store,
    device: str,
    cache: Path | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
    *,
    scripted: bool = False,
) -> dict[int, Profile]:
    """Profiles by batch size, from the cache where these graphs were measured on this device before."""
    paths = {
        batch: cache / f"{fingerprint([graph.fingerprint, device])[:32]}.json"
        for batch, graph in lowered.graphs.items()
        if cache is not None
    }
    known = {batch: p for batch, path in paths.items() if (p := _cached(path, lowered.graphs[batch])) is not None}
    if len(known) == len(lowered.graphs):
        return known
    measured = measure(lowered, store, device, on_progress, scripted=scripted)
    for batch, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(profile_format.encode(measured[batch]))
    return measured


def _cached(path: Path, graph: Graph) -> Profile | None:
    with suppress(FileNotFoundError, FormatError):
        known = profile_format.decode(path.read_bytes())
        if known.graph == graph.fingerprint:
            return known
    return None


def measure(
    lowered: Lowered,
    store: Store,
    device: str,
    on_progress: Callable[[str], None] = lambda text: None,
    *,
    scripted: bool = False,
) -> dict[int, Profile]:
    """Run a model with every parameter resident, at every batch size, alone and beside a busy link.

    With `scripted`, as served in stretches: each op has its share of its stretch's time. What the link does, and what
    it and the ops do to each other, is measured at the smallest batch.
    """
    profiles: dict[int, Profile] = {}
    cold = _Cold.beside(lowered.manifest)
    with Arena(2 * lowered.manifest.segment_bytes) as arena, Executor() as executor:
        for batch, graph in sorted(lowered.graphs.items()):
            on_progress(f"{lowered.name}: measuring batch {batch}")
            program = build(lowered, resident_plan(graph), None, arena, Bases(0, 0), store, scripted=scripted)
            if not profiles:
                executor.load(program)
                link = _measure_link(lowered.manifest, store, arena, executor, cold)
                way_out = _measure_way_out(store)
            alone_s, op_seconds = _measure_ops(lowered, program, executor, cold)
            if not profiles:
                copies = _copies(lowered.manifest, store, arena, None)
                slowdowns = _measure_contention(program, lowered.examples(batch), executor, copies, cold, alone_s)
                stretch_s = _measure_stretch(lowered, program, store, executor, cold) if program.stretched else 0.0
            profiles[batch] = Profile(graph.fingerprint, device, op_seconds, link, way_out, *slowdowns, stretch_s)
    return profiles


def resident_plan(graph: Graph) -> Plan:
    """Everything resident, every activation at bytes of its own: right for any graph, and wasteful."""
    partition = workspace = 0
    residents: list[Placement] = []
    for i in graph.parameters:
        residents.append(Placement(i, Address("partition", partition)))
        partition += graph.tensors[i].nbytes
    places: dict[int, Address] = {}
    for i, tensor in enumerate(graph.tensors):
        if tensor.kind != "parameter":
            places[i] = Address("workspace", workspace)
            workspace += -(-tensor.nbytes // tensor.alignment) * tensor.alignment
    scratch = Address("workspace", workspace)
    return Plan(
        graph=graph.fingerprint,
        profile="",
        partition_bytes=partition,
        workspace_bytes=workspace + max((op.scratch_bytes for op in graph.ops), default=0),
        inputs=tuple(Placement(i, places[i]) for i, t in enumerate(graph.tensors) if t.kind == "input"),
        residents=tuple(residents),
        steps=tuple(
            Compute(n, tuple(places[i] for i in op.writes), scratch if op.scratch_bytes else None)
            for n, op in enumerate(graph.ops)
        ),
    )


class _Cold:
    """Makes the processor's caches forget a model, as the requests for other models between two of its own do."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = np.zeros(nbytes, np.uint8)

    @staticmethod
    def beside(manifest: Manifest) -> "_Cold":
        """A model that no cache can hold forgets itself."""
        cache_bytes = _largest_cache_bytes()
        return _Cold(0 if manifest.segment_bytes > 2 * cache_bytes else 2 * cache_bytes)

    def __call__(self) -> None:
        self._buffer += 1


def _measure_ops(
    lowered: Lowered, program: Program, executor: Executor, cold: _Cold
) -> tuple[float, tuple[float, ...]]:
    """Median latency as served, and seconds per op, with what lies between ops spread over them."""
    executor.run(program, lowered.examples(program.batch))
    by_op, as_served = _Times(program.computes), _Times(program.stretched)
    for _ in _repeat():
        cold()
        timeline = executor.run(program, lowered.examples(program.batch), traced=True).timeline
        assert timeline is not None
        by_op.add(timeline.latency_s, timeline.spans)
        if program.stretched:
            cold()
            as_served.add(*_followed(program, lowered.examples(program.batch), executor))
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


def _followed(
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


def _measure_link(manifest: Manifest, store: Store, arena: Arena, executor: Executor, cold: _Cold) -> Link:
    """Copy every segment whole, then the first block of each: the difference is bandwidth, the rest latency."""
    whole = _copies(manifest, store, arena, None)
    blocks = _copies(manifest, store, arena, BLOCK_BYTES)
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


def _measure_way_out(store: Store) -> Link:
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


def _copies(manifest: Manifest, store: Store, arena: Arena, most: int | None) -> list[SwapInStep]:
    """Copies of all segments to the arena's second half."""
    steps = []
    for n, segment in enumerate(manifest.segments):
        nbytes = segment.nbytes if most is None else min(segment.nbytes, most)
        if nbytes:
            destination = arena.bytes(manifest.segment_bytes + segment.offset, nbytes)
            steps.append(SwapInStep(-1, n, store.copy(n, destination), nbytes, 0))
    return steps


def _measure_contention(
    program: Program,
    examples: Sequence[torch.Tensor],
    executor: Executor,
    copies: Sequence[SwapInStep],
    cold: _Cold,
    alone_s: float,
) -> tuple[float, float]:
    """How much ops and copies slow each other down: `(compute, swap)`, both at least 1."""
    if not copies:
        return 1.0, 1.0
    alone_copy_s = statistics.median(_seconds(copies) for _ in range(3))
    rounds: list[float] = []
    with repeating(lambda: rounds.append(_seconds(copies)), "busy-link"):
        latencies = []
        for _ in _repeat():
            cold()
            latencies.append(_followed(program, examples, executor)[0])
    beside_s = statistics.median(latencies)
    beside_copy_s = statistics.median(rounds) if rounds else alone_copy_s
    return max(1.0, beside_s / alone_s), max(1.0, beside_copy_s / alone_copy_s)


def _measure_stretch(lowered: Lowered, program: Program, store: Store, executor: Executor, cold: _Cold) -> float:
    """What it costs to end one stretch and begin another: a resident model in many, against the same in few.

    Most of it is that Python's code and TorchScript's have left the processor's caches. The fastest runs are compared,
    because whatever else the machine does only makes runs slower.
    """
    pieces = in_pieces(lowered, program, store, _OPS_IN_A_PIECE)
    more = sum(1 for _ in between(range(0, len(program.computes), _OPS_IN_A_PIECE), len(program.computes))) - 1
    if more < 1:
        return 0.0
    fastest_s = {False: math.inf, True: math.inf}
    for _ in _repeat():
        for cut, one in ((False, program), (True, pieces)):
            cold()
            seconds, _ = _followed(one, lowered.examples(one.batch), executor)
            fastest_s[cut] = min(fastest_s[cut], seconds)
    return max(0.0, fastest_s[True] - fastest_s[False]) / more


def _seconds(copies: Sequence[SwapInStep]) -> float:
    start = time.perf_counter()
    for step in copies:
        step.copy()
    return time.perf_counter() - start


def _repeat() -> Iterator[int]:
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


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
