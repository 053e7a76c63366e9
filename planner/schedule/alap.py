"""As-late-as-possible (ALAP) sequences of actions from one choice per gap between uses, in compiled loops.

Tensors leave right after a use and return right before the next. A recomputation runs right before the use that needs
it, with its dependencies (HOME, section 2.2); tensors brought in for it leave after it. No sequence with the same
choices needs less memory."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cohabit.planner.arrays import Bools, Ints, ints
from cohabit.planner.compiled import compiled
from cohabit.planner.errors import UnsupportedProblem
from cohabit.planner.schedule.gaps import START, Choice, Gaps
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT

Codes = NDArray[np.int8]
"""One choice per gap, as numbers."""

KEEP, SWAP, RECOMPUTE, RESTORE = map(int, Choice)
GONE: Final = 4
"""Code of a tensor that is not needed any more."""

_NONE: Final = -1
_PARAMETER: Final = 0
_STATE: Final = 1
_INPUT: Final = 2
_KINDS: Final = {"parameter": _PARAMETER, "state": _STATE, "input": _INPUT, "activation": 3}
LONGEST: Final = 4
"""Maximum length relative to a sequence without recomputation; longer sequences are abandoned."""


NEEDED: Final = 0
"""Tensors an op needs in memory besides its writes: its reads; for the last op also the outputs."""
WRITES: Final = 1
READS: Final = 2
CHANGES: Final = 3
AGAIN: Final = 4
"""Gaps that end at an op and allow recomputation."""
INPUTS: Final = 5
"""The graph's inputs, at the first op."""


class Tables(NamedTuple):
    """A graph and its gaps as arrays. Ops are positions."""

    start: Ints
    """List l (NEEDED to INPUTS) of the op at position p is `ids[start[l, p]:start[l, p + 1]]`."""
    ids: Ints
    gap_after: Ints
    """Per entry of `ids` that is a use, the gap that begins there, or _NONE."""
    scratch_bytes: Ints
    nbytes: Ints
    kind: Ints
    stays: Bools
    """Whether a tensor is in memory at the end: outputs other than parameters."""
    last_use: Ints
    producer: Ints
    stored: Ints
    """Used parameters and state, in the order of their first use."""
    wrapping: Ints
    """Gap of each `stored` tensor over the end of the inference."""
    tensor: Ints
    """Per gap."""
    plain: int
    """Upper bound on the number of actions without recomputation."""
    most: int
    """Maximum number of actions."""


class AlapSequence(NamedTuple):
    """A sequence, and the bytes in memory during each action; empty if the sequence is too long."""

    verb: Ints
    what: Ints
    """A tensor; for COMPUTE, an op's position."""
    held: Ints


@lru_cache(maxsize=4)
def tables(gaps: Gaps) -> Tables:
    """Return arrays for `alap`. Raises UnsupportedProblem for a graph without ops."""
    graph = gaps.graph
    ops = graph.ops
    if not ops:
        raise UnsupportedProblem(
            f"{graph.name}: it has no ops, only inputs that are its outputs, so there is nothing to choose; ask the"
            " searcher best for its plan"
        )
    # outputs must be in memory when the last op ends
    needed = [op.reads for op in ops]
    needed[-1] = tuple(t for t in dict.fromkeys((*ops[-1].reads, *graph.outputs)) if t not in ops[-1].writes)
    gap_after = {(g.tensor, g.last_use): i for i, g in enumerate(gaps.all) if not g.wraps}
    wrapping = {g.tensor: i for i, g in enumerate(gaps.all) if g.wraps}
    again: list[list[int]] = [[] for _ in ops]
    for i, gap in enumerate(gaps.all):
        if Choice.RECOMPUTE in gap.choices:
            again[gap.next_use].append(i)
    stored = sorted(wrapping, key=lambda t: (gaps.uses[t][0], t))
    writes, changes = [op.writes for op in ops], [op.mutates for op in ops]
    first_inputs = [graph.inputs, *(() for _ in ops[1:])]
    # in the order of the constants NEEDED to INPUTS
    lists: list[Sequence[Sequence[int]]] = [needed, writes, [op.reads for op in ops], changes, again, first_inputs]
    begins = [
        gap_after.get((i, START if kind == INPUTS else p), _NONE) if kind in (NEEDED, WRITES, INPUTS) else _NONE
        for kind, of_ops in enumerate(lists)
        for p, some in enumerate(of_ops)
        for i in some
    ]
    lengths = [[len(some) for some in of_ops] for of_ops in lists]
    end = np.cumsum(lengths).reshape(len(lists), len(ops))
    # at most a swap-in, a swap-out and a drop per use
    uses = sum(len(need) + len(some) for need, some in zip(needed, writes, strict=True))
    plain = len(ops) + 3 * uses + 2 * len(graph.inputs) + 3 * len(stored)
    return Tables(
        start=np.concatenate([end[:, :1] - np.array(lengths)[:, :1], end], axis=1),
        ids=ints(i for of_ops in lists for some in of_ops for i in some),
        gap_after=ints(begins),
        scratch_bytes=ints(op.aligned_scratch_bytes for op in ops),
        nbytes=ints(t.aligned_bytes for t in graph.tensors),
        kind=ints(_KINDS[t.kind] for t in graph.tensors),
        stays=np.array([t in graph.outputs and what.kind != "parameter" for t, what in enumerate(graph.tensors)]),
        last_use=ints(uses[-1] if uses else START for uses in gaps.uses),
        producer=ints(gaps.producer.get(t, _NONE) for t in range(len(graph.tensors))),
        stored=ints(stored),
        wrapping=ints(wrapping[t] for t in stored),
        tensor=ints(g.tensor for g in gaps.all),
        plain=plain,
        most=LONGEST * plain,
    )


