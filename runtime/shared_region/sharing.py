"""Published ways to share one region among models: what stays between runs, and how parameters are copied.

- `time_shared`: one model at a time, copied as a whole before the run (SwapAdvisor's baseline)
- `pipelined`: one model at a time, copied layer by layer while it computes (PipeSwitch)
- `lru`: whole models, least recently used ones evicted; the next one is copied while another one computes (as Clockwork
  and the replicas of Ray's multiplexing do, without their controllers)
- `on_demand`: parameters, least recently used ones evicted (SwapAdvisor's ODSwap)
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from cohabit.planner.errors import format_bytes
from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend, Capture, Result, SharedLayout
from cohabit.runtime.binding.program import Program
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.errors import MemoryExceeded, UnsupportedPlan
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.memory import DeviceArena, HostStore
from cohabit.runtime.recording import OnRecording
from cohabit.runtime.shared_region.region import PLACEMENTS_KEPT, FetchPlan, Keeps, ParameterRegion, ParameterUses
from cohabit.runtime.shared_region.relocatable import RelocatableModel

PROGRAMS_KEPT = PLACEMENTS_KEPT
"""Maximum number of fetch plans per model whose programs are kept: on CUDA each has its own graphs."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How models share a region."""

    keeps: Keeps
    arrives: Literal["whole", "by layer", "on demand"]
    """Before the run; while it computes; or on demand, where a model's first run fetches each parameter only when its
    op is next, and later runs prefetch in the order of the first."""

    @property
    def blocking(self) -> bool:
        return self.arrives == "whole"


SHARINGS = {
    "time_shared": Sharing("one", "whole"),
    "pipelined": Sharing("one", "by layer"),
    "lru": Sharing("models", "whole"),
    "on_demand": Sharing("tensors", "on demand"),
}


def _open(
    sharing: Sharing, backend: Backend, arena: DeviceArena[Any], workspace_bytes: int, region_bytes: int
) -> "SharedRegion":
    return SharedRegion(backend, sharing, arena, workspace_bytes, region_bytes)


time_shared = partial(_open, SHARINGS["time_shared"])
pipelined = partial(_open, SHARINGS["pipelined"])
lru = partial(_open, SHARINGS["lru"])
on_demand = partial(_open, SHARINGS["on_demand"])
"""Each is a `runtime.backend.OpenLayout`."""


@dataclass(slots=True)
class _SharedModel:
    """One model in one bucket, with the programs of its latest fetch plans."""

    relocatable: RelocatableModel
    programs: OrderedDict[FetchPlan, Program] = field(default_factory=OrderedDict)
    first: Program | None = None
    """The program that was loaded first; on CUDA it holds the pool of programs that are not kept."""


@dataclass(frozen=True, slots=True)
class _LoadedAhead:
    """A model that is copied in while another one runs."""

    wait: Callable[[], float]
    nbytes: int


