"""Profiles of a lowered model, measured with every parameter resident, or read from the cache."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from msgspec.structs import replace

from cohabit.planner import cache_file
from cohabit.planner import profile as profile_format
from cohabit.planner.errors import FormatError
from cohabit.planner.graph import Graph, fingerprint
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Address, Compute, Placement, Plan
from cohabit.planner.profile import NOISY, Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Executor
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.model import TABLE_OPS
from cohabit.runtime.measure.link import (
    leading,
    measure_contention,
    measure_swap_in,
    measure_swap_out,
    measured_bytes,
    segment_copies,
)
from cohabit.runtime.measure.other_work import cpu_times, share_between
from cohabit.runtime.measure.stopwatch import ColdCaches, measure_ops, tiny_op_seconds
from cohabit.runtime.memory import DeviceArena, HostStore

logger = logging.getLogger(__name__)

_LEAST_S = 1e-9
_METHOD = 6
"""Version of the measurement method; a change invalidates cached profiles."""

_CHEAP_BYTES = 16 << 10
"""An op that touches at most this many bytes takes a few times as long as torch's smallest op."""
_CHEAP_TIMES = 10
"""Limit for the cheapest such op, as a multiple of torch's smallest. Time beyond it is other work's, on every op."""

_SAMPLE_BYTES = 64 << 20
"""Bytes of a model that are copied to time the link provisionally: lowering needs memory in the same process."""

_profiles: WeakValueDictionary[bytes, Profile] = WeakValueDictionary()
"""Profiles in use, by a digest of their files, which models of a family share."""

OpenArena = Callable[[int], AbstractContextManager[DeviceArena[Any]]]
Build = Callable[[Lowered, Plan, None, DeviceArena[Any], Bases, HostStore[Any]], Program]


def cached_profiles(
    lowered: Lowered,
    device: str,
    cache: Path | None,
    measured: Callable[[], dict[Bucket, Profile]],
    *,
    quick: bool,
    is_quiet: Callable[[], bool] = lambda: False,
) -> dict[Bucket, Profile]:
    """Return profiles by bucket, from the cache if all these graphs were measured on this device before.

    Otherwise `measured` measures them. With `quick`, cached profiles may be provisional. Without, noisy ones are
    measured again if the machine is quiet now.
    """

    def paths(*, provisional: bool) -> dict[Bucket, Path]:
        return {
            bucket: _path(cache, graph.fingerprint, device, provisional=provisional)
            for bucket, graph in lowered.graphs.items()
            if cache is not None
        }

    for kind in (False, True) if quick else (False,):
        found = {bucket: _cached(path, lowered.graphs[bucket]) for bucket, path in paths(provisional=kind).items()}
        known = {bucket: profile for bucket, profile in found.items() if profile is not None}
        if len(known) == len(lowered.graphs):
            is_noisy = max(profile.noise for profile in known.values()) > NOISY
            if quick or not is_noisy or not is_quiet():
                return known
    profiles = measured()
    provisional = any(profile.provisional for profile in profiles.values())
    for bucket, path in paths(provisional=provisional).items():
        try:
            cache_file.write(path, profile_format.encode(profiles[bucket]))
        except OSError as error:
            logger.warning("profile not kept: %s", error)
    return profiles


def forget(profiles: Iterable[Profile], cache: Path) -> None:
    """Remove profiles from the cache, so that they are measured again."""
    for profile in profiles:
        _path(cache, profile.graph, profile.device, provisional=profile.provisional).unlink(missing_ok=True)


def _path(cache: Path, graph: str, device: str, *, provisional: bool) -> Path:
    return cache / f"{fingerprint([graph, device, _METHOD, provisional])[:32]}.json"


def _cached(path: Path, graph: Graph) -> Profile | None:
    with suppress(FileNotFoundError, FormatError):
        raw = cache_file.read(path)
        key = hashlib.blake2b(raw).digest()
        if (known := _profiles.get(key)) is None:
            known = _profiles[key] = profile_format.decode(raw)
        if known.graph == graph.fingerprint and len(known.op_seconds) == len(graph.ops):
            return known
    return None


