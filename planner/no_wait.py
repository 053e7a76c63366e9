"""From a fate per gap to a sequence of actions, and to a plan.

Beaumont et al. (2020), Proposition 1: once it is decided what to offload, and in which order, it is best to do
everything as early as memory allows. Here transfers are in the order of the uses that they are for. First everything
is put as late as it can be, in the least memory that the fates need; then swap-ins move ahead in what is left of it.
A computation is repeated right before the use that it is for (HOME, section 2.2: as far back as it takes), and what
it brought leaves after it.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner.compiled import compiled
from planner.gaps import START, Fate, Gaps
from planner.placement import SCRATCH_ALIGNMENT
from planner.plan import Plan
from planner.problem import Problem
from planner.sequence import Action, Verb, compute, drop, lay_out, swap_in, swap_out, write
from planner.serial import serial

Ints = NDArray[np.int64]
Decided = tuple[list[Action], frozenset[int]]
"""A sequence, and the residents that it starts and ends with."""

SHARES: Final = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6)
"""Of the memory, what swap-ins may use; the rest is for fragmentation."""


def no_wait(gaps: Gaps, memory_bytes: int, fates: Sequence[Fate]) -> Decided | None:
    """The best sequence with these fates; None if they need more than `memory_bytes`, alignment counted."""
    late = _Late(gaps, fates)
    return late.hastened(memory_bytes) if late.peak_bytes <= memory_bytes else None


def fit(problem: Problem, gaps: Gaps, fates: Sequence[Fate], shares: Sequence[float] = SHARES) -> Plan | None:
    """The plan with the largest share of the memory for swap-ins that can be placed; None if there is none."""
    graph, memory_bytes = problem.graph, problem.memory_bytes
    late = _Late(gaps, fates)
    if late.peak_bytes > memory_bytes:
        return None
    before: list[Action] | None = None
    for share in shares:
        actions, residents = late.hastened(int(share * memory_bytes))
        if actions == before:
            continue
        placed = lay_out(graph, actions, residents, memory_bytes)
        if placed.peak_bytes <= memory_bytes:
            return write(graph, problem.profile, memory_bytes, actions, residents, placed)
        before = actions
    return None


def lean(gaps: Gaps) -> list[Fate]:
    """All gaps swapped: no fates need less memory."""
    return [Fate.SWAP] * len(gaps.all)


class _Late:
    """The sequence with every swap-in right before its use, and the bytes in memory during each action."""

    def __init__(self, gaps: Gaps, fates: Sequence[Fate]) -> None:
        graph = gaps.graph
        self._gaps = gaps
        self._graph = graph
        self._ops = [graph.ops[k] for k in gaps.ops_at]
        self._nbytes = [_aligned(t.nbytes, t.alignment) for t in graph.tensors]
        self._behind: dict[tuple[int, int], Fate] = {}  # by tensor and last use
        self._repeated: list[list[int]] = [[] for _ in self._ops]  # tensors that are computed again for an op
        self._kept: set[int] = set()
        self._restored: list[int] = []
        self._decide(fates)
        self.residents = frozenset((*self._kept, *self._restored))
        inputs = [t for t, what in enumerate(graph.tensors) if what.kind == "input"]
        self._here = {*inputs, *self.residents}
        self._saved = {
            t
            for t, what in enumerate(graph.tensors)
            if what.kind == "parameter" or (what.kind == "state" and t not in self.residents)
        }
        self._forgotten: set[int] = set()  # in a gap that ends with a computation
        self._actions: list[Action] = []
        self._held: list[int] = []
        self._now_bytes = sum(self._nbytes[t] for t in self._here)
        self._run(inputs)

    @property
    def peak_bytes(self) -> int:
        return max(self._held, default=0)

    def hastened(self, memory_bytes: int) -> Decided:
        """Swap-ins, in the same order, stand as early as memory allows; those behind the last op stay there."""
        nbytes, earliest = np.zeros((2, len(self._actions)), np.int64)
        left: dict[int, int] = {}
        for i, action in enumerate(self._actions):
            if action.verb is Verb.SWAP_IN:
                nbytes[i], earliest[i] = self._nbytes[action.what], left.get(action.what, 0)
            elif action.verb is Verb.DROP:
                left[action.what] = i + 1
        swap_ins = [i for i, a in enumerate(self._actions) if a.verb is Verb.SWAP_IN]
        moving = np.array(swap_ins[: len(swap_ins) - len(self._restored)], np.int64)
        place = np.arange(len(self._actions))
        place[moving] = _hasten(np.array(self._held, np.int64), moving, nbytes, earliest, memory_bytes)
        stands = np.ones(len(self._actions), np.int64)
        stands[moving] = 0
        return [self._actions[i] for i in np.lexsort((stands, place)).tolist()], self.residents

    def _decide(self, fates: Sequence[Fate]) -> None:
        for gap, fate in zip(self._gaps.all, fates, strict=True):
            if not gap.wraps:
                self._behind[gap.tensor, gap.last_use] = fate
                if fate is Fate.RECOMPUTE:
                    self._repeated[gap.next_use].append(gap.tensor)
            elif fate is Fate.KEEP or (fate is Fate.RESTORE and gap.last_use == len(self._ops) - 1):
                self._kept.add(gap.tensor)
            elif fate is Fate.RESTORE:
                self._restored.append(gap.tensor)
        self._restored.sort(key=lambda t: self._gaps.uses[t][0])

    def _run(self, inputs: Sequence[int]) -> None:
        if not self._ops:
            for action in serial(self._graph):
                self._add(action)
            return
        self._leave(inputs, START)
        for k, op in enumerate(self._ops):
            if self._repeated[k]:
                self._repeat(k)
            for t in self._needed(k):
                if t not in self._here:
                    self._add(swap_in(t))
            self._add(compute(self._gaps.ops_at[k]))
            self._saved.difference_update(op.mutates)
            self._leave((*self._needed(k), *op.writes), k)
        for t in self._restored:
            self._add(swap_in(t))

    def _needed(self, k: int) -> list[int]:
        """What must be in memory for the op at position k besides what it writes."""
        outputs = self._graph.outputs if k == len(self._ops) - 1 else ()
        return [t for t in dict.fromkeys((*self._ops[k].reads, *outputs)) if t not in self._ops[k].writes]

    def _leave(self, used: Iterable[int], k: int) -> None:
        """Behind position k, what is gone anyway leaves first, so that no transfer has to be waited for."""
        leaving = [(t, fate) for t in used if (fate := self._fate_behind(t, k)) is not Fate.KEEP]
        swapped = [t for t, fate in leaving if fate is Fate.SWAP and t not in self._saved]
        for t, _ in leaving:
            if t not in swapped:
                self._add(drop(t))
        self._forgotten.update(t for t, fate in leaving if fate is Fate.RECOMPUTE)
        for t in swapped:
            self._add(swap_out(t))
            if t not in self._graph.outputs or k < self._gaps.uses[t][-1]:
                self._add(drop(t))

    def _fate_behind(self, t: int, k: int) -> Fate | None:
        """What becomes of a tensor behind its use at k; None if it is needed no more."""
        if (t, k) in self._behind:
            return self._behind[t, k]
        kind, uses = self._graph.tensors[t].kind, self._gaps.uses[t]
        if (uses and k < uses[-1]) or t in self._kept:
            return Fate.KEEP
        stays = t in self._graph.outputs and kind != "parameter"
        if kind == "state" and t not in self._saved:
            return Fate.SWAP
        return Fate.KEEP if stays else None

    def _repeat(self, k: int) -> None:
        """Compute again what the op at k needs, and what that needs; whatever comes only for that leaves again."""
        again = self._ops_to_repeat(self._repeated[k])
        last_read = {t: p for p in again for t in self._ops[p].reads}
        wanted, brought = set(self._needed(k)), set[int]()
        for p in again:
            op = self._ops[p]
            for t in op.reads:
                if t not in self._here:
                    brought.add(t)
                    self._add(swap_in(t))
            for t in op.writes:
                if t in self._here:  # it must not be when the op runs
                    self._add(drop(t))
                else:
                    brought.add(t)
            self._add(compute(self._gaps.ops_at[p]))
            for t in (*op.reads, *op.writes):
                if t in brought and t not in wanted and last_read.get(t, p) <= p:
                    self._add(drop(t))
        self._forgotten.difference_update(self._repeated[k])

    def _ops_to_repeat(self, tensors: Iterable[int]) -> list[int]:
        """Positions of the ops without which these tensors cannot be had, in order."""
        producer = self._gaps.producer
        again, stack = set[int](), [producer[t] for t in tensors]
        while stack:
            p = stack.pop()
            if p in again:
                continue
            again.add(p)
            missing = [t for t in self._ops[p].reads if t not in self._here]
            stack += [producer[t] for t in missing if t not in self._saved or t in self._forgotten]
        return sorted(again)

    def _add(self, action: Action) -> None:
        came: tuple[int, ...] = ()
        more_bytes = 0
        match action.verb:
            case Verb.COMPUTE:
                op = self._graph.ops[action.what]
                came, more_bytes = op.writes, _aligned(op.scratch_bytes, SCRATCH_ALIGNMENT)
            case Verb.SWAP_IN:
                came = (action.what,)
            case Verb.SWAP_OUT:
                self._saved.add(action.what)
        self._here.update(came)
        self._now_bytes += sum(self._nbytes[t] for t in came)
        self._actions.append(action)
        self._held.append(self._now_bytes + more_bytes)
        if action.verb is Verb.DROP:
            self._here.remove(action.what)
            self._now_bytes -= self._nbytes[action.what]


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


@compiled
def _hasten(held: Ints, moving: Ints, nbytes: Ints, earliest: Ints, memory_bytes: int) -> Ints:
    """Where each of the actions `moving`, in this order, goes: right before the action of that index."""
    place = np.empty(len(moving), np.int64)
    front = 0
    for n in range(len(moving)):
        i = moving[n]
        at, low = i, max(front, earliest[i])
        while at > low and held[at - 1] + nbytes[i] <= memory_bytes:
            at -= 1
            held[at] += nbytes[i]
        place[n] = front = at
    return place
