"""Measures a model on a CUDA device: scratch and time of its kernels, and how much copies slow them down.

Kernels are measured layer by layer, with only the op's own parameters on the device (HOME, section 3.7), so that a
model may be larger than the device. Times are device times between events. A run as one graph, without gaps between
kernels, corrects their sum: with everything resident if that fits, else layer by layer.
"""

import fcntl
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from pathlib import Path

import msgspec
import torch
from msgspec import UNSET

from cohabit.planner import cache_file
from cohabit.planner.errors import FormatError
from cohabit.planner.graph import Graph, aligned, decode_as, fingerprint
from cohabit.planner.lifetimes import lifespans, live_activation_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Address, Compute, Drop, Plan, Step, SwapIn
from cohabit.planner.profile import Link, Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend, OnProgress
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.executor import CudaExecutor
from cohabit.runtime.cuda.profiling.dry_run import LEAST_LARGE_BYTES
from cohabit.runtime.cuda.profiling.fusion_probe import refused_ops, with_plain, with_probes
from cohabit.runtime.cuda.profiling.link import LinkBench
from cohabit.runtime.cuda.profiling.scratch import kernel_scratch, wasted_bytes, with_scratch
from cohabit.runtime.cuda.program import MOST_SCRATCH_BYTES, CudaProgram
from cohabit.runtime.lowering.lower import Lowered, NotCached
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import HostStore
from cohabit.runtime.stores.pinned import PinnedMemory

FORMAT_VERSION = 6
_ROUNDS = 7
_QUEUE_S = 0.03
"""Seconds that the device is held while an inference is issued op by op, so that it runs without gaps."""
_PAGE_BYTES = 4 << 10
_SPARE_SHARE, _SPARE_BYTES = 0.05, 256 << 20
"""Free memory left to graphs and libraries by the correcting run: a fraction, and its maximum in bytes."""
_LEAST_FACTOR, _MOST_FACTOR = 0.25, 4.0
"""Limits of the correction of op times."""


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measurements of a model, per bucket in order."""

    scratch: tuple[tuple[int, ...], ...]
    """Bytes by op."""
    profiles: tuple[Profile, ...]
    """With the link from pinned memory."""
    staged: Link
    """The link through the staging ring."""
    refused: tuple[tuple[int, ...], ...]
    """Fused ops without a kernel on the device."""
    key: str = ""
    """Fingerprint of the measured graphs and device."""
    graphs: tuple[str, ...] = ()
    """Fingerprints of the graphs as lowered; the profiles name the graphs with measured scratch."""
    format_version: int = FORMAT_VERSION


_decoder = msgspec.json.Decoder(Measurement)


def measured(
    device: Backend,
    device_id: str,
    alone: Callable[[], AbstractContextManager[CudaExecutor]],
    pinned: PinnedMemory,
    lowered: Lowered,
    store: HostStore[torch.Tensor],
    cache: Path | None,
    on_progress: OnProgress,
    *,
    known_only: bool = False,
) -> tuple[Lowered, dict[Bucket, Profile]]:
    """Return the model with the scratch of its kernels on this device, and its profiles, from the cache if possible.

    `alone` returns an executor that serves nothing else. Only one process at a time measures on a device: two would
    disturb each other. It waits for that before it holds up its own lanes.

    Raises MemoryExceeded if the device cannot hold one op with its live activations, DeviceError, and with `known_only`
    NotCached.
    """
    graphs = [lowered.graphs[b].fingerprint for b in lowered.buckets]
    key = fingerprint([*graphs, device.name, store.kind, lowered.options.tf32])
    path = None if cache is None else cache / f"cuda-{key[:32]}.json"
    known = None if path is None else _read(path, key)
    if known is None and known_only:
        raise NotCached(f"{lowered.name}: the cache has no undamaged profile of it")
    if known is None:
        with _only_process(cache, device_id):
            known = None if path is None else _read(path, key)  # another process may have measured it meanwhile
            if known is None:
                with alone() as executor:
                    known = _measure(device, executor, pinned, lowered, store, on_progress)
                known = msgspec.structs.replace(known, key=key, graphs=tuple(graphs))
                if path is not None:
                    cache_file.write(path, msgspec.json.encode(known))
    profiles = known.profiles
    if store.staged:
        profiles = tuple(
            msgspec.structs.replace(profile, swap_in=known.staged, encoded=UNSET) for profile in profiles
        )
    for bucket, scratch, refused in zip(lowered.buckets, known.scratch, known.refused, strict=True):
        lowered = with_plain(with_scratch(lowered, bucket, scratch), bucket, refused)
    return lowered, dict(zip(lowered.buckets, profiles, strict=True))


def _read(path: Path, key: str) -> Measurement | None:
    try:
        known = decode_as(cache_file.read(path), _decoder, "measurement", FORMAT_VERSION)
    except (FileNotFoundError, FormatError):
        return None
    return known if known.key == key else None


@contextmanager
def _only_process(folder: Path | None, device: str) -> Iterator[None]:
    """Hold the lock by which processes that share the folder measure on this device one at a time."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".measuring-{device.replace(':', '-')}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, however the process ends
        yield


