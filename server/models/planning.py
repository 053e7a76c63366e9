"""The planner's long calls, as functions for worker processes.

They import what they need when they are called: the planner's compiled code takes a second and 100 MiB, and the
engine's process only reads stored plans. Nothing here imports torch, which a process that plans does without.
"""

from collections.abc import Mapping, Sequence

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.deployment import Division, LayoutName, ModelDemand
from cohabit.server.models.worker_process import stage


def divide(
    models: Sequence[ModelDemand], memory_bytes: int, layout: LayoutName, lanes: int, least_workspace_bytes: int = 0
) -> Division:
    """See `planner.sizing.division.divide`."""
    from cohabit.planner.sizing import division

    with stage("dividing memory among the models"):
        return division.divide(
            models, memory_bytes, layout, least_workspace_bytes=least_workspace_bytes, lanes=lanes
        )


def least_memory(models: Sequence[ModelDemand], layout: LayoutName, lanes: int) -> int:
    """Return the least memory in bytes that these models can be divided."""
    from cohabit.planner.sizing import division

    try:
        with stage("dividing memory among the models"):
            return division.divide(models, 1, layout, lanes=lanes).memory_bytes
    except InfeasibleBudget as error:
        return error.least_bytes


def plan_model(
    model: ModelDemand, room: Memory, library: Library | None, searcher: str, quick: bool = False
) -> Mapping[Bucket, Plan]:
    """See `planner.sizing.fitting.plan_model`."""
    from cohabit.planner.sizing import fitting

    with stage(f"planning model '{model.name}'"):
        return fitting.plan_model(model, room, library, searcher, quick=quick)


def workspaces_for(model: ModelDemand, memory_bytes: int) -> list[int]:
    """See `planner.sizing.fitting.workspaces_for`."""
    from cohabit.planner.sizing import fitting

    with stage(f"planning model '{model.name}'"):
        return fitting.workspaces_for(model, memory_bytes)


def fit(model: ModelDemand, rooms: Sequence[Memory]) -> Memory | None:
    """See `planner.sizing.fitting.fit`."""
    from cohabit.planner.sizing import fitting

    with stage(f"planning model '{model.name}'"):
        return fitting.fit(model, rooms)
