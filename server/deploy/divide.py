"""Asks the planner to divide memory among models, and for their plans.

The planner runs in worker processes: its compiled code takes a second and 100 MiB. Nothing here imports torch, so that
a planning process does without it.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.problem import Division, ModelDemand, layout_name
from cohabit.planner.sizing.shares import Curve
from cohabit.server.config.config import ServeConfig, cache_of
from cohabit.server.deploy.partitions import Partitions
from cohabit.server.deploy.worker import WorkerProcesses, stage, wait_for_requests

_DIVIDING = "dividing memory among the models"


class Planner:
    """All methods block. Any thread may call them except the event loop's and the compute lanes'.

    Divisions and plans of full searches are stored in the cache's library, and read from there.
    """

    def __init__(self, config: ServeConfig, workers: WorkerProcesses) -> None:
        self._workers = workers
        self._searcher = config.search
        self._layout = layout_name(config.layout)
        self._lanes = config.compute_lanes
        self._library = Library(cache_of(config))

    def division(
        self,
        models: Sequence[ModelDemand],
        memory_bytes: int,
        least_workspace_bytes: int = 0,
        on_divided: Callable[[], None] = lambda: None,
        *,
        low_priority: bool = False,
        rough: bool = False,
        keep: bool = True,
    ) -> Division:
        """Return the division of memory among models. Calls `on_divided` first if it is not cached.

        Latencies are read from the models' ladders if all have one. Otherwise they are estimated, with `rough` by a
        rule of thumb; `rough` also accepts the cached division of other profiles, so that a start after a crash has the
        partitions, and finds the plans, that were in use. Unchanged plans may need `least_workspace_bytes`. With
        `keep`, the division is stored for the next start.

        Raises InfeasibleBudget, or WorkerFailed with its message.
        """
        layout, lanes = self._layout, self._lanes
        known = None
        if not least_workspace_bytes:
            known = self._library.division(models, memory_bytes, layout, lanes, any_profiles=rough)
        if known is not None:
            return known
        on_divided()
        call = self._workers.call_low_priority if low_priority else self._workers.call
        ladders = [self._library.ladders(model, self._searcher) for model in models]
        division: Division = call(
            _sized,
            _DIVIDING,
            "division",
            "divide",
            models,
            memory_bytes,
            layout,
            least_workspace_bytes=least_workspace_bytes,
            lanes=lanes,
            rough=rough,
            ladders=ladders,
        )
        if keep and not least_workspace_bytes:
            by_rule = rough and not all(division.workspace_bytes in ladder for ladder in ladders)
            self._library.store_division(models, memory_bytes, layout, lanes, division, rough=by_rule)
        return division

    def keep_division(self, models: Sequence[ModelDemand], memory_bytes: int, division: Division) -> None:
        """Store a division for the next start of these models. Its plans must be stored."""
        self._library.store_division(models, memory_bytes, self._layout, self._lanes, division)

    def is_divided(self, models: Sequence[ModelDemand], memory_bytes: int) -> bool:
        """Whether the division for these profiles is cached."""
        return self._library.division(models, memory_bytes, self._layout, self._lanes) is not None

    def least_memory(self, models: Sequence[ModelDemand], memory_bytes: int) -> int:
        """Return the least memory in bytes for these models, or `memory_bytes` if a division of it is cached."""
        if self._library.division(models, memory_bytes, self._layout, self._lanes, any_profiles=True) is not None:
            return memory_bytes
        return self._workers.call(_least_memory, models, self._layout, self._lanes)

    def memory_for(self, model: ModelDemand, partitions: Partitions) -> Memory | None:
        """Return the free memory in which one more model is fastest; None if it fits nowhere."""
        return self._workers.call(_memory_for, model, partitions, self._library.ladders(model, self._searcher))

    def least_workspace(self, model: ModelDemand, memory_bytes: int) -> int:
        """Return the smallest workspace size worth trying for a model."""
        sizes = self._workers.call(_sized, _planning(model), "fitting", "workspaces_for", model, memory_bytes)
        return min(sizes, default=0)

    def known_plans(self, model: ModelDemand, memory: Memory) -> dict[Bucket, Plan] | None:
        """Return the cached plans of a full search, for this memory or the largest rung within it, if any."""
        known = self._library.plans(model, memory, self._searcher)
        return known or self._library.plans_of_rung(model, memory, self._searcher)

    def quick_plans(self, model: ModelDemand, memory: Memory) -> Mapping[Bucket, Plan]:
        """Return the first feasible plans. Raises InfeasibleBudget, or WorkerFailed with its message."""
        plans: Mapping[Bucket, Plan] = self._workers.call(
            _sized, _planning(model), "fitting", "plan_model", model, memory, searcher=self._searcher, quick=True
        )
        return plans

    def first_plans_by_size(
        self, model: ModelDemand, workspace_bytes: int
    ) -> list[tuple[Mapping[Bucket, Plan], bool]]:
        """Return the plans of each rung, smallest first, and whether they were searched; quick ones where there are
        none. Raises WorkerFailed."""
        arguments = model, workspace_bytes, self._library, self._searcher
        found: list[tuple[Mapping[Bucket, Plan], bool]] = self._workers.call_low_priority(
            _sized, _planning(model), "ladder", "first_plans_by_size", *arguments
        )
        return found

    def climb(self, model: ModelDemand, workspace_bytes: int) -> bool:
        """Search the plans of the least rung that the cache lacks, and cache them. Raises WorkerFailed.

        Returns whether every rung is cached.
        """
        if workspace_bytes in self._library.ladders(model, self._searcher):
            return True
        arguments = model, workspace_bytes, self._library, self._searcher, wait_for_requests, 1
        ladder = self._workers.call_low_priority(_sized, _planning(model), "ladder", "climb", *arguments)
        return ladder is not None

    def best_plans(self, model: ModelDemand, memory: Memory) -> Mapping[Bucket, Plan]:
        """Return a full search's plans for exactly this memory, and cache them. Raises as `quick_plans` does."""
        known = self._library.plans(model, memory, self._searcher)
        return known or self._workers.call_low_priority(_search, model, memory, self._library, self._searcher)


