"""The sequence that fates of gaps make when everything happens as late as it can, compiled.

Tensors leave right after their last use and come back right before the next. A computation is repeated right before
the use that it is for, as far back as it takes (HOME, section 2.2); what it brought leaves after it. No sequence
with the same fates needs less memory.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.compiled import compiled
from planner.gaps import START, Fate, Gaps
from planner.placement import SCRATCH_ALIGNMENT

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Codes = NDArray[np.int8]
"""A fate per gap, by its place in FATES."""

FATES: Final = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE, Fate.RESTORE)
KEEP: Final = 0
SWAP: Final = 1
RECOMPUTE: Final = 2
RESTORE: Final = 3
GONE: Final = 4
"""What is needed no more."""

COMPUTE: Final = 0
SWAP_IN: Final = 1
SWAP_OUT: Final = 2
DROP: Final = 3

_NONE: Final = -1
_PARAMETER: Final = 0
_STATE: Final = 1
_INPUT: Final = 2
_KINDS: Final = {"parameter": _PARAMETER, "state": _STATE, "input": _INPUT, "activation": 3}
LONGEST: Final = 4
"""Sequences that recomputation makes so many times longer than any other are given up."""


NEEDED: Final = 0
"""What must be in memory for an op besides what it writes: its reads, and the outputs for the last op."""
READS: Final = 1
WRITES: Final = 2
CHANGES: Final = 3
AGAIN: Final = 4
"""The gaps that end at an op and can be recomputed."""
INPUTS: Final = 5
"""The graph's, at the first op."""


class Tables(NamedTuple):
    """A graph and its gaps as arrays. Ops go by position."""

    start: Ints
    """List l of the op at position p is `ids[start[l, p]:start[l, p + 1]]`, l one of those above."""
    ids: Ints
    behind: Ints
    """For each id that is a use, the gap that begins there, or none."""
    scratch_bytes: Ints
    nbytes: Ints
    kind: Ints
    stays: Bools
    """Outputs but for parameters: they are in memory at the end."""
    last_use: Ints
    producer: Ints
    stored: Ints
    """Parameters and state that are used, in the order of their first use."""
    wrapping: Ints
    """The wrapping gap of each of `stored`."""
    tensor: Ints
    """Of each gap."""
    most: int
    """Actions that a sequence may have."""


class Late(NamedTuple):
    """A sequence, and the bytes in memory during each action; empty if it were too long."""

    verb: Ints
    what: Ints
    """A tensor; for COMPUTE the position of an op."""
    held: Ints


class _Memory(NamedTuple):
    here: Bools
    saved: Bools
    """The host store has a copy."""
    forgotten: Bools
    """In a gap that a computation ends."""
    log: Ints
    """Verb, what and held bytes of each action so far, [3, most]."""
    now: Ints
    """Actions so far, and bytes in memory."""
    asked: Bools
    """For `_ops_to_repeat`, by op: false between calls."""
    found: Ints


