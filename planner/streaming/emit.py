"""Adds drops to the schedule of ops and swap-ins that `planner.streaming.stream` evaluates."""

from collections import defaultdict, deque

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.graph import Graph
from cohabit.planner.schedule.table import COMPUTE, DROP, NOTHING, SWAP_IN, Row, Schedule
from cohabit.planner.streaming.stream import Swaps, schedule_of
from cohabit.planner.streaming.workload import Workload


def emit(work: Workload, resident_at: Ints, swaps: Swaps) -> Schedule:
    """Return the schedule that runs the ops in the order of `work`, with every tensor dropped after its last use."""
    schedule = _by_address(schedule_of(work.arrays, work.numbering, resident_at, swaps))
    activations, parameters = _activation_drops(work.footprint.graph), _parameter_drops(work, schedule, swaps)
    # Op -1 is the start: its drops come before the first row.
    row_after_op = [0, *(np.flatnonzero(schedule.verb == COMPUTE) + 1).tolist()]
    drops = [(row, t) for k, row in enumerate(row_after_op, -1) for t in (*activations[k], *parameters[k])]
    at, dropped = np.array(drops, np.int64).reshape(-1, 2).T
    return schedule._replace(
        verb=np.insert(schedule.verb, at, DROP),
        what=np.insert(schedule.what, at, dropped),
        offset=np.insert(schedule.offset, at, NOTHING),
        wait=np.insert(schedule.wait, at, NOTHING, axis=0),
    )


class ParameterRows:
    """The swap-ins and drops of parameters that `emit` writes, for callers that take them one at a time, in order.

    Op numbers are positions in the order of execution.
    """

    def __init__(self, work: Workload, resident_at: Ints, swaps: Swaps) -> None:
        schedule = _by_address(schedule_of(work.arrays, work.numbering, resident_at, swaps))
        self.resident_at = dict(zip(schedule.residents.tolist(), schedule.resident_at.tolist(), strict=True))
        """Offsets of the residents."""
        self._drops = _parameter_drops(work, schedule, swaps)
        copied = schedule.verb == SWAP_IN
        columns = (schedule.what[copied], schedule.offset[copied], swaps.after_op, swaps.op)
        self._swap_ins = deque(zip(*(column.tolist() for column in columns), strict=False))

    @property
    def needed_by(self) -> int | None:
        """Op that needs the next copy; the number of ops for the epilogue, None if no copy is left."""
        return self._swap_ins[0][3] if self._swap_ins else None

    def may_start(self, k: int) -> bool:
        """Whether the next copy may start once op k has ended."""
        return bool(self._swap_ins) and self._swap_ins[0][2] <= k

    def swap_in(self) -> Row:
        """Remove and return the row of the next copy."""
        tensor, offset, after_op, _ = self._swap_ins.popleft()
        return SWAP_IN, tensor, offset, after_op

    def drops_after(self, k: int) -> list[Row]:
        """Return the drops of parameters after op k (-1: at the start)."""
        return [(DROP, t, NOTHING, NOTHING) for t in self._drops[k]]


def _by_address(schedule: Schedule) -> Schedule:
    """Sort the residents by address, then by tensor: empty residents share an address."""
    order = np.lexsort((schedule.residents, schedule.resident_at))
    return schedule._replace(residents=schedule.residents[order], resident_at=schedule.resident_at[order])


def _activation_drops(graph: Graph) -> dict[int, list[int]]:
    """Return, for each op, the inputs and activations to drop after it because it uses them last."""
    last_touch = dict.fromkeys(graph.inputs, 0)
    for k, op in enumerate(graph.ops):
        last_touch |= dict.fromkeys((*op.reads, *op.writes), k)
    drops: dict[int, list[int]] = defaultdict(list)
    for t, k in last_touch.items():
        if graph.tensors[t].kind != "parameter" and t not in graph.outputs:
            drops[k].append(t)
    return drops


def _parameter_drops(work: Workload, schedule: Schedule, swaps: Swaps) -> dict[int, list[int]]:
    """Return the parameters to drop after each op: after the last use of each stay in memory."""
    ops, residents = len(work.footprint.uses), frozenset(schedule.residents.tolist())
    drops: dict[int, list[int]] = defaultdict(list)
    reads: dict[int, list[int]] = {t: [] for t in residents}
    for k, uses in enumerate(work.footprint.uses):
        for t in uses:
            reads.setdefault(t, []).append(k)
    arrivals: dict[int, list[int]] = defaultdict(list)
    for t, k in zip(schedule.what[schedule.verb == SWAP_IN].tolist(), swaps.op.tolist(), strict=False):
        arrivals[t].append(k)
    for t, uses_of_t in reads.items():
        # Each stay in memory begins with an arrival (or the start) and ends before the next one (or after the last op).
        starts = [-1, *arrivals[t]] if t in residents else arrivals[t]
        ends = [*starts[1:], ops]
        for start, end in zip(starts, ends, strict=True):
            is_last_stay = end == ops and start == starts[-1]
            if is_last_stay and t in residents:
                continue
            drops[max((k for k in uses_of_t if start <= k < end), default=-1)].append(t)
    return drops
