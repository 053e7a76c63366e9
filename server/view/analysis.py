"""A plan over time: the bytes in use, the stalls of the compute lane, and the copies of each tensor.

Times are the simulator's. A tensor occupies its bytes from the start of the step that brings it in, until the end of
the last step that uses it before its drop. Then another tensor may be written there.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from cohabit.planner.graph import Graph
from cohabit.planner.layout.placement import Block, place
from cohabit.planner.lifetimes import START, Lifespan, LiveRange, live_ranges
from cohabit.planner.plan import Compute, Drop, Lane, Plan, Span, SwapIn, SwapOut, Timeline
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.simulate import simulate

Kind = Literal["resident", "parameter", "state", "input", "activation", "scratch"]
KINDS: tuple[Kind, ...] = ("resident", "parameter", "state", "input", "activation", "scratch")
"""A resident is a parameter that is in memory from the start; `parameter` here is one that is swapped in."""

LANES: tuple[tuple[Lane, str], ...] = (("compute", "compute"), ("swap_in", "swap in"), ("swap_out", "swap out"))
"""Each lane and its label, in drawing order."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Bytes in use from `start_s` to `end_s` by a tensor, or by the scratch of an op."""

    kind: Kind
    what: int
    """A tensor's id; for scratch, an op's."""
    nbytes: int
    start_s: float
    end_s: float
    has_address: bool
    """Whether the plan assigns an address. Counted bytes, which have none, are drawn somewhere in the pool."""
    drawn_at: int
    """The first byte, counted through the partition and then the workspace."""
    drawn_bytes: int
    """Less than `nbytes` if the pool has no contiguous range for them."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Time in which the compute lane waits to run a step."""

    start_s: float
    end_s: float
    step: int
    waits_for: int | None
    """Of the steps that it waits for, the last to end."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class TensorTraffic:
    """The copies of one tensor."""

    tensor: int
    swapped_in: int
    swapped_out: int
    nbytes: int
    """Total of both directions."""


@dataclass(frozen=True)
class PlanAnalysis:
    graph: Graph
    profile: Profile
    plan: Plan
    timeline: Timeline
    occupancies: tuple[Occupancy, ...]
    """By start."""
    stalls: tuple[Stall, ...]
    """By start."""
    traffic: tuple[TensorTraffic, ...]
    """Most bytes first."""

    @cached_property
    def end_s(self) -> float:
        """End of the last step, which may be after the outputs are complete."""
        return max((s.end_s for s in self.timeline.spans), default=0.0)

    @property
    def has_epilogue(self) -> bool:
        """Whether steps end after the outputs are complete."""
        return self.end_s > self.timeline.latency_s * (1 + 1e-9)

    @property
    def memory_bytes(self) -> int:
        return self.plan.memory.nbytes

    @property
    def resident_bytes(self) -> int:
        return sum(self.graph.tensors[p.tensor].nbytes for p in self.plan.residents)

    @property
    def peak_bytes(self) -> int:
        return max((sum(now.values()) for _, now in bytes_in_use(self.occupancies)), default=0)

    @property
    def stall_s(self) -> float:
        return sum(s.seconds for s in self.stalls)

    @property
    def longest_stalls(self) -> list[Stall]:
        return sorted(self.stalls, key=lambda s: -s.seconds)

    @property
    def slowed_s(self) -> float:
        """Additional time of ops because of concurrent copies."""
        return max(0.0, self.timeline.latency_s - self.stall_s - self.profile.compute_s)

    def spans_of(self, lane: Lane) -> list[Span]:
        return [span for span in self.timeline.spans if span.lane == lane]

    def name_of(self, step: int) -> str:
        """Describe a step, such as `op conv1` or `swap-in of conv1.weight`."""
        match self.plan.steps[step]:
            case Compute(op=op):
                return f"op {self.graph.ops[op].name}"
            case SwapIn(tensor=tensor):
                return f"swap-in of {self.graph.tensors[tensor].name}"
            case SwapOut(tensor=tensor):
                return f"swap-out of {self.graph.tensors[tensor].name}"
            case Drop(tensor=tensor):
                return f"drop of {self.graph.tensors[tensor].name}"


def analyze(graph: Graph, profile: Profile, plan: Plan) -> PlanAnalysis:
    """Simulate a plan that `check` has accepted, and collect the data to draw."""
    timeline = simulate(graph, plan, profile)
    return PlanAnalysis(
        graph,
        profile,
        plan,
        timeline,
        tuple(sorted(_occupancies(graph, plan, timeline), key=lambda o: (o.start_s, o.end_s, o.what))),
        tuple(_stalls(plan, timeline)),
        tuple(sorted(_traffic(graph, plan), key=lambda t: (-t.nbytes, t.tensor))),
    )


def bytes_in_use(occupancies: Sequence[Occupancy]) -> list[tuple[float, dict[Kind, int]]]:
    """Return the bytes in use by kind from each time on; times ascend."""
    change: dict[float, dict[Kind, int]] = defaultdict(lambda: defaultdict(int))
    for occupancy in occupancies:
        change[occupancy.start_s][occupancy.kind] += occupancy.nbytes
        change[occupancy.end_s][occupancy.kind] -= occupancy.nbytes
    now = dict.fromkeys(KINDS, 0)
    found = []
    for time_s in sorted(change):
        for kind, delta in change[time_s].items():
            now[kind] += delta
        found.append((time_s, dict(now)))
    return found


def _occupancies(graph: Graph, plan: Plan, timeline: Timeline) -> list[Occupancy]:
    span_of = {span.step: span for span in timeline.spans}
    last_s = max((s.end_s for s in timeline.spans), default=0.0)
    lives = live_ranges(graph, plan)
    times: list[tuple[float, float]] = []
    for live in lives:
        start_s = 0.0 if live.start == START else span_of[live.start].start_s
        steps = [index for index in (live.start, *live.uses) if index != START]
        end_s = max((span_of[index].end_s for index in steps), default=0.0)
        stays = live.tensor is not None and live.end == len(plan.steps)
        times.append((start_s, last_s if stays else end_s))
    drawn = _drawn(lives, times, plan)
    return [
        Occupancy(kind, what, live.nbytes, start_s, end_s, live.address is not None, at, nbytes)
        for live, (start_s, end_s), (at, nbytes) in zip(lives, times, drawn, strict=True)
        for kind, what in [_subject(graph, plan, live)]
    ]


def _subject(graph: Graph, plan: Plan, live: LiveRange) -> tuple[Kind, int]:
    if live.tensor is None:
        step = plan.steps[live.start]
        assert isinstance(step, Compute)
        return "scratch", step.op
    kind: Kind = graph.tensors[live.tensor].kind
    return ("resident" if live.start == START and kind != "input" else kind), live.tensor


def _drawn(
    lives: Sequence[LiveRange], times: Sequence[tuple[float, float]], plan: Plan
) -> Iterator[tuple[int, int]]:
    """Yield each live range's first byte and size as drawn. Counted ranges get some offset in the pool."""
    moments = {time_s: n for n, time_s in enumerate(sorted({time_s for time in times for time_s in time}))}
    counted = [i for i, live in enumerate(lives) if live.address is None]
    blocks = [
        Block(lives[i].nbytes, 1, Lifespan(first, max(end, first + 1)))
        for i in counted
        for first, end in [(moments[times[i][0]], moments[times[i][1]])]
    ]
    layout = place(blocks, plan.pool_bytes)
    scale = min(1.0, plan.pool_bytes / max(layout.peak_bytes, 1))
    offsets = dict(zip(counted, layout.offsets, strict=True))
    partition_bytes = plan.memory.partition_bytes
    for i, live in enumerate(lives):
        if live.address is None:
            start, end = int(offsets[i] * scale), int((offsets[i] + live.nbytes) * scale)
            yield partition_bytes + start, end - start
        else:
            base = 0 if live.address.region == "partition" else partition_bytes
            yield base + live.address.offset, live.nbytes


def _stalls(plan: Plan, timeline: Timeline) -> Iterator[Stall]:
    ends = {span.step: span.end_s for span in timeline.spans}
    free_s = 0.0
    for span in timeline.spans:
        if span.lane != "compute":
            continue
        if span.start_s - free_s > 1e-9 * timeline.latency_s:
            step = plan.steps[span.step]
            assert isinstance(step, Compute)
            yield Stall(free_s, span.start_s, span.step, max(step.after, key=lambda i: ends[i], default=None))
        free_s = span.end_s


def _traffic(graph: Graph, plan: Plan) -> Iterator[TensorTraffic]:
    copies: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for step in plan.steps:
        if isinstance(step, SwapIn | SwapOut):
            copies[step.tensor][isinstance(step, SwapOut)] += 1
    for tensor, (copied_in, copied_out) in copies.items():
        yield TensorTraffic(tensor, copied_in, copied_out, graph.tensors[tensor].nbytes * (copied_in + copied_out))