def _measure(
    device: Backend,
    executor: CudaExecutor,
    pinned: PinnedMemory,
    lowered: Lowered,
    store: HostStore[torch.Tensor],
    on_progress: OnProgress,
) -> Measurement:
    scratch: list[tuple[int, ...]] = []
    profiles: list[Profile] = []
    refused: list[tuple[int, ...]] = []
    streams = executor.streams
    bench = LinkBench(streams, pinned)
    try:
        link_in, link_out = bench.links()
        staged = bench.staged(store, lowered.manifest)
        encoded = bench.encoded(store, lowered.manifest, link_in)
        for bucket in lowered.buckets:
            on_progress(f"{lowered.name}: measuring batch {bucket}")
            graph, examples = lowered.graphs[bucket], lowered.examples(bucket)
            # The first run also chooses between fused and plain kernels.
            tried, probes = with_probes(lowered, bucket)
            plan = _layer_plan(graph, streams.driver.memory().free_bytes)
            with loaded(device, executor, tried, store, plan) as program:
                beyond = kernel_scratch(streams, program, graph, examples)
                seconds = _op_seconds(executor, program, examples)
                contended = _op_seconds(executor, program, examples, bench, link_in)
            # The pool's waste depends on the scratch, and the graph's fingerprint on both.
            refused.append(refused_ops(lowered, bucket, probes))
            lowered = with_plain(with_scratch(lowered, bucket, beyond), bucket, refused[-1])
            waste = wasted_bytes(streams, lowered.graphs[bucket])
            scratch.append(tuple(nbytes + waste for nbytes in beyond))
            lowered = with_scratch(lowered, bucket, scratch[-1])
            slowdown = max(1.0, sum(contended) / (sum(seconds) or 1.0))
            link = staged if store.staged else link_in
            profile = Profile(
                lowered.graphs[bucket].fingerprint,
                device.name,
                seconds,
                link,
                link_out,
                slowdown,
                encoded=encoded,
            )
            # The correction predicts with this store's link; the cached profile has that of pinned memory.
            profile = _corrected(device, executor, lowered, store, bucket, profile, bench)
            profiles.append(msgspec.structs.replace(profile, swap_in=link_in))
    finally:
        bench.close()
    return Measurement(tuple(scratch), tuple(profiles), staged, tuple(refused))


@contextmanager
def loaded(
    device: Backend, executor: CudaExecutor, lowered: Lowered, store: HostStore[torch.Tensor], plan: Plan
) -> Iterator[CudaProgram]:
    """Load a plan's program into a separate arena, for the block."""
    arena = device.arena(plan.memory.nbytes)
    program = device.build(lowered, plan, None, arena, Bases(0, plan.memory.partition_bytes), store)
    assert isinstance(program, CudaProgram)
    try:
        executor.load(program)
        yield program
    finally:
        executor.release(program)
        arena.close()


def _layer_plan(graph: Graph, free_bytes: int) -> Plan:
    """Return a plan that swaps each parameter in after the op before its reader, and drops it after the reader.

    As far as memory is free, the pool holds the peak of live activations, gaps between them, and the maximum scratch of
    a kernel.
    """
    steps: list[Step] = []
    computes: list[int] = []
    dead = _dead_after(graph)
    window = 0
    for number, needed in enumerate(graph.needed):
        streamed = [i for i in needed if graph.tensors[i].kind == "parameter"]
        sizes = [aligned(graph.tensors[i].nbytes, _PAGE_BYTES) for i in streamed]
        for i, offset in zip(streamed, accumulate(sizes, initial=0), strict=False):
            steps.append(SwapIn(i, Address("partition", offset), tuple(computes[-1:])))
        waits = (len(steps) - 1,) if streamed else ()
        computes.append(len(steps))
        steps += [Compute(number, waits), *map(Drop, dead[number])]
        if number < len(graph.needed) - 1:  # outputs may be parameters
            steps += [Drop(i) for i in streamed]
        window = max(window, sum(sizes))
    peak = max(live_activation_bytes(graph))
    pool = peak + max(peak, 2 * LEAST_LARGE_BYTES) + MOST_SCRATCH_BYTES
    pool = max(peak, min(pool, free_bytes - window - _spare_bytes(free_bytes)))
    memory = Memory(aligned(pool, _PAGE_BYTES), window)
    return Plan(graph.fingerprint, "", memory, memory.workspace_bytes, (), tuple(steps))


