"""Builds a schedule from one choice (such as keep, swap or recompute) for each gap between two uses of a tensor.

For given offloads in a given order, it is optimal to do everything as early as memory allows (Beaumont et al., 2020,
Proposition 1). Here the copies are in the order of the uses that need them. They start from their as-late-as-possible
positions (`planner.schedule.alap`): swap-ins move to earlier positions where memory is free, and drops move to later
ones, after the swap-outs have ended."""

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.alap import SWAP, AlapSequence, alap, codes, tables
from cohabit.planner.schedule.gaps import Gaps
from cohabit.planner.schedule.serial import least_bytes, serial
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Action, Schedule, columns, counted


class ActionSequence(NamedTuple):
    """Actions in order, and the tensors in memory at the start and end of an inference. No tensor has an address."""

    verb: Ints
    what: Ints
    residents: frozenset[int]


def no_wait(gaps: Gaps, memory_bytes: int, choices: Iterable[int]) -> ActionSequence | None:
    """Return the best sequence with these choices, one per gap; None if they need more than `memory_bytes`.

    Also None if recomputations require so many others that the sequence is too long (`planner.schedule.alap.LONGEST`).
    """
    if not gaps.graph.ops:
        fits = least_bytes(gaps.graph) <= memory_bytes
        return ActionSequence(*columns(serial(gaps.graph)), frozenset()) if fits else None
    t, chosen = tables(gaps), codes(choices)
    made = alap(t, chosen)
    if not len(made.held) or made.held.max() > memory_bytes:
        return None
    order = with_earliest_swap_ins(made, t.nbytes, memory_bytes)
    residents = np.sort(t.stored[chosen[t.wrapping] != SWAP])
    return ActionSequence(made.verb[order], made.what[order], frozenset(residents.tolist()))


