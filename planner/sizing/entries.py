"""Makes the final plans of a model: one per batch size, all with the same residents."""

from collections.abc import Callable

import msgspec

from planner.library import Library
from planner.plan import Placement, Plan
from planner.problem import Limit, Problem
from planner.search.driver import search
from planner.sizing.demand import Demand

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


class EntryPlanner:
    """Makes the final plans; models with the same graph and profile share them."""

    def __init__(
        self,
        library: Library | None,
        seed: int,
        total: int,
        on_progress: Progress | None,
        limit: Limit | None = None,
    ) -> None:
        self.library = library
        self.seed = seed
        self.limit = limit
        self.total = total
        self.on_progress = on_progress
        self.done = 0
        self.made: dict[tuple[str, str, int, int, tuple[Placement, ...] | None], Plan] = {}

    def entry(self, demand: Demand, offset: int, partition: int, workspace: int) -> DeploymentEntry:
        """Plan every batch; the smallest chooses the residents of all."""
        plans: dict[int, Plan] = {}
        residents: tuple[Placement, ...] | None = None
        for batch in sorted(demand.model.graphs):
            graph, profile = demand.model.graphs[batch], demand.model.profiles[batch]
            plans[batch] = self._plan(Problem(graph, profile, partition, workspace, residents))
            residents = plans[batch].residents
            self.done += 1
            if self.on_progress is not None:
                self.on_progress(self.done, self.total, f"{demand.model.name} at batch {batch}")
        tensors = demand.model.graphs[demand.smallest_batch].tensors
        return DeploymentEntry(
            name=demand.model.name,
            partition_offset=offset,
            partition_bytes=partition,
            plans=plans,
            parameter_bytes=demand.model.graphs[demand.smallest_batch].parameter_bytes,
            resident_bytes=sum(tensors[p.tensor].nbytes for p in residents or ()),
        )

    def _plan(self, problem: Problem) -> Plan:
        key = (
            problem.graph.fingerprint,
            problem.profile.fingerprint,
            problem.partition_bytes,
            problem.workspace_bytes,
            problem.residents,
        )
        if key not in self.made:
            if self.library is None:
                self.made[key] = search(problem, seed=self.seed, limit=self.limit)
            else:
                self.made[key] = self.library.plan(problem, seed=self.seed)
        return self.made[key]
