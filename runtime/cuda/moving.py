"""Programs for CUDA whose parameters lie wherever there is room."""

from dataclasses import replace
from typing import Any

import torch

from planner.plan import Plan
from planner.profile import Profile
from runtime.binding.program import Bases, Program
from runtime.cuda.host import Pinned
from runtime.cuda.lower import schedule
from runtime.cuda.program import CudaProgram, Readiness, equip, prepared_copies
from runtime.cuda.surface import Driver
from runtime.lowering.lower import Lowered
from runtime.memory import Memory, Source
from runtime.shared_region.moving import Movable
from runtime.shared_region.region import Visit

_MOVES = "its parameters lie elsewhere at every run"


class CudaMovable(Movable):
    """Lasting placements have a pool and graphs of their own; others share a pool and are issued command by command."""

    is_admitted = True
    home: CudaProgram

    def __init__(
        self,
        driver: Driver,
        pinned: Pinned,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: Memory[torch.Tensor],
        bases: Bases,
        store: Source[Any],
    ) -> None:
        super().__init__(lowered, plan, profile, arena, store)
        self._driver = driver
        self.home = equip(driver, pinned, lowered, self.home, profile, arena, bases, store)
        self._shared = Readiness(refused=_MOVES)

    def placed(self, visit: Visit, *, blocking: bool, lasting: bool) -> Program:
        own = replace(self.home, **self._changes(visit, blocking))
        lowered_to = schedule(own, join=not own.staged)
        return replace(
            own,
            schedule=lowered_to,
            copies=prepared_copies(lowered_to, self._arena, self._store),
            link_free=self._driver.event(external=True),
            ready=Readiness(refused=own.ready.refused) if lasting else self._shared,
            borrows=True,
        )
