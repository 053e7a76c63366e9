"""The searcher `on_demand`: ODSwap, SwapAdvisor's online baseline. LRU eviction, with prefetching in later iterations.

SwapAdvisor, section 6.1, Baselines: "in the first training iteration, ODSwap swaps out a tensor when the GPU memory
is insufficient to run the next node based on LRU. In subsequent iterations, ODSwap performs prefetching based on the
scheduling decisions seen in the first iteration."

The paper says no more. Here, the recorded iteration starts with the weights that it ends with. Prefetching moves
swap-ins ahead, in the order of demand, as far as memory allows; evicted tensors leave right after their last use.
Copies overlap with ops in both directions."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.serial import require_counted
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Action, Schedule, columns, counted
from cohabit.planner.search.searcher import Searcher


class OnDemand(Searcher[None]):
    """Evaluates the decisions of one iteration: there is nothing to choose."""

    def __init__(self, problem: Problem, seed: int) -> None:
        require_counted(problem, "on_demand")
        self.problem = problem
        self.evaluations = 1
        self._steps = self._search()

    def _search(self) -> Iterator[Sequence[None]]:
        yield [None]

    def _schedule(self, candidate: None) -> Schedule | None:
        graph, memory_bytes = self.problem.graph, self.problem.memory.nbytes
        course = steady(graph, memory_bytes)
        actions = prefetched(graph, course)
        return counted(self.problem.arrays, *columns(actions), course.residents, memory_bytes)


@dataclass(frozen=True, slots=True)
class Eviction:
    """Eviction of a tensor: a swap-out if its host copy is stale (`save`), and a drop unless it `stays`."""

    tensor: int
    used: int
    """Last op that touched it; -1 for none."""
    save: bool
    stays: bool = False


@dataclass(frozen=True, slots=True)
class EvictAndFetch:
    """Actions right before an op, or after the last one: first evictions, then fetches."""

    leaves: tuple[Eviction, ...]
    fetches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LruDecisions:
    """Decisions of one iteration: a turn per op, and one after the last."""

    capacity_bytes: int
    residents: frozenset[int]
    turns: tuple[EvictAndFetch, ...]
    kept: frozenset[int]
    """Weights in memory at the end, except residents that were evicted before their first use."""


def steady(graph: Graph, capacity_bytes: int) -> LruDecisions:
    """Return the decisions of an iteration that starts with weights that it ends with.

    The first pass starts without weights, and the second with those at the end of the first. Weights that are evicted
    before their first use, or missing at the end, are removed from the residents, and the pass is repeated.
    """
    residents = least_recently_used(graph, capacity_bytes, frozenset()).kept
    while True:
        course = least_recently_used(graph, capacity_bytes, residents)
        if residents <= course.kept:
            return course
        residents &= course.kept


def least_recently_used(graph: Graph, capacity_bytes: int, residents: frozenset[int]) -> LruDecisions:
    """Run the ops in order; if the next does not fit, the least recently used tensors leave.

    A use is the position of the op; ties leave in order of their ids. Residents were last used an iteration ago,
    inputs just before the first op. Tensors without further use leave at once.
    """
    memory = _LruMemory(graph, capacity_bytes, residents)
    turns = [memory.turn(k) for k in range(len(graph.ops))]
    kept = memory.kept()
    return LruDecisions(capacity_bytes, residents, (*turns, memory.end()), kept)


def on_demand(graph: Graph, course: LruDecisions) -> list[Action]:
    """Return the actions of the decisions as made: those for an op are right before it."""
    actions: list[Action] = []
    for k, turn in enumerate(course.turns):
        actions += [a for leave in turn.leaves for a in _leave(leave)]
        actions += [(SWAP_IN, t) for t in turn.fetches]
        actions += [(COMPUTE, k)] if k < len(graph.ops) else []
    return actions


def prefetched(graph: Graph, course: LruDecisions) -> list[Action]:
    """Return the actions of the same decisions, as early as possible.

    Evicted tensors leave right after their last use. Swap-ins, in the order of demand, are issued as soon as they fit
    in memory until they are needed.
    """
    leaves: list[list[Eviction]] = [[] for _ in course.turns]
    for turn in course.turns:
        for leave in turn.leaves:
            leaves[leave.used + 1].append(leave)
    fetches: list[list[int]] = [[] for _ in course.turns]
    held = np.array(_held_bytes(graph, course, leaves), dtype=np.int64)
    nbytes = [t.aligned_bytes for t in graph.tensors]
    gone = dict.fromkeys(range(len(graph.tensors)), 0)
    earliest = 0
    for k, turn in enumerate(course.turns):
        gone |= {leave.tensor: leave.used + 1 for leave in turn.leaves}
        for t in turn.fetches:
            earliest = _moved_ahead(held, k, max(earliest, gone[t]), nbytes[t], course.capacity_bytes)
            fetches[earliest].append(t)
    moved = [EvictAndFetch(tuple(a), tuple(b)) for a, b in zip(leaves, fetches, strict=True)]
    return on_demand(graph, LruDecisions(course.capacity_bytes, course.residents, tuple(moved), course.kept))


@compiled
def _moved_ahead(held: Ints, at: int, earliest: int, nbytes: int, capacity_bytes: int) -> int:
    """Return the turn to which a fetch can move ahead from `at`, and add its bytes to `held` from there on."""
    while at > earliest and held[at - 1] + nbytes <= capacity_bytes:
        at -= 1
        held[at] += nbytes
    return at


class _LruMemory:
    """Contents of memory during one iteration, least recently used first."""

    def __init__(self, graph: Graph, capacity_bytes: int, residents: Collection[int]) -> None:
        self._graph = graph
        self._nbytes = [t.aligned_bytes for t in graph.tensors]
        self._last = _last_uses(graph)
        self._is_weight = [t.is_weight for t in graph.tensors]
        self._residents = residents
        inputs = graph.inputs
        self._used = dict.fromkeys((*sorted(residents, key=lambda t: (self._last[t], t)), *inputs), -1)
        self._unsaved = {t for t in self._used if graph.tensors[t].kind != "parameter"}
        self._evicted_unused: set[int] = set()
        self._free = capacity_bytes - sum(self._nbytes[t] for t in self._used)
        self._leaving: list[Eviction] = []
        self._evict(())
        self._leaving += [self._leave(t) for t in inputs if t not in self._last]

    def turn(self, k: int) -> EvictAndFetch:
        """Make room for op k and run it."""
        op, needed = self._graph.ops[k], self._graph.needed[k]
        missing = [t for t in needed if t not in self._used]
        scratch = self._graph.ops[k].aligned_scratch_bytes
        self._free -= scratch + sum(self._nbytes[t] for t in missing)
        self._evict(needed)
        self._free += scratch
        turn = EvictAndFetch(tuple(self._leaving), tuple(t for t in missing if t not in op.writes))
        for t in sorted(needed):
            self._used.pop(t, None)
            self._used[t] = k
        self._unsaved.update((*op.writes, *op.mutates))
        self._leaving = [self._leave(t) for t in needed if self._last[t] == k and not self._is_weight[t]]
        return turn

    def kept(self) -> frozenset[int]:
        """Return the weights that the iteration may start with, by its course so far."""
        return frozenset(t for t in self._used if self._is_weight[t]) - self._evicted_unused

    def end(self) -> EvictAndFetch:
        """Evict weights except outputs and residents, and save changed state except residents."""
        for t in list(self._used):
            if t not in self._residents and self._is_weight[t]:
                if t not in self._graph.outputs or self._graph.tensors[t].kind == "parameter":
                    self._leaving.append(self._leave(t))
                elif t in self._unsaved:
                    self._leaving.append(Eviction(t, self._used[t], save=True, stays=True))
        return EvictAndFetch(tuple(self._leaving), ())

    def _evict(self, needed: Collection[int]) -> None:
        for t in list(self._used) if self._free < 0 else ():
            if self._free >= 0:
                return
            if t not in needed and self._nbytes[t]:
                if self._used[t] < 0:
                    self._evicted_unused.add(t)
                self._leaving.append(self._leave(t))

    def _leave(self, t: int) -> Eviction:
        used = self._used.pop(t)
        needed = self._is_weight[t] or used < self._last.get(t, -1)
        self._free += self._nbytes[t]
        leave = Eviction(t, used, save=needed and t in self._unsaved)
        self._unsaved.discard(t)
        return leave


def _leave(leave: Eviction) -> list[Action]:
    actions = [(SWAP_OUT, leave.tensor)] if leave.save else []
    return actions if leave.stays else [*actions, (DROP, leave.tensor)]


def _held_bytes(graph: Graph, course: LruDecisions, leaves: Sequence[Sequence[Eviction]]) -> list[int]:
    """Return the bytes in memory during each op if tensors leave at these turns."""
    nbytes = [t.aligned_bytes for t in graph.tensors]
    now = sum(nbytes[t] for t in (*graph.inputs, *course.residents))
    held = []
    for k, op in enumerate(graph.ops):
        now -= sum(nbytes[x.tensor] for x in leaves[k] if not x.stays)
        now += sum(nbytes[t] for t in (*course.turns[k].fetches, *op.writes))
        held.append(now + op.aligned_scratch_bytes)
    return held


def _last_uses(graph: Graph) -> dict[int, int]:
    """Return the last op that touches each tensor; the number of ops for outputs."""
    last = {t: k for k, needed in enumerate(graph.needed) for t in needed}
    return last | {t: len(graph.ops) for t in graph.outputs if graph.tensors[t].kind in ("input", "activation")}
