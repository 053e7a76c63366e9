"""Writes the plan of a choice of residents and swap-ins. Steps come as early in the total order as lanes allow."""

from collections import defaultdict, deque
from collections.abc import Mapping

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.graph import Graph
from cohabit.planner.order import in_original_order
from cohabit.planner.plan import Address, Placement, Plan
from cohabit.planner.problem import Problem
from cohabit.planner.sequence.plan_writer import PlanWriter
from cohabit.planner.streaming.op_orders import OpOrder
from cohabit.planner.streaming.page_map import NOWHERE
from cohabit.planner.streaming.stream import Swaps
from cohabit.planner.streaming.workload import Workload


class ParameterCopies:
    """A plan in the making, and the copies of its parameters that are still to be issued, in order."""

    def __init__(
        self,
        problem: Problem,
        work: Workload,
        inputs: Mapping[int, int],
        residents: tuple[Placement, ...],
        swaps: Swaps,
    ) -> None:
        """Inputs have offsets, which count through the partition and then the workspace."""
        count = int(swaps.length[0])
        columns = (swaps.parameter, swaps.page, swaps.after_op, swaps.op)
        parameter, page, after_op, needed_by = (column[:count].tolist() for column in columns)
        tensor = [work.parameters[p] for p in parameter]
        self._work = work
        self._partition_bytes = problem.partition_bytes
        self._drops = _parameter_drops(work, frozenset(p.tensor for p in residents), tensor, needed_by)
        self._left = deque(zip(tensor, page, after_op, needed_by, strict=True))
        homes = {p.tensor: self.offset(p.address) for p in residents}
        sizes = problem.partition_bytes, problem.workspace_bytes
        self.writer = PlanWriter(work.footprint.graph, *sizes, inputs, homes)

    def offset(self, address: Address) -> int:
        return address.offset + (self._partition_bytes if address.region == "workspace" else 0)

    @property
    def needed_by(self) -> int | None:
        """The op that the next copy is for; the number of ops for the epilogue, None if no copy is left."""
        return self._left[0][3] if self._left else None

    def may_start(self, k: int) -> bool:
        """Whether the next copy may start once op k has ended."""
        return bool(self._left) and self._left[0][2] <= k

    def issue(self) -> None:
        """Write the next copy."""
        tensor, page, *_ = self._left.popleft()
        self.writer.swap_in(tensor, self.offset(self._work.address(page)))

    def drop_after(self, k: int) -> None:
        """Drop the parameters that are not needed after op k (-1: from the start)."""
        for t in self._drops.get(k, ()):
            self.writer.drop(t)


def emit(problem: Problem, view: OpOrder, home: Ints, swaps: Swaps) -> Plan:
    """Make a plan in which the ops run in some order and activations have fixed places."""
    work = view.work
    graph, layout = work.footprint.graph, work.footprint.activations
    base = 0 if work.arrays.single else problem.partition_bytes
    inputs = {i: base + layout.tensors[i] for i in graph.inputs}
    copies = ParameterCopies(problem, work, inputs, residents_of(problem, work, home), swaps)
    drops = _activation_drops(graph)
    for k in range(-1, len(graph.ops)):
        if k >= 0:
            op = graph.ops[k]
            copies.writer.compute(
                k,
                [base + layout.tensors[t] for t in op.writes],
                base + layout.scratch[k] if op.scratch_bytes else None,
                [t for t in work.footprint.uses[k] if t not in op.reads],
            )
        for t in drops.get(k, ()):
            copies.writer.drop(t)
        copies.drop_after(k)
        while copies.may_start(k):
            copies.issue()
    plan = copies.writer.plan(work.profile.fingerprint)
    return in_original_order(plan, view.order, problem.graph, problem.profile)


def residents_of(problem: Problem, work: Workload, home: Ints) -> tuple[Placement, ...]:
    """Residents of a plan: those given, or those with a home in page order."""
    if problem.residents is not None:
        return problem.residents
    chosen = sorted(np.flatnonzero(home != NOWHERE).tolist(), key=lambda p: (int(home[p]), p))
    return tuple(Placement(work.parameters[p], work.address(int(home[p]))) for p in chosen)


def _activation_drops(graph: Graph) -> dict[int, list[int]]:
    """Inputs and activations to drop after each op: those that it is the last to touch."""
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
    """Parameters to drop after each op. `tensor[i]` is swapped in for op `needed_by[i]`."""
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