def codes(choices: Iterable[Choice]) -> Codes:
    return np.fromiter(choices, np.int8)


# These loops run for every candidate of a search. numba counts references wherever an array is passed or sliced,
# which would dominate the time; so one function makes all of a sequence without recomputation.


@compiled
def alap(t: Tables, choices: Codes) -> AlapSequence:
    """Return the sequence of these choices."""
    start, ids, gap_after, last_use, stays, kind = t.start, t.ids, t.gap_after, t.last_use, t.stays, t.kind
    here, saved, kept = _at_the_start(t, choices)
    forgotten = np.zeros(len(here), np.bool_)  # in a gap that a recomputation ends
    verb, what, length = np.empty(t.most + t.plain, np.int64), np.empty(t.most + t.plain, np.int64), 0
    mark, saving = np.full((3, len(here)), -1), np.empty(len(here), np.int64)
    for p in range(START, len(t.scratch_bytes)):
        # Before the op: recompute, then swap in the rest of its tensors.
        if p != START:
            repeats = False
            for n in range(start[AGAIN, p], start[AGAIN, p + 1]):
                repeats |= choices[ids[n]] == RECOMPUTE
            if repeats:
                length = _repeat(t, choices, here, saved, forgotten, p, mark, verb, what, length)
                if length > t.most:
                    return AlapSequence(verb[:0], what[:0], what[:0])
            for n in range(start[NEEDED, p], start[NEEDED, p + 1]):
                if not here[ids[n]]:
                    here[ids[n]] = True
                    verb[length], what[length], length = SWAP_IN, ids[n], length + 1
            verb[length], what[length], length = COMPUTE, p, length + 1
            for n in range(start[WRITES, p], start[WRITES, p + 1]):
                here[ids[n]] = True
            for n in range(start[CHANGES, p], start[CHANGES, p + 1]):
                saved[ids[n]] = False
        # After the op: drop tensors whose gap or end begins here. Those to save come last, since they wait for a copy.
        saves = 0
        for uses in range(NEEDED if p != START else INPUTS, WRITES + 1 if p != START else INPUTS + 1):
            for n in range(start[uses, max(p, 0)], start[uses, max(p, 0) + 1]):
                i, choice = ids[n], GONE
                if gap_after[n] >= 0:
                    choice = choices[gap_after[n]]
                elif p < last_use[i] or kept[i]:
                    choice = KEEP
                elif kind[i] == _STATE and not saved[i]:
                    choice = SWAP
                elif stays[i]:
                    choice = KEEP
                if choice == SWAP and not saved[i]:
                    saving[saves], saves = i, saves + 1
                elif choice != KEEP:
                    here[i], forgotten[i] = False, choice == RECOMPUTE
                    verb[length], what[length], length = DROP, i, length + 1
        for n in range(saves):
            i = saving[n]
            saved[i] = True
            verb[length], what[length], length = SWAP_OUT, i, length + 1
            if not stays[i] or p < last_use[i]:
                here[i] = False
                verb[length], what[length], length = DROP, i, length + 1
    # After the last op: restore residents that have left.
    for n in range(len(t.stored)):
        if choices[t.wrapping[n]] == RESTORE and not kept[t.stored[n]]:
            verb[length], what[length], length = SWAP_IN, t.stored[n], length + 1
    return AlapSequence(verb[:length], what[:length], _held(t, choices, verb[:length], what[:length]))


