"""A linear relaxation of all plans: every tensor may be kept, copied and computed again in parts.

Time is cut at the moments of a chain (planner.chain). Per stretch of a tensor between two uses the program chooses
what share of it is kept, computed again, or copied in. Copies arrive in the order of their uses: of those under way
only the link time spent ahead of need is a variable, and the bytes that this puts in memory are bounded from below by
chords of the tensors' bytes per link second. So the program grows with the ops, not with ops times tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from planner.chain import Chain, Stretch, follow
from planner.graph import Graph
from planner.linear import Program
from planner.profile import Profile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_MOMENTS: Final = 2000
CHORDS: Final = 4
"""Tangents to the bytes that copies ahead of need take in memory."""
PAGE_BYTES: Final = 4096
"""Most tensors are so many times as large as this that their sums can be enumerated."""
MOST_SUMS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Relaxed:
    """The best that the relaxation can do."""

    latency_s: float
    """Lower bound of every plan's latency."""
    resident: dict[int, float]
    """Share of each parameter and state that it keeps in memory from the start to its first use."""


def relax(graph: Graph, profile: Profile, partition_bytes: int, workspace_bytes: int) -> Relaxed | None:
    """Solve the relaxation; None where it has no solution (then no plan has) or the solver finds none."""
    chain = follow(graph, profile, MOST_MOMENTS)
    memory = partition_bytes + workspace_bytes
    inputs = sum(t.nbytes for t in graph.tensors if t.kind == "input")
    resident_bytes = min(partition_bytes, memory - inputs)
    if resident_bytes < 0 or max(chain.needed_bytes) > memory:
        return None
    rooms = room_beside(chain, memory)
    stored = [s.nbytes for s in chain.stretches if s.first]
    solved = _Relaxation(chain, rooms, largest_sum(stored, resident_bytes), memory).program.solve()
    if solved is None:
        return None
    latency_s, values = solved
    shares = {s.tensor: float(values[i]) for i, s in enumerate(chain.stretches) if s.first}
    return Relaxed(latency_s, shares)


