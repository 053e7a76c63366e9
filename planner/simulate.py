"""The planner's model of time: when each step of a plan runs. It is the only cost function.

Three lanes (compute, swap-in, swap-out) work through their steps in order; a step starts when its lane is free and
every step in its `after` has ended. While an op and a transfer overlap, both slow down by the profile's factors. The
simulation advances from one completion to the next and rescales the remaining work."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Address, Compute, Drop, Lane, Plan, SwapIn, SwapOut
from cohabit.planner.profile import Profile
from cohabit.planner.timeline import Span, Timeline

COMPUTE: Final = 0
SWAP_IN: Final = 1
SWAP_OUT: Final = 2
LANES: tuple[Lane, ...] = ("compute", "swap_in", "swap_out")
NOTHING: Final = -1
"""In the arrays of this file: waits for no step."""

MOST_INFERENCES: Final = 8
"""Inferences after which the search for a stable period ends."""


class LaneArrays(NamedTuple):
    """A plan as arrays, for search loops. `n` is the length of the longest lane.

    LaneArrays are in order, so of all the steps of one lane that a step waits for only the last one matters.
    """

    length: Ints
    """Steps per lane, [3]."""
    work_s: Floats
    """Duration of a lane's i-th step with nothing else running, [3, n]."""
    wait: Ints
    """`wait[lane, i, other]`: position on the other lane that must have ended, or NOTHING, [3, n, 3]."""
    carried: Ints
    """Per compute step, the previous inference's swap-in that restored a resident it reads, or overwrites
    unread, or NOTHING, [n]."""


def simulate(graph: Graph, plan: Plan, profile: Profile) -> Timeline:
    """Predict one inference on an idle device, and the period of inferences run back to back.

    Back to back, the next inference's ops follow the last op of this one, its transfers follow this one's
    epilogue and never start before this one's last op has ended. Nothing of it starts before this one's last
    swap-out has ended: bytes and host copies are free by then.
    """
    lanes, issued = prepare(graph, plan, profile)
    slowdowns = profile.compute_slowdown, profile.swap_slowdown
    start, end = (times.tolist() for times in run(lanes, *slowdowns, 1)[:2])
    spans = [Span(index, LANES[lane], start[lane][i], end[lane][i]) for index, lane, i in issued]
    computes = int(lanes.length[COMPUTE])
    return Timeline(
        spans=tuple(spans),
        latency_s=end[COMPUTE][computes - 1] if computes else 0.0,
        period_s=float(run(lanes, *slowdowns, MOST_INFERENCES)[2]) if computes else None,
        link_bytes=sum(
            graph.tensors[s.tensor].nbytes for s in plan.steps if type(s) is SwapIn or type(s) is SwapOut
        ),
    )


def prepare(graph: Graph, plan: Plan, profile: Profile) -> tuple[LaneArrays, list[tuple[int, int, int]]]:
    """Turn a plan into arrays; return these, and each step that has a lane as (index, lane, position).

    Plain loops: this runs per evaluation.
    """
    tensors, op_seconds = graph.tensors, profile.op_seconds
    transfer_s = {SwapIn: profile.swap_in.seconds, SwapOut: profile.swap_out.seconds}
    lane_of_type = {Compute: COMPUTE, SwapIn: SWAP_IN, SwapOut: SWAP_OUT}
    work: list[list[float]] = [[], [], []]
    where: list[tuple[int, int]] = []  # of every step: lane, position
    issued: list[tuple[int, int, int]] = []
    waits: list[tuple[int, int, int, int]] = []
    restored: dict[int, int] = {}
    reads: list[tuple[int, ...]] = []
    unread = {p.tensor: p.address for p in plan.residents}
    given_up: dict[int, Address] = {}  # residents that no op read before they were dropped
    for index, step in enumerate(plan.steps):
        kind = type(step)
        if isinstance(step, Drop):
            where.append((NOTHING, NOTHING))
            if step.tensor in unread:
                given_up[step.tensor] = unread.pop(step.tensor)
            continue
        lane = lane_of_type[kind]
        position = len(work[lane])
        if isinstance(step, Compute):
            work[COMPUTE].append(op_seconds[step.op])
            read = graph.ops[step.op].reads
            for i in read:
                unread.pop(i, None)
            reads.append((*read, *_overwritten(graph, step, given_up)) if given_up else read)
        else:
            work[lane].append(transfer_s[kind](tensors[step.tensor].nbytes))
            if lane == SWAP_IN:
                restored[step.tensor] = position
        where.append((lane, position))
        issued.append((index, lane, position))
        waits += [(lane, position, *where[earlier]) for earlier in step.after]
    lanes = empty_lanes(np.array([len(w) for w in work], dtype=np.int64))
    for lane, seconds_by_position in enumerate(work):
        lanes.work_s[lane, : len(seconds_by_position)] = seconds_by_position
    if waits:
        lane_at, position_at, other_at, earlier = np.array(waits, dtype=np.int64).T
        np.maximum.at(lanes.wait, (lane_at, position_at, other_at), earlier)
    residents = {p.tensor for p in plan.residents}
    if back := {tensor: position for tensor, position in restored.items() if tensor in residents}:
        lanes.carried[: len(reads)] = [max((back[i] for i in read if i in back), default=NOTHING) for read in reads]
    return lanes, issued