@lru_cache(maxsize=4)
def tables(gaps: Gaps) -> Tables:
    """Arrays for `late`. The graph must have ops."""
    graph = gaps.graph
    ops = [graph.ops[k] for k in gaps.ops_at]
    needed = [list(op.reads) for op in ops]
    needed[-1] = [t for t in dict.fromkeys((*ops[-1].reads, *graph.outputs)) if t not in ops[-1].writes]
    behind = {(g.tensor, g.last_use): i for i, g in enumerate(gaps.all) if not g.wraps}
    wrapping = {g.tensor: i for i, g in enumerate(gaps.all) if g.wraps}
    again: list[list[int]] = [[] for _ in ops]
    for i, gap in enumerate(gaps.all):
        if Fate.RECOMPUTE in gap.fates:
            again[gap.next_use].append(i)
    inputs = [t for t, what in enumerate(graph.tensors) if what.kind == "input"]
    stored = sorted(wrapping, key=lambda t: (gaps.uses[t][0], t))
    writes, changes = [op.writes for op in ops], [op.mutates for op in ops]
    first_inputs = [inputs, *([] for _ in ops[1:])]
    lists: list[Sequence[Sequence[int]]] = [needed, [op.reads for op in ops], writes, changes, again, first_inputs]
    begins = [
        behind.get((i, START if kind == INPUTS else p), _NONE) if kind in (NEEDED, WRITES, INPUTS) else _NONE
        for kind, of_ops in enumerate(lists)
        for p, some in enumerate(of_ops)
        for i in some
    ]
    lengths = [[len(some) for some in of_ops] for of_ops in lists]
    end = np.cumsum(lengths).reshape(len(lists), len(ops))
    uses = sum(len(need) + len(some) for need, some in zip(needed, writes, strict=True))
    return Tables(
        start=np.concatenate([end[:, :1] - np.array(lengths)[:, :1], end], axis=1),
        ids=_ints(i for of_ops in lists for some in of_ops for i in some),
        behind=_ints(begins),
        scratch_bytes=_ints(aligned(op.scratch_bytes, SCRATCH_ALIGNMENT) for op in ops),
        nbytes=_ints(aligned(t.nbytes, t.alignment) for t in graph.tensors),
        kind=_ints(_KINDS[t.kind] for t in graph.tensors),
        stays=np.array([t in graph.outputs and what.kind != "parameter" for t, what in enumerate(graph.tensors)]),
        last_use=_ints(uses[-1] if uses else START for uses in gaps.uses),
        producer=_ints(gaps.producer.get(t, _NONE) for t in range(len(graph.tensors))),
        stored=_ints(stored),
        wrapping=_ints(wrapping[t] for t in stored),
        tensor=_ints(g.tensor for g in gaps.all),
        most=LONGEST * (len(ops) + 3 * uses + 2 * len(inputs) + 3 * len(stored)),
    )


def codes(fates: Iterable[Fate]) -> Codes:
    return np.array([FATES.index(fate) for fate in fates], np.int8)


def aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


@compiled
def ids(t: Tables, kind: int, p: int) -> Ints:
    """One list of the op at position p."""
    return t.ids[t.start[kind, p] : t.start[kind, p + 1]]


@compiled
def residents(t: Tables, fates: Codes) -> Bools:
    """By tensor: whether it is in memory before the inference and after it."""
    found = np.zeros(len(t.nbytes), np.bool_)
    for i in range(len(t.stored)):
        found[t.stored[i]] = fates[t.wrapping[i]] != SWAP
    return found


@compiled
def late(t: Tables, fates: Codes) -> Late:
    """The sequence of these fates."""
    m = _start(t, fates)
    count = len(t.scratch_bytes)
    kept = np.zeros(len(t.nbytes), np.bool_)
    for i in range(len(t.stored)):
        fate = fates[t.wrapping[i]]
        kept[t.stored[i]] = fate == KEEP or (fate == RESTORE and t.last_use[t.stored[i]] == count - 1)
    mark = np.full((3, len(t.nbytes)), -1)
    _leave(t, fates, kept, m, START)
    for p in range(count):
        again = _ops_to_repeat(t, fates, m, p)
        if len(again):
            _repeat(t, fates, m, p, again, mark)
        for i in ids(t, NEEDED, p):
            if not m.here[i]:
                _put(t, m, SWAP_IN, i)
        _put(t, m, COMPUTE, p)
        for i in ids(t, CHANGES, p):
            m.saved[i] = False
        _leave(t, fates, kept, m, p)
        if m.now[0] >= t.most:
            return Late(m.log[0, :0], m.log[1, :0], m.log[2, :0])
    for i in range(len(t.stored)):
        if fates[t.wrapping[i]] == RESTORE and not kept[t.stored[i]]:
            _put(t, m, SWAP_IN, t.stored[i])
    length = m.now[0]
    return Late(m.log[0, :length], m.log[1, :length], m.log[2, :length])


@compiled
def _start(t: Tables, fates: Codes) -> _Memory:
    here = residents(t, fates)
    saved = np.zeros(len(here), np.bool_)
    for i in range(len(here)):
        saved[i] = t.kind[i] == _PARAMETER or (t.kind[i] == _STATE and not here[i])
        here[i] = here[i] or t.kind[i] == _INPUT
    now = np.array([0, (t.nbytes * here).sum()])
    count = len(t.scratch_bytes)
    return _Memory(
        here,
        saved,
        np.zeros(len(here), np.bool_),
        np.empty((3, t.most), np.int64),
        now,
        np.zeros(count, np.bool_),
        np.empty(count, np.int64),
    )


