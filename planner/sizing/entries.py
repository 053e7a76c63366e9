"""The final plans of a model: one per batch size, all with the same residents."""

from collections.abc import Callable

import msgspec

from planner.plan import Placement, Plan
from planner.problem import Problem
from planner.sizing.demand import ModelDemand

Progress = Callable[[int, int, str], None]
"""Called with the plans made, the plans to make, and the current model and batch."""


class DeploymentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model's part of a deployment."""

    name: str
    partition_offset: int
    partition_bytes: int
    plans: dict[int, Plan]
    """By batch size; all have the same residents."""
    parameter_bytes: int
    resident_bytes: int


def plan_batches(
    model: ModelDemand, partition_bytes: int, workspace_bytes: int, plan: Callable[[Problem], Plan | None]
) -> dict[int, Plan]:
    """Plan every batch, the smallest first: it chooses the residents of all. Ends where `plan` returns None."""
    plans: dict[int, Plan] = {}
    residents: tuple[Placement, ...] | None = None
    for batch in sorted(model.graphs):
        graph, profile = model.graphs[batch], model.profiles[batch]
        found = plan(Problem(graph, profile, partition_bytes, workspace_bytes, residents))
        if found is None:
            break
        plans[batch], residents = found, found.residents
    return plans
