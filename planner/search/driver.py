"""Runs a searcher on a problem and returns the best plan found, checked."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

from msgspec.structs import replace

from cohabit.planner.check import check
from cohabit.planner.errors import FingerprintMismatch
from cohabit.planner.plan import Plan, Provenance
from cohabit.planner.problem import TIE, Cost, Limit, Problem
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.registry import make

Progress = Callable[[int, float, float], None]
"""Called with the evaluations so far, the best latency or period, and its lower bound (in the first call, the
resident latency)."""


def search(
    problem: Problem,
    searcher: str = "best",
    *,
    seed: int = 0,
    limit: Limit | None = None,
    workers: int = 1,
    on_progress: Progress | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
    pause: Callable[[], None] = lambda: None,
) -> Plan:
    """Find the plan with the least latency. Ties (within TIE) go to the least period, then to the fewest link bytes.

    If the period is the problem's objective, it comes before the latency.

    `workers` threads evaluate candidates whose evaluation is compiled. Without a limit in seconds, the same problem,
    searcher and seed give the same plan with any number of workers. Once `is_stopped` returns true, the best plan so
    far is returned. `pause` is called between evaluations, and may wait.

    Raises InfeasibleBudget, UnsupportedProblem, UnknownSearcher or FingerprintMismatch.
    """
    graph, profile = problem.graph, problem.profile
    if profile.graph != graph.fingerprint:
        raise FingerprintMismatch("profile", graph.fingerprint, profile.graph)
    started = time.monotonic()
    limit = limit if limit is not None else Limit()
    state = make(searcher, problem, seed)
    deadline_s = math.inf if limit.seconds is None else started + limit.seconds
    limited = limit.evaluations is not None or limit.seconds is not None
    shortlist = Shortlist(problem)

    def is_over() -> bool:
        return is_stopped() or time.monotonic() >= deadline_s

    with ThreadPoolExecutor(workers) as threads:

        def evaluate(candidates: Sequence[Any]) -> list[Cost]:
            """Return the candidates' costs in order; stops early once the search is over."""
            sequential_map: Callable[..., Iterable[Cost]] = map
            map_ = threads.map if workers > 1 and state.is_compiled else sequential_map
            costs = []
            for cost in map_(state.evaluate, candidates, repeat(shortlist.least_s * TIE)):
                costs.append(cost)
                pause()
                if is_over():
                    threads.shutdown(wait=False, cancel_futures=True)
                    break
            return costs

        # Ask, evaluate and tell, until the searcher has no candidates or a limit is reached.
        while candidates := state.ask():
            most = limit.evaluations if limited else state.evaluations
            left = len(candidates) if most is None else most - shortlist.evaluations
            if left <= 0:
                break
            candidates = candidates[:left]
            costs = evaluate(candidates)
            if limit.strict and is_over() and shortlist.evaluations + len(costs) > 1:
                costs = costs[:-1]  # the last evaluation ended after the limit
            candidates = candidates[: len(costs)]
            state.tell(candidates, costs)
            shortlist.add(candidates, costs)
            if on_progress is not None:
                bound_s = problem.bound_s if shortlist.evaluations > len(costs) else profile.compute_s
                on_progress(shortlist.evaluations, shortlist.least_s, bound_s)
            if is_over():
                break
    # Write the best as a plan. Its times come from the simulator for all searchers.
    best = shortlist.best()
    plan, member = state.write(best), state.found_by(best)
    timeline = simulate(graph, plan, profile)
    assert timeline.period_s is not None or not graph.ops
    plan = replace(
        plan,
        provenance=Provenance(
            searcher=searcher if member is None else f"{searcher} ({member})",
            seed=seed,
            evaluations=shortlist.evaluations,
            latency_s=timeline.latency_s,
            period_s=timeline.period_s or 0.0,
            baseline_s=shortlist.first_s,
            resident_s=profile.compute_s,
            bound_s=problem.bound_s,
            objective=problem.objective,
        ),
    )
    check(graph, profile, plan)
    return plan


class Shortlist:
    """Candidates that tie with the best so far in the objective."""

    def __init__(self, problem: Problem) -> None:
        self._seconds, self._other_s = problem.seconds, problem.other_seconds
        self.evaluations = 0
        self.first_s = 0.0
        self.least_s = float("inf")
        self._kept: list[tuple[Any, Cost]] = []

    def add(self, candidates: Sequence[Any], costs: Sequence[Cost]) -> None:
        """Count evaluated candidates, and keep those that tie."""
        if not self.evaluations and costs:
            self.first_s = self._seconds(costs[0])
        self.evaluations += len(costs)
        least_s = min(map(self._seconds, costs), default=self.least_s)
        better = least_s < self.least_s
        self.least_s = min(least_s, self.least_s)
        self._kept += zip(candidates, costs, strict=False)
        if better or len(self._kept) > 4096:
            self._kept = self._fast()

    def best(self) -> Any:
        """Return the best candidate; ties go to the best other time, then to the fewest link bytes."""
        fast = self._fast()
        least_s = min(self._other_s(cost) for _, cost in fast)
        ties = [(candidate, cost) for candidate, cost in fast if self._other_s(cost) <= least_s * TIE]
        return min(ties, key=lambda kept: (kept[1].link_bytes, self._seconds(kept[1])))[0]

    def _fast(self) -> list[tuple[Any, Cost]]:
        return [kept for kept in self._kept if self._seconds(kept[1]) <= self.least_s * TIE]
