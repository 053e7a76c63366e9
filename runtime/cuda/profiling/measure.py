"""Measures a model on a CUDA device: scratch and time of its kernels, and how much copies slow them down.

While it is measured, a model's weights and activations are on the device at once, outside of any budget.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from cohabit.planner import cache_file
from cohabit.planner.errors import FormatError
from cohabit.planner.graph import Graph, decode_as, fingerprint
from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan
from cohabit.planner.profile import Link, Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import DeviceBackend, OnProgress
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.issue import Streams
from cohabit.runtime.cuda.profiling.fusion_probe import refused_ops, with_plain, with_probes
from cohabit.runtime.cuda.profiling.link import LinkBench
from cohabit.runtime.cuda.profiling.scratch import kernel_scratch, wasted_bytes, with_scratch
from cohabit.runtime.cuda.program import ALIGNMENT_BYTES, CudaProgram
from cohabit.runtime.cuda.stores import PinnedMemory
from cohabit.runtime.lowering.lower import Lowered, NotCached
from cohabit.runtime.memory import HostStore
from cohabit.runtime.profiling.profile import resident_plan

FORMAT_VERSION = 4
CudaDevice = DeviceBackend[CudaProgram]
_ROUNDS = 9
_AMPLE_BYTES = 16 << 30
"""The most memory besides its activations that a model is measured with, so that kernels get the scratch that they
prefer; at most half of what is free."""
_QUEUE_S = 0.03
"""How long the device is kept busy while an inference is issued op by op, so that it runs without gaps."""


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured of a model, per bucket in order."""

    scratch: tuple[tuple[int, ...], ...]
    """Bytes by op."""
    profiles: tuple[Profile, ...]
    refused: tuple[tuple[int, ...], ...]
    """The fused ops for which the device has no kernel."""
    key: str = ""
    """Fingerprint of the graphs and the device that were measured."""
    graphs: tuple[str, ...] = ()
    """Fingerprints of the graphs as they were lowered: those of the profiles have the scratch that was measured."""
    format_version: int = FORMAT_VERSION


_decoder = msgspec.json.Decoder(Measurement)


def measured(
    device: CudaDevice,
    streams: Streams,
    pinned: PinnedMemory,
    lowered: Lowered,
    store: HostStore[torch.Tensor],
    cache: Path | None,
    on_progress: OnProgress,
    *,
    known_only: bool = False,
) -> tuple[Lowered, dict[Bucket, Profile]]:
    """The model with the scratch that its kernels take here, and its profiles; from the cache if it has them.

    Raises MemoryExceeded if the device cannot hold the model at once, DeviceError, and with `known_only` NotCached.
    """
    graphs = [lowered.graphs[b].fingerprint for b in lowered.buckets]
    key = fingerprint([*graphs, device.name, store.kind, store.staged, lowered.options.tf32])
    path = None if cache is None else cache / f"cuda-{key[:32]}.json"
    known = None if path is None else _read(path, key)
    if known is None and known_only:
        raise NotCached(f"{lowered.name}: the cache has no undamaged profile of it")
    if known is None:
        known = _measure(device, streams, pinned, lowered, store, on_progress)
        if path is not None:
            cache_file.write(
                path, msgspec.json.encode(msgspec.structs.replace(known, key=key, graphs=tuple(graphs)))
            )
    for bucket, scratch, refused in zip(lowered.buckets, known.scratch, known.refused, strict=True):
        lowered = with_plain(with_scratch(lowered, bucket, scratch), bucket, refused)
    return lowered, dict(zip(lowered.buckets, known.profiles, strict=True))


def _read(path: Path, key: str) -> Measurement | None:
    try:
        known = decode_as(cache_file.read(path), _decoder, "measurement", FORMAT_VERSION)
    except (FileNotFoundError, FormatError):
        return None
    return known if known.key == key else None


