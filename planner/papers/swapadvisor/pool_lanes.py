"""Evaluates a pool's swap plan on the simulator's lanes, and writes it as a plan.

A swap-in waits for the last user of its object: the paper's edge from a swap-out (or from the last user of what was
dropped) to the swap-in (section 4.2, Figure 3). A swap-out waits for the tensor's last user."""

from collections.abc import Sequence

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.papers.swapadvisor.pool_state import GONE, IN, OUT, RESULT, RUN, SCRATCH, SwapLog
from cohabit.planner.papers.swapadvisor.pool_swaps import plan_swaps
from cohabit.planner.papers.swapadvisor.pools import VALUE, MemoryPool, OpUses
from cohabit.planner.plan import Plan
from cohabit.planner.problem import UNFIT, Cost, Problem
from cohabit.planner.sequence.plan_writer import PlanWriter
from cohabit.planner.simulate import (
    COMPUTE,
    NOTHING,
    SWAP_IN,
    SWAP_OUT,
    LaneArrays,
    empty_lanes,
    latency_and_period,
    wait_for,
)


def evaluate(
    uses: OpUses, order: Ints, pool: MemoryPool, threshold: float, good_s: float, double_pass: bool = True
) -> Cost:
    """Plan the swaps and simulate them; the period only if the latency is at most `good_s`."""
    fits, latency_s, period_s, link_bytes = _evaluate(
        uses, order, pool.class_of_size, pool.counts, threshold, good_s, double_pass
    )
    return Cost(latency_s, period_s, link_bytes) if fits else UNFIT


@compiled
def _evaluate(
    uses: OpUses, order: Ints, class_of_size: Ints, counts: Ints, threshold: float, good_s: float, double_pass: bool
) -> tuple[bool, float, float, int]:
    fits, log, start = plan_swaps(uses, order, class_of_size, counts, threshold, double_pass)
    if not fits:
        return False, np.inf, np.inf, 0
    lanes, link_bytes = _line_up(uses, log, start, counts.sum())
    latency_s, period_s = latency_and_period(lanes, uses.compute_slowdown, uses.swap_slowdown, good_s)
    return True, latency_s, period_s, link_bytes


@compiled
def _line_up(uses: OpUses, log: SwapLog, start: Ints, objects: int) -> tuple[LaneArrays, int]:
    """What `simulate.prepare` makes of the plan that this log becomes, and the bytes that are copied."""
    length, link_bytes = np.zeros(3, np.int64), 0
    for entry in log.entries[: log.length[0]]:
        if entry.verb == RUN:
            length[COMPUTE] += 1
        elif entry.verb in (IN, OUT):
            length[SWAP_IN if entry.verb == IN else SWAP_OUT] += 1
            link_bytes += uses.nbytes[entry.what]
    lanes = empty_lanes(length)
    tensors = len(uses.size)
    place, arrived = start.copy(), np.full(tensors, NOTHING)  # arrived: by which swap-in, of what is in memory
    used, saved = np.full(tensors, NOTHING), np.full(tensors, NOTHING)  # by which op, by which swap-out
    last = np.full((objects, 3), NOTHING)  # per object and lane, its last user
    done = np.zeros(3, np.int64)
    for entry in log.entries[: log.length[0]]:
        verb, t, o = entry.verb, entry.what, entry.where
        k, i, j = done[COMPUTE], done[SWAP_IN], done[SWAP_OUT]
        if verb in (RESULT, SCRATCH):
            wait_for(lanes, COMPUTE, k, SWAP_IN, last[o, SWAP_IN])
            wait_for(lanes, COMPUTE, k, SWAP_OUT, last[o, SWAP_OUT])
            last[o, COMPUTE] = k
            if verb == RESULT:
                place[t], arrived[t] = o, NOTHING
        elif verb == RUN:
            lanes.work_s[COMPUTE, k] = uses.op_s[t]
            for u in range(uses.start[t], uses.start[t + 1]):
                v = uses.tensor[u]
                wait_for(lanes, COMPUTE, k, SWAP_IN, arrived[v])
                used[v] = k
                if place[v] >= 0:
                    last[place[v], COMPUTE] = k
            if k == length[COMPUTE] - 1:
                for v in uses.outputs:
                    wait_for(lanes, COMPUTE, k, SWAP_IN, arrived[v])
            done[COMPUTE] += 1
        elif verb == IN:
            lanes.work_s[SWAP_IN, i] = uses.in_s[t]
            wait_for(lanes, SWAP_IN, i, COMPUTE, last[o, COMPUTE])
            wait_for(lanes, SWAP_IN, i, SWAP_OUT, max(last[o, SWAP_OUT], saved[t]))
            last[o, SWAP_IN] = i
            place[t], arrived[t], used[t] = o, i, NOTHING
            done[SWAP_IN] += 1
        elif verb == OUT:
            lanes.work_s[SWAP_OUT, j] = uses.out_s[t]
            wait_for(lanes, SWAP_OUT, j, COMPUTE, used[t])
            wait_for(lanes, SWAP_OUT, j, SWAP_IN, arrived[t])
            if place[t] >= 0:
                last[place[t], SWAP_OUT] = j
            saved[t] = j
            done[SWAP_OUT] += 1
        elif verb == GONE:
            place[t] = NOTHING
    _carry(uses, log, start, lanes, arrived)
    return lanes, link_bytes