def _least_memory(models: Sequence[ModelDemand], layout: str, lanes: int) -> int:
    try:
        division: Division = _sized(_DIVIDING, "division", "divide", models, 1, layout, lanes=lanes)
        return division.memory_bytes
    except InfeasibleBudget as error:
        return error.least_bytes


def _memory_for(model: ModelDemand, partitions: Partitions, ladders: Mapping[int, Curve]) -> Memory | None:
    sizes = _sized(_planning(model), "fitting", "workspaces_for", model, partitions.arena_bytes)
    found: Memory | None = _sized(_planning(model), "fitting", "fit", model, partitions.memories(sizes), ladders)
    return found


def _search(model: ModelDemand, memory: Memory, library: Library, searcher: str) -> Mapping[Bucket, Plan]:
    """Plan a model by a full search, which begins with the plans of the rungs next to its memory."""
    near = _sized(_planning(model), "ladder", "between", model, memory, library, searcher)
    plans: Mapping[Bucket, Plan] = _sized(
        _planning(model),
        "fitting",
        "plan_model",
        model,
        memory,
        library,
        searcher,
        neighbours=near,
        pause=wait_for_requests,
    )
    return plans


def _planning(model: ModelDemand) -> str:
    return f"planning model '{model.name}'"


def _sized(doing: str, module: str, function: str, *args: Any, **options: Any) -> Any:
    """Call a function of `planner.sizing`. Importing it takes a second, so only planning processes do it."""
    with stage(doing):
        return getattr(import_module(f"cohabit.planner.sizing.{module}"), function)(*args, **options)