class SharedRegion(SharedLayout):
    """Runs programs of models that share a region, by the backend's own executor. Belongs to the engine's thread.

    Each run first plans its copies.
    """

    def __init__(
        self, backend: Backend, sharing: Sharing, arena: DeviceArena[Any], workspace_bytes: int, region_bytes: int
    ) -> None:
        """The workspace is at the arena's start, followed by the region."""
        self.region = ParameterRegion(workspace_bytes, region_bytes, sharing.keeps, whole=sharing.blocking)
        self._workspace_bytes = workspace_bytes
        self._backend = backend
        self._executor = backend.executor
        self._sharing = sharing
        self._arena = arena
        self._models: dict[tuple[str, Bucket], _SharedModel] = {}
        self._have_run: set[str] = set()
        self._foreseen: Program | None = None
        self._ahead: dict[str, _LoadedAhead] = {}
        """By model: the load that its next run waits for."""

    @property
    def lost(self) -> str | None:
        return self._executor.lost

    def add(self, lowered: Lowered, plan: Plan, profile: Profile | None, store: HostStore[Any]) -> Program:
        """Prepare a plan that keeps every parameter, and return the program to run.

        Raises MemoryExceeded if it can never run here, and the errors of `Backend.build`.
        """
        if plan.memory.workspace_bytes > self._workspace_bytes:
            raise MemoryExceeded(
                f"{lowered.name}: the plan has a workspace of {format_bytes(plan.memory.workspace_bytes)}, there are"
                f" {format_bytes(self._workspace_bytes)} below the region that models share"
            )
        relocatable = self._relocatable(lowered, plan, profile, store)
        self.region.require(relocatable.uses)
        model = self._models[lowered.name, relocatable.unplaced.bucket] = _SharedModel(relocatable)
        if relocatable.is_admitted:
            self._admit(model)
        return relocatable.unplaced

    def _relocatable(
        self, lowered: Lowered, plan: Plan, profile: Profile | None, store: HostStore[Any]
    ) -> RelocatableModel:
        if isinstance(self._backend, CpuBackend):
            self._backend.keep_activations(plan)
            return RelocatableModel(lowered, plan, profile, self._arena, store)
        from cohabit.runtime.cuda.backend import CudaBackend
        from cohabit.runtime.shared_region.cuda import CudaRelocatableModel

        if not isinstance(self._backend, CudaBackend):
            raise UnsupportedPlan(
                f"models on {self._backend.name} cannot share a region: choose --layout partitioned"
            )
        return CudaRelocatableModel(self._backend.pinned_memory, lowered, plan, profile, self._arena, store)

    def foresee(self, program: Program) -> None:
        """See `runtime.backend.Runner`. If whole models stay, this one is copied in during the next run."""
        self._foreseen = program

    def _admit(self, model: _SharedModel) -> None:
        """Load a model's programs for both cases: to be fetched, and already in the region."""
        uses = model.relocatable.uses
        model.first = self._program(model, self.region.plan_run(uses))
        self._executor.load(model.first)
        again = self._program(model, self.region.plan_run(uses))
        if again is not model.first:
            self._executor.load(again)
        self.region.forget(uses.model)

    def run(
        self,
        program: Program,
        inputs: Sequence[torch.Tensor],
        *,
        traced: bool = False,
        on_recording: OnRecording | None = None,
    ) -> Result:
        """Run one inference of a program that `add` returned. See `runtime.backend.Runner.run`."""
        model = self._models[program.name, program.bucket]
        uses = model.relocatable.uses
        prefetch = self._sharing.arrives != "on demand" or program.name in self._have_run
        foreseen, self._foreseen = self._foreseen, None
        ahead = self._ahead.pop(program.name, None)
        if not self.region.holds(program.name):
            ahead = (
                None  # evicted since: its bytes are another model's, and the device may not have made the copies
            )
        try:
            waited_s = 0.0 if ahead is None else ahead.wait()
            fetch_plan = self.region.plan_run(uses, prefetch=prefetch)
            placed = self._program(model, fetch_plan)
            if self._sharing.blocking and fetch_plan.fetches:
                waited_s += self._executor.load(placed, on_recording=on_recording)
            if foreseen is not None:
                self._load_ahead(foreseen, program.name)
            result = self._executor.run(placed, inputs, traced=traced, on_recording=on_recording)
        except BaseException:
            self.region.forget(program.name)
            raise
        self._have_run.add(program.name)
        result.latency_s += waited_s
        result.stall_s += waited_s
        result.link_bytes = _bytes_of(uses, fetch_plan) + (0 if ahead is None else ahead.nbytes)
        return result

    def _load_ahead(self, program: Program, running: str) -> None:
        """Begin to copy a model in, unless that needs the bytes of the running one."""
        if self._sharing.keeps != "models" or program.name in self._ahead:
            return
        model = self._models[program.name, program.bucket]
        uses = model.relocatable.uses
        if (fetch_plan := self.region.plan_ahead(uses, running)) is not None:
            wait = self._executor.begin_load(self._program(model, fetch_plan))
            self._ahead[program.name] = _LoadedAhead(wait, _bytes_of(uses, fetch_plan))

    def capture(self, program: Program) -> Capture | None:
        """Return how a model's programs are issued. Any thread."""
        model = self._models[program.name, program.bucket]
        programs = list(model.programs.values())
        if model.first is not None and not any(p is model.first for p in programs):
            programs.append(model.first)
        if self._sharing.keeps == "tensors":  # they share one pool and are issued the same way
            programs = programs[:1]
        captures = [capture for p in programs if (capture := self._executor.capture(p)) is not None]
        if not captures:
            return None
        refused = next((c.refused for c in captures if c.refused is not None), None)
        return Capture(sum(c.graphs for c in captures), sum(c.graph_bytes for c in captures), refused)

    def close(self) -> None:
        """Release the programs' resources."""
        for model in self._models.values():
            for program in (model.first, *model.programs.values(), model.relocatable.unplaced):
                if program is not None:
                    self._executor.release(program)
        self._models = {}

    def _program(self, model: _SharedModel, fetch_plan: FetchPlan) -> Program:
        """Return the program of a fetch plan. With `blocking`, it does not depend on the present parameters."""
        blocking, programs = self._sharing.blocking, model.programs
        if blocking:
            offsets = {**dict(fetch_plan.present), **{f.segment: f.offset for f in fetch_plan.fetches}}
            fetch_plan = FetchPlan(tuple(sorted(offsets.items())), ())
        lasting = self._sharing.keeps != "tensors"
        if fetch_plan not in programs:
            programs[fetch_plan] = model.relocatable.placed(fetch_plan, blocking=blocking, lasting=lasting)
            if len(programs) > PROGRAMS_KEPT:
                _, oldest = programs.popitem(last=False)
                if lasting:
                    self._executor.release(oldest)
        programs.move_to_end(fetch_plan)
        return programs[fetch_plan]


def _bytes_of(uses: ParameterUses, fetch_plan: FetchPlan) -> int:
    return sum(uses.nbytes[fetch.segment] for fetch in fetch_plan.fetches)
