"""As-late-as-possible (ALAP) sequences of actions from one choice per gap between uses, in compiled loops.

Tensors leave right after a use and return right before the next. A recomputation, with its dependencies, runs right
before the use that needs it (HOME, section 2.2); tensors brought in for it leave after it. No sequence with the same
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
"""Code of a tensor that is no longer needed."""

_NONE: Final = -1
_PARAMETER: Final = 0
_STATE: Final = 1
_INPUT: Final = 2
_KINDS: Final = {"parameter": _PARAMETER, "state": _STATE, "input": _INPUT, "activation": 3}
LONGEST: Final = 4
"""Maximum length of a sequence, relative to one without recomputation. Longer sequences are abandoned."""


NEEDED: Final = 0
"""Tensors an op needs in memory besides its writes: its reads; for the last op also the outputs."""
WRITES: Final = 1
READS: Final = 2
CHANGES: Final = 3
RECOMPUTABLE: Final = 4
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
    plain_actions: int
    """Upper bound on the number of actions without recomputation."""
    most_actions: int
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
    # Outputs must be in memory when the last op ends.
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
    # In the order of the constants NEEDED to INPUTS.
    lists: list[Sequence[Sequence[int]]] = [needed, writes, [op.reads for op in ops], changes, again, first_inputs]
    begins = [
        gap_after.get((i, START if kind == INPUTS else p), _NONE) if kind in (NEEDED, WRITES, INPUTS) else _NONE
        for kind, of_ops in enumerate(lists)
        for p, some in enumerate(of_ops)
        for i in some
    ]
    lengths = [[len(some) for some in of_ops] for of_ops in lists]
    end = np.cumsum(lengths).reshape(len(lists), len(ops))
    # At most a swap-in, a swap-out and a drop per use.
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
        plain_actions=plain,
        most_actions=LONGEST * plain,
    )


def codes(choices: Iterable[int]) -> Codes:
    return np.fromiter(choices, np.int8)


# These loops run for every candidate of a search. In numba, passing or slicing an array changes its reference count,
# which would dominate the time. So one function makes a whole sequence, except for its recomputations.


@compiled
def alap(t: Tables, choices: Codes) -> AlapSequence:
    """Return the sequence of these choices."""
    start, ids, gap_after, last_use, stays, kind = t.start, t.ids, t.gap_after, t.last_use, t.stays, t.kind
    in_memory, on_host, kept = _at_the_start(t, choices)
    forgotten = np.zeros(len(in_memory), np.bool_)  # dropped, to be recomputed before the next use
    capacity = t.most_actions + t.plain_actions
    verb, what, length = np.empty(capacity, np.int64), np.empty(capacity, np.int64), 0
    mark, saving = np.full((3, len(in_memory)), -1), np.empty(len(in_memory), np.int64)
    for p in range(START, len(t.scratch_bytes)):
        # Before the op: recompute the tensors that it needs, or swap them in.
        if p != START:
            repeats = False
            for n in range(start[RECOMPUTABLE, p], start[RECOMPUTABLE, p + 1]):
                repeats |= choices[ids[n]] == RECOMPUTE
            if repeats:
                length = _recompute(t, choices, in_memory, on_host, forgotten, p, mark, verb, what, length)
                if length > t.most_actions:
                    return AlapSequence(verb[:0], what[:0], what[:0])
            for n in range(start[NEEDED, p], start[NEEDED, p + 1]):
                if not in_memory[ids[n]]:
                    in_memory[ids[n]] = True
                    verb[length], what[length], length = SWAP_IN, ids[n], length + 1
            verb[length], what[length], length = COMPUTE, p, length + 1
            for n in range(start[WRITES, p], start[WRITES, p + 1]):
                in_memory[ids[n]] = True
            for n in range(start[CHANGES, p], start[CHANGES, p + 1]):
                on_host[ids[n]] = False
        # After the op: drop tensors that start a gap, or are used for the last time. Tensors to swap out come last,
        # because their drops wait for a copy.
        saves = 0
        for uses in range(NEEDED if p != START else INPUTS, WRITES + 1 if p != START else INPUTS + 1):
            for n in range(start[uses, max(p, 0)], start[uses, max(p, 0) + 1]):
                i, choice = ids[n], GONE
                if gap_after[n] >= 0:
                    choice = choices[gap_after[n]]
                elif p < last_use[i] or kept[i]:
                    choice = KEEP
                elif kind[i] == _STATE and not on_host[i]:
                    choice = SWAP
                elif stays[i]:
                    choice = KEEP
                if choice == SWAP and not on_host[i]:
                    saving[saves], saves = i, saves + 1
                elif choice != KEEP:
                    in_memory[i], forgotten[i] = False, choice == RECOMPUTE
                    verb[length], what[length], length = DROP, i, length + 1
        for n in range(saves):
            i = saving[n]
            on_host[i] = True
            verb[length], what[length], length = SWAP_OUT, i, length + 1
            if not stays[i] or p < last_use[i]:
                in_memory[i] = False
                verb[length], what[length], length = DROP, i, length + 1
    # After the last op: restore residents that have left.
    for n in range(len(t.stored)):
        if choices[t.wrapping[n]] == RESTORE and not kept[t.stored[n]]:
            verb[length], what[length], length = SWAP_IN, t.stored[n], length + 1
    return AlapSequence(verb[:length], what[:length], _bytes_during(t, choices, verb[:length], what[:length]))


@compiled
def _at_the_start(t: Tables, choices: Codes) -> tuple[Bools, Bools, Bools]:
    """Return three flags per tensor, as of the start: in memory, in the host store, and a resident that stays."""
    count = len(t.nbytes)
    in_memory, on_host, kept = np.zeros(count, np.bool_), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    for n in range(len(t.stored)):
        i, choice = t.stored[n], choices[t.wrapping[n]]
        in_memory[i] = choice != SWAP
        kept[i] = choice == KEEP or (choice == RESTORE and t.last_use[i] == len(t.scratch_bytes) - 1)
    for i in range(count):
        on_host[i] = t.kind[i] == _PARAMETER or (t.kind[i] == _STATE and not in_memory[i])
        in_memory[i] |= t.kind[i] == _INPUT
    return in_memory, on_host, kept


@compiled
def _bytes_during(t: Tables, choices: Codes, verb: Ints, what: Ints) -> Ints:
    """Return the bytes in memory during each action."""
    start, ids, nbytes, scratch_bytes = t.start, t.ids, t.nbytes, t.scratch_bytes
    held, now = np.empty(len(verb), np.int64), 0
    for i, is_in_memory in enumerate(_at_the_start(t, choices)[0]):
        now += nbytes[i] if is_in_memory else 0
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
def _recompute(
    t: Tables,
    choices: Codes,
    in_memory: Bools,
    on_host: Bools,
    forgotten: Bools,
    p: int,
    mark: Ints,
    verb: Ints,
    what: Ints,
    length: int,
) -> int:
    """Recompute tensors for the op at p, with their dependencies. Drops the tensors brought in only for that.

    `mark[:, i]` has three positions for tensor i: the last p for whose recomputations it was brought in or computed,
    the last p that needs it, and the last op of this recomputation that uses it. Returns the sequence's new length.
    """
    start, ids = t.start, t.ids
    arrived_for, needed_at, last_user = mark[0], mark[1], mark[2]
    for n in range(start[NEEDED, p], start[NEEDED, p + 1]):
        needed_at[ids[n]] = p
    # Find the last user of each tensor among the ops to run again: tensors brought in only for these are dropped then.
    repeated = _ops_to_recompute(t, choices, in_memory, on_host, forgotten, p)
    for q in repeated:
        for uses in range(WRITES, READS + 1):
            for n in range(start[uses, q], start[uses, q + 1]):
                last_user[ids[n]] = q
    for q in repeated:
        for n in range(start[READS, q], start[READS, q + 1]):
            if not in_memory[ids[n]]:
                in_memory[ids[n]], arrived_for[ids[n]] = True, p
                verb[length], what[length], length = SWAP_IN, ids[n], length + 1
        for n in range(start[WRITES, q], start[WRITES, q + 1]):
            if in_memory[ids[n]]:  # an op's results must not be in memory when it runs
                verb[length], what[length], length = DROP, ids[n], length + 1
            else:
                in_memory[ids[n]], arrived_for[ids[n]] = True, p
        verb[length], what[length], length = COMPUTE, q, length + 1
        for uses in range(WRITES, READS + 1):
            for n in range(start[uses, q], start[uses, q + 1]):
                i = ids[n]
                if arrived_for[i] == p and needed_at[i] != p and last_user[i] == q:
                    in_memory[i] = False
                    verb[length], what[length], length = DROP, i, length + 1
        if length > t.most_actions:
            return length
    for n in range(start[RECOMPUTABLE, p], start[RECOMPUTABLE, p + 1]):
        if choices[ids[n]] == RECOMPUTE:
            forgotten[t.tensor[ids[n]]] = False
    return length


@compiled
def _ops_to_recompute(
    t: Tables, choices: Codes, in_memory: Bools, on_host: Bools, forgotten: Bools, p: int
) -> Ints:
    """Return the positions, ascending, of the ops that run again for the recomputations before p."""
    start, ids, producer, tensor = t.start, t.ids, t.producer, t.tensor
    asked, found, length = np.zeros(p, np.bool_), np.empty(p, np.int64), 0
    for n in range(start[RECOMPUTABLE, p], start[RECOMPUTABLE, p + 1]):
        if choices[ids[n]] == RECOMPUTE:
            q = producer[tensor[ids[n]]]
            if not asked[q]:
                asked[q], found[length], length = True, q, length + 1
    done = 0
    while done < length:
        for n in range(start[READS, found[done]], start[READS, found[done] + 1]):
            i = ids[n]
            if not in_memory[i] and (not on_host[i] or forgotten[i]) and not asked[producer[i]]:
                asked[producer[i]], found[length], length = True, producer[i], length + 1
        done += 1
    return np.flatnonzero(asked)
