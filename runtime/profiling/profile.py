"""A lowered model's profiles on this machine, measured or from the cache."""

import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from planner import profile as profile_format
from planner.errors import FormatError
from planner.graph import Graph, fingerprint
from planner.plan import Address, Compute, Placement, Plan
from planner.profile import Profile
from runtime.binding.program import Bases, build
from runtime.cpu.arena import Arena
from runtime.cpu.executor import Executor
from runtime.cpu.store import Store
from runtime.lowering.lower import Lowered
from runtime.profiling.measuring import (
    Cold,
    copies_of,
    measure_contention,
    measure_link,
    measure_ops,
    measure_way_out,
)

_METHOD = 2
"""Counted up with whatever is measured otherwise: what a cache has from before is measured anew."""


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
        batch: cache / f"{fingerprint([graph.fingerprint, device, _METHOD])[:32]}.json"
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
    cold = Cold.beside(lowered.manifest)
    with Arena(2 * lowered.manifest.segment_bytes) as arena, Executor() as executor:
        for batch, graph in sorted(lowered.graphs.items()):
            on_progress(f"{lowered.name}: measuring batch {batch}")
            program = build(lowered, resident_plan(graph), None, arena, Bases(0, 0), store, scripted=scripted)
            if not profiles:
                executor.load(program)
                link = measure_link(lowered.manifest, store, arena, executor, cold)
                way_out = measure_way_out(store)
            alone_s, op_seconds = measure_ops(lowered, program, executor, cold)
            if not profiles:
                copies = copies_of(lowered.manifest, store, arena, None)
                slowdowns = measure_contention(program, lowered.examples(batch), executor, copies, cold, alone_s)
            profiles[batch] = Profile(graph.fingerprint, device, op_seconds, link, way_out, *slowdowns)
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


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