@compiled
def _put(t: Tables, m: _Memory, verb: int, what: int) -> None:
    """Do one action; none beyond the longest sequence."""
    n = m.now[0]
    if n == t.most:
        return
    scratch = 0
    if verb == COMPUTE:
        scratch = t.scratch_bytes[what]
        for i in ids(t, WRITES, what):
            m.here[i] = True
            m.now[1] += t.nbytes[i]
    elif verb == SWAP_IN:
        m.here[what] = True
        m.now[1] += t.nbytes[what]
    elif verb == SWAP_OUT:
        m.saved[what] = True
    m.log[0, n], m.log[1, n], m.log[2, n] = verb, what, m.now[1] + scratch
    m.now[0] += 1
    if verb == DROP:
        m.here[what] = False
        m.now[1] -= t.nbytes[what]


@compiled
def _leave(t: Tables, fates: Codes, kept: Bools, m: _Memory, p: int) -> None:
    """Behind position p, what need not be saved leaves first, so that nobody waits for a transfer."""
    for saving in (False, True):
        for kind in (INPUTS, NEEDED, WRITES):
            if (kind == INPUTS) != (p == START):
                continue
            for n in range(t.start[kind, max(p, 0)], t.start[kind, max(p, 0) + 1]):
                i = t.ids[n]
                fate = _fate_behind(t, fates, kept, m, i, t.behind[n], p)
                saves = fate == SWAP and not m.saved[i]
                if saves and saving:
                    _put(t, m, SWAP_OUT, i)
                    if not t.stays[i] or p < t.last_use[i]:
                        _put(t, m, DROP, i)
                elif fate != KEEP and not saves and not saving:
                    _put(t, m, DROP, i)
                    m.forgotten[i] = fate == RECOMPUTE


@compiled
def _fate_behind(t: Tables, fates: Codes, kept: Bools, m: _Memory, i: int, gap: int, p: int) -> int:
    """What becomes of tensor i behind its use at p, where `gap` begins, if any does."""
    if gap >= 0:
        return int(fates[gap])
    if p < t.last_use[i] or kept[i]:
        return KEEP
    if t.kind[i] == _STATE and not m.saved[i]:
        return SWAP
    return KEEP if t.stays[i] else GONE


@compiled
def _repeat(t: Tables, fates: Codes, m: _Memory, p: int, again: Ints, mark: Ints) -> None:
    """Compute again what the op at p needs, and what that needs; what comes only for that leaves after it.

    `mark[:, i]` tells, of tensor i, the last p for which it came, and the last that it is wanted at; and the last op
    of this repetition that uses it.
    """
    came, wanted, last = mark[0], mark[1], mark[2]
    for i in ids(t, NEEDED, p):
        wanted[i] = p
    for q in again:
        for kind in (READS, WRITES):
            for i in ids(t, kind, q):
                last[i] = q
    for q in again:
        for i in ids(t, READS, q):
            if not m.here[i]:
                came[i] = p
                _put(t, m, SWAP_IN, i)
        for i in ids(t, WRITES, q):
            if m.here[i]:  # it must not be when the op runs
                _put(t, m, DROP, i)
            else:
                came[i] = p
        _put(t, m, COMPUTE, q)
        for kind in (READS, WRITES):
            for i in ids(t, kind, q):
                if came[i] == p and wanted[i] != p and last[i] == q:
                    _put(t, m, DROP, i)
    for gap in ids(t, AGAIN, p):
        if fates[gap] == RECOMPUTE:
            m.forgotten[t.tensor[gap]] = False


@compiled
def _ops_to_repeat(t: Tables, fates: Codes, m: _Memory, p: int) -> Ints:
    """Positions of the ops without which the tensors that are computed again for p cannot be had, in order."""
    length = 0
    asked, found = m.asked, m.found
    for gap in ids(t, AGAIN, p):
        if fates[gap] == RECOMPUTE:
            length = _ask(t, t.tensor[gap], asked, found, length)
    done = 0
    while done < length:
        for i in ids(t, READS, found[done]):
            if not m.here[i] and (not m.saved[i] or m.forgotten[i]):
                length = _ask(t, i, asked, found, length)
        done += 1
    length = 0
    for q in range(p if done else 0):
        if asked[q]:
            asked[q], found[length] = False, q
            length += 1
    return found[:length]


@compiled
def _ask(t: Tables, i: int, asked: Bools, found: Ints, length: int) -> int:
    q = t.producer[i]
    if asked[q]:
        return length
    asked[q], found[length] = True, q
    return length + 1