def resident(graph: Graph) -> Plan:
    """Return a plan with every parameter resident and a pool of the size that activations and scratch need."""
    plan, dead = resident_plan(graph), _dead_after(graph)
    pool = aligned(max(live_activation_bytes(graph)), _PAGE_BYTES)
    memory = Memory(pool, plan.memory.partition_bytes)
    steps = [step for number in range(len(graph.ops)) for step in (Compute(number), *map(Drop, dead[number]))]
    return msgspec.structs.replace(plan, memory=memory, pool_bytes=pool, steps=tuple(steps))


def _dead_after(graph: Graph) -> list[list[int]]:
    """Return, by op, the inputs and activations that it uses last."""
    dead: list[list[int]] = [[] for _ in graph.ops]
    for i, span in enumerate(lifespans(graph)):
        if span is not None and i not in graph.outputs and not graph.tensors[i].is_weight and graph.ops:
            dead[span.end - 1].append(i)
    return dead


def _spare_bytes(free_bytes: int) -> int:
    return min(int(_SPARE_SHARE * free_bytes), _SPARE_BYTES)


def _op_seconds(
    executor: CudaExecutor,
    program: CudaProgram,
    examples: Sequence[torch.Tensor],
    bench: LinkBench | None = None,
    link: Link | None = None,
) -> tuple[float, ...]:
    """Return the median device time of each op; with `bench`, while the link is busy with other copies."""
    columns: list[list[float]] = [[] for _ in program.computes]
    streams, wall_s = executor.streams, 0.0
    for n in range(_ROUNDS + 1):
        with streams.driver.on(streams.compute):
            streams.driver.hold(_QUEUE_S)
        wait = None
        if bench is not None and link is not None and n:
            wait = bench.busy(2 * wall_s + _QUEUE_S, link)
        result = executor.run(program, examples, traced=True)
        wall_s = result.latency_s
        if wait is not None:
            wait()
        assert result.timeline is not None
        if n:  # the first run initialises libraries
            spans = [span for span in result.timeline.spans if span.lane == "compute"]
            for column, span in zip(columns, spans, strict=True):
                column.append(span.end_s - span.start_s)
    return tuple(statistics.median(column) for column in columns)


def _corrected(
    device: Backend,
    executor: CudaExecutor,
    lowered: Lowered,
    store: HostStore[torch.Tensor],
    bucket: Bucket,
    profile: Profile,
    bench: LinkBench,
) -> Profile:
    """Return the profile with op times scaled so that a plan's prediction matches its run, and with the host's time.

    If the run copies nothing, also measures how much ops slow copies down.
    """
    graph, examples = lowered.graphs[bucket], lowered.examples(bucket)
    streams = executor.streams
    free_bytes, plan, swap_slowdown = streams.driver.memory().free_bytes, resident(graph), 1.0
    if plan.memory.nbytes > free_bytes - _spare_bytes(free_bytes):
        plan = _layer_plan(graph, free_bytes)
    with loaded(device, executor, lowered, store, plan) as program:
        runs = [executor.run(program, examples) for _ in range(3 * _ROUNDS)][_ROUNDS:]
        device_s = statistics.median(run.device_s or 0.0 for run in runs)
        host_s = statistics.median(run.latency_s - (run.device_s or 0.0) for run in runs)
        copies = [program.schedule.copies[c.index] for c in program.schedule.inference if c.verb == "copy"]
        if not copies:
            swap_slowdown = _swap_slowdown(executor, program, examples, bench, profile.swap_in, device_s)
    copies_s = sum(profile.link_of(graph.tensors[copy.segment]).seconds(copy.nbytes) for copy in copies)
    factor = _correction(profile.compute_s, device_s, copies_s)
    return msgspec.structs.replace(
        profile,
        op_seconds=tuple(factor * seconds for seconds in profile.op_seconds),
        swap_slowdown=swap_slowdown,
        host_s=max(0.0, host_s),
    )


def _correction(ops_s: float, device_s: float, copies_s: float) -> float:
    """Return the factor of op times with which ops and copies, run in sequence, take the measured device time.

    The factor is limited: where copies take nearly all of the time, their variance hides the ops.
    """
    return min(max((device_s - copies_s) / (ops_s or 1.0), _LEAST_FACTOR), _MOST_FACTOR)


def _swap_slowdown(
    executor: CudaExecutor,
    program: CudaProgram,
    examples: Sequence[torch.Tensor],
    bench: LinkBench,
    link: Link,
    device_s: float,
) -> float:
    """Return the factor, at least 1, by which copies slow down while a program without copies computes."""
    copying: list[float] = []
    for _ in range(_ROUNDS):
        alone = bench.busy(0.8 * device_s, link)()
        wait = bench.busy(0.8 * device_s, link)
        executor.run(program, examples)
        copying.append(wait() / alone)
    return max(1.0, statistics.median(copying))