@compiled
def _carry(uses: OpUses, log: SwapLog, start: Ints, lanes: LaneArrays, arrived: Ints) -> None:
    """Ops that read initial residents wait for the previous inference to have restored them."""
    k = 0
    for entry in log.entries[: log.length[0]]:
        if entry.verb == RUN:
            for u in range(uses.start[entry.what], uses.start[entry.what + 1]):
                t = uses.tensor[u]
                if start[t] >= 0 and uses.kind[t] != VALUE:
                    lanes.carried[k] = max(lanes.carried[k], arrived[t])
            k += 1


def write(
    problem: Problem, uses: OpUses, order: Ints, pool: MemoryPool, threshold: float, double_pass: bool = True
) -> Plan:
    """The plan of an order that can run in this pool."""
    fits, log, start = plan_swaps(uses, order, pool.class_of_size, pool.counts, threshold, double_pass)
    assert fits
    graph = problem.graph
    offsets = pool.offsets.tolist()
    writer = PlanWriter(graph, problem.memory_bytes, 0, *_at_start(graph, offsets, start))
    results: dict[int, int] = {}
    scratch: int | None = None
    last = int(order[-1])
    for verb, what, where in log.entries[: log.length[0]].tolist():
        if verb == RUN:
            writes = graph.ops[what].writes
            arrived = [t for t in graph.outputs if t not in writes] if what == last else ()
            writer.compute(what, [results.pop(t, 0) for t in writes], scratch, arrived)
            scratch = None
        elif verb == RESULT:
            results[what] = offsets[where]
        elif verb == SCRATCH:
            scratch = offsets[where]
        elif verb == IN:
            writer.swap_in(what, offsets[where])
        elif verb == OUT:
            writer.swap_out(what, after_uses=True)
        else:
            writer.drop(what)
    return writer.plan(problem.profile.fingerprint)


def _at_start(graph: Graph, offsets: Sequence[int], start: Ints) -> tuple[dict[int, int], dict[int, int]]:
    """Offsets of the inputs and the initial residents. What has no bytes is always in memory."""
    inputs: dict[int, int] = {}
    residents: dict[int, int] = {}
    used = {t for op in graph.ops for t in op.reads} | set(graph.outputs)
    for t, tensor in enumerate(graph.tensors):
        offset = offsets[start[t]] if start[t] >= 0 else 0
        if tensor.kind == "input":
            inputs[t] = offset
        elif tensor.kind != "activation" and (start[t] >= 0 or (not tensor.nbytes and t in used)):
            residents[t] = offset
    return inputs, residents
