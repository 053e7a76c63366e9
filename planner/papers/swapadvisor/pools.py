"""SwapAdvisor's memory pool, and a graph's needs of it.

SwapAdvisor, section 4.1 (memory allocation): a pool has size classes, and each class a number of objects of one
size. An object is a fixed range of bytes and holds one tensor, or one op's scratch, at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints, ints
from cohabit.planner.graph import SCRATCH_ALIGNMENT, Graph
from cohabit.planner.profile import Profile

CONSTANT: Final = 0
STATE: Final = 1
VALUE: Final = 2
"""Kinds of tensors in compiled loops: parameters, state, and inputs or activations."""

NO_SIZE: Final = -1
"""Size of tensors and scratch without bytes, which take no object."""


class OpUses(NamedTuple):
    """A graph and its costs as arrays, without empty tensors."""

    start: Ints
    """Op k's uses are `start[k]` to `start[k + 1]`, reads before writes; shape [ops + 1]."""
    tensor: Ints
    written: Bools
    """Whether a use creates the tensor."""
    changed: Bools
    """Whether a use makes the host copy stale: the tensor is written, or changed in place."""
    scratch: Ints
    """Index of each op's scratch in `TensorSizes.nbytes`, or NO_SIZE; shape [ops]."""
    size: Ints
    """Index of each tensor in `TensorSizes.nbytes`, or NO_SIZE; shape [tensors]."""
    kind: Ints
    in_s: Floats
    out_s: Floats
    op_s: Floats
    inputs: Ints
    outputs: Ints


@dataclass(frozen=True)
class TensorSizes:
    """TS, the sorted sizes in a graph (section 5.3), and their counts."""

    nbytes: Ints
    alignment: Ints
    count: Ints
    """Tensors of each size, plus one for scratch of that size."""
    at_once: Ints
    """Objects that some op needs at once, by size; one row per distinct need; shape [needs, sizes]."""


@dataclass(frozen=True)
class MemoryPool:
    """The objects of one allocation, numbered class by class."""

    class_of_size: Ints
    """Class of each size; classes are numbered from 0 here."""
    counts: Ints
    object_bytes: Ints

    @property
    def nbytes(self) -> int:
        """Bytes of all objects."""
        return int(self.counts @ self.object_bytes)


def uses_of(graph: Graph, profile: Profile) -> tuple[OpUses, TensorSizes]:
    """Convert a graph to arrays."""
    tensors, kinds = graph.tensors, {"parameter": CONSTANT, "state": STATE}
    touched = {t for op in graph.ops for t in (*op.reads, *op.writes)} | set(graph.outputs)
    touched |= {i for i, t in enumerate(tensors) if t.kind == "input"}
    held = {t for t in touched if tensors[t].nbytes}
    alignment: dict[int, int] = {}
    for nbytes, needed in (
        *((tensors[t].nbytes, tensors[t].alignment) for t in sorted(held)),
        *((op.scratch_bytes, SCRATCH_ALIGNMENT) for op in graph.ops if op.scratch_bytes),
    ):
        alignment[nbytes] = max(alignment.get(nbytes, 1), needed)
    order = sorted(alignment)
    index = {nbytes: i for i, nbytes in enumerate(order)} | {0: NO_SIZE}
    rows = [[t for t in (*op.reads, *op.writes) if t in held] for op in graph.ops]
    each = [(op, t) for op, row in zip(graph.ops, rows, strict=True) for t in row]
    uses = OpUses(
        start=ints(np.cumsum([0, *map(len, rows)])),
        tensor=ints(t for _, t in each),
        written=np.fromiter((t in op.writes for op, t in each), np.bool_),
        changed=np.fromiter((t in (*op.writes, *op.mutates) for op, t in each), np.bool_),
        scratch=ints(index[op.scratch_bytes] for op in graph.ops),
        size=ints(index[t.nbytes] if i in held else NO_SIZE for i, t in enumerate(tensors)),
        kind=ints(kinds.get(t.kind, VALUE) for t in tensors),
        in_s=np.array([profile.swap_in_seconds(t) for t in tensors]),
        out_s=np.array([profile.swap_out.seconds(t.nbytes) for t in tensors]),
        op_s=np.array(profile.op_seconds),
        inputs=ints(i for i in sorted(held) if tensors[i].kind == "input"),
        outputs=ints(i for i in dict.fromkeys(graph.outputs) if i in held),
    )
    return uses, _sizes(uses, order, [alignment[n] for n in order], sorted(held))


def _sizes(uses: OpUses, order: Sequence[int], alignment: Sequence[int], held: Sequence[int]) -> TensorSizes:
    count = np.bincount(uses.size[list(held)], minlength=len(order))
    count[np.unique(uses.scratch[uses.scratch != NO_SIZE])] += 1
    needs = {_tally(uses.size[uses.inputs], len(order))}
    for k, scratch in enumerate(uses.scratch.tolist()):
        tensors = uses.tensor[uses.start[k] : uses.start[k + 1]]
        if k == len(uses.scratch) - 1:
            tensors = np.union1d(tensors, uses.outputs)
        sizes = uses.size[tensors]
        needs.add(_tally(sizes if scratch == NO_SIZE else np.append(sizes, scratch), len(order)))
    return TensorSizes(ints(order), ints(alignment), count, np.array(sorted(needs), dtype=np.int64))


def _tally(sizes: Ints, length: int) -> tuple[int, ...]:
    return tuple(np.bincount(sizes, minlength=length).tolist())


def object_bytes(sizes: TensorSizes, classes: Ints) -> Ints:
    """Return the size of each class's objects: its largest tensor's, rounded up to align all its tensors.

    `classes` are numbered from 1, as in the paper.
    """
    largest, alignment = np.zeros(classes.max(), np.int64), np.ones(classes.max(), np.int64)
    np.maximum.at(largest, classes - 1, sizes.nbytes)
    np.maximum.at(alignment, classes - 1, sizes.alignment)
    objects: Ints = -(-largest // alignment) * alignment
    return objects


def pool_of(sizes: TensorSizes, classes: Ints, counts: Ints) -> MemoryPool:
    """Return the pool of an allocation, CLS and CNT."""
    return MemoryPool(classes - 1, counts, object_bytes(sizes, classes))