def _overwritten(graph: Graph, step: Compute, given_up: Mapping[int, Address]) -> Iterator[int]:
    """The residents whose bytes an op overwrites: the previous inference may still be restoring them there."""
    op = graph.ops[step.op]
    written = [(a, graph.tensors[i].nbytes) for a, i in zip(step.outputs, op.writes, strict=True)]
    if step.scratch is not None:
        written.append((step.scratch, op.scratch_bytes))
    for tensor, home in given_up.items():
        end = home.offset + graph.tensors[tensor].nbytes
        if any(a.region == home.region and a.offset < end and home.offset < a.offset + n for a, n in written):
            yield tensor


@compiled
def empty_lanes(length: Ints) -> LaneArrays:
    """Arrays for lanes without any waits."""
    longest = length.max()
    return LaneArrays(length, np.zeros((3, longest)), np.full((3, longest, 3), NOTHING), np.full(longest, NOTHING))


@compiled
def wait_for(lanes: LaneArrays, lane: int, i: int, other: int, earlier: int) -> None:
    """Let step `i` of a lane wait for step `earlier` of another lane, or for none if that is NOTHING."""
    lanes.wait[lane, i, other] = max(lanes.wait[lane, i, other], earlier)


@compiled
def latency_and_period(
    lanes: LaneArrays, compute_slowdown: float, swap_slowdown: float, good_s: float
) -> tuple[float, float]:
    """Latency, and the period; that is infinite unless the latency is at most `good_s`."""
    _, end, _ = run(lanes, compute_slowdown, swap_slowdown, 1)
    latency_s = end[COMPUTE, lanes.length[COMPUTE] - 1]
    if latency_s > good_s:
        return latency_s, np.inf
    return latency_s, run(lanes, compute_slowdown, swap_slowdown, MOST_INFERENCES)[2]


@compiled
def run(
    lanes: LaneArrays, compute_slowdown: float, swap_slowdown: float, inferences: int
) -> tuple[Floats, Floats, float]:
    """Simulate `inferences` back to back; return starts and ends of the first one, each [3, n], and the settled period.

    Stops when two inferences end in the same state, since all others will then. If none do, the period is the
    mean over the later half.
    """
    start, end = np.zeros(lanes.work_s.shape), np.zeros(lanes.work_s.shape)
    finished_s = np.zeros(inferences + 1)  # end of each inference's last op, from [1]
    done = np.zeros(3, np.int64)  # steps ended per lane, over all inferences
    active = np.zeros(3, np.bool_)
    left_s = np.zeros(3)  # work left of each lane's step
    state, state_before = np.zeros(4), np.full(4, np.inf)
    now = 0.0
    while True:
        for lane in range(3):
            if not active[lane] and _ready(lanes, done, lane, inferences):
                inference, i = divmod(done[lane], lanes.length[lane])
                active[lane] = True
                left_s[lane] = lanes.work_s[lane, i]
                if inference == 0:
                    start[lane, i] = now
        if not (active[COMPUTE] or active[SWAP_IN] or active[SWAP_OUT]):
            break
        contended = active[COMPUTE] and (active[SWAP_IN] or active[SWAP_OUT])
        passed_s, first = np.inf, COMPUTE
        for lane in range(3):
            slowdown = compute_slowdown if lane == COMPUTE else swap_slowdown
            lane_s = left_s[lane] * slowdown if contended else left_s[lane]
            if active[lane] and lane_s < passed_s:
                passed_s, first = lane_s, lane
        now += passed_s
        answered = 0
        for lane in range(3):
            slowdown = compute_slowdown if lane == COMPUTE else swap_slowdown
            left_s[lane] -= passed_s / slowdown if contended else passed_s
            if not active[lane] or (lane != first and left_s[lane] > 0.0):
                continue
            active[lane] = False
            inference, i = divmod(done[lane], lanes.length[lane])
            done[lane] += 1
            if inference == 0:
                end[lane, i] = now
            if lane == COMPUTE and i == lanes.length[COMPUTE] - 1:
                answered = inference + 1
        if answered > 0:
            finished_s[answered] = now
            for j, lane in enumerate((SWAP_IN, SWAP_OUT)):
                state[j] = done[lane] - answered * lanes.length[lane]
                state[j + 2] = left_s[lane] if active[lane] else 0.0
            if np.abs(state - state_before).max() <= 1e-9 * now:
                return start, end, now - finished_s[answered - 1]
            state_before[:] = state
    half = inferences // 2
    return start, end, (finished_s[inferences] - finished_s[half]) / (inferences - half)


@compiled
def _ready(lanes: LaneArrays, done: Ints, lane: int, inferences: int) -> bool:
    """Whether a lane's next step exists and everything that it waits for has ended."""
    if done[lane] >= lanes.length[lane] * inferences:
        return False
    inference, i = divmod(done[lane], lanes.length[lane])
    for other in range(3):
        earlier = lanes.wait[lane, i, other]
        if earlier >= 0 and done[other] <= inference * lanes.length[other] + earlier:
            return False
    if inference == 0:
        return True
    if done[SWAP_OUT] < inference * lanes.length[SWAP_OUT]:
        return False
    if lane != COMPUTE:
        return bool(done[COMPUTE] >= inference * lanes.length[COMPUTE])
    restored = (inference - 1) * lanes.length[SWAP_IN] + lanes.carried[i]
    return bool(lanes.carried[i] < 0 or done[SWAP_IN] > restored)
