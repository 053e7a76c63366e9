"""The CPU as a device: anonymous memory, stores that threads read, and executors with two threads each."""

from collections.abc import Sequence
from pathlib import Path

import torch

from planner.plan import Plan
from planner.profile import Profile
from runtime.backend import OnProgress
from runtime.binding.program import Bases, Program, build
from runtime.cpu.arena import Arena
from runtime.cpu.executor import Executor
from runtime.cpu.pages import Bytes
from runtime.cpu.store import LimitedStore, Links, open_store
from runtime.lowering.lower import Lowered
from runtime.lowering.weights import Manifest
from runtime.memory import Memory, Source, StoreKind
from runtime.profiling.profile import device_name, profile
from runtime.shared_region.moving import Movable


class CpuBackend:
    """`link_bandwidth_bytes_per_s` slows copies down, to stand in for another bus or flash.

    With `scripted`, stretches of a program's calls run outside of Python's interpreter, and profiles are of such runs.
    """

    name = "cpu"

    def __init__(self, link_bandwidth_bytes_per_s: float | None = None, *, scripted: bool = False) -> None:
        self._bandwidth = link_bandwidth_bytes_per_s
        self.scripted = scripted
        self._links = Links()
        self._executors: list[Executor] = []

    def arena(self, nbytes: int) -> Arena:
        return Arena(nbytes)

    def open_store(self, kind: StoreKind, path: Path, manifest: Manifest) -> Source[Bytes]:
        store = open_store(kind, path, manifest)
        return store if self._bandwidth is None else LimitedStore(store, self._bandwidth, links=self._links)

    @property
    def executor(self) -> Executor:
        return self.executors(1)[0]

    def executors(self, count: int) -> Sequence[Executor]:
        """Started when they are first asked for."""
        while len(self._executors) < count:
            self._executors.append(Executor())
            self._executors[-1].start()
        return self._executors[:count]

    def measure(
        self, lowered: Lowered, store: Source[Bytes], cache: Path | None, on_progress: OnProgress
    ) -> tuple[Lowered, dict[int, Profile]]:
        limit = "" if self._bandwidth is None else f" at {self._bandwidth:.0f} B/s"
        device = device_name(torch.get_num_threads(), store, limit, scripted=self.scripted)
        return lowered, profile(lowered, store, device, cache, on_progress, scripted=self.scripted)

    def build(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: Memory[Bytes],
        bases: Bases,
        store: Source[Bytes],
    ) -> Program:
        return build(lowered, plan, profile, arena, bases, store, scripted=self.scripted)

    def movable(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: Memory[Bytes],
        bases: Bases,
        store: Source[Bytes],
    ) -> Movable:
        return Movable(lowered, plan, profile, arena, store, scripted=self.scripted)

    def close(self) -> None:
        for executor in self._executors:
            executor.close()
