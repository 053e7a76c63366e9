"""Ours: parameters stream through the window in the order of their use, past residents chosen by the simulator.

Activations have fixed places and ops the graph's order; the search is over the set of residents and over what the
swap planner may displace.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.belady import Rule, first_pass, judge, plan_swaps, pressed_out
from planner.bound import latency_bound
from planner.emit import emit, placements
from planner.feasible import PAGE_BYTES, Footprint
from planner.plan import Plan
from planner.problem import Cost, Problem
from planner.profile import Profile
from planner.residents import Choice, change, guesses
from planner.workload import Workload

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Residents by their homes' pages (see `Workload.pack`), and what may be displaced."""

    home: tuple[int, ...]
    rule: Rule


class Streaming:
    """Judges SwapAdvisor's own residents and quick guesses under every rule; then improves the best."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self.work = Workload.of(
            Footprint.of(problem.graph, problem.overlay),
            problem.profile,
            problem.partition_bytes,
            problem.workspace_bytes,
            problem.residents or (),
        )
        parameters = max(len(self.work.parameters), 1)
        self.evaluations = len(rules(self.work)) * 8 + min(max(60_000 // parameters, 40), 400)
        self._bound_s = latency_bound(
            problem.graph, problem.profile, problem.partition_bytes, problem.workspace_bytes
        )
        self._newest: Cost | None = None
        self._steps = self._search(np.random.default_rng(seed))

    def ask(self) -> Sequence[Candidate]:
        candidate = next(self._steps, None)
        return () if candidate is None else (candidate,)

    def tell(self, candidates: Sequence[Candidate], costs: Sequence[Cost]) -> None:
        if costs:
            self._newest = costs[0]

    def judge(self, candidate: Candidate, good_s: float) -> Cost:
        return judge(self.work, np.array(candidate.home), candidate.rule, good_s)

    def write(self, candidate: Candidate) -> Plan:
        problem, home = self.problem, np.array(candidate.home)
        residents = placements(self.work, home) if problem.residents is None else problem.residents
        swaps = plan_swaps(self.work, home, candidate.rule)
        return emit(self.work, problem.partition_bytes, problem.workspace_bytes, residents, swaps)

    def _search(self, rng: np.random.Generator) -> Generator[Candidate, None, None]:
        if self.problem.residents is not None:
            home = tuple(self.work.homes(self.problem.residents).tolist())
            for rule in rules(self.work):
                yield Candidate(home, rule)
            return
        starts: list[tuple[float, Choice, Rule]] = []
        for residents, rule in self._starts():
            yield self._candidate(residents, rule)
            starts.append((self._score(), residents, rule))
            if self._perfect():
                return
        starts.sort(key=lambda s: s[0])
        least, residents, rule = starts[0]
        now, now_residents, now_rule = starts[0]
        others = rules(self.work)
        heat = 0.02 * least
        step = 0
        while True:
            step += 1
            heat = least * 0.01 * max(1 - step / 20000, 0.0)
            changed = change(self.work, now_residents, rng)
            changed_rule = others[rng.integers(len(others))] if rng.random() < 0.05 else now_rule
            yield self._candidate(changed, changed_rule)
            score = self._score()
            if score <= now or rng.random() < np.exp((now - score) / max(heat, 1e-12)):
                now, now_residents, now_rule = score, changed, changed_rule
            if score < least:
                least, residents, rule = score, changed, changed_rule
            if self._perfect():
                return

    def _starts(self) -> Iterator[tuple[Choice, Rule]]:
        for residents in guesses(self.work):
            for rule in rules(self.work):
                yield residents, rule
        for rule in rules(self.work)[:0:-1]:
            for residents in double_pass(self.work, rule):
                yield residents, rule

    def _candidate(self, residents: Choice, rule: Rule) -> Candidate:
        return Candidate(tuple(self.work.pack(residents).tolist()), rule)

    def _score(self) -> float:
        """The newest candidate's latency, with a little weight on the time that the link is busy."""
        assert self._newest is not None
        busy_s = self._newest.link_bytes / self.problem.profile.swap_in.bandwidth_bytes_per_s
        return self._newest.latency_s + 0.002 * busy_s

    def _perfect(self) -> bool:
        """Whether there is nothing to improve on: at the bound, back to back too, with hardly a needless copy."""
        assert self._newest is not None
        arrays = self.work.arrays
        necessary = int(arrays.size.sum()) - self.work.resident_pages + int(arrays.size.max(initial=0))
        at_bound = self._newest.period_s <= self._bound_s * (1 + 1e-6)
        return at_bound and self._newest.link_bytes <= max(necessary, 0) * PAGE_BYTES


def rules(work: Workload) -> list[Rule]:
    """Streaming, then displacing what this inference no longer needs, then anything, by various thresholds."""
    ops = len(work.arrays.op_s)
    longest_s = float(work.arrays.swap_s.max(initial=0.0))
    thresholds = [longest_s * factor for factor in (0.0, 0.5, 1.0, 2.0, 4.0)]
    return [Rule(), *(Rule(t, keep) for keep in (ops, 0) for t in thresholds)]


def double_pass(work: Workload, rule: Rule) -> list[Choice]:
    """Initial residents as SwapAdvisor finds them, with and without those that the second pass displaces."""
    residents = first_pass(work, rule)
    gone = pressed_out(work, work.pack(residents), rule)
    return list(dict.fromkeys((residents, tuple(p for p in residents if p not in gone))))


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