def measure(
    lowered: Lowered,
    device: str,
    build: Build,
    arena: DeviceArena[Any],
    store: HostStore[Any],
    executor: Executor,
    window_bytes: int = 0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[Bucket, Profile]:
    """Run a model with every parameter resident, alone and alongside a busy link.

    At the smallest batch size every bucket is measured, at each other batch size one. `_scaled_from` derives the rest,
    and lists the exceptions. `arena` has `measured_bytes`. The link, and how much the link and the ops slow each other
    down, are measured in the smallest bucket.
    """
    profiles: dict[Bucket, Profile] = {}
    before = cpu_times()
    cold = ColdCaches.for_model(lowered.manifest)
    for bucket, graph in sorted(lowered.graphs.items()):
        if _scaled_from(lowered, bucket) is not None:
            continue
        on_progress(f"{lowered.name}: measuring batch {bucket}")
        program = build(lowered, resident_plan(graph), None, arena, Bases(0, 0), store)

        def examples(bucket: Bucket = bucket) -> list[torch.Tensor]:
            return lowered.examples(bucket)

        if not profiles:
            # Once: all buckets have the same residents.
            executor.load(program)
            links_in = measure_swap_in(lowered.manifest, store, arena, window_bytes, cold)
            swap_out = measure_swap_out(store)
        times = measure_ops(program, examples, executor, cold)
        if not profiles:
            # The other profiles copy the links of this one.
            copies = segment_copies(lowered.manifest, store, arena, window_bytes)
            slowdowns = measure_contention(program, examples, executor, copies, cold, times.latency_s)
            links = Profile(
                "",
                device,
                (),
                links_in.plain,
                swap_out,
                *slowdowns,
                window_bytes=window_bytes,
                encoded=links_in.encoded,
            )
        op_seconds, extra = without_extra(graph, times.medians(), tiny_op_seconds())
        noise = max(times.noise, extra)
        profiles[bucket] = replace(links, graph=graph.fingerprint, op_seconds=op_seconds, noise=noise)
    # An op's time at its sizes and batch follows from three measured buckets.
    for bucket, graph in lowered.graphs.items():
        if (known := _scaled_from(lowered, bucket)) is not None:
            columns = zip(*(profiles[b].op_seconds for b in known), strict=True)
            op_seconds = tuple(
                at_size * at_batch / max(at_both, _LEAST_S) for at_size, at_batch, at_both in columns
            )
            noise = max(profiles[b].noise for b in known)
            profiles[bucket] = replace(links, graph=graph.fingerprint, op_seconds=op_seconds, noise=noise)
    # A steady load slows all runs alike, so that they do not differ.
    others = share_between(before, cpu_times())
    return {bucket: replace(own, noise=max(own.noise, others)) for bucket, own in profiles.items()}


def without_extra(graph: Graph, op_seconds: Sequence[float], tiny_s: float) -> tuple[tuple[float, ...], float]:
    """Return op times without the time that other work added to each, and that time as a fraction of the rest.

    Runs that are all disturbed equally show no noise, but their cheapest op is far slower than possible. `tiny_s` is
    the time of torch's smallest op. Gathers from the host's tables do not count as cheap: they read cold rows.
    """
    touched = [sum(graph.tensors[t].nbytes for t in op.touched) for op in graph.ops]
    gathers = set(map(str, TABLE_OPS))
    cheap = [
        seconds
        for op, seconds, nbytes in zip(graph.ops, op_seconds, touched, strict=True)
        if nbytes <= _CHEAP_BYTES and op.target not in gathers
    ]
    extra_s = max(0.0, min(cheap, default=0.0) - _CHEAP_TIMES * tiny_s)
    left = tuple(max(_LEAST_S, seconds - extra_s) for seconds in op_seconds)
    return left, extra_s * len(left) / max(_LEAST_S, sum(left))


def traced_profiles(
    lowered: Lowered, device: str, open_arena: OpenArena, store: HostStore[Any], window_bytes: int = 0
) -> dict[Bucket, Profile] | None:
    """Return provisional profiles with the times of a model's traced runs; None for a cached model.

    The link is measured once, alone, with the first segments.
    """
    seconds = {bucket: trace.op_seconds for bucket, trace in lowered.traces.items()}
    if not all(seconds.values()):
        return None
    sample = leading(lowered.manifest, _SAMPLE_BYTES)
    with open_arena(measured_bytes(sample, window_bytes)) as arena:
        links_in = measure_swap_in(sample, store, arena, window_bytes, ColdCaches(0), rounds=1)
    links = Profile(
        "",
        device,
        (),
        links_in.plain,
        measure_swap_out(store),
        provisional=True,
        window_bytes=window_bytes,
        encoded=links_in.encoded,
    )
    return {
        bucket: replace(links, graph=graph.fingerprint, op_seconds=seconds[bucket])
        for bucket, graph in lowered.graphs.items()
    }


def _scaled_from(lowered: Lowered, bucket: Bucket) -> tuple[Bucket, Bucket, Bucket] | None:
    """Return the buckets that determine a bucket's times; None for a bucket that is measured itself.

    These are its sizes at the smallest batch size, and the middle sizes at its own batch size and at the smallest: an
    op's time is assumed to grow by the same factor with the batch at all sizes. Buckets with a size of 1, or with other
    ops than these, are measured. Running large batches of large sizes would take most of a model's first start.
    """
    least = lowered.batches[0]
    alike = [b for b in lowered.buckets if b.batch == bucket.batch and 1 not in b.sizes]
    if bucket.batch == least or bucket not in alike:
        return None
    middle = alike[len(alike) // 2]
    known = (Bucket(least, bucket.sizes), middle, Bucket(least, middle.sizes))
    ops = {tuple(op.name for op in lowered.graphs[b].ops) for b in (bucket, *known)}
    return known if bucket != middle and len(ops) == 1 else None


def resident_plan(graph: Graph) -> Plan:
    """Return a plan with every parameter resident and space for all activations at once: valid, and wasteful."""
    partition = 0
    residents: list[Placement] = []
    for i in graph.parameters:
        residents.append(Placement(i, Address("partition", partition)))
        partition += graph.tensors[i].nbytes
    activations = sum(t.aligned_bytes for t in graph.tensors if t.kind != "parameter")
    pool = activations + max((op.aligned_scratch_bytes for op in graph.ops), default=0)
    return Plan(
        graph=graph.fingerprint,
        profile="",
        memory=Memory(pool, partition),
        pool_bytes=pool,
        residents=tuple(residents),
        steps=tuple(Compute(k) for k in range(len(graph.ops))),
    )