def _measure(
    device: CudaDevice,
    streams: Streams,
    pinned: PinnedMemory,
    lowered: Lowered,
    store: HostStore[torch.Tensor],
    on_progress: OnProgress,
) -> Measurement:
    scratch: list[tuple[int, ...]] = []
    profiles: list[Profile] = []
    refused: list[tuple[int, ...]] = []
    bench = LinkBench(streams, pinned)
    try:
        link_in, link_out = bench.links()
        for bucket in lowered.buckets:
            on_progress(f"{lowered.name}: measuring batch {bucket}")
            graph, examples = lowered.graphs[bucket], lowered.examples(bucket)
            tried, probes = with_probes(lowered, bucket)
            with resident(device, streams, tried, store, graph) as program:
                beyond = kernel_scratch(streams, program, graph, examples)
                seconds = _op_seconds(device, streams, program, examples)
                slowdowns = _slowdowns(device, program, examples, bench, link_in)
                swap_in = _staged_link(device, program, link_in) if program.staged else link_in
            refused.append(refused_ops(lowered, bucket, probes))
            lowered = with_scratch(lowered, bucket, beyond)
            waste = wasted_bytes(streams, lowered.graphs[bucket])
            scratch.append(tuple(nbytes + waste for nbytes in beyond))
            lowered = with_scratch(lowered, bucket, scratch[-1])
            measured_graph = lowered.graphs[bucket].fingerprint
            profiles.append(Profile(measured_graph, device.name, seconds, swap_in, link_out, *slowdowns))
    finally:
        bench.close()
    return Measurement(tuple(scratch), tuple(profiles), tuple(refused))


@contextmanager
def resident(
    device: CudaDevice, streams: Streams, lowered: Lowered, store: HostStore[torch.Tensor], graph: Graph
) -> Iterator[CudaProgram]:
    """Load a program with everything resident and ample memory, for the block.

    Scratch that its kernels are refused is logged: the library has other kernels, which are then the measured ones.
    """
    plan = _ample_plan(graph, streams.driver.memory().free_bytes)
    arena = device.arena(plan.memory.nbytes)
    program = device.build(lowered, plan, None, arena, Bases(0, plan.memory.partition_bytes), store)
    program.admission.measuring = True
    try:
        device.executor.load(program)
        yield program
    finally:
        device.executor.release(program)
        arena.close()


def _ample_plan(graph: Graph, free_bytes: int) -> Plan:
    """Everything resident, and a workspace with as much more as kernels may want and the device can give."""
    plan = resident_plan(graph)
    pool = max(plan.pool_bytes, 2 * peak_activation_bytes(graph))
    spare = max(0, free_bytes - plan.memory.partition_bytes - pool)
    pool += min(spare // 2, _AMPLE_BYTES) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return msgspec.structs.replace(plan, memory=Memory(pool, plan.memory.partition_bytes), pool_bytes=pool)


def _op_seconds(
    device: CudaDevice, streams: Streams, program: CudaProgram, examples: Sequence[torch.Tensor]
) -> tuple[float, ...]:
    """An inference's time as it is served, divided among the ops by their device times."""
    columns: list[list[float]] = [[] for _ in program.computes]
    for _ in range(_ROUNDS):
        with streams.driver.on(streams.compute):
            streams.driver.hold(_QUEUE_S)
        timeline = device.executor.run(program, examples, traced=True).timeline
        assert timeline is not None
        for column, span in zip(columns, timeline.spans, strict=True):
            column.append(span.end_s - span.start_s)
    medians = [statistics.median(column) for column in columns]
    scale = _latency_s(device, program, examples) / (sum(medians) or 1.0)
    return tuple(m * scale for m in medians)


def _latency_s(device: CudaDevice, program: CudaProgram, examples: Sequence[torch.Tensor]) -> float:
    runs = [device.executor.run(program, examples).latency_s for _ in range(3 * _ROUNDS)]
    return statistics.median(runs[_ROUNDS:])


def _slowdowns(
    device: CudaDevice, program: CudaProgram, examples: Sequence[torch.Tensor], bench: LinkBench, link: Link
) -> tuple[float, float]:
    """Return the factors by which ops and copies slow each other down: (compute, swap), both at least 1."""
    alone_s = _latency_s(device, program, examples)
    overlapped: list[float] = []
    copying: list[float] = []
    for _ in range(_ROUNDS):
        wait = bench.busy(3 * alone_s, link)
        overlapped.append(device.executor.run(program, examples).latency_s)
        wait()
        alone = bench.busy(0.8 * alone_s, link)()
        wait = bench.busy(0.8 * alone_s, link)
        device.executor.run(program, examples)
        copying.append(wait() / alone)
    return max(1.0, statistics.median(overlapped) / alone_s), max(1.0, statistics.median(copying))


def _staged_link(device: CudaDevice, program: CudaProgram, link: Link) -> Link:
    """The link as the staging ring leaves it."""
    nbytes = sum(step.nbytes for step in program.residents)
    if not nbytes:
        return link
    seconds = statistics.median(device.executor.load(program) for _ in range(3))
    return Link(link.latency_s, nbytes / seconds)
