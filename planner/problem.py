"""A planning problem, the cost of a candidate plan, and the limit of a search."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from cohabit.planner.arrays import GraphArrays
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Objective, Placement
from cohabit.planner.profile import Profile

TIE: Final = 1.001
"""Latencies (and periods) within this factor count as equal."""


@dataclass(frozen=True)
class Problem:
    """A graph, what its steps cost, and the memory to run it in."""

    graph: Graph
    profile: Profile
    memory: Memory
    residents: tuple[Placement, ...] | None = None
    """Residents that another bucket's plan has chosen; None leaves the choice to the search."""
    objective: Objective = "latency"
    """What is minimised: the latency of one inference, or the period of steps that run back to back, as in training.
    Only a counted budget can be planned for its period."""

    @property
    def key(self) -> tuple[str, str, Memory, tuple[Placement, ...] | None, Objective]:
        """What tells a problem from others; graphs of the same fingerprint are the same graph."""
        return self.graph.fingerprint, self.profile.fingerprint, self.memory, self.residents, self.objective

    @cached_property
    def bound_s(self) -> float:
        """Lower bound of every plan's latency, and so of its period, which is never less. Computed once."""
        from cohabit.planner.bounds.bound import latency_bound  # scipy, which reading stored plans does not need

        return latency_bound(self.graph, self.profile, self.memory)

    @cached_property
    def arrays(self) -> GraphArrays:
        """The graph and its costs for compiled loops."""
        return GraphArrays.of(self.graph, self.profile)

    def seconds(self, cost: "Cost") -> float:
        """What the objective says of a candidate; less is better."""
        return cost.period_s if self.objective == "period" else cost.latency_s

    def other_seconds(self, cost: "Cost") -> float:
        """Of latency and period, the one that is not the objective."""
        return cost.latency_s if self.objective == "period" else cost.period_s


@dataclass(frozen=True, slots=True)
class Cost:
    """The simulated cost of a candidate. Less is better: first of what is the objective, then of the rest in order."""

    latency_s: float
    """Infinite for a candidate that does not fit."""
    period_s: float
    """Infinite where it was not simulated."""
    link_bytes: int


UNFIT: Final = Cost(math.inf, math.inf, 0)
"""The cost of a candidate that does not fit in memory."""


@dataclass(frozen=True, slots=True)
class Limit:
    """When a search stops. Without either, after the searcher's own number of evaluations.

    Only a limit on evaluations, or none, makes the same seed give the same plan.
    """

    evaluations: int | None = None
    seconds: float | None = None
    strict: bool = False
    """Whether a candidate whose evaluation ends after `seconds` is left out, unless it is the first: for comparisons
    in equal time."""
