"""The planner's model of time: when each step of a plan runs. The only cost function.

Three lanes (compute, swap-in, swap-out) work through their steps in order; a step starts when its lane is free
and every step in its `after` has ended. While an op and a transfer are in flight together, both slow down by the
profile's factors: the simulation advances from one completion to the next and rescales what is left.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.compiled import compiled
from planner.graph import Graph
from planner.plan import Compute, Drop, Lane, Plan, SwapIn, SwapOut, lane_of
from planner.profile import Profile
from planner.timeline import Span, Timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

COMPUTE: Final = 0
SWAP_IN: Final = 1
SWAP_OUT: Final = 2
LANES: tuple[Lane, ...] = ("compute", "swap_in", "swap_out")
NOTHING: Final = -1
"""In the arrays of this file: waits for no step."""

MOST_INFERENCES: Final = 16
"""How long to look for a stable period."""


class Lanes(NamedTuple):
    """A plan as arrays, for search loops. `n` is the length of the longest lane.

    Lanes are in order, so of all the steps of one lane that a step waits for only the last one matters.
    """

    length: Ints
    """Steps per lane, [3]."""
    work_s: Floats
    """Duration of a lane's i-th step with nothing else running, [3, n]."""
    wait: Ints
    """`wait[lane, i, other]`: position on the other lane that must have ended, or NOTHING, [3, n, 3]."""
    carried: Ints
    """Per compute step, the previous inference's swap-in that restored a resident it reads, or NOTHING, [n]."""


def simulate(graph: Graph, plan: Plan, profile: Profile) -> Timeline:
    """Predict one inference on an idle device, and the period of inferences run back to back.

    Back to back, the next inference's ops follow the last op of this one, its transfers queue behind this one's
    epilogue and never start before this one's last op has ended.
    """
    lanes = prepare(graph, plan, profile)
    start, end = run_once(lanes, profile)
    position = [0, 0, 0]
    spans = []
    for index, step in enumerate(plan.steps):
        lane = lane_of(step)
        if lane is None:
            continue
        which = LANES.index(lane)
        i = position[which]
        position[which] += 1
        spans.append(Span(index, lane, float(start[which, i]), float(end[which, i])))
    computes = int(lanes.length[COMPUTE])
    return Timeline(
        spans=tuple(spans),
        latency_s=float(end[COMPUTE, computes - 1]) if computes else 0.0,
        period_s=period(lanes, profile) if computes else None,
        link_bytes=sum(graph.tensors[s.tensor].nbytes for s in plan.steps if isinstance(s, SwapIn | SwapOut)),
    )


def prepare(graph: Graph, plan: Plan, profile: Profile) -> Lanes:
    """Turn a plan into arrays."""
    where: dict[int, tuple[int, int]] = {}  # step -> lane, position
    work: list[list[float]] = [[], [], []]
    waits: list[tuple[int, int, int, int]] = []
    restored: dict[int, int] = {}
    reads: list[tuple[int, ...]] = []
    for index, step in enumerate(plan.steps):
        match step:
            case Compute():
                lane, seconds = COMPUTE, profile.op_seconds[step.op]
                reads.append(graph.ops[step.op].reads)
            case SwapIn():
                lane, seconds = SWAP_IN, profile.swap_in.seconds(graph.tensors[step.tensor].nbytes)
                restored[step.tensor] = len(work[SWAP_IN])
            case SwapOut():
                lane, seconds = SWAP_OUT, profile.swap_out.seconds(graph.tensors[step.tensor].nbytes)
            case Drop():
                continue
        position = len(work[lane])
        where[index] = (lane, position)
        work[lane].append(seconds)
        waits += ((lane, position, *where[earlier]) for earlier in step.after)
    lanes = empty_lanes(np.array([len(w) for w in work], dtype=np.int64))
    for lane, seconds_by_position in enumerate(work):
        lanes.work_s[lane, : len(seconds_by_position)] = seconds_by_position
    for lane, position, other, earlier in waits:
        lanes.wait[lane, position, other] = max(lanes.wait[lane, position, other], earlier)
    residents = {p.tensor for p in plan.residents}
    for position, tensors in enumerate(reads):
        lanes.carried[position] = max(
            (restored[i] for i in tensors if i in residents and i in restored), default=NOTHING
        )
    return lanes