class _Relaxation:
    """Variables in seconds, and in shares of the memory."""

    def __init__(self, chain: Chain, rooms: Sequence[int], resident_bytes: int, memory_bytes: int) -> None:
        self._chain = chain
        self._room = np.array(rooms[1:]) / max(memory_bytes, 1)
        stretches, last = chain.stretches, chain.moments
        self._copy_s = _column(stretches, "copy_s")
        self._share = _column(stretches, "nbytes") / max(memory_bytes, 1)
        self._until = _column(stretches, "until").astype(np.int64)
        self._kept_from = np.maximum(_column(stretches, "kept_from").astype(np.int64), 1)
        parted = [_parted_at(s, rooms) for s in stretches]
        self._parted = np.array([at is not None for at in parted])
        self._arrives_from = np.array(
            [max(s.arrives_from, at + 1 if at is not None else 0) for s, at in zip(stretches, parted, strict=True)],
            dtype=np.int64,
        )
        self._due = _column(stretches, "due").astype(np.int64)
        self._most_s = sum(chain.op_s) + sum(s for _, _, s in chain.loose) + float(self._copy_s.sum())
        p = self.program = Program(self._most_s)
        self._kept = p.variables(len(stretches), 0, 1 - self._parted)  # the first, so that they are found again
        self._again = self._shares_again()
        self._wait_s = p.variables(last, 0, self._most_s, cost=1)  # of window i, beyond its ops
        self._ahead_s = self._spent_ahead()
        p.fixed_cost = sum(chain.op_s)
        self._residents(resident_bytes / max(memory_bytes, 1))
        self._link()
        self._memory_rows()
        self._compute_again()
        self._loose_ops()

    def _shares_again(self) -> Ints:
        """Shares that are computed again; those that cannot be have a variable that is zero."""
        most = np.array([0.0 if s.again_s is None else 1.0 for s in self._chain.stretches])
        again = self.program.variables(len(most), 0, most)
        some = np.flatnonzero(most)
        rows = self.program.at_most(np.ones(len(some)))
        self.program.put(rows, self._kept[some], 1)
        self.program.put(rows, again[some], 1)
        return again

    def _spent_ahead(self) -> Ints:
        """Link time spent by each moment, less what uses that may have passed by then can have taken."""
        total = float(self._copy_s.sum())
        most = np.full(self._chain.moments + 1, total)
        least = np.zeros(self._chain.moments + 1)
        most[[0, -1]] = 0.0
        for s in self._chain.stretches:
            least[s.until + 1 : s.due] -= s.copy_s  # may be still to come
        return self.program.variables(len(most), least, most)

    def _put_copied(self, rows: Ints, stretches: Ints, factor: Floats) -> None:
        """Add `factor` times the shares of these stretches that are copied."""
        self.program.put(rows, self._kept[stretches], -factor)
        self.program.put(rows, self._again[stretches], -factor)
        self.program.add_constant(rows, factor)

    def _residents(self, room: float) -> None:
        first = np.array([i for i, s in enumerate(self._chain.stretches) if s.first], dtype=np.int64)
        row = np.repeat(self.program.at_most(np.array([room])), len(first))
        self.program.put(row, self._kept[first], self._share[first])

    def _link(self) -> None:
        """Copies take no more time than passes, are there when their use comes, and not before the last use."""
        p, every = self.program, np.arange(len(self._copy_s))
        op_s, last_s = np.array(self._chain.op_s[1:]), np.array(self._chain.last_s[1:])
        before, now = self._ahead_s[:-1], self._ahead_s[1:]
        busy = p.at_most(op_s)
        p.put(busy, now, 1)
        p.put(busy, before, -1)
        p.put(busy, self._wait_s, -1)
        self._put_copied(busy[self._until], every, self._copy_s)
        onward = p.at_most(np.zeros(len(op_s)))
        p.put(onward, before, 1)
        p.put(onward, now, -1)
        self._put_copied(onward[self._until], every, -self._copy_s)
        in_time = p.at_most(op_s - last_s)
        p.put(in_time, before, -1)
        p.put(in_time, self._wait_s, -1)
        self._put_copied(in_time[self._until], every, self._copy_s)
        for i in np.flatnonzero(self._until + 1 < self._due).tolist():
            late = np.arange(self._until[i] + 1, self._due[i])
            stretches = np.repeat(i, len(late))
            self._put_copied(in_time[late - 1], stretches, np.repeat(-self._copy_s[i], len(late)))

    def _memory_rows(self) -> None:
        p = self.program
        kept = self._sum_over(self._kept_from, self._share, self._kept)
        plain = p.at_most(self._room)
        p.put(plain, kept, 1)
        density = self._share / self._copy_s
        for chord in _chords(density, self._copy_s):
            light = self._copied_over(np.maximum(chord - density, 0) * self._copy_s)
            rows = p.at_most(self._room)
            p.put(rows, kept, 1)
            p.put(rows, self._ahead_s[1:], chord)
            p.put(rows, light, -1)
        rows = p.at_most(np.zeros(len(self._room)))
        p.put(rows, self._ahead_s[1:], 1)
        p.put(rows, self._copied_over(self._copy_s), -1)

    def _sum_over(self, since: Ints, weight: Floats, shares: Ints) -> Ints:
        """Per moment from 1 on, a variable: weight times share of all stretches from `since` to `until`."""
        p, last = self.program, self._chain.moments
        inside = np.flatnonzero((since <= self._until) & (weight != 0))
        sums = p.variables(last, 0, float(weight[inside].sum()))
        rows = p.equal(np.zeros(last))
        p.put(rows, sums, 1)
        p.put(rows[1:], sums[:-1], -1)
        p.put(rows[since[inside] - 1], shares[inside], -weight[inside])
        ends = inside[self._until[inside] < last]
        p.put(rows[self._until[ends]], shares[ends], weight[ends])
        return sums

    def _copied_over(self, weight: Floats) -> Ints:
        """The same for the shares that are copied, from the moment at which they can have arrived."""
        p, last, since = self.program, self._chain.moments, self._arrives_from
        inside = np.flatnonzero((since <= self._until) & (weight != 0))
        sums = p.variables(last, 0, float(weight[inside].sum()))
        rows = p.equal(np.zeros(last))
        p.put(rows, sums, 1)
        p.put(rows[1:], sums[:-1], -1)
        self._put_copied(rows[since[inside] - 1], inside, -weight[inside])
        ends = inside[self._until[inside] < last]
        self._put_copied(rows[self._until[ends]], ends, weight[ends])
        return sums

    def _compute_again(self) -> None:
        """Waits are long enough for what is computed again between two uses."""
        p, chain = self.program, self._chain
        some = np.array([i for i, s in enumerate(chain.stretches) if s.again_s], dtype=np.int64)
        if not len(some):
            return
        again_s = np.array([s.again_s or 0.0 for s in chain.stretches])
        ahead = p.variables(chain.moments + 1, 0, np.array([0.0, *[self._most_s] * chain.moments]))
        rows = p.at_most(np.zeros(chain.moments))  # what is done by a moment, less what is due
        p.put(rows, ahead[1:], 1)
        p.put(rows, ahead[:-1], -1)
        p.put(rows, self._wait_s, -1)
        p.put(rows[self._due[some] - 1], self._again[some], again_s[some])

    def _loose_ops(self) -> None:
        """All ops that certainly run before a moment, or after it, take their time."""
        chain, p = self._chain, self.program
        if not chain.loose:
            return
        before, behind = np.zeros(chain.moments + 1), np.zeros(chain.moments + 1)
        for after, by, op_s in chain.loose:
            before[by:] += op_s
            behind[: after + 1] += op_s
        passed = p.variables(chain.moments, 0, self._most_s * chain.moments)
        rows = p.equal(np.zeros(chain.moments))
        p.put(rows, passed, 1)
        p.put(rows[1:], passed[:-1], -1)
        p.put(rows, self._wait_s, -1)
        p.put(p.at_most(-before[1:]), passed, -1)
        rows = p.at_most(-behind[:-1])
        p.put(rows, np.repeat(passed[-1], len(rows)), -1)
        p.put(rows[1:], passed[:-1], 1)


