"""Simulates when each step of a schedule runs. This is the planner's only cost function.

Three lanes (compute, swap-in, swap-out) run their steps in order; a step starts when its lane is free and
every step that it waits for has ended. While an op and a transfer overlap, both slow down by the profile's factors. The
simulation advances from one completion to the next and rescales the remaining work."""

from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Floats, GraphArrays, Ints, ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Compute, Drop, Lane, Plan, Span, SwapIn, SwapOut, Timeline
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.table import COMPUTE, DROP, NOTHING, SWAP_IN, SWAP_OUT, Schedule

LANES: tuple[Lane, ...] = ("compute", "swap_in", "swap_out")
_VERBS: Final = {Compute: COMPUTE, SwapIn: SWAP_IN, SwapOut: SWAP_OUT, Drop: DROP}

MOST_INFERENCES: Final = 8
"""Maximum number of inferences simulated to find a stable period."""


class LaneArrays(NamedTuple):
    """A schedule by lanes. `n` is the length of the longest lane.

    Lanes run in order, so a step waits only for the last step that it needs of each lane.
    """

    length: Ints
    """Steps per lane; shape [3]."""
    work_s: Floats
    """Duration of a lane's i-th step while nothing else runs; shape [3, n]."""
    wait: Ints
    """`wait[lane, i, other]`: position on the other lane that must have ended, or NOTHING; shape [3, n, 3]."""
    carried: Ints
    """Per compute step, the previous inference's last swap-in that restores one of its reads, or NOTHING; shape [n]."""


@compiled
def lanes_of(g: GraphArrays, schedule: Schedule) -> LaneArrays:
    """Sort a schedule's rows by lane, for `run`."""
    length = np.zeros(3, np.int64)
    for verb in schedule.verb:
        if verb != DROP:
            length[verb] += 1
    longest = length.max()
    work_s, wait = np.zeros((3, longest)), np.full((3, longest, 3), NOTHING)
    carried, restored = np.full(longest, NOTHING), np.full(len(g.nbytes), NOTHING)
    done = np.zeros(3, np.int64)
    for i in range(len(schedule.verb)):
        lane, x = schedule.verb[i], schedule.what[i]
        if lane == DROP:
            continue
        position = done[lane]
        if lane == COMPUTE:
            work_s[lane, position] = g.op_s[x]
        elif lane == SWAP_IN:
            work_s[lane, position] = g.swap_in_s[x]
            restored[x] = position
        else:
            work_s[lane, position] = g.swap_out_s[x]
        for other in range(3):
            wait[lane, position, other] = schedule.wait[i, other]
        done[lane] += 1
    # ops of the next inference wait for residents that this one restores
    back = np.full(len(g.nbytes), NOTHING)
    for t in schedule.residents:
        back[t] = restored[t]
    position = 0
    for i in range(len(schedule.verb)):
        if schedule.verb[i] == COMPUTE:
            x = schedule.what[i]
            for t in g.read[g.read_start[x] : g.read_start[x + 1]]:
                carried[position] = max(carried[position], back[t])
            position += 1
    return LaneArrays(length, work_s, wait, carried)


def evaluate(problem: Problem, schedule: Schedule, good_s: float) -> Cost:
    """Simulate a schedule. The period is infinite if the latency exceeds `good_s`."""
    return Cost(*_evaluate(problem.arrays, schedule, good_s))


@compiled
def _evaluate(g: GraphArrays, schedule: Schedule, good_s: float) -> tuple[float, float, int]:
    lanes, copied = lanes_of(g, schedule), 0
    for i in range(len(schedule.verb)):
        if schedule.verb[i] == SWAP_IN or schedule.verb[i] == SWAP_OUT:
            copied += g.copied_bytes[schedule.what[i]]
    if lanes.length[COMPUTE] == 0:
        return 0.0, 0.0, copied
    latency_s, period_s = latency_and_period(lanes, g.compute_slowdown, g.swap_slowdown, good_s)
    return latency_s, period_s, copied


def simulate(graph: Graph, plan: Plan, profile: Profile) -> Timeline:
    """Predict one inference on an idle device, and the period of inferences run back to back.

    Run back to back, the next inference's ops follow this one's last op. Its transfers follow this one's epilogue,
    and start only after this one's last op. All its steps start after this one's last swap-out: bytes and host copies
    are free by then.
    """
    arrays = GraphArrays.of(graph, profile)
    lanes = lanes_of(arrays, schedule_of(plan))
    slowdowns = profile.compute_slowdown, profile.swap_slowdown
    start, end = (times.tolist() for times in run(lanes, *slowdowns, 1)[:2])
    spans, done = [], [0, 0, 0]
    for index, step in enumerate(plan.steps):
        if not isinstance(step, Drop):
            lane = _VERBS[type(step)]
            spans.append(Span(index, LANES[lane], start[lane][done[lane]], end[lane][done[lane]]))
            done[lane] += 1
    computes = int(lanes.length[COMPUTE])
    return Timeline(
        spans=tuple(spans),
        latency_s=end[COMPUTE][computes - 1] if computes else 0.0,
        period_s=float(run(lanes, *slowdowns, MOST_INFERENCES)[2]) if computes else None,
        link_bytes=sum(
            graph.tensors[s.tensor].nbytes for s in plan.steps if type(s) is SwapIn or type(s) is SwapOut
        ),
    )


