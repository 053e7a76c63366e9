"""The planner's front door: a problem in, the best plan found out, checked."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.belady import Cost, Rule, first_pass, judge, plan_swaps, pressed_out
from planner.bound import latency_bound
from planner.check import check
from planner.emit import emit, placements
from planner.errors import FingerprintMismatch
from planner.feasible import PAGE_BYTES, Footprint
from planner.graph import Graph
from planner.plan import Placement, Plan, Provenance
from planner.profile import Profile
from planner.residents import Choice, guesses, neighbours
from planner.workload import Workload

Ints = NDArray[np.int64]
Progress = Callable[[int, float, float], None]
"""Told the evaluations so far, the best latency and its lower bound."""

TIE = 1.005
"""Latencies (and periods) within this factor count as equal."""


@dataclass(frozen=True)
class Problem:
    """A graph, what its steps cost, and the memory to run it in."""

    graph: Graph
    profile: Profile
    partition_bytes: int
    workspace_bytes: int
    residents: tuple[Placement, ...] | None = None
    """Residents that another batch size's plan has chosen; None leaves the choice to the search."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    home: Ints
    rule: Rule
    cost: Cost


def search(
    problem: Problem, *, seed: int = 0, rounds: int | None = None, on_progress: Progress | None = None
) -> Plan:
    """Find a plan of little latency; among equals, of short period, then of few copied bytes.

    `rounds` limits the changes tried to the set of residents (default: what takes a fraction of a second). The
    same problem, seed and rounds give the same plan. Raises InfeasibleBudget.
    """
    graph, profile = problem.graph, problem.profile
    if profile.graph != graph.fingerprint:
        raise FingerprintMismatch("profile", graph.fingerprint, profile.graph)
    work = Workload.of(
        Footprint.of(graph), profile, problem.partition_bytes, problem.workspace_bytes, problem.residents or ()
    )
    bound_s = latency_bound(graph, profile, problem.partition_bytes, problem.workspace_bytes)
    trial = _Trial(work, bound_s, on_progress)
    if problem.residents is None:
        _search_residents(work, trial, np.random.default_rng(seed), rounds)
    else:
        for rule in rules(work):
            trial.judge(work.homes(problem.residents), rule)
    best = trial.best()
    residents = placements(work, best.home) if problem.residents is None else problem.residents
    plan = emit(
        work,
        problem.partition_bytes,
        problem.workspace_bytes,
        residents,
        plan_swaps(work, best.home, best.rule),
        Provenance(
            searcher="belady",
            seed=seed,
            evaluations=len(trial.seen),
            latency_s=best.cost.latency_s,
            period_s=best.cost.period_s,
            baseline_s=trial.seen[0].cost.latency_s,
            resident_s=profile.compute_s,
            bound_s=bound_s,
        ),
    )
    check(graph, profile, plan)
    return plan


def rules(work: Workload) -> list[Rule]:
    """Streaming, then displacing what this inference no longer needs, then anything, by various thresholds."""
    ops = len(work.arrays.op_s)
    longest_s = float(work.arrays.swap_s.max(initial=0.0))
    thresholds = [longest_s * factor for factor in (0.0, 0.5, 1.0, 2.0, 4.0)]
    return [Rule(), *(Rule(t, keep) for keep in (ops, 0) for t in thresholds)]


def quick_latency_s(footprint: Footprint, profile: Profile, partition_bytes: int, workspace_bytes: int) -> float:
    """Latency that a search would at least reach, in a few milliseconds. Raises InfeasibleBudget."""
    work = Workload.of(footprint, profile, partition_bytes, workspace_bytes)
    ops, longest_s = len(work.arrays.op_s), float(work.arrays.swap_s.max(initial=0.0))
    least_s = np.inf
    for residents in guesses(work):
        for rule in (Rule(), Rule(0.0, ops), Rule(longest_s, ops)):
            least_s = min(least_s, judge(work, work.pack(residents), rule, 0.0).latency_s)
            if least_s <= profile.compute_s * (1 + 1e-6):
                return least_s
    return least_s


class _Trial:
    """Judges candidates and remembers them."""

    def __init__(self, work: Workload, bound_s: float, on_progress: Progress | None) -> None:
        self.work = work
        self.bound_s = bound_s
        self.on_progress = on_progress
        self.seen: list[_Candidate] = []
        self.least_s = np.inf

    def judge(self, home: Ints, rule: Rule) -> Cost:
        cost = judge(self.work, home, rule, self.least_s * TIE)
        self.seen.append(_Candidate(home, rule, cost))
        if cost.latency_s < self.least_s:
            self.least_s = cost.latency_s
            if self.on_progress is not None:
                self.on_progress(len(self.seen), self.least_s, self.bound_s)
        return cost

    @property
    def perfect(self) -> bool:
        """Whether there is nothing to improve on: at the bound, back to back too, with hardly a needless copy."""
        newest, arrays = self.seen[-1].cost, self.work.arrays
        necessary = int(arrays.size.sum()) - arrays.partition_pages + int(arrays.size.max(initial=0))
        return newest.period_s <= self.bound_s * (1 + 1e-6) and newest.link_pages <= max(necessary, 0)

    def best(self) -> _Candidate:
        fast = [c for c in self.seen if c.cost.latency_s <= self.least_s * TIE]
        shortest_s = min(c.cost.period_s for c in fast)
        short = [c for c in fast if c.cost.period_s <= shortest_s * TIE]
        return min(short, key=lambda c: (c.cost.link_pages, c.cost.latency_s))


def _search_residents(work: Workload, trial: _Trial, rng: np.random.Generator, rounds: int | None) -> None:
    """Judge SwapAdvisor's own residents and the guesses under every rule; then improve the best."""
    starts: list[tuple[float, Choice, Rule]] = []

    def attempt(residents: Choice, rule: Rule) -> bool:
        cost = trial.judge(work.pack(residents), rule)
        starts.append((_score(work, cost), residents, rule))
        return trial.perfect

    for rule in rules(work)[:0:-1]:
        for residents in double_pass(work, rule):
            if attempt(residents, rule):
                return
    for residents in guesses(work):
        for rule in rules(work):
            if attempt(residents, rule):
                return
    starts.sort(key=lambda s: s[0])
    if rounds is None:
        rounds = min(max(60_000 // max(len(work.parameters), 1), 40), 400)
    change = neighbours(work, rng)
    for least, residents, rule in starts[:2]:
        for _ in range(rounds // 2):
            changed = change(residents)
            cost = trial.judge(work.pack(changed), rule)
            if _score(work, cost) < least:
                least, residents = _score(work, cost), changed
            if trial.perfect:
                return


def double_pass(work: Workload, rule: Rule) -> list[Choice]:
    """Initial residents as SwapAdvisor finds them, with and without those that the second pass displaces."""
    residents = first_pass(work, rule)
    gone = pressed_out(work, work.pack(residents), rule)
    return list(dict.fromkeys((residents, tuple(p for p in residents if p not in gone))))


def _score(work: Workload, cost: Cost) -> float:
    """Latency, with a little weight on the time that the link is busy."""
    busy_s = cost.link_pages * PAGE_BYTES / work.profile.swap_in.bandwidth_bytes_per_s
    return cost.latency_s + 0.002 * busy_s