def _column(stretches: Sequence[Stretch], name: str) -> Floats:
    return np.array([getattr(s, name) for s in stretches], dtype=np.float64)


def _chords(density: Floats, copy_s: Floats) -> Floats:
    """Some densities, from least to most, between which there is about as much to copy."""
    if not len(density):
        return density
    order = np.argsort(density)
    passed = np.cumsum(copy_s[order]) / copy_s.sum()
    at = np.searchsorted(passed, np.arange(CHORDS) / CHORDS).clip(max=len(order) - 1)
    return np.unique([*density[order][at], density.max()])


def _parted_at(stretch: Stretch, rooms: Sequence[int]) -> int | None:
    """The last moment of a stretch at which its tensor cannot be in memory; a copy reserves its bytes at the start."""
    since = max(min(stretch.kept_from, stretch.arrives_from), 1)
    return next((i for i in range(stretch.until, since - 1, -1) if rooms[i] < stretch.nbytes), None)


def room_beside(chain: Chain, memory_bytes: int) -> list[int]:
    """Most bytes, per moment, of whole tensors that are still to be used and lie in memory beside what is needed."""
    rooms = [memory_bytes - n for n in chain.needed_bytes]
    still = _Sums(memory_bytes)
    by_last = sorted(chain.stretches, key=lambda s: s.until)
    seen: set[int] = set()
    for i in range(chain.moments, -1, -1):
        while by_last and by_last[-1].until >= i:
            stretch = by_last.pop()
            if stretch.tensor not in seen:
                seen.add(stretch.tensor)
                still.add(stretch.nbytes)
        rooms[i] = still.largest(rooms[i])
    return rooms


def largest_sum(sizes: Sequence[int], limit: int) -> int:
    """At least the largest sum of some of the sizes that is at most `limit`."""
    sums = _Sums(limit)
    for nbytes in sizes:
        sums.add(nbytes)
    return sums.largest(limit)


class _Sums:
    """All sums of some sizes: bit s of an integer stands for s pages. Odd sizes may fill any gap."""

    def __init__(self, limit: int) -> None:
        self._mask = (1 << (limit // PAGE_BYTES + 1)) - 1 if limit // PAGE_BYTES < MOST_SUMS else 0
        self._reached = 1
        self._odd = 0

    def add(self, nbytes: int) -> None:
        if nbytes % PAGE_BYTES or not self._mask:
            self._odd += nbytes
        else:
            self._reached |= self._reached << nbytes // PAGE_BYTES & self._mask

    def largest(self, limit: int) -> int:
        if limit < 0:
            return limit
        within = self._reached & ((1 << (limit // PAGE_BYTES + 1)) - 1)
        return min(limit, (within.bit_length() - 1) * PAGE_BYTES + self._odd)
