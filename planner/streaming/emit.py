"""Converts residents and swap-ins to a schedule. Rows come as early in the total order as lanes allow."""

from collections import defaultdict, deque

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.graph import Graph
from cohabit.planner.schedule.table import COMPUTE, DROP, NOTHING, SWAP_IN, Row, Schedule, scheduled
from cohabit.planner.streaming.page_map import NOWHERE
from cohabit.planner.streaming.stream import Swaps
from cohabit.planner.streaming.workload import Workload


class ParameterRows:
    """Rows of parameters' copies and drops, taken in order. Op positions are those of execution."""

    def __init__(self, work: Workload, resident_at: Ints, swaps: Swaps) -> None:
        count = int(swaps.length[0])
        columns = (swaps.parameter, swaps.page, swaps.after_op, swaps.op)
        parameter, page, after_op, needed_by = (column[:count].tolist() for column in columns)
        tensor = [work.parameters[p] for p in parameter]
        resident = sorted(
            np.flatnonzero(resident_at != NOWHERE).tolist(), key=lambda p: (int(resident_at[p]), work.parameters[p])
        )
        self.resident_at = {work.parameters[p]: work.offset(int(resident_at[p])) for p in resident}
        """Offsets of the residents."""
        self._work = work
        self._drops = _parameter_drops(work, frozenset(self.resident_at), tensor, needed_by)
        self._left = deque(zip(tensor, page, after_op, needed_by, strict=True))

    @property
    def needed_by(self) -> int | None:
        """Op that needs the next copy; the number of ops for the epilogue, None if no copy is left."""
        return self._left[0][3] if self._left else None

    def may_start(self, k: int) -> bool:
        """Whether the next copy may start once op k has ended."""
        return bool(self._left) and self._left[0][2] <= k

    def swap_in(self) -> Row:
        """Remove and return the row of the next copy."""
        tensor, page, after_op, _ = self._left.popleft()
        return SWAP_IN, tensor, self._work.offset(page), after_op

    def drops_after(self, k: int) -> list[Row]:
        """Return the drops of parameters that are not needed after op k (-1: from the start)."""
        return [(DROP, t, NOTHING, NOTHING) for t in self._drops.get(k, ())]


def emit(work: Workload, resident_at: Ints, swaps: Swaps) -> Schedule:
    """Make a schedule that runs the ops in the order of `work`."""
    copies, drops = ParameterRows(work, resident_at, swaps), _activation_drops(work.footprint.graph)
    rows: list[Row] = []
    for k in range(-1, len(work.numbering.op)):
        if k >= 0:
            rows.append((COMPUTE, int(work.numbering.op[k]), NOTHING, NOTHING))
        rows += [(DROP, t, NOTHING, NOTHING) for t in drops.get(k, ())]
        rows += copies.drops_after(k)
        while copies.may_start(k):
            rows.append(copies.swap_in())
    return scheduled(work.numbering.graph, rows, copies.resident_at, work.footprint.activation_bytes)


def _activation_drops(graph: Graph) -> dict[int, list[int]]:
    """Return the inputs and activations to drop after each op, their last user."""
    last_touch = dict.fromkeys(graph.inputs, 0)
    for k, op in enumerate(graph.ops):
        last_touch |= dict.fromkeys((*op.reads, *op.writes), k)
    drops: dict[int, list[int]] = defaultdict(list)
    for t, k in last_touch.items():
        if graph.tensors[t].kind != "parameter" and t not in graph.outputs:
            drops[k].append(t)
    return drops


def _parameter_drops(
    work: Workload, residents: frozenset[int], tensor: list[int], needed_by: list[int]
) -> dict[int, list[int]]:
    """Return the parameters to drop after each op. `tensor[i]` is swapped in for op `needed_by[i]`."""
    ops = len(work.footprint.uses)
    drops: dict[int, list[int]] = defaultdict(list)
    reads: dict[int, list[int]] = {t: [] for t in residents}
    for k, uses in enumerate(work.footprint.uses):
        for t in uses:
            reads.setdefault(t, []).append(k)
    arrivals: dict[int, list[int]] = defaultdict(list)
    for t, k in zip(tensor, needed_by, strict=True):
        arrivals[t].append(k)
    for t, uses_of_t in reads.items():
        starts = [-1, *arrivals[t]] if t in residents else arrivals[t]
        ends = [*starts[1:], ops]
        for start, end in zip(starts, ends, strict=True):
            stays_on = end == ops and start == starts[-1]
            if stays_on and t in residents:
                continue
            drops[max((k for k in uses_of_t if start <= k < end), default=-1)].append(t)
    return drops