@compiled
def _at_the_start(t: Tables, choices: Codes) -> tuple[Bools, Bools, Bools]:
    """Return per tensor whether it is in memory at the start, in the host store, and a resident that stays."""
    count = len(t.nbytes)
    here, saved, kept = np.zeros(count, np.bool_), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for n in range(len(t.stored)):
        i, choice = t.stored[n], choices[t.wrapping[n]]
        here[i] = choice != SWAP
        kept[i] = choice == KEEP or (choice == RESTORE and t.last_use[i] == len(t.scratch_bytes) - 1)
    for i in range(count):
        saved[i] = t.kind[i] == _PARAMETER or (t.kind[i] == _STATE and not here[i])
        here[i] |= t.kind[i] == _INPUT
    return here, saved, kept


@compiled
def _held(t: Tables, choices: Codes, verb: Ints, what: Ints) -> Ints:
    """Return the bytes in memory during each action."""
    start, ids, nbytes, scratch_bytes = t.start, t.ids, t.nbytes, t.scratch_bytes
    held, now = np.empty(len(verb), np.int64), 0
    for i, there in enumerate(_at_the_start(t, choices)[0]):
        now += nbytes[i] if there else 0
    for i in range(len(verb)):
        if verb[i] == COMPUTE:
            for n in range(start[WRITES, what[i]], start[WRITES, what[i] + 1]):
                now += nbytes[ids[n]]
        elif verb[i] == SWAP_IN:
            now += nbytes[what[i]]
        held[i] = now + (scratch_bytes[what[i]] if verb[i] == COMPUTE else 0)
        if verb[i] == DROP:
            now -= nbytes[what[i]]
    return held


@compiled
def _repeat(
    t: Tables,
    choices: Codes,
    here: Bools,
    saved: Bools,
    forgotten: Bools,
    p: int,
    mark: Ints,
    verb: Ints,
    what: Ints,
    length: int,
) -> int:
    """Recompute tensors for the op at p, with their dependencies; tensors brought in only for that leave after it.

    `mark[:, i]` has, for tensor i, the last p that it came for, the last p that needs it, and the last op of this
    recomputation that uses it. Returns the length of the sequence so far.
    """
    start, ids = t.start, t.ids
    came, wanted, last = mark[0], mark[1], mark[2]
    for n in range(start[NEEDED, p], start[NEEDED, p + 1]):
        wanted[ids[n]] = p
    # last user of each tensor among the ops to repeat: tensors that came for these leave after it
    again = _ops_to_repeat(t, choices, here, saved, forgotten, p)
    for q in again:
        for uses in range(WRITES, READS + 1):
            for n in range(start[uses, q], start[uses, q + 1]):
                last[ids[n]] = q
    for q in again:
        for n in range(start[READS, q], start[READS, q + 1]):
            if not here[ids[n]]:
                here[ids[n]], came[ids[n]] = True, p
                verb[length], what[length], length = SWAP_IN, ids[n], length + 1
        for n in range(start[WRITES, q], start[WRITES, q + 1]):
            if here[ids[n]]:  # an op's results must not be in memory when it runs
                verb[length], what[length], length = DROP, ids[n], length + 1
            else:
                here[ids[n]], came[ids[n]] = True, p
        verb[length], what[length], length = COMPUTE, q, length + 1
        for uses in range(WRITES, READS + 1):
            for n in range(start[uses, q], start[uses, q + 1]):
                i = ids[n]
                if came[i] == p and wanted[i] != p and last[i] == q:
                    here[i] = False
                    verb[length], what[length], length = DROP, i, length + 1
        if length > t.most:
            return length
    for n in range(start[AGAIN, p], start[AGAIN, p + 1]):
        if choices[ids[n]] == RECOMPUTE:
            forgotten[t.tensor[ids[n]]] = False
    return length


@compiled
def _ops_to_repeat(t: Tables, choices: Codes, here: Bools, saved: Bools, forgotten: Bools, p: int) -> Ints:
    """Return the positions, ascending, of the ops that run again for the recomputations before p."""
    start, ids, producer, tensor = t.start, t.ids, t.producer, t.tensor
    asked, found, length = np.zeros(p, np.bool_), np.empty(p, np.int64), 0
    for n in range(start[AGAIN, p], start[AGAIN, p + 1]):
        if choices[ids[n]] == RECOMPUTE:
            q = producer[tensor[ids[n]]]
            if not asked[q]:
                asked[q], found[length], length = True, q, length + 1
    done = 0
    while done < length:
        for n in range(start[READS, found[done]], start[READS, found[done] + 1]):
            i = ids[n]
            if not here[i] and (not saved[i] or forgotten[i]) and not asked[producer[i]]:
                asked[producer[i]], found[length], length = True, producer[i], length + 1
        done += 1
    return np.flatnonzero(asked)
