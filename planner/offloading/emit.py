"""Makes schedules in which parameters stream and activations are offloaded within their pool.

Both share the swap-in lane. Among the copies that may start, the one needed first is issued first."""

from collections import deque
from itertools import accumulate

from cohabit.planner.arrays import Ints
from cohabit.planner.offloading.pool import ActivationPool
from cohabit.planner.schedule.table import COMPUTE, NOTHING, SWAP_IN, Row, Schedule, scheduled
from cohabit.planner.streaming.emit import ParameterRows
from cohabit.planner.streaming.stream import Swaps
from cohabit.planner.streaming.workload import Workload


class OffloadingEmitter:
    """Makes one schedule. With `strictly`, no copy overtakes another that is needed sooner but cannot start yet."""

    def __init__(
        self, work: Workload, pool: ActivationPool, pool_bytes: int, resident_at: Ints, swaps: Swaps, strictly: bool
    ) -> None:
        """`pool_bytes` is the size of the pool, `pool` has the actions on activations in it."""
        self._work, self._pool, self._pool_bytes, self._strictly = work, pool, pool_bytes, strictly
        self._graph = work.footprint.graph
        self._copies = ParameterRows(work, resident_at, swaps)
        self._rows: list[Row] = []
        self._returning = deque[int]()
        """Activations that may return now."""
        self._returns_due = deque(self._find_returns_due())

    def schedule(self) -> Schedule:
        last = -1
        self._rows += self._copies.drops_after(-1)
        self._issue(-1)
        for verb, what in self._pool.actions:
            if verb == SWAP_IN:
                self._returning.append(what)
                self._issue(last)
                continue
            self._rows.append((verb, what, NOTHING, NOTHING))
            if verb == COMPUTE:
                last = what
                self._rows += self._copies.drops_after(last)
                self._issue(last)
        assert not self._returning, "an activation returns without a use"
        return scheduled(self._work.numbering.graph, self._rows, self._copies.resident_at, self._pool_bytes)

    def _issue(self, k: int) -> None:
        """Issue every copy that may start after op k, in order of need."""
        while (parameter := self._copies.may_start(k)) or self._returning:
            first = self._is_activation_first(parameter, bool(self._returning))
            if first is None:
                return
            if first:
                self._returns_due.popleft()
                self._rows.append((SWAP_IN, self._returning.popleft(), NOTHING, NOTHING))
            else:
                self._rows.append(self._copies.swap_in())

    def _is_activation_first(self, parameter: bool, activation: bool) -> bool | None:
        """Whether the next copy is an activation's, not a parameter's; None if it cannot start yet."""
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
        """Return, for each swap-in of an activation, in order: the first op that uses it or any later one."""
        due: list[int] = []
        upcoming = {t: len(self._graph.ops) - 1 for t in self._graph.outputs}
        for verb, what in reversed(self._pool.actions):
            if verb == COMPUTE:
                upcoming |= dict.fromkeys(self._graph.ops[what].reads, what)
            elif verb == SWAP_IN:
                due.append(upcoming[what])
        return list(accumulate(due, min))[::-1]