def schedule_of_choices(
    problem: Problem, gaps: Gaps, choices: Iterable[int], *, delayed: bool = False
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
        delayed_actions = delay_drops(problem.graph, problem.profile, actions, found.residents, memory_bytes)
        found = ActionSequence(*columns(delayed_actions), found.residents)
    return counted(problem.arrays, found.verb, found.what, found.residents, memory_bytes)


@compiled
def with_earliest_swap_ins(made: AlapSequence, nbytes: Ints, memory_bytes: int) -> Ints:
    """Return the indices of the actions in a new order: swap-ins as early as memory allows, in the same order.

    Each swap-in stays after its tensor's previous drop. Swap-ins after the last op do not move.
    """
    count = len(made.verb)
    held = made.held.copy()
    earliest = np.zeros(len(nbytes), np.int64)  # position after each tensor's last drop
    ops, done = (made.verb == COMPUTE).sum(), 0
    order, length = np.empty(count, np.int64), 0
    # Find the new position of each swap-in, and hold its bytes from there on.
    swap_ins, position, found = np.empty(count, np.int64), np.empty(count, np.int64), 0
    previous = 0  # new position of the swap-in before
    for i in range(count):
        if made.verb[i] == COMPUTE:
            done += 1
        elif made.verb[i] == DROP:
            earliest[made.what[i]] = i + 1
        elif made.verb[i] == SWAP_IN:
            at, lowest, size = i, i, nbytes[made.what[i]]
            if done < ops:
                lowest = max(previous, earliest[made.what[i]])
            while at > lowest and held[at - 1] + size <= memory_bytes:
                at -= 1
                held[at] += size
            swap_ins[found], position[found], previous = i, at, at
            found += 1
    # Merge the moved swap-ins with the other actions, which keep their order.
    merged = 0
    for i in range(count):
        while merged < found and position[merged] <= i:
            order[length] = swap_ins[merged]
            merged += 1
            length += 1
        if made.verb[i] != SWAP_IN:
            order[length] = i
            length += 1
    return order


def delay_drops(
    graph: Graph, profile: Profile, actions: Iterable[Action], residents: Collection[int], memory_bytes: int
) -> list[Action]:
    """Return the sequence with each drop after the op during which its swap-out ends, as far as memory allows.

    If a drop followed its swap-out directly, the placement could reuse the bytes at once, and their next writer would
    wait for the copy. In a no-wait schedule (Beaumont et al., Proposition 1), steps wait only for lack of memory. In an
    ordered one (Lemma 3), no swap-in takes the memory of a tensor that is still being copied out. So, unless the next
    op needs it, a tensor that was swapped out returns only after all pending swap-outs, and no swap-in makes an op wait
    for a swap-out. Times are those of lanes without slowdowns.
    """
    return _DelayedDrops(graph, profile, residents, memory_bytes).replayed(actions)


class _DelayedDrops:
    """Replays a sequence. Swap-ins and drops wait in two queues until they are due."""

    def __init__(self, graph: Graph, profile: Profile, residents: Collection[int], memory_bytes: int) -> None:
        self._graph, self._profile, self._memory_bytes = graph, profile, memory_bytes
        self._nbytes = [t.aligned_bytes for t in graph.tensors]
        self._held_bytes = sum(self._nbytes[t] for t in (*graph.inputs, *residents))
        self._now_s = self._in_s = self._out_s = 0.0  # when each lane is free
        self._ready_s: dict[int, float] = {}
        """When each tensor's bytes are complete: the end of its swap-in or of the last op that wrote it."""
        self._saved_s: dict[int, float] = {}
        """When each tensor's swap-out ends."""
        self._pending_drops = deque[int]()
        self._pending_swap_ins = deque[int]()
        self._actions: list[Action] = []

    def replayed(self, actions: Iterable[Action]) -> list[Action]:
        for verb, what in actions:
            if verb == COMPUTE:
                self._compute(what)
            elif verb == SWAP_IN:
                self._pending_swap_ins.append(what)
                self._issue_swap_ins()
            elif verb == SWAP_OUT:
                self._issue_needed_swap_ins((what,))
                begin_s = max(self._out_s, self._ready_s.get(what, 0.0))
                self._out_s = begin_s + self._profile.swap_out.seconds(self._graph.tensors[what].nbytes)
                self._saved_s[what] = self._out_s
                self._actions.append((verb, what))
            else:
                self._issue_needed_swap_ins((what,))
                self._pending_drops.append(what)
                if self._saved_s.get(what, 0.0) <= self._now_s:
                    self._pending_drops.pop()
                    self._drop(what)
        self._issue_needed_swap_ins(tuple(self._pending_swap_ins))
        while self._pending_drops:
            self._drop(self._pending_drops.popleft())
        return self._actions

    def _compute(self, k: int) -> None:
        op = self._graph.ops[k]
        last = len(self._graph.ops) - 1
        self._issue_needed_swap_ins((*op.reads, *(self._graph.outputs if k == last else ())))
        begin_s = max((self._now_s, *(self._ready_s.get(t, 0.0) for t in op.reads)))
        self._drop_saved(begin_s)
        scratch = op.aligned_scratch_bytes
        written = sum(self._nbytes[t] for t in op.writes)
        begin_s = max(begin_s, self._free_memory(written + scratch, op.writes))
        self._now_s = begin_s + self._profile.op_seconds[k]
        self._ready_s |= dict.fromkeys((*op.writes, *op.mutates), self._now_s)
        self._held_bytes += written
        self._actions.append((COMPUTE, k))
        self._issue_swap_ins()

    def _issue_swap_ins(self) -> None:
        """Issue pending swap-ins, in order, up to the first that would have to wait for a swap-out."""
        self._drop_saved(self._now_s)
        while self._pending_swap_ins:
            t = self._pending_swap_ins[0]
            if self._pending_drops and (
                t in self._saved_s or self._held_bytes + self._nbytes[t] > self._memory_bytes
            ):
                return
            self._swap_in(self._pending_swap_ins.popleft())

    def _issue_needed_swap_ins(self, needed: Collection[int]) -> None:
        """Issue pending swap-ins, in order, until no needed tensor is pending."""
        while not set(needed).isdisjoint(self._pending_swap_ins):
            self._swap_in(self._pending_swap_ins.popleft())

    def _swap_in(self, tensor: int) -> None:
        begin_s = max(
            self._in_s, self._free_memory(self._nbytes[tensor], (tensor,)), self._saved_s.get(tensor, 0.0)
        )
        self._in_s = begin_s + self._profile.swap_in_seconds(self._graph.tensors[tensor])
        self._ready_s[tensor] = self._in_s
        self._held_bytes += self._nbytes[tensor]
        self._actions.append((SWAP_IN, tensor))

    def _drop_saved(self, now_s: float) -> None:
        """Issue pending drops, in order, while their swap-outs have ended."""
        while self._pending_drops and self._saved_s.get(self._pending_drops[0], 0.0) <= now_s:
            self._drop(self._pending_drops.popleft())

    def _free_memory(self, nbytes: int, arriving: Collection[int]) -> float:
        """Issue pending drops, in order, until `nbytes` fit and no `arriving` tensor is pending.

        Returns the time at which the bytes are free: the end of the last of these tensors' swap-outs.
        """
        ready_s = 0.0
        while self._pending_drops and (
            self._held_bytes + nbytes > self._memory_bytes or not set(arriving).isdisjoint(self._pending_drops)
        ):
            ready_s = self._saved_s.get(self._pending_drops[0], 0.0)
            self._drop(self._pending_drops.popleft())
        return ready_s

    def _drop(self, tensor: int) -> None:
        self._held_bytes -= self._nbytes[tensor]
        self._actions.append((DROP, tensor))
