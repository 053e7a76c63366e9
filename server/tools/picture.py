"""A plan as something to look at: who is in which bytes when, and when each lane is busy or waits.

Times are the simulator's. A tensor's stay begins when the step that brings it starts, and ends with the last step
that uses it before its drop: by then, at the earliest, somebody else may write there.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner.graph import Graph
from planner.plan import Address, Compute, Drop, Plan, Region, Step, SwapIn, SwapOut
from planner.profile import Profile
from planner.simulate import simulate
from planner.timeline import Span, Timeline

Kind = Literal["resident", "parameter", "state", "input", "activation", "scratch"]
KINDS: tuple[Kind, ...] = ("resident", "parameter", "state", "input", "activation", "scratch")
"""A resident is a parameter that is in memory from the start; `parameter` here is one that was swapped in."""


@dataclass(frozen=True, slots=True)
class Stay:
    """Bytes that are in use from `start_s` to `end_s`: by a tensor, or by the scratch of an op."""

    kind: Kind
    what: int
    """A tensor's id; for scratch, an op's."""
    address: Address
    nbytes: int
    start_s: float
    end_s: float
    brought_by: int | None
    """The step that brought it; None for what is there from the start."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Time in which the compute lane waits to run a step."""

    start_s: float
    end_s: float
    step: int
    waits_for: int | None
    """The step that ends last of those that it waits for."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one tensor costs the link."""

    tensor: int
    swapped_in: int
    swapped_out: int
    nbytes: int
    """In all, in both directions."""


@dataclass(frozen=True, slots=True)
class Picture:
    graph: Graph
    profile: Profile
    plan: Plan
    timeline: Timeline
    end_s: float
    """When the last step has ended, those behind the answer included."""
    stays: tuple[Stay, ...]
    stalls: tuple[Stall, ...]
    traffic: tuple[Traffic, ...]
    """Most bytes first."""

    @property
    def memory_bytes(self) -> int:
        return self.plan.partition_bytes + self.plan.workspace_bytes

    @property
    def stall_s(self) -> float:
        return sum(s.seconds for s in self.stalls)

    @property
    def slowed_s(self) -> float:
        """Time that ops take longer because copies are under way beside them."""
        return max(0.0, self.timeline.latency_s - self.stall_s - self.profile.compute_s)

    def name_of(self, step: int) -> str:
        """What a step is about: `op conv1` or `swap-in of conv1.weight`."""
        return describe(self.graph, self.plan.steps[step])


def picture(graph: Graph, profile: Profile, plan: Plan) -> Picture:
    """Simulate a plan that was checked, and find what there is to see."""
    timeline = simulate(graph, plan, profile)
    end_s = max((s.end_s for s in timeline.spans), default=0.0)
    return Picture(
        graph=graph,
        profile=profile,
        plan=plan,
        timeline=timeline,
        end_s=end_s,
        stays=tuple(_Stays(graph, plan, timeline, end_s).found()),
        stalls=tuple(_stalls(plan, timeline)),
        traffic=tuple(_traffic(graph, plan)),
    )


def describe(graph: Graph, step: Step) -> str:
    match step:
        case Compute():
            return f"op {graph.ops[step.op].name}"
        case SwapIn():
            return f"swap-in of {graph.tensors[step.tensor].name}"
        case SwapOut():
            return f"swap-out of {graph.tensors[step.tensor].name}"
        case Drop():
            return f"drop of {graph.tensors[step.tensor].name}"


def held(stays: Sequence[Stay]) -> list[tuple[float, dict[Kind, int]]]:
    """Bytes in use from each time on, by kind; times are rising."""
    change: dict[float, dict[Kind, int]] = defaultdict(lambda: defaultdict(int))
    for stay in stays:
        change[stay.start_s][stay.kind] += stay.nbytes
        change[stay.end_s][stay.kind] -= stay.nbytes
    now = dict.fromkeys(KINDS, 0)
    found = []
    for time_s in sorted(change):
        for kind, delta in change[time_s].items():
            now[kind] += delta
        found.append((time_s, dict(now)))
    return found


def peak_bytes(stays: Sequence[Stay]) -> int:
    return max((sum(now.values()) for _, now in held(stays)), default=0)


