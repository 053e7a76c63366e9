"""Array types for compiled loops, and a graph with its costs as arrays."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cohabit.planner.graph import Graph
from cohabit.planner.profile import Profile

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def ints(values: Iterable[int]) -> Ints:
    """Return the values as a 1-D array."""
    return np.fromiter(values, np.int64)


class GraphArrays(NamedTuple):
    """A graph and its costs. Byte counts are aligned."""

    read_start: Ints
    """Op k reads `read[read_start[k]:read_start[k + 1]]`; shape [ops + 1]."""
    read: Ints
    write_start: Ints
    write: Ints
    change_start: Ints
    change: Ints
    """Likewise for tensors it writes and tensors it changes in place."""
    scratch_bytes: Ints
    nbytes: Ints
    is_weight: Bools
    inputs: Ints
    outputs: Ints
    op_s: Floats
    swap_in_s: Floats
    """Per tensor."""
    swap_out_s: Floats
    copied_bytes: Ints
    """Bytes that copying each tensor moves, unaligned."""
    compute_slowdown: float
    swap_slowdown: float

    @staticmethod
    def of(graph: Graph, profile: Profile) -> "GraphArrays":
        return GraphArrays(
            *_lists([op.reads for op in graph.ops]),
            *_lists([op.writes for op in graph.ops]),
            *_lists([op.mutates for op in graph.ops]),
            scratch_bytes=ints(op.aligned_scratch_bytes for op in graph.ops),
            nbytes=ints(t.aligned_bytes for t in graph.tensors),
            is_weight=np.array([t.is_weight for t in graph.tensors], np.bool_),
            inputs=ints(graph.inputs),
            outputs=ints(graph.outputs),
            op_s=np.array(profile.op_seconds, np.float64),
            swap_in_s=np.array([profile.swap_in_seconds(t) for t in graph.tensors]),
            swap_out_s=np.array([profile.swap_out.seconds(t.nbytes) for t in graph.tensors]),
            copied_bytes=ints(t.nbytes for t in graph.tensors),
            compute_slowdown=profile.compute_slowdown,
            swap_slowdown=profile.swap_slowdown,
        )


def _lists(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Return each row's start, shape [rows + 1], and the rows concatenated."""
    return ints(np.cumsum([0, *map(len, rows)])), ints(i for row in rows for i in row)
