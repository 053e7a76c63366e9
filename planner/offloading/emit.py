"""Writes the plan in which parameters stream and activations are offloaded within their zone.

Both share the swap-in lane. Of the copies that may start, the one that is needed first is issued first."""

from collections import deque
from itertools import accumulate

from cohabit.planner.offloading.zone import ActivationZone
from cohabit.planner.plan import Placement, Plan
from cohabit.planner.problem import Problem
from cohabit.planner.sequence.sequence import ActionKind
from cohabit.planner.streaming.emit import ParameterCopies
from cohabit.planner.streaming.stream import Swaps
from cohabit.planner.streaming.workload import Workload


class OffloadingEmitter:
    """Writes one plan. With `strictly`, no copy overtakes another that is needed sooner but cannot start yet."""

    def __init__(
        self,
        problem: Problem,
        work: Workload,
        zone: ActivationZone,
        residents: tuple[Placement, ...],
        swaps: Swaps,
        strictly: bool,
    ) -> None:
        self._work, self._zone, self._strictly = work, zone, strictly
        self._graph = work.footprint.graph
        self._partition_bytes = problem.partition_bytes
        self._starting = {
            (s.tensor, s.span.first): problem.partition_bytes + offset
            for s, offset in zip(zone.placed.ranges, zone.placed.offsets, strict=True)
        }
        inputs = {i: self._starting[i, 0] for i in self._graph.inputs}
        self._copies = ParameterCopies(problem, work, inputs, residents, swaps)
        self._returning = deque[tuple[int, int]]()
        """Activations that may return now, with their offsets."""
        self._returns_due = deque(self._find_returns_due())

    def plan(self) -> Plan:
        """Write the plan and return it."""
        writer, last = self._copies.writer, -1
        self._copies.drop_after(-1)
        self._issue(-1)
        for index, action in enumerate(self._zone.actions):
            match action.verb:
                case ActionKind.COMPUTE:
                    last = action.what
                    self._compute(index, last)
                    self._copies.drop_after(last)
                    self._issue(last)
                case ActionKind.SWAP_IN:
                    self._returning.append((action.what, self._starting[action.what, index]))
                    self._issue(last)
                case ActionKind.SWAP_OUT:
                    writer.swap_out(action.what)
                case ActionKind.DROP:
                    writer.drop(action.what)
        assert not self._returning, "an activation returns without a use"
        return writer.plan(self._work.profile.fingerprint)

    def _compute(self, index: int, k: int) -> None:
        op, graph = self._graph.ops[k], self._graph
        scratch = self._zone.placed.scratch.get(index)
        arrived = [t for t in self._work.footprint.uses[k] if t not in op.reads]
        if k == len(graph.ops) - 1:
            arrived += [t for t in graph.outputs if graph.tensors[t].kind != "parameter" and t not in op.writes]
        self._copies.writer.compute(
            k,
            [self._starting[t, index] for t in op.writes],
            None if scratch is None else self._partition_bytes + scratch,
            arrived,
        )

    def _issue(self, k: int) -> None:
        """Issue, after op k, every copy that may start by now, in order of need."""
        while (parameter := self._copies.may_start(k)) or self._returning:
            first = self._is_activation_first(parameter, bool(self._returning))
            if first is None:
                return
            if first:
                self._returns_due.popleft()
                self._copies.writer.swap_in(*self._returning.popleft())
            else:
                self._copies.issue()

    def _is_activation_first(self, parameter: bool, activation: bool) -> bool | None:
        """Whether an activation is next rather than a parameter; None if the next copy cannot start yet."""
        ops = len(self._graph.ops)
        never = ops + 1
        needed_by = self._copies.needed_by
        parameter_due = never if needed_by is None else needed_by
        activation_due = self._returns_due[0] if self._returns_due else never
        if self._strictly or parameter_due >= ops:
            if activation_due < parameter_due and not activation:
                return None
            if parameter_due < activation_due and not parameter:
                return None
        return activation if activation != parameter else activation_due <= parameter_due

    def _find_returns_due(self) -> list[int]:
        """For each return of an activation, in order: the first op that uses it or any later return."""
        due: list[int] = []
        upcoming = {t: len(self._graph.ops) - 1 for t in self._graph.outputs}
        for action in reversed(self._zone.actions):
            if action.verb is ActionKind.COMPUTE:
                upcoming |= dict.fromkeys(self._graph.ops[action.what].reads, action.what)
            elif action.verb is ActionKind.SWAP_IN:
                due.append(upcoming[action.what])
        return list(accumulate(due, min))[::-1]