class _Stays:
    """Walks through the steps with the tensors that are in memory."""

    def __init__(self, graph: Graph, plan: Plan, timeline: Timeline, end_s: float) -> None:
        self._graph = graph
        self._plan = plan
        self._end_s = end_s
        self._span = {span.step: span for span in timeline.spans}
        self._here: dict[int, Stay] = {}
        self._used_s: dict[int, float] = {}
        self._done: list[Stay] = []

    def found(self) -> list[Stay]:
        for placement in self._plan.inputs:
            self._bring("input", placement.tensor, placement.address, None, None)
        for placement in self._plan.residents:
            self._bring("resident", placement.tensor, placement.address, None, None)
        for index, step in enumerate(self._plan.steps):
            self._step(index, step)
        self._done += (replace(stay, end_s=self._end_s) for stay in self._here.values())
        return sorted(self._done, key=lambda s: (s.start_s, s.end_s, s.what))

    def _step(self, index: int, step: Step) -> None:
        match step:
            case Compute():
                span, op = self._span[index], self._graph.ops[step.op]
                for tensor in op.reads:
                    self._use(tensor, span)
                for tensor, address in zip(op.writes, step.outputs, strict=True):
                    self._bring("activation", tensor, address, index, span)
                if op.scratch_bytes and step.scratch is not None:
                    self._done.append(
                        Stay(
                            "scratch",
                            step.op,
                            step.scratch,
                            op.scratch_bytes,
                            span.start_s,
                            span.end_s,
                            index,
                        )
                    )
            case SwapIn():
                kind = self._graph.tensors[step.tensor].kind
                self._bring(kind, step.tensor, step.address, index, self._span[index])
            case SwapOut():
                self._use(step.tensor, self._span[index])
            case Drop():
                self._done.append(replace(self._here.pop(step.tensor), end_s=self._used_s.pop(step.tensor)))

    def _bring(self, kind: Kind, tensor: int, address: Address, step: int | None, span: Span | None) -> None:
        nbytes = self._graph.tensors[tensor].nbytes
        start_s = 0.0 if span is None else span.start_s
        self._here[tensor] = Stay(kind, tensor, address, nbytes, start_s, start_s, step)
        self._used_s[tensor] = 0.0 if span is None else span.end_s

    def _use(self, tensor: int, span: Span) -> None:
        self._used_s[tensor] = max(self._used_s[tensor], span.end_s)


def _stalls(plan: Plan, timeline: Timeline) -> list[Stall]:
    ends = {span.step: span.end_s for span in timeline.spans}
    computes = [span for span in timeline.spans if span.lane == "compute"]
    free_s = [0.0, *(span.end_s for span in computes)]
    found = []
    for since_s, span in zip(free_s, computes, strict=False):
        if span.start_s - since_s > 1e-9 * timeline.latency_s:
            step = plan.steps[span.step]
            assert isinstance(step, Compute)
            cause = max(step.after, key=lambda i: ends[i], default=None)
            found.append(Stall(since_s, span.start_s, span.step, cause))
    return found


def _traffic(graph: Graph, plan: Plan) -> list[Traffic]:
    copied_in: dict[int, int] = defaultdict(int)
    copied_out: dict[int, int] = defaultdict(int)
    for step in plan.steps:
        if isinstance(step, SwapIn):
            copied_in[step.tensor] += 1
        elif isinstance(step, SwapOut):
            copied_out[step.tensor] += 1
    found = [
        Traffic(t, copied_in[t], copied_out[t], graph.tensors[t].nbytes * (copied_in[t] + copied_out[t]))
        for t in sorted({*copied_in, *copied_out})
    ]
    return sorted(found, key=lambda t: (-t.nbytes, t.tensor))


def shortened(name: str, cells: int) -> str:
    """The end of a name that is too long: names of parameters differ there."""
    return name if len(name) <= cells else f"…{name[1 - cells :]}"


def base_of(plan: Plan, region: Region) -> int:
    """Where a region begins when the workspace is drawn behind the partition."""
    return 0 if region == "partition" else plan.partition_bytes


def nice_ticks(end: float, most: int) -> list[float]:
    """Round positions from 0 to `end`, at most that many intervals."""
    if end <= 0 or most < 1:
        return [0.0]
    magnitude = 1.0
    while magnitude * most > end:
        magnitude /= 10
    while magnitude * 10 * most <= end:
        magnitude *= 10
    step = next(magnitude * m for m in (1, 2, 5, 10, 20) if magnitude * m * most >= end)
    return [i * step for i in range(int(end / step + 1e-9) + 1)]
