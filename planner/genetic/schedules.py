"""SwapAdvisor's operators on schedules (section 5.2): crossover and mutation of the order of a graph's ops.

Besides data dependencies, an op that changes a tensor in place keeps its order relative to all other users of the
tensor.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Literal

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.order import predecessors

NONE: Final = -1
Run = Literal["", "weights", "newest"]
"""Which ops a mutation runs after one that it has drawn: none in particular, those that read the same weights, or
those that became ready last, depth first."""
RUN: Final = 150
"""Mean number of these ops."""


@dataclass(frozen=True)
class Precedence:
    """Op k comes before the ops `after[start[k]]` to `after[start[k + 1] - 1]`, and after `before[k]` ops."""

    start: Ints
    after: Ints
    before: Ints
    weights: Ints
    """Per op, the number of the set of weights that it reads, or NONE if it reads none."""


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
        _weights(graph),
    )


def _weights(graph: Graph) -> Ints:
    number = {frozenset[int](): NONE}
    read = [frozenset(t for t in op.reads if graph.tensors[t].is_weight) for op in graph.ops]
    return np.array([number.setdefault(weights, len(number)) for weights in read], np.int64)


def cross_schedules(first: Ints, second: Ints, cut: int) -> tuple[Ints, Ints]:
    """Return two children: each begins with `cut` ops of one parent, then has the other's order (Figure 4).

    SCH_C1 begins like the second parent, SCH_C2 like the first.
    """
    return _join(second, first, cut), _join(first, second, cut)


def _join(head: Ints, tail: Ints, cut: int) -> Ints:
    there = np.zeros(len(head), np.bool_)
    there[head[:cut]] = True
    return np.concatenate([head[:cut], tail[~there[tail]]])


def mutate_schedule(
    order: Ints, rule: Precedence, probability: float, rng: np.random.Generator, run: Run = ""
) -> Ints:
    """Reschedule as a dataflow engine would: the first ready op of `order`, or, with `probability`, any ready one.

    The paper may "mutate multiple nodes in one mutation", and leaves open which. With `run`, an op drawn at random is
    followed by about RUN others: ops that read the same weights or none, if it reads any; or the ops that became ready
    last.
    """
    count = len(order)
    random, pick = rng.random(count) < probability, rng.random(count)
    lengths = rng.geometric(1 / RUN, count) if run else np.zeros(count, np.int64)
    newest = run == "newest"
    return _mutate(order, rule.start, rule.after, rule.before, rule.weights, random, pick, lengths, newest)


def random_schedule(rule: Precedence, rng: np.random.Generator) -> Ints:
    """Return an order that runs a random ready op at each step.

    The paper leaves the distribution open: individuals are "created randomly" (section 5.1).
    """
    return mutate_schedule(np.arange(len(rule.before)), rule, 1.0, rng)


@compiled
def _mutate(
    order: Ints,
    start: Ints,
    after: Ints,
    before: Ints,
    weights: Ints,
    random: Bools,
    pick: Floats,
    run: Ints,
    newest: bool,
) -> Ints:
    count = len(order)
    position, missing = np.empty(count, np.int64), before.copy()
    for i in range(count):
        position[order[i]] = i
    ready, place = np.empty(count, np.int64), np.full(count, -1)  # ready ops, and the index of each
    since = np.full(count, -1)  # number of ops that had run when an op became ready
    ready_length = 0
    heap = [np.int64(count)]  # positions of ready ops, least first; those of ops that ran are skipped
    for k in range(count):
        if missing[k] == 0:
            ready[ready_length], place[k] = k, ready_length
            ready_length += 1
            heappush(heap, position[k])
    result = np.empty(count, np.int64)
    wanted, left = NONE, 0  # weights whose ops run together, and the number of ops still to run so
    for i in range(count):
        k = NONE
        if left > 0:
            left -= 1
            if newest:
                k = _newest(ready[:ready_length], position, since)
            else:
                k = _of_weights(ready[:ready_length], position, weights, wanted)
                if k == NONE:
                    k = _of_weights(ready[:ready_length], position, weights, NONE)
                if k == NONE:
                    left = 0
        if k == NONE and random[i]:
            k = ready[int(pick[i] * ready_length)]
            if newest or weights[k] != NONE:
                wanted, left = weights[k], run[i]
        if k == NONE:
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
                ready[ready_length], place[j], since[j] = j, ready_length, i
                ready_length += 1
                heappush(heap, position[j])
    return result


@compiled
def _newest(ready: Ints, position: Ints, since: Ints) -> int:
    """Return the ready op that became so last; of several, the first in the order."""
    found = NONE
    for k in ready:
        if found == NONE or since[k] > since[found] or (since[k] == since[found] and position[k] < position[found]):
            found = k
    return found


@compiled
def _of_weights(ready: Ints, position: Ints, weights: Ints, wanted: int) -> int:
    """Return the first of the ready ops that reads these weights, or NONE."""
    found = NONE
    for k in ready:
        if weights[k] == wanted and (found == NONE or position[k] < position[found]):
            found = k
    return found
