"""Builds a schedule from one choice (such as keep, swap or recompute) for each gap between two uses of a tensor.

Beaumont et al. (2020), Proposition 1: for given offloads in a given order, it is optimal to do everything as early as
memory allows. Here copies are in the order of the uses that need them. Starting from the as-late-as-possible
sequence (`planner.schedule.alap`), swap-ins move to earlier positions where memory is free, and drops wait for
swap-outs."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.alap import AlapSequence, alap, codes, tables
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.schedule.serial import least_bytes, serial
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Action, Schedule, columns, counted


class ActionSequence(NamedTuple):
    """Actions in order, and the residents at the start and end of an inference. No tensor has an address."""

    verb: Ints
    what: Ints
    residents: frozenset[int]


def no_wait(gaps: Gaps, memory_bytes: int, choices: Sequence[Choice]) -> ActionSequence | None:
    """Return the best sequence with these choices; None if they need more than `memory_bytes`.

    Also None if recomputation triggers too much further recomputation for any plan to pay (`planner.schedule.alap`).
    """
    if not gaps.graph.ops:
        fits = least_bytes(gaps.graph) <= memory_bytes
        return ActionSequence(*columns(serial(gaps.graph)), frozenset()) if fits else None
    made = alap(tables(gaps), codes(choices))
    if not len(made.held) or made.held.max() > memory_bytes:
        return None
    order = with_earliest_swap_ins(made, tables(gaps).nbytes, memory_bytes)
    residents = (
        g.tensor for g, choice in zip(gaps.all, choices, strict=True) if g.wraps and choice is not Choice.SWAP
    )
    return ActionSequence(made.verb[order], made.what[order], frozenset(residents))


def schedule_of_choices(
    problem: Problem, gaps: Gaps, choices: Sequence[Choice], *, delayed: bool = False
) -> Schedule | None:
    """Return the schedule of these choices; None if they need more than the memory.

    With `delayed`, a swapped-out tensor keeps its bytes until its copy has ended or they are needed (`delay_drops`).
    """
    memory_bytes = problem.memory.nbytes
    found = no_wait(gaps, memory_bytes, choices)
    if found is None:
        return None
    if delayed and (found.verb == SWAP_OUT).any():
        actions = zip(found.verb.tolist(), found.what.tolist(), strict=True)
        delayed_ones = delay_drops(problem.graph, problem.profile, actions, found.residents, memory_bytes)
        found = ActionSequence(*columns(delayed_ones), found.residents)
    return counted(problem.arrays, found.verb, found.what, found.residents, memory_bytes)


@compiled
def with_earliest_swap_ins(made: AlapSequence, nbytes: Ints, memory_bytes: int) -> Ints:
    """Return the indices of the actions in a new order: swap-ins as early as memory allows, in the same order.

    Each swap-in stays after its tensor's previous drop. Swap-ins after the last op stay where they are.
    """
    count = len(made.verb)
    held = made.held.copy()
    left = np.zeros(len(nbytes), np.int64)
    ops, done = (made.verb == COMPUTE).sum(), 0
    order, length = np.empty(count, np.int64), 0
    moved, place, moves = np.empty(count, np.int64), np.empty(count, np.int64), 0
    front = 0
    for i in range(count):
        if made.verb[i] == COMPUTE:
            done += 1
        elif made.verb[i] == DROP:
            left[made.what[i]] = i + 1
        elif made.verb[i] == SWAP_IN:
            at, low, size = i, i, nbytes[made.what[i]]
            if done < ops:
                low = max(front, left[made.what[i]])
            while at > low and held[at - 1] + size <= memory_bytes:
                at -= 1
                held[at] += size
            moved[moves], place[moves], front = i, at, at
            moves += 1
    move = 0
    for i in range(count):
        while move < moves and place[move] <= i:
            order[length] = moved[move]
            move += 1
            length += 1
        if made.verb[i] != SWAP_IN:
            order[length] = i
            length += 1
    return order


def delay_drops(
    graph: Graph, profile: Profile, actions: Iterable[Action], residents: Collection[int], memory_bytes: int
) -> list[Action]:
    """Return the sequence with each drop after the op during which its swap-out ends, as far as memory allows.

    A drop right after its swap-out would let the placement reuse the bytes at once, and the next writer would wait for
    the copy. No-wait (Beaumont et al., Proposition 1) means waiting only for lack of memory. In an ordered schedule, no
    returning tensor takes the memory of one that is still being copied out (Lemma 3): unless the next op needs it, a
    swapped-out tensor returns only after all pending swap-outs, and no swap-in makes an op wait for a swap-out. Times
    are those of lanes without slowdowns.
    """
    return _DelayedDrops(graph, profile, residents, memory_bytes).replayed(actions)


class _DelayedDrops:
    def __init__(self, graph: Graph, profile: Profile, residents: Collection[int], memory_bytes: int) -> None:
        self._graph, self._profile, self._memory_bytes = graph, profile, memory_bytes
        self._nbytes = [t.aligned_bytes for t in graph.tensors]
        self._held_bytes = sum(self._nbytes[t] for t in (*graph.inputs, *residents))
        self._now_s = self._in_s = self._out_s = 0.0  # when each lane is free
        self._there_s: dict[int, float] = {}
        self._saved_s: dict[int, float] = {}
        self._leaving = deque[int]()
        self._coming = deque[int]()
        self._actions: list[Action] = []

    def replayed(self, actions: Iterable[Action]) -> list[Action]:
        for verb, what in actions:
            if verb == COMPUTE:
                self._compute(what)
            elif verb == SWAP_IN:
                self._coming.append(what)
                self._bring()
            elif verb == SWAP_OUT:
                self._fetch_until((what,))
                begin_s = max(self._out_s, self._there_s.get(what, 0.0))
                self._out_s = begin_s + self._profile.swap_out.seconds(self._graph.tensors[what].nbytes)
                self._saved_s[what] = self._out_s
                self._actions.append((verb, what))
            else:
                self._fetch_until((what,))
                self._leaving.append(what)
                if self._saved_s.get(what, 0.0) <= self._now_s:
                    self._leaving.pop()
                    self._drop(what)
        self._fetch_until(tuple(self._coming))
        while self._leaving:
            self._drop(self._leaving.popleft())
        return self._actions

    def _compute(self, k: int) -> None:
        op = self._graph.ops[k]
        last = len(self._graph.ops) - 1
        self._fetch_until((*op.reads, *(self._graph.outputs if k == last else ())))
        begin_s = max((self._now_s, *(self._there_s.get(t, 0.0) for t in op.reads)))
        self._let_go(begin_s)
        scratch = op.aligned_scratch_bytes
        written = sum(self._nbytes[t] for t in op.writes)
        begin_s = max(begin_s, self._make_room(written + scratch, op.writes))
        self._now_s = begin_s + self._profile.op_seconds[k]
        self._there_s |= dict.fromkeys((*op.writes, *op.mutates), self._now_s)
        self._held_bytes += written
        self._actions.append((COMPUTE, k))
        self._bring()

    def _bring(self) -> None:
        """Issue swap-ins while they make no step wait."""
        self._let_go(self._now_s)
        while self._coming:
            t = self._coming[0]
            if self._leaving and (t in self._saved_s or self._held_bytes + self._nbytes[t] > self._memory_bytes):
                return
            self._swap_in(self._coming.popleft())

    def _fetch_until(self, needed: Collection[int]) -> None:
        """Issue swap-ins, in order, until all needed ones are issued."""
        while not set(needed).isdisjoint(self._coming):
            self._swap_in(self._coming.popleft())

    def _swap_in(self, tensor: int) -> None:
        begin_s = max(self._in_s, self._make_room(self._nbytes[tensor], (tensor,)), self._saved_s.get(tensor, 0.0))
        self._in_s = begin_s + self._profile.swap_in_seconds(self._graph.tensors[tensor])
        self._there_s[tensor] = self._in_s
        self._held_bytes += self._nbytes[tensor]
        self._actions.append((SWAP_IN, tensor))

    def _let_go(self, now_s: float) -> None:
        while self._leaving and self._saved_s.get(self._leaving[0], 0.0) <= now_s:
            self._drop(self._leaving.popleft())

    def _make_room(self, nbytes: int, brought: Collection[int]) -> float:
        """Drop tensors with pending swap-outs, in order, until `nbytes` fit. Returns when the bytes are free."""
        ready_s = 0.0
        while self._leaving and (
            self._held_bytes + nbytes > self._memory_bytes or not set(brought).isdisjoint(self._leaving)
        ):
            ready_s = self._saved_s.get(self._leaving[0], 0.0)
            self._drop(self._leaving.popleft())
        return ready_s

    def _drop(self, tensor: int) -> None:
        self._held_bytes -= self._nbytes[tensor]
        self._actions.append((DROP, tensor))
