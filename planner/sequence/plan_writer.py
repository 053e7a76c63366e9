"""Writes plans: the caller gives actions and offsets in order, the writer adds the waits.

A step waits for the steps that wrote what it reads, and for the last users of the bytes that it overwrites. A wait
that lane order or another wait implies is left out. The caller is responsible for order and offsets; the checker
finds mistakes."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Final

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, Step, SwapIn, SwapOut
from cohabit.planner.simulate import COMPUTE, SWAP_IN, SWAP_OUT

_LANES: Final = (COMPUTE, SWAP_IN, SWAP_OUT)

_Clock = tuple[int, int, int]
"""Steps of each lane that have ended."""
_NEVER: Final[_Clock] = (0, 0, 0)


class PlanWriter:
    """Builds one plan. Offsets count through the partition and then the workspace."""

    def __init__(
        self,
        graph: Graph,
        partition_bytes: int,
        workspace_bytes: int,
        inputs: Mapping[int, int],
        residents: Mapping[int, int],
    ) -> None:
        self._graph = graph
        self._partition_bytes = partition_bytes
        self._workspace_bytes = workspace_bytes
        self._inputs = dict(inputs)
        self._residents = dict(residents)
        self._steps: list[Step] = []
        self._issued: tuple[list[int], list[int], list[int]] = ([], [], [])  # per lane, indices of its steps
        self._ended: dict[int, _Clock] = {}  # per step, what has ended once it has
        self._latest: list[_Clock] = [_NEVER, _NEVER, _NEVER]  # per lane, what its next step knows to have ended
        self._users = _LastUsers(partition_bytes + workspace_bytes)
        self._offset: dict[int, int] = {}
        self._written: dict[int, _Clock] = {}
        self._used: dict[int, _Clock] = {}
        self._saved: dict[int, _Clock] = {}
        for tensor, offset in (*self._inputs.items(), *self._residents.items()):
            self._appear(tensor, offset, _NEVER)

    def compute(
        self, op: int, outputs: Sequence[int] = (), scratch: int | None = None, arrived: Sequence[int] = ()
    ) -> None:
        """Run an op; its results go to these offsets, in the order of its writes.

        It waits for the tensors in `arrived` as for what it reads: the last op does for the graph's outputs.
        """
        what = self._graph.ops[op]
        needed = [self._written[t] for t in (*what.reads, *arrived)]
        needed += [self._saved.pop(t) for t in what.mutates if t in self._saved]
        needed += [
            self._users.users(o, self._graph.tensors[t].nbytes) for t, o in zip(what.writes, outputs, strict=True)
        ]
        if scratch is not None:
            needed.append(self._users.users(scratch, what.scratch_bytes))
        after, mine = self._issue(COMPUTE, needed)
        addresses = tuple(self._address(o) for o in outputs)
        self._steps.append(Compute(op, addresses, None if scratch is None else self._address(scratch), after))
        for t in what.reads:
            self._used[t] = _latest(self._used[t], mine)
        for t in what.mutates:
            self._written[t] = _latest(self._written[t], mine)
        for t, offset in zip(what.writes, outputs, strict=True):
            self._appear(t, offset, mine)
        if scratch is not None:
            self._users.leave(scratch, what.scratch_bytes, mine)

    def swap_in(self, tensor: int, offset: int) -> None:
        """Copy a tensor from the host store to this offset."""
        needed = [self._users.users(offset, self._graph.tensors[tensor].nbytes), self._saved.get(tensor, _NEVER)]
        after, mine = self._issue(SWAP_IN, needed)
        self._steps.append(SwapIn(tensor, self._address(offset), after))
        self._appear(tensor, offset, mine)

    def swap_out(self, tensor: int, after_uses: bool = False) -> None:
        """Copy a tensor to the host store once it has been written, or once all its uses so far have ended."""
        after, mine = self._issue(SWAP_OUT, [(self._used if after_uses else self._written)[tensor]])
        self._steps.append(SwapOut(tensor, after))
        self._used[tensor] = _latest(self._used[tensor], mine)
        self._saved[tensor] = mine

    def drop(self, tensor: int) -> None:
        """Give up a tensor's bytes."""
        self._steps.append(Drop(tensor))
        self._users.leave(self._offset.pop(tensor), self._graph.tensors[tensor].nbytes, self._used.pop(tensor))
        del self._written[tensor]

    def plan(self, profile: str) -> Plan:
        """The plan so far, for the profile with this fingerprint."""
        return Plan(
            graph=self._graph.fingerprint,
            profile=profile,
            partition_bytes=self._partition_bytes,
            workspace_bytes=self._workspace_bytes,
            inputs=tuple(Placement(t, self._address(o)) for t, o in self._inputs.items()),
            residents=tuple(Placement(t, Address("partition", o)) for t, o in self._residents.items()),
            steps=tuple(self._steps),
        )

    def _appear(self, tensor: int, offset: int, by: _Clock) -> None:
        self._offset[tensor] = offset
        self._written[tensor] = self._used[tensor] = by

    def _issue(self, lane: int, needed: Sequence[_Clock]) -> tuple[tuple[int, ...], _Clock]:
        """Number a step; return the steps it must wait for, and the clock that only its own end advances."""
        known = self._latest[lane]
        missing = {
            self._issued[other][count - 1]: other
            for other in _LANES
            if other != lane and (count := max((clock[other] for clock in needed), default=0)) > known[other]
        }
        after: list[int] = []
        for step in sorted(missing, reverse=True):  # the latest first: it may imply the others
            if self._ended[step][missing[step]] > known[missing[step]]:
                after.append(step)
                known = _latest(known, self._ended[step])
        self._issued[lane].append(len(self._steps))
        mine = _alone(lane, len(self._issued[lane]))
        self._latest[lane] = self._ended[len(self._steps)] = _latest(known, mine)
        return tuple(sorted(after)), mine

    def _address(self, offset: int) -> Address:
        if offset < self._partition_bytes or not self._workspace_bytes:
            return Address("partition", offset)
        return Address("workspace", offset - self._partition_bytes)


class _LastUsers:
    """The last users of all bytes: disjoint ranges that cover the memory, each with a clock."""

    def __init__(self, nbytes: int) -> None:
        self._start = [0]
        self._clock = [_NEVER]
        self._end = nbytes

    def users(self, offset: int, nbytes: int) -> _Clock:
        """The clock at which all users of these bytes have ended."""
        if nbytes == 0:
            return _NEVER
        first = bisect_right(self._start, offset) - 1
        last = bisect_left(self._start, offset + nbytes)
        return reduce(_latest, self._clock[first:last], _NEVER)

    def leave(self, offset: int, nbytes: int, clock: _Clock) -> None:
        """These bytes were used until `clock`; earlier users were waited for."""
        if nbytes == 0:
            return
        first = bisect_right(self._start, offset) - 1
        last = bisect_left(self._start, offset + nbytes)
        starts, clocks = [offset], [clock]
        if self._start[first] < offset:
            starts.insert(0, self._start[first])
            clocks.insert(0, self._clock[first])
        if offset + nbytes < (self._start[last] if last < len(self._start) else self._end):
            starts.append(offset + nbytes)
            clocks.append(self._clock[last - 1])
        self._start[first:last] = starts
        self._clock[first:last] = clocks


def _alone(lane: int, count: int) -> _Clock:
    return (count, 0, 0) if lane == COMPUTE else (0, count, 0) if lane == SWAP_IN else (0, 0, count)


def _latest(a: _Clock, b: _Clock) -> _Clock:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2])
