"""Models that share one region: what stays there between runs, and how parameters come. The published systems, as data.

- `time_shared`: one model at a time, copied in whole and waited for (SwapAdvisor's baseline)
- `pipelined`: one model at a time, layer by layer beside its computing (PipeSwitch)
- `lru`: whole models, the least recently used ones leave (Clockwork, Ray's multiplexing)
- `on_demand`: parameters, the least recently used ones leave (SwapAdvisor's ODSwap)
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from planner.errors import format_bytes
from planner.plan import Plan
from planner.profile import Profile
from runtime.backend import Backend, Result
from runtime.binding.program import Bases, Program
from runtime.captures import Capture, together
from runtime.errors import MemoryExceeded
from runtime.lowering.lower import Lowered
from runtime.memory import Memory, Source
from runtime.recording import Follow
from runtime.shared_region.moving import Movable
from runtime.shared_region.region import PLACES_REMEMBERED, Keeps, Region, Visit

PROGRAMS_KEPT = PLACES_REMEMBERED
"""Visits of a program that stay prepared: on CUDA each has graphs of its own."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How models share a region."""

    keeps: Keeps
    arrives: Literal["whole", "by layer", "on demand"]
    """Before the run; or while it computes, each op waiting for its own; or so, but on a model's first run only when
    an op is next, and prefetched once that run has shown the order."""

    @property
    def blocking(self) -> bool:
        return self.arrives == "whole"


SHARINGS = {
    "time_shared": Sharing("one", "whole"),
    "pipelined": Sharing("one", "by layer"),
    "lru": Sharing("models", "whole"),
    "on_demand": Sharing("tensors", "on demand"),
}


@dataclass(slots=True)
class _Guest:
    """One model at one batch size, and the visits that it was prepared for last."""

    movable: Movable
    programs: OrderedDict[Visit, Program] = field(default_factory=OrderedDict)
    first: Program | None = None
    """What was loaded first; on CUDA it holds the pool of those that are not prepared for good."""


class SharedRegion:
    """Runs programs of models that share a region, by the backend's own executor. Belongs to the engine's thread.

    To those who run programs it is an executor: each run first decides what has to be copied where.
    """

    changes_threads = False

    def __init__(
        self, backend: Backend, sharing: Sharing, arena: Memory[Any], workspace_bytes: int, region_bytes: int
    ) -> None:
        """The region lies behind the workspace, which begins with the arena."""
        self.region = Region(workspace_bytes, region_bytes, sharing.keeps, whole=sharing.blocking)
        self._workspace_bytes = workspace_bytes
        self._backend = backend
        self._executor = backend.executor
        self._sharing = sharing
        self._arena = arena
        self._guests: dict[tuple[str, int], _Guest] = {}
        self._known: set[str] = set()
        """Models that have run."""

    @property
    def lost(self) -> str | None:
        return self._executor.lost

    def add(self, lowered: Lowered, plan: Plan, profile: Profile | None, store: Source[Any]) -> Program:
        """Bind a plan that keeps every parameter, and make its program ready for visits.

        Raises MemoryExceeded if it can never run here, and what binding raises.
        """
        if plan.workspace_bytes > self._workspace_bytes:
            raise MemoryExceeded(
                f"{lowered.name}: the plan has a workspace of {format_bytes(plan.workspace_bytes)}, there are"
                f" {format_bytes(self._workspace_bytes)} below the region that models share"
            )
        movable = self._backend.movable(lowered, plan, profile, self._arena, Bases(0, 0), store)
        self.region.require(movable.uses)
        guest = self._guests[lowered.name, movable.home.batch] = _Guest(movable)
        if movable.is_admitted:
            self._admit(guest)
        return movable.home

    def _admit(self, guest: _Guest) -> None:
        """Load the programs of a model that comes, and of one that is found there."""
        uses = guest.movable.uses
        guest.first = self._program(guest, self.region.visit(uses))
        self._executor.load(guest.first)
        again = self._program(guest, self.region.visit(uses))
        if again is not guest.first:
            self._executor.load(again)
        self.region.forget(uses.model)

    def run(
        self,
        program: Program,
        inputs: Sequence[torch.Tensor],
        *,
        traced: bool = False,
        follow: Follow | None = None,
        serial: bool = False,
    ) -> Result:
        """Run one inference of a program that `add` returned. See `runtime.backend.Executor`."""
        guest = self._guests[program.name, program.batch]
        prefetch = self._sharing.arrives != "on demand" or program.name in self._known
        visit = self.region.visit(guest.movable.uses, prefetch=prefetch)
        try:
            visiting = self._program(guest, visit)
            comes_whole = self._sharing.blocking and visit.fetches
            waited_s = self._executor.load(visiting, follow=follow) if comes_whole else 0.0
            result = self._executor.run(visiting, inputs, traced=traced, follow=follow, serial=serial)
        except BaseException:
            self.region.forget(program.name)
            raise
        self._known.add(program.name)
        result.latency_s += waited_s
        result.stall_s += waited_s
        result.link_bytes = sum(guest.movable.uses.nbytes[fetch.segment] for fetch in visit.fetches)
        return result

    def expect(self, program: Program | None, *, followed: bool = False) -> None:
        """There are no bytes of the next model's own in which its copies could begin."""

    def expect_behind(self, program: Program, *, followed: bool = False) -> None:
        """As `expect`."""

    def capture(self, program: Program) -> Capture | None:
        """How a program's visits are issued. Any thread."""
        guest = self._guests[program.name, program.batch]
        programs = list(guest.programs.values())
        if guest.first is not None and not any(p is guest.first for p in programs):
            programs.append(guest.first)
        if self._sharing.keeps == "tensors":  # they have one pool, and what it stands for
            programs = programs[:1]
        return together(self._executor.capture(p) for p in programs)

    def close(self) -> None:
        """Give back what the programs hold."""
        for guest in self._guests.values():
            for program in (guest.first, *guest.programs.values(), guest.movable.home):
                if program is not None:
                    self._executor.dismiss(program)
        self._guests = {}

    def _program(self, guest: _Guest, visit: Visit) -> Program:
        """The program for a visit; with `blocking` it is the same whether its model was there or came."""
        blocking, programs = self._sharing.blocking, guest.programs
        if blocking:
            found = {**dict(visit.places), **{f.segment: f.offset for f in visit.fetches}}
            visit = Visit(tuple(sorted(found.items())), ())
        lasting = self._sharing.keeps != "tensors"
        if visit not in programs:
            programs[visit] = guest.movable.placed(visit, blocking=blocking, lasting=lasting)
            if len(programs) > PROGRAMS_KEPT:
                _, oldest = programs.popitem(last=False)
                if lasting:
                    self._executor.dismiss(oldest)
        programs.move_to_end(visit)
        return programs[visit]
