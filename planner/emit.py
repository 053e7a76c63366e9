"""Writes out the plan that a choice of residents and swap-ins amounts to.

Every step comes as early in the total order as its lane allows and waits for no more than it must.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from planner.belady import Swaps
from planner.memory import NOWHERE
from planner.plan import Compute, Drop, Placement, Plan, Provenance, Step, SwapIn
from planner.workload import Workload

Ints = NDArray[np.int64]


def emit(
    work: Workload,
    partition_bytes: int,
    workspace_bytes: int,
    residents: tuple[Placement, ...],
    swaps: Swaps,
    provenance: Provenance | None = None,
) -> Plan:
    """Make a plan in which the ops run in the graph's order and activations have fixed places."""
    graph, layout = work.footprint.graph, work.footprint.activations
    return Plan(
        graph=graph.fingerprint,
        profile=work.profile.fingerprint,
        partition_bytes=partition_bytes,
        workspace_bytes=workspace_bytes,
        inputs=tuple(
            Placement(i, work.activation_address(layout.tensors[i]))
            for i, tensor in enumerate(graph.tensors)
            if tensor.kind == "input"
        ),
        residents=residents,
        steps=tuple(_Emitter(work, swaps, frozenset(p.tensor for p in residents)).steps()),
        provenance=provenance,
    )


def placements(work: Workload, home: Ints) -> tuple[Placement, ...]:
    """Residents of a plan, in page order."""
    chosen = sorted(np.flatnonzero(home != NOWHERE).tolist(), key=lambda p: (int(home[p]), p))
    return tuple(Placement(work.parameters[p], work.address(int(home[p]))) for p in chosen)


class _Emitter:
    """Merges the swap-in lane into the ops: swap-ins stand behind the op whose bytes they overwrite."""

    def __init__(self, work: Workload, swaps: Swaps, residents: frozenset[int]) -> None:
        self.work = work
        self.graph = work.footprint.graph
        self.tensor = [work.parameters[p] for p in swaps.parameter.tolist()]
        self.page = swaps.page.tolist()
        self.behind = swaps.behind.tolist()
        self.op = swaps.op.tolist()
        self.residents = residents
        self.arrived_by = self._arrivals()
        self.drops = self._drops()
        self.out: list[Step] = []
        self.compute_step: list[int] = []
        self.swap_step: list[int] = []

    def steps(self) -> list[Step]:
        self._drop_behind(-1)
        self._swap_in_behind(-1, -1)
        latest_wait = latest_op = -1
        for k in range(len(self.graph.ops)):
            needed = self.arrived_by[k]
            self._compute(k, self.swap_step[needed] if needed > latest_wait else None)
            latest_wait = max(latest_wait, needed)
            self._drop_behind(k)
            latest_op = self._swap_in_behind(k, latest_op)
        return self.out

    def _arrivals(self) -> list[int]:
        """For each op, the last swap-in among those of its parameters; -1 where all are residents."""
        newest: dict[int, int] = {}
        found, i = [], 0
        for k, uses in enumerate(self.work.footprint.uses):
            while i < len(self.op) and self.op[i] <= k:
                newest[self.tensor[i]] = i
                i += 1
            found.append(max((newest.get(t, -1) for t in uses), default=-1))
        return found

    def _drops(self) -> dict[int, list[int]]:
        """Tensors to give up behind each op (-1: before the first): after the last read of each stay in memory."""
        graph, ops = self.graph, len(self.work.footprint.uses)
        drops: dict[int, list[int]] = defaultdict(list)
        last_touch = {i: 0 for i, t in enumerate(graph.tensors) if t.kind == "input"}
        for k, op in enumerate(graph.ops):
            for t in (*op.reads, *op.writes):
                last_touch[t] = k
        for t, k in last_touch.items():
            if graph.tensors[t].kind != "parameter" and t not in graph.outputs:
                drops[k].append(t)
        reads: dict[int, list[int]] = defaultdict(list)
        for k, uses in enumerate(self.work.footprint.uses):
            for t in uses:
                reads[t].append(k)
        arrivals: dict[int, list[int]] = defaultdict(list)
        for t, k in zip(self.tensor, self.op, strict=True):
            arrivals[t].append(k)
        for t, uses_of_t in reads.items():
            starts = [-1, *arrivals[t]] if t in self.residents else arrivals[t]
            ends = [*starts[1:], ops]
            for start, end in zip(starts, ends, strict=True):
                stays_on = end == ops and start == starts[-1]
                if stays_on and t in self.residents:
                    continue
                drops[max((k for k in uses_of_t if start <= k < end), default=-1)].append(t)
        return drops

    def _compute(self, k: int, swap_step: int | None) -> None:
        layout, op = self.work.footprint.activations, self.graph.ops[k]
        self.compute_step.append(len(self.out))
        self.out.append(
            Compute(
                op=k,
                outputs=tuple(self.work.activation_address(layout.tensors[t]) for t in op.writes),
                scratch=self.work.activation_address(layout.scratch[k]) if op.scratch_bytes else None,
                after=() if swap_step is None else (swap_step,),
            )
        )

    def _drop_behind(self, k: int) -> None:
        self.out += (Drop(t) for t in self.drops.get(k, ()))

    def _swap_in_behind(self, k: int, latest: int) -> int:
        """Add the swap-ins that wait for op k at most; return the op that the lane has waited for by now."""
        while (i := len(self.swap_step)) < len(self.tensor) and self.behind[i] <= k:
            if self.behind[i] > latest:
                latest = self.behind[i]
                after: tuple[int, ...] = (self.compute_step[latest],)
            else:
                after = ()
            self.swap_step.append(len(self.out))
            self.out.append(SwapIn(self.tensor[i], self.work.address(self.page[i]), after))
        return latest
