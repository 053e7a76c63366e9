"""An order of a graph's ops in which memory becomes free early, for parameters that stream through it."""

from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Floats, Ints, ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.order import predecessors

STEPS: Final = 5000
"""Changes that are tried: about 60 ms for a thousand ops."""
PEAK_WEIGHT: Final = 5.0
"""Weight of the most bytes at any time, relative to the mean over time."""
OUTSIDE: Final = -1
"""In place of an op: written before the first one, or read after the last one."""


class Uses(NamedTuple):
    """The ops' dependencies, and the tensors that they touch."""

    before: Ints
    """Predecessors of op k are in `before[before_start[k]]` to `before[before_start[k + 1]]`."""
    before_start: Ints
    tensor: Ints
    """Positions in the graph, ascending; the arrays below go by it."""
    nbytes: Ints
    writer: Ints
    """Op that writes each tensor, or OUTSIDE."""
    reader: Ints
    """Readers of tensor i are `reader[reader_start[i]]` to `reader[reader_start[i + 1]]`."""
    reader_start: Ints


def uses_of(graph: Graph) -> Uses:
    used = {t for op in graph.ops for t in (*op.reads, *op.writes, *op.mutates)}
    number = {t: i for i, t in enumerate(sorted(used))}
    writer, readers = [OUTSIDE] * len(number), [list[int]() for _ in number]
    for k, op in enumerate(graph.ops):
        for t in op.writes:
            writer[number[t]] = k
        for t in (*op.reads, *op.mutates):
            readers[number[t]].append(k)
    for t in number.keys() & {*graph.outputs}:
        readers[number[t]].append(OUTSIDE)
    before, before_start = _joined([sorted(b) for b in predecessors(graph)])
    nbytes = ints(graph.tensors[t].nbytes for t in number)
    return Uses(before, before_start, ints(number), nbytes, ints(writer), *_joined(readers))


def by_memory(graph: Graph, op_seconds: Sequence[float]) -> tuple[int, ...]:
    """Climb from the graph's order to one that needs fewer bytes, weighted by time, were all parameters resident.

    A parameter counts until the last op that reads it, an activation from the op that writes it to its last use. Each
    change takes one op, and what it depends on, ahead of some of the ops before it. Deterministic.
    """
    share = np.array(op_seconds) / max(sum(op_seconds), 1e-30)
    return tuple(_climb(uses_of(graph), share, STEPS).tolist())


def _joined(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    return ints(chain.from_iterable(lists)), ints(np.cumsum([0, *map(len, lists)]))


@compiled
def _climb(uses: Uses, share: Floats, steps: int) -> Ints:
    np.random.seed(0)
    ops = len(share)
    order, position = np.arange(ops), np.arange(ops)
    best = _memory(uses, share, order, position)
    for _ in range(steps if ops > 1 else 0):
        k = np.random.randint(1, ops)
        first = max(k - int(ops ** np.random.random()), 0)
        old = order[first : k + 1].copy()
        put(order, position, first, last_ahead(uses, old))
        memory = _memory(uses, share, order, position)
        if memory <= best:
            best = memory
        else:
            put(order, position, first, old)
    return order


@compiled
def put(order: Ints, position: Ints, first: int, window: Ints) -> None:
    """Let these ops run one after the other from `first` on."""
    order[first : first + len(window)] = window
    position[window] = np.arange(first, first + len(window))


@compiled
def last_ahead(uses: Uses, window: Ints) -> Ints:
    """The last of these ops, and those it depends on, before the others."""
    taken = np.zeros(len(uses.before_start), np.bool_)
    taken[window[-1]] = True
    for op in window[::-1]:
        if taken[op]:
            taken[uses.before[uses.before_start[op] : uses.before_start[op + 1]]] = True
    return np.concatenate((window[taken[window]], window[~taken[window]]))


@compiled
def first_behind(uses: Uses, window: Ints) -> Ints:
    """The first of these ops, and those that depend on it, after the others."""
    taken = np.zeros(len(uses.before_start), np.bool_)
    taken[window[0]] = True
    for op in window[1:]:
        taken[op] = taken[uses.before[uses.before_start[op] : uses.before_start[op + 1]]].any()
    return np.concatenate((window[~taken[window]], window[taken[window]]))


@compiled
def _memory(uses: Uses, share: Floats, order: Ints, position: Ints) -> float:
    """The mean over time of the bytes that are needed, and the most."""
    ops = len(order)
    change = np.zeros(ops + 1, np.int64)
    for i in range(len(uses.nbytes)):
        first = last = 0 if uses.writer[i] == OUTSIDE else position[uses.writer[i]]
        for j in range(uses.reader_start[i], uses.reader_start[i + 1]):
            op = uses.reader[j]
            last = max(last, ops - 1 if op == OUTSIDE else position[op])
        change[first] += uses.nbytes[i]
        change[last + 1] -= uses.nbytes[i]
    live, most, mean = 0, 0, 0.0
    for k in range(ops):
        live += change[k]
        most = max(most, live)
        mean += live * share[order[k]]
    return mean + PEAK_WEIGHT * most
