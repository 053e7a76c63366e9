"""A planning problem, the cost of a candidate plan, and the limit of a search."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from cohabit.planner.arrays import GraphArrays
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Placement
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

    @property
    def key(self) -> tuple[str, str, Memory, tuple[Placement, ...] | None]:
        """What tells a problem from others; graphs of the same fingerprint are the same graph."""
        return self.graph.fingerprint, self.profile.fingerprint, self.memory, self.residents

    @cached_property
    def bound_s(self) -> float:
        """Lower bound of every plan's latency. Computed once, in a fraction of a second."""
        from cohabit.planner.bounds.bound import latency_bound  # scipy, which reading stored plans does not need

        return latency_bound(self.graph, self.profile, self.memory)

    @cached_property
    def arrays(self) -> GraphArrays:
        """The graph and its costs for compiled loops."""
        return GraphArrays.of(self.graph, self.profile)


@dataclass(frozen=True, slots=True)
class Cost:
    """The simulated cost of a candidate. Less is better, in this order."""

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
