"""Programs on CUDA whose parameters' addresses change between runs."""

from dataclasses import replace
from typing import Any

import torch

from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda.commands import schedule
from cohabit.runtime.cuda.program import AdmissionState, CudaProgram, prepare, prepared_copies
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.memory import DeviceArena, HostStore
from cohabit.runtime.shared_region.region import FetchPlan
from cohabit.runtime.shared_region.relocatable import RelocatableModel
from cohabit.runtime.stores.pinned import PinnedMemory

_RELOCATED = "its parameters lie elsewhere at every run"


class CudaRelocatableModel(RelocatableModel):
    """Lasting programs have their own pool and graphs. Others share a pool and are issued command by command.

    The workspace is at the arena's start.
    """

    is_admitted = True
    unplaced: CudaProgram

    def __init__(
        self,
        pinned: PinnedMemory,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: DeviceArena[torch.Tensor],
        store: HostStore[Any],
    ) -> None:
        super().__init__(lowered, plan, profile, arena, store)
        self.unplaced = prepare(pinned, lowered, self.unplaced, profile, arena, Bases(0, 0), store)
        self._shared_admission = AdmissionState(refused=_RELOCATED)

    def placed(self, fetch_plan: FetchPlan, *, blocking: bool, lasting: bool) -> CudaProgram:
        own = replace(self.unplaced, **self._changes(fetch_plan, blocking))
        scheduled = schedule(own, join=not own.staged)
        return replace(
            own,
            schedule=scheduled,
            copies=prepared_copies(scheduled, self._arena, self._store),
            admission=AdmissionState(refused=own.admission.refused) if lasting else self._shared_admission,
            borrows_buffers=True,
        )
