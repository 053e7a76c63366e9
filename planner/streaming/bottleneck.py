"""The op at which copies are furthest behind, and orders of the ops in which they are less so.

When an op starts, the parameters that are still to be read and not in memory are still to be copied, one after the
other. So an inference takes no less than the ops before and these copies. Most copies are saved if memory holds those
that take longest for their size."""

from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.profile import Profile
from cohabit.planner.streaming.memory_order import OUTSIDE, Uses, first_behind, last_ahead, put, uses_of
from cohabit.planner.streaming.workload import Arrays

STEPS: Final = 500
"""Changes that are tried: about 25 ms for a thousand ops."""
NO_ROOM: Final = 1e9
"""Seconds that stand for an op that does not fit, to which the bytes that it lacks are added."""


class _Inference(NamedTuple):
    uses: Uses
    is_weight: Bools
    """Per tensor of `uses`."""
    weights: Ints
    """Those, costly ones first."""
    copy_s: Floats
    """Of each of these."""
    op_s: Floats
    memory_bytes: int


def least_latency_s(work: Arrays) -> float:
    """Estimate the least latency in an order whose activations have their places: parameters lie above these."""
    costly_first = np.argsort(-work.swap_s / np.maximum(work.size, 1), kind="stable")
    size, swap_s, last_use = work.size[costly_first], work.swap_s[costly_first], work.last_use[costly_first]
    return float(_least_latency_s(work, size, swap_s, last_use))


def less_behind(
    graph: Graph, profile: Profile, memory_bytes: int, order: tuple[int, ...], seed: int
) -> tuple[int, ...]:
    """Descend from an order to one in which copies are less far behind, were memory never in pieces.

    Each change is about the op at which they are furthest behind: some op comes ahead of it, or after it.
    Deterministic for a seed.
    """
    uses = uses_of(graph)
    is_weight = np.array([graph.tensors[t].is_weight for t in uses.tensor.tolist()], np.bool_)
    copy_s = np.array([profile.swap_in.seconds(n) for n in uses.nbytes.tolist()])
    costly_first = np.argsort(-copy_s / np.maximum(uses.nbytes, 1), kind="stable")
    weights = costly_first[is_weight[costly_first]]
    op_s = np.array(profile.op_seconds)
    work = _Inference(uses, is_weight, weights, copy_s[weights], op_s, memory_bytes)
    return tuple(_descend(work, np.array(order, np.int64), STEPS, seed).tolist())


@compiled
def _still_to_copy_s(size: Ints, copy_s: Floats, last_use: Ints, op: int, room: int) -> float:
    """Of the parameters (costly ones first) that are read by `op` or later, what does not fit in the room."""
    left_s = 0.0
    for i in range(len(size)):
        if last_use[i] < op:
            continue
        if size[i] <= room:
            room -= size[i]
        else:
            left_s += copy_s[i] * (1 - room / size[i])
            room = 0
    return left_s


@compiled
def _least_latency_s(work: Arrays, size: Ints, swap_s: Floats, last_use: Ints) -> float:
    most_s = 0.0
    for k in range(len(work.op_s)):
        room = work.workspace_pages - work.zone[k]
        most_s = max(most_s, work.op_start_s[k] + _still_to_copy_s(size, swap_s, last_use, k, room))
    return most_s


@compiled
def _descend(work: _Inference, start: Ints, steps: int, seed: int) -> Ints:
    np.random.seed(seed)
    uses, ops = work.uses, len(work.op_s)
    order, position = start.copy(), np.argsort(start)
    behind_s = np.full(ops, np.inf)
    _is_lower(work, order, position, behind_s, 0, ops)
    for _ in range(steps if ops > 1 else 0):
        at = int(behind_s.argmax())
        first = max(at + 1 - int(ops ** np.random.random()), 0)
        end = min(at + int(ops ** np.random.random()), ops)
        if end - first < 2:
            continue
        old, old_s = order[first:end].copy(), behind_s[first:end].copy()
        put(order, position, first, last_ahead(uses, old) if np.random.random() < 0.5 else first_behind(uses, old))
        if not _is_lower(work, order, position, behind_s, first, end):
            put(order, position, first, old)
            behind_s[first:end] = old_s
    return order


@compiled
def _is_lower(work: _Inference, order: Ints, position: Ints, behind_s: Floats, first: int, end: int) -> bool:
    """Set what ops from `first` to `end` are at least behind; False as soon as one is so as much as any was."""
    uses, is_weight, ops = work.uses, work.is_weight, len(order)
    most_s = behind_s.max()
    live, read = np.zeros(ops + 1, np.int64), np.zeros(ops, np.int64)
    last_use = np.empty(len(uses.nbytes), np.int64)
    for i in range(len(uses.nbytes)):
        written = last = 0 if uses.writer[i] == OUTSIDE else position[uses.writer[i]]
        for op in uses.reader[uses.reader_start[i] : uses.reader_start[i + 1]]:
            at = ops - 1 if op == OUTSIDE else position[op]
            last = max(last, at)
            read[at] += uses.nbytes[i] if is_weight[i] else 0
        last_use[i] = last
        if not is_weight[i]:
            live[written] += uses.nbytes[i]
            live[last + 1] -= uses.nbytes[i]
    live = np.cumsum(live)
    nbytes, last_use = uses.nbytes[work.weights], last_use[work.weights]
    passed_s = work.op_s[order[:first]].sum()
    for k in range(first, end):
        lacking = live[k] + read[k] - work.memory_bytes
        room = work.memory_bytes - live[k]
        behind_s[k] = passed_s + _still_to_copy_s(nbytes, work.copy_s, last_use, k, room)
        if lacking > 0:
            behind_s[k] = NO_ROOM + lacking
        if behind_s[k] >= most_s:
            return False
        passed_s += work.op_s[order[k]]
    return True
