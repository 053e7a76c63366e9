"""SwapAdvisor's operators on schedules (section 5.2): crossover and mutation of the order of a graph's ops.

Besides data dependencies, an op that changes a tensor in place keeps its order relative to all other users of the
tensor.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.order import predecessors


@dataclass(frozen=True)
class Precedence:
    """Op k comes before the ops `after[start[k]]` to `after[start[k + 1] - 1]`, and after `before[k]` ops."""

    start: Ints
    after: Ints
    before: Ints


def precedence(graph: Graph) -> Precedence:
    """Return which ops must run before others."""
    earlier = predecessors(graph)
    after: list[list[int]] = [[] for _ in earlier]
    for k, needed in enumerate(earlier):
        for j in needed:
            after[j].append(k)
    return Precedence(
        np.cumsum([0, *map(len, after)]),
        np.array([k for ops in after for k in ops], np.int64),
        np.array([len(needed) for needed in earlier], np.int64),
    )


def cross_schedules(first: Ints, second: Ints, cut: int) -> tuple[Ints, Ints]:
    """Return two children: each begins with `cut` ops of one parent, then has the other's order (Figure 4).

    SCH_C1 begins like the second parent, SCH_C2 like the first.
    """
    return _join(second, first, cut), _join(first, second, cut)


def _join(head: Ints, tail: Ints, cut: int) -> Ints:
    there = np.zeros(len(head), np.bool_)
    there[head[:cut]] = True
    return np.concatenate([head[:cut], tail[~there[tail]]])


def mutate_schedule(order: Ints, rule: Precedence, probability: float, rng: np.random.Generator) -> Ints:
    """Reschedule as a dataflow engine would: the first ready op of `order`, or, with `probability`, any ready one."""
    count = len(order)
    return _mutate(order, rule.start, rule.after, rule.before, rng.random(count) < probability, rng.random(count))


def random_schedule(rule: Precedence, rng: np.random.Generator) -> Ints:
    """Return an order that runs a random ready op at each step.

    The paper leaves the distribution open: individuals are "created randomly" (section 5.1).
    """
    return mutate_schedule(np.arange(len(rule.before)), rule, 1.0, rng)


@compiled
def _mutate(order: Ints, start: Ints, after: Ints, before: Ints, random: Bools, pick: Floats) -> Ints:
    count = len(order)
    position, missing = np.empty(count, np.int64), before.copy()
    for i in range(count):
        position[order[i]] = i
    ready, place = np.empty(count, np.int64), np.full(count, -1)  # ready ops, and the index of each
    ready_length = 0
    heap = [np.int64(count)]  # positions of ready ops, least first; those of ops that ran are skipped
    for k in range(count):
        if missing[k] == 0:
            ready[ready_length], place[k] = k, ready_length
            ready_length += 1
            heappush(heap, position[k])
    result = np.empty(count, np.int64)
    for i in range(count):
        if random[i]:
            k = ready[int(pick[i] * ready_length)]
        else:
            while place[order[heap[0]]] < 0:
                heappop(heap)
            k = order[heap[0]]
        ready_length -= 1
        ready[place[k]] = ready[ready_length]
        place[ready[ready_length]] = place[k]
        place[k] = -1
        result[i] = k
        for j in after[start[k] : start[k + 1]]:
            missing[j] -= 1
            if missing[j] == 0:
                ready[ready_length], place[j] = j, ready_length
                ready_length += 1
                heappush(heap, position[j])
    return result