@compiled
def empty_lanes(length: Ints) -> Lanes:
    """Arrays for lanes without any waits."""
    longest = length.max()
    return Lanes(length, np.zeros((3, longest)), np.full((3, longest, 3), NOTHING), np.full(longest, NOTHING))


def run_once(lanes: Lanes, profile: Profile) -> tuple[Floats, Floats]:
    """Start and end in seconds of every step of one isolated inference, each [3, n]."""
    start, end, _ = run(lanes, profile.compute_slowdown, profile.swap_slowdown, 1)
    return start, end


def period(lanes: Lanes, profile: Profile) -> float:
    """Seconds between inferences run back to back, once that has settled."""
    _, _, seconds = run(lanes, profile.compute_slowdown, profile.swap_slowdown, MOST_INFERENCES)
    return float(seconds)


@compiled
def run(
    lanes: Lanes, compute_slowdown: float, swap_slowdown: float, inferences: int
) -> tuple[Floats, Floats, float]:
    """Simulate `inferences` back to back; return starts and ends of the first one, and the settled period.

    Stops early when the period is stable; if it never is, the period is the mean over the later half.
    """
    length, work_s, wait, carried = lanes.length, lanes.work_s, lanes.wait, lanes.carried
    start = np.zeros(work_s.shape)
    end = np.zeros(work_s.shape)
    finished = np.zeros(inferences)  # end of each inference's last op
    done = np.zeros(3, dtype=np.int64)  # steps ended per lane, over all inferences
    active = np.zeros(3, dtype=np.bool_)
    left = np.zeros(3)
    now = 0.0
    while True:
        for lane in range(3):
            if active[lane] or done[lane] >= length[lane] * inferences:
                continue
            inference, i = divmod(done[lane], length[lane])
            ready = True
            for other in range(3):
                earlier = wait[lane, i, other]
                ready &= earlier < 0 or done[other] > inference * length[other] + earlier
            if inference > 0 and lane != COMPUTE:
                ready &= done[COMPUTE] >= inference * length[COMPUTE]
            elif inference > 0 and carried[i] >= 0:
                ready &= done[SWAP_IN] > (inference - 1) * length[SWAP_IN] + carried[i]
            if ready:
                active[lane] = True
                left[lane] = work_s[lane, i]
                if inference == 0:
                    start[lane, i] = now
        if not active.any():
            break
        together = active[COMPUTE] and (active[SWAP_IN] or active[SWAP_OUT])
        step_s, first = np.inf, 0
        for lane in range(3):
            if active[lane]:
                slowdown = 1.0 if not together else (compute_slowdown if lane == COMPUTE else swap_slowdown)
                if left[lane] * slowdown < step_s:
                    step_s, first = left[lane] * slowdown, lane
        now += step_s
        for lane in range(3):
            if not active[lane]:
                continue
            slowdown = 1.0 if not together else (compute_slowdown if lane == COMPUTE else swap_slowdown)
            left[lane] = 0.0 if lane == first else max(left[lane] - step_s / slowdown, 0.0)
            if left[lane] > 0.0:
                continue
            active[lane] = False
            inference, i = divmod(done[lane], length[lane])
            done[lane] += 1
            if inference == 0:
                end[lane, i] = now
            if lane == COMPUTE and i == length[COMPUTE] - 1:
                finished[inference] = now
                if inference >= 2:
                    latest = finished[inference] - finished[inference - 1]
                    before = finished[inference - 1] - finished[inference - 2]
                    if abs(latest - before) <= 1e-9 * latest:
                        return start, end, latest
    if inferences == 1:
        return start, end, finished[0]
    half = inferences // 2
    return start, end, (finished[inferences - 1] - finished[half - 1]) / (inferences - half)
