"""What searchers share whose candidates become whole plans: these are what the simulator judges."""

from collections.abc import Callable
from typing import Generic, TypeVar

from planner.plan import Plan
from planner.problem import UNFIT, Cost, Problem
from planner.simulate import simulate

C = TypeVar("C")


class ByPlan(Generic[C]):
    """Needs `problem` and `_plan`, which makes a candidate's plan, or None where it does not fit in memory."""

    problem: Problem
    is_compiled = False
    _plan: Callable[[C], Plan | None]

    def judge(self, candidate: C, good_s: float) -> Cost:
        plan = self._plan(candidate)
        if plan is None:
            return UNFIT
        timeline = simulate(self.problem.graph, plan, self.problem.profile)
        return Cost(timeline.latency_s, timeline.period_s or 0.0, timeline.link_bytes)

    def write(self, candidate: C) -> Plan:
        plan = self._plan(candidate)
        assert plan is not None
        return plan