def schedule_of(plan: Plan) -> Schedule:
    """Return a plan's steps as a schedule with the plan's own waits, without addresses."""
    where: list[tuple[int, int]] = []  # lane and position of every step
    done = [0, 0, 0]
    wait = np.full((len(plan.steps), 3), NOTHING)
    for index, step in enumerate(plan.steps):
        if isinstance(step, Drop):
            where.append((NOTHING, NOTHING))
            continue
        lane = _VERBS[type(step)]
        where.append((lane, done[lane]))
        done[lane] += 1
        for earlier in step.after:
            other, position = where[earlier]
            wait[index, other] = max(wait[index, other], position)
    whats = [step.op if isinstance(step, Compute) else step.tensor for step in plan.steps]
    residents = ints(p.tensor for p in plan.residents)
    nowhere = np.full(len(plan.steps), NOTHING)
    return Schedule(
        ints(_VERBS[type(step)] for step in plan.steps),
        ints(whats),
        nowhere,
        wait,
        residents,
        np.full(len(residents), NOTHING),
    )


@compiled
def latency_and_period(
    lanes: LaneArrays, compute_slowdown: float, swap_slowdown: float, good_s: float
) -> tuple[float, float]:
    """Return latency and period; the period is infinite if the latency exceeds `good_s`."""
    _, end, _ = run(lanes, compute_slowdown, swap_slowdown, 1)
    latency_s = end[COMPUTE, lanes.length[COMPUTE] - 1]
    if latency_s > good_s:
        return latency_s, np.inf
    return latency_s, run(lanes, compute_slowdown, swap_slowdown, MOST_INFERENCES)[2]


@compiled
def run(
    lanes: LaneArrays, compute_slowdown: float, swap_slowdown: float, inferences: int
) -> tuple[Floats, Floats, float]:
    """Simulate inferences back to back. Returns the first one's starts and ends, shape [3, n], and the stable period.

    Stops when two successive inferences end in the same state, since all later ones will, too. If none do, the period
    is the mean over the later half.
    """
    start, end = np.zeros(lanes.work_s.shape), np.zeros(lanes.work_s.shape)
    finished_s = np.zeros(inferences + 1)  # [k]: end of the k-th inference's last op, from 1
    done = np.zeros(3, np.int64)  # steps ended per lane, over all inferences
    active = np.zeros(3, np.bool_)
    left_s = np.zeros(3)  # remaining work of each lane's step
    state, state_before = np.zeros(4), np.full(4, np.inf)
    now = 0.0
    while True:
        # Start all steps that are ready.
        for lane in range(3):
            if not active[lane] and _ready(lanes, done, lane, inferences):
                inference, i = divmod(done[lane], lanes.length[lane])
                active[lane] = True
                left_s[lane] = lanes.work_s[lane, i]
                if inference == 0:
                    start[lane, i] = now
        if not (active[COMPUTE] or active[SWAP_IN] or active[SWAP_OUT]):
            break
        # Advance to the next completion; ops and transfers that overlap slow each other.
        contended = active[COMPUTE] and (active[SWAP_IN] or active[SWAP_OUT])
        passed_s, first = np.inf, COMPUTE
        for lane in range(3):
            slowdown = compute_slowdown if lane == COMPUTE else swap_slowdown
            lane_s = left_s[lane] * slowdown if contended else left_s[lane]
            if active[lane] and lane_s < passed_s:
                passed_s, first = lane_s, lane
        now += passed_s
        # Subtract the work done meanwhile, and end steps without any left.
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
            # Lanes in the same state as one inference before: the period is stable.
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
    """Whether a lane has a next step and all steps that it waits for have ended."""
    if done[lane] >= lanes.length[lane] * inferences:
        return False
    inference, i = divmod(done[lane], lanes.length[lane])
    for other in range(3):
        earlier = lanes.wait[lane, i, other]
        if earlier >= 0 and done[other] <= inference * lanes.length[other] + earlier:
            return False
    if inference == 0:
        return True
    # Waits across inferences: see `simulate`.
    if done[SWAP_OUT] < inference * lanes.length[SWAP_OUT]:
        return False
    if lane != COMPUTE:
        return bool(done[COMPUTE] >= inference * lanes.length[COMPUTE])
    restored = (inference - 1) * lanes.length[SWAP_IN] + lanes.carried[i]
    return bool(lanes.carried[i] < 0 or done[SWAP_IN] > restored)
