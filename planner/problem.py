"""Planning problems, costs of candidate plans, and limits of a search."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from cohabit.planner.arrays import GraphArrays
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Objective, Placement, Plan
from cohabit.planner.profile import Profile

TIE: Final = 1.001
"""Latencies (and periods) within this factor count as equal."""


@dataclass(frozen=True)
class Problem:
    """A graph, its profile, and the memory to run it in."""

    graph: Graph
    profile: Profile
    memory: Memory
    residents: tuple[Placement, ...] | None = None
    """Residents that another bucket's plan has chosen; None lets the search choose."""
    objective: Objective = "latency"
    """The time to minimise: the latency of one inference, or the period of steps run back to back, as in training.
    Planning for the period requires a single budget."""
    neighbours: tuple[Plan, ...] = ()
    """Plans of this graph for other memory sizes, from which a search may start. Not part of the problem's identity."""

    @property
    def key(self) -> tuple[str, str, Memory, tuple[Placement, ...] | None, Objective]:
        """Identity of the problem. Graphs with the same fingerprint are the same graph."""
        return self.graph.fingerprint, self.profile.fingerprint, self.memory, self.residents, self.objective

    @cached_property
    def bound_s(self) -> float:
        """Lower bound on every plan's latency, and so on its period, which is at least the latency. Computed once."""
        from cohabit.planner.bounds.relaxation import latency_bound  # imports scipy; stored plans do not need it

        return latency_bound(self.graph, self.profile, self.memory)

    @cached_property
    def arrays(self) -> GraphArrays:
        """The graph and its costs as arrays for compiled loops. Computed once."""
        return GraphArrays.of(self.graph, self.profile)

    def seconds(self, cost: "Cost") -> float:
        """Return the objective's value for a candidate; less is better."""
        return cost.period_s if self.objective == "period" else cost.latency_s

    def other_seconds(self, cost: "Cost") -> float:
        """Return whichever of latency and period is not the objective."""
        return cost.latency_s if self.objective == "period" else cost.period_s


@dataclass(frozen=True, slots=True)
class Cost:
    """Simulated cost of a candidate. Less is better: the objective first, then the other fields in order."""

    latency_s: float
    """Infinite if the candidate does not fit in memory."""
    period_s: float
    """Infinite if it was not simulated."""
    link_bytes: int


UNFIT: Final = Cost(math.inf, math.inf, 0)
"""The cost of a candidate that does not fit in memory."""


@dataclass(frozen=True, slots=True)
class Limit:
    """When a search stops; by default, after the searcher's own number of evaluations.

    With a limit in seconds, the same seed may give another plan.
    """

    evaluations: int | None = None
    seconds: float | None = None
    strict: bool = False
    """Whether to discard a candidate whose evaluation ends after `seconds`, unless it is the first; for comparisons in
    equal time."""
