"""The time of a planned step by its parts: computation, overlap, recomputation and swapping, as HOME has them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Compute, Drop, Plan, Step, SwapIn, SwapOut
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class TimeParts:
    """A step's time back to back, in seconds, as HOME's section 4.3 divides it. The parts add up to it."""

    computation_s: float
    """Ops for the first time, while nothing is copied."""
    overlap_s: float
    """Ops for the first time, while something is copied."""
    recomputation_s: float
    """Ops again."""
    swapping_s: float
    """No op runs: the next one waits for a copy."""

    @classmethod
    def of(cls, graph: Graph, plan: Plan, profile: Profile) -> "TimeParts":
        """Simulate two steps back to back, and divide the time from the end of the first's last op to the second's."""
        count, both = len(plan.steps), twice(graph, plan)
        spans = simulate(graph, both, profile).spans
        busy = united([(span.start_s, span.end_s) for span in spans if span.lane != "compute"])
        ops = [span for span in spans if span.lane == "compute"]
        start_s = max(span.end_s for span in ops if span.step < count)
        computation_s = overlap_s = recomputation_s = 0.0
        ran = set[int]()
        for span in ops:
            step, seconds = both.steps[span.step], span.end_s - span.start_s
            assert isinstance(step, Compute)
            if span.step < count:
                continue
            if step.op in ran:
                recomputation_s += seconds
                continue
            ran.add(step.op)
            hidden_s = sum(max(min(span.end_s, end) - max(span.start_s, start), 0.0) for start, end in busy)
            overlap_s += hidden_s
            computation_s += seconds - hidden_s
        idle_s = ops[-1].end_s - start_s - computation_s - overlap_s - recomputation_s
        return cls(computation_s, overlap_s, recomputation_s, idle_s)

    @property
    def shares(self) -> list[float]:
        seconds = np.array([self.computation_s, self.overlap_s, self.recomputation_s, self.swapping_s])
        shares: list[float] = (seconds / seconds.sum()).tolist()
        return shares

    @property
    def period_s(self) -> float:
        return self.computation_s + self.overlap_s + self.recomputation_s + self.swapping_s


def twice(graph: Graph, plan: Plan) -> Plan:
    """A plan's steps twice, the second time with the waits that the simulator has between steps back to back.

    Nothing starts before the first time's swap-outs have ended, no copy before its last op, and no op before what it
    reads has been restored.
    """
    count, last = len(plan.steps), plan.epilogue_start - 1
    outs = [i for i, step in enumerate(plan.steps) if isinstance(step, SwapOut)][-1:]
    residents = {placement.tensor for placement in plan.residents}
    restored = {s.tensor: i for i, s in enumerate(plan.steps) if isinstance(s, SwapIn) and s.tensor in residents}
    again: list[Step] = []
    for step in plan.steps:
        if isinstance(step, Drop):
            again.append(step)
            continue
        between = [last] if isinstance(step, SwapIn | SwapOut) else []
        if isinstance(step, Compute):
            between = [restored[t] for t in graph.ops[step.op].reads if t in restored]
        again.append(replace(step, after=(*(i + count for i in step.after), *outs, *between)))
    return replace(plan, steps=(*plan.steps, *again))


def united(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join half-open spans that overlap or touch, and leave out empty ones; in order of time."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined
