"""Lower bound on the latency of every plan in a given memory, for any order of the ops.

Its main part is a linear program that relaxes the planning problem: a fraction of a tensor may be kept, and other
fractions copied in or recomputed. Time is divided at the moments of a chain (`planner.bounds.chain`). For each interval
between two uses of a tensor, the program chooses the fractions that are kept, recomputed and copied in. For copies
ahead of need, only their link time is a variable. A lower bound on the bytes that they occupy follows from the tensors'
densities (bytes per second of link time), as a piecewise linear function. So the program grows with the number of ops,
not with the number of ops times that of tensors.

Every plan yields a solution that takes no longer. A copy is counted between the last use of the tensor before it and
the next use after it. A plan may start the copy earlier, while an op still reads the older copy of the tensor; but then
it could have kept the older copy instead. Addresses, slowdowns, copies out and the memory of recomputation are ignored.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from cohabit.planner.arrays import Floats, Ints
from cohabit.planner.bounds.chain import OpChain, UseInterval, exclusions, longest_chain
from cohabit.planner.bounds.linear import LinearProgram
from cohabit.planner.bounds.subset_sums import largest_sum, last_absence, most_whole_tensor_bytes
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.profile import Profile

MOST_OPS: Final = 200
"""Maximum length of a chain. Longer ones are thinned out, which lowers the bound by less than a thousandth."""
MOST_UNORDERED: Final = 0.2
"""A second chain is tried if ops outside of the first one take more than this fraction of the compute time."""
DENSITIES: Final = 4
"""Number of lines that bound the bytes in memory of copies ahead of need."""
TIE_BREAK: Final = 1e-6
"""Objective weight of residents, as a fraction of their copy time. It breaks ties in favour of residents used late."""
MOST_BETWEEN: Final = 10
"""Maximum number of terms per interval for copies that are confined between two moments."""
ROUNDING: Final = 1e-12
"""Relative rounding error: the simulator adds in another order."""


def latency_bound(graph: Graph, profile: Profile, memory: Memory) -> float:
    """Return the lower bound in seconds.

    It is the maximum of three bounds: the time of all ops; the copies of weights that cannot be resident, in case the
    solver gives up; and the relaxation.
    """
    if not graph.ops:
        return 0.0
    resident_limit_bytes = most_resident_bytes(graph, memory)
    bounds = [profile.compute_s]
    if not _all_fits(graph, resident_limit_bytes, memory.nbytes):
        bounds.append(_copying_bound(graph, profile, resident_limit_bytes))
        relaxed = relax(graph, profile, memory)
        if relaxed is not None:
            bounds.append(relaxed.latency_s)
    return max(bounds) * (1 - ROUNDING)


def _all_fits(graph: Graph, resident_limit_bytes: int, memory_bytes: int) -> bool:
    """Whether no step ever waits for memory. Parameters have `resident_limit_bytes` at the start."""
    total = sum(t.nbytes for t in graph.tensors) + max(op.scratch_bytes for op in graph.ops)
    return graph.weight_bytes <= resident_limit_bytes and total <= memory_bytes


def _copying_bound(graph: Graph, profile: Profile, resident_limit_bytes: int) -> float:
    """Return the least link time: all weights that ops read are resident, or copied before their op starts."""
    read = {t for op in graph.ops for t in op.reads if graph.tensors[t].is_weight}
    nbytes = np.array([graph.tensors[t].nbytes for t in read], dtype=np.float64)
    missing = float(nbytes.sum()) - resident_limit_bytes
    if missing <= 0:
        return 0.0
    largest_first = np.cumsum(np.sort(nbytes)[::-1])
    transfers = int(np.searchsorted(largest_first, missing)) + 1
    links = [profile.link_of(graph.tensors[t]) for t in read]
    fastest = max(link.bandwidth_bytes_per_s for link in links)
    return transfers * min(link.latency_s for link in links) + missing / fastest


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Solution of the relaxation."""

    latency_s: float
    """Lower bound on every plan's latency."""
    resident: dict[int, float]
    """Fraction of each parameter and state that stays in memory from the start to its first use."""


def most_resident_bytes(graph: Graph, memory: Memory) -> int:
    """Return the maximum bytes of residents: they fit into memory that lasts, and into all memory with the inputs."""
    without_inputs = memory.nbytes - sum(t.nbytes for t in graph.tensors if t.kind == "input")
    return min(memory.lasting_bytes, without_inputs)


@lru_cache(maxsize=4)  # a search calls it twice: for its bound and for initial residents
def relax(graph: Graph, profile: Profile, memory: Memory) -> Relaxed | None:
    """Solve the relaxation. None if it has no solution (then no plan exists) or the solver finds none."""
    resident_bytes = most_resident_bytes(graph, memory)
    chains = [longest_chain(graph, profile, MOST_OPS)]
    if sum(op_s for _, _, op_s in chains[0].unordered) > MOST_UNORDERED * profile.compute_s:
        chains.append(longest_chain(graph, profile, MOST_OPS, latest=False))
    excluded = list(exclusions(graph, profile, memory.nbytes))
    solved = [_relax(chain, excluded, memory.nbytes, resident_bytes) for chain in chains]
    return max((r for r in solved if r is not None), key=lambda r: r.latency_s, default=None)


def _relax(
    chain: OpChain, excluded: Sequence[tuple[float, set[int]]], memory_bytes: int, resident_bytes: int
) -> Relaxed | None:
    if resident_bytes < 0 or max(chain.needed_bytes) > memory_bytes:
        return None
    free_bytes = most_whole_tensor_bytes(chain, memory_bytes)
    stored = [s.nbytes for s in chain.intervals if s.is_before_first_use]
    relaxation = _Relaxation(chain, free_bytes, largest_sum(stored, resident_bytes), memory_bytes)
    for ops_s, tensors in excluded:
        relaxation.keep_apart(ops_s, tensors)
    solved = relaxation.program.least_whole(relaxation.whole)
    if solved is None:
        return None
    latency_s, values = solved
    shares = {s.tensor: float(values[i]) for i, s in enumerate(chain.intervals) if s.is_before_first_use}
    return Relaxed(latency_s, shares)


class _Relaxation:
    """The linear program of a chain. Variables are in seconds, and in shares of the memory."""

    def __init__(self, chain: OpChain, free_bytes: Sequence[int], resident_bytes: int, memory_bytes: int) -> None:
        self._chain = chain
        self._room = np.array(free_bytes[1:]) / max(memory_bytes, 1)
        intervals, last = chain.intervals, chain.moments
        self._copy_s = _column(intervals, "copy_s")
        self._share = _column(intervals, "nbytes") / max(memory_bytes, 1)
        self._until = _column(intervals, "until").astype(np.int64)
        self._kept_from = np.maximum(_column(intervals, "kept_from").astype(np.int64), 1)
        # A tensor that is absent at some moment cannot be kept, and arrives after the last of these moments.
        last_absences = [last_absence(s, free_bytes) for s in intervals]
        cannot_stay = [at is not None and at >= s.kept_from for s, at in zip(intervals, last_absences, strict=True)]
        self._arrives_from = np.array(
            [
                max(s.arrives_from, at + 1 if at is not None else 0)
                for s, at in zip(intervals, last_absences, strict=True)
            ],
            dtype=np.int64,
        )
        self._due = _column(intervals, "due").astype(np.int64)
        self._recompute_s = np.array([s.recompute_s or 0.0 for s in intervals])
        self._most_s = sum(chain.op_s) + sum(s for _, _, s in chain.unordered) + float(self._copy_s.sum())
        p = self.program = LinearProgram(self._most_s)
        late = _column(intervals, "is_before_first_use") * self._until / (last + 1)
        self._kept = p.variables(
            len(intervals), 0, 1 - np.array(cannot_stay, dtype=np.float64), cost=-TIE_BREAK * late * self._copy_s
        )  # the first variables: `_relax` reads them by index
        self.whole = self._kept
        """Variables that are 0 or 1 in every plan: a tensor is kept whole, or not."""
        self._again = self._shares_again()
        self._wait_s = p.variables(last, 0, self._most_s, cost=1)  # waits in window i, beyond its ops
        self._ahead_s = self._spent_ahead()
        p.fixed_cost = sum(chain.op_s)
        self._residents(resident_bytes / max(memory_bytes, 1))
        self._link()
        self._memory_rows()
        self._between()
        self._loose_ops(self._compute_again())

    def _shares_again(self) -> Ints:
        """Add variables for recomputed shares, which are zero where recomputing is impossible."""
        most = np.array([0.0 if s.recompute_s is None else 1.0 for s in self._chain.intervals])
        again = self.program.variables(len(most), 0, most)
        some = np.flatnonzero(most)
        rows = self.program.at_most(np.ones(len(some)))
        self.program.put(rows, self._kept[some], 1)
        self.program.put(rows, again[some], 1)
        return again

    def _spent_ahead(self) -> Ints:
        """Add variables for the link time spent ahead by each moment, less that of uses that may have passed by
        then."""
        total = float(self._copy_s.sum())
        most = np.full(self._chain.moments + 1, total)
        least = np.zeros(self._chain.moments + 1)
        most[[0, -1]] = 0.0
        for s in self._chain.intervals:
            least[s.until + 1 : s.due] -= s.copy_s  # the use may still come
        return self.program.variables(len(most), least, most)

    def _put_copied(self, rows: Ints, intervals: Ints, factor: Floats) -> None:
        """Add `factor` times the copied shares of these intervals."""
        self.program.put(rows, self._kept[intervals], -factor)
        self.program.put(rows, self._again[intervals], -factor)
        self.program.add_constant(rows, factor)

    def _residents(self, room: float) -> None:
        first = np.array([i for i, s in enumerate(self._chain.intervals) if s.is_before_first_use], dtype=np.int64)
        row = np.repeat(self.program.at_most(np.array([room])), len(first))
        self.program.put(row, self._kept[first], self._share[first])

    def _link(self) -> None:
        """Constraints: copies take at most the time that passes, arrive before their use, and not before the last
        use."""
        p, every = self.program, np.arange(len(self._copy_s))
        op_s, last_s = np.array(self._chain.op_s[1:]), np.array(self._chain.chain_op_s[1:])
        before, now = self._ahead_s[:-1], self._ahead_s[1:]
        # Link time per window is at most the window's duration.
        busy = p.at_most(op_s)
        p.put(busy, now, 1)
        p.put(busy, before, -1)
        p.put(busy, self._wait_s, -1)
        self._put_copied(busy[self._until], every, self._copy_s)
        # Link time spent ahead shrinks only by copies for uses that pass.
        onward = p.at_most(np.zeros(len(op_s)))
        p.put(onward, before, 1)
        p.put(onward, now, -1)
        self._put_copied(onward[self._until], every, -self._copy_s)
        # Copies for the op that ends a window arrive before it starts.
        in_time = p.at_most(op_s - last_s)
        p.put(in_time, before, -1)
        p.put(in_time, self._wait_s, -1)
        self._put_copied(in_time[self._until], every, self._copy_s)
        for i in np.flatnonzero(self._until + 1 < self._due).tolist():
            late = np.arange(self._until[i] + 1, self._due[i])
            intervals = np.repeat(i, len(late))
            self._put_copied(in_time[late - 1], intervals, np.repeat(-self._copy_s[i], len(late)))

    def _memory_rows(self) -> None:
        p = self.program
        kept = self._sum_over(self._kept_from, self._share, self._put_kept)
        plain = p.at_most(self._room)
        p.put(plain, kept, 1)
        density = self._share / self._copy_s
        for dense in _densities(density, self._copy_s):
            light = self._sum_over(
                self._arrives_from, np.maximum(dense - density, 0) * self._copy_s, self._put_copied
            )
            rows = p.at_most(self._room)
            p.put(rows, kept, 1)
            p.put(rows, self._ahead_s[1:], dense)
            p.put(rows, light, -1)
        rows = p.at_most(np.zeros(len(self._room)))
        p.put(rows, self._ahead_s[1:], 1)
        p.put(rows, self._sum_over(self._arrives_from, self._copy_s, self._put_copied), -1)

    def _put_kept(self, rows: Ints, intervals: Ints, factor: Floats) -> None:
        """Add `factor` times the kept shares of these intervals."""
        self.program.put(rows, self._kept[intervals], factor)

    def _sum_over(self, since: Ints, weight: Floats, put: Callable[[Ints, Ints, Floats], None]) -> Ints:
        """Add a variable per moment from 1 on: the sum of weight times share over intervals from `since` to `until`."""
        p, last = self.program, self._chain.moments
        inside = np.flatnonzero((since <= self._until) & (weight != 0))
        sums = p.variables(last, 0, float(weight[inside].sum()))
        rows = p.equal(np.zeros(last))
        p.put(rows, sums, 1)
        p.put(rows[1:], sums[:-1], -1)
        put(rows[since[inside] - 1], inside, -weight[inside])
        ends = inside[self._until[inside] < last]
        put(rows[self._until[ends]], ends, weight[ends])
        return sums

    def _between(self) -> None:
        """Constraints: copies and recomputation confined between two moments fit between them."""
        p, chain, since = self.program, self._chain, self._arrives_from - 1
        pairs = {(a, d) for a, d in zip(since.tolist(), self._due.tolist(), strict=True) if a > 0}
        if not pairs:
            return
        waited = p.variables(chain.moments + 1, 0, np.array([0.0, *[self._most_s * chain.moments] * chain.moments]))
        rows = p.equal(np.zeros(chain.moments))
        p.put(rows, waited[1:], 1)
        p.put(rows, waited[:-1], -1)
        p.put(rows, self._wait_s, -1)
        passed_s = np.cumsum(chain.op_s)
        left = MOST_BETWEEN * len(since)
        for a, d in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair)):
            inside = np.flatnonzero((since >= a) & (self._due <= d))
            left -= len(inside)
            if left < 0:
                return
            ops_s = passed_s[d] - passed_s[a] - chain.chain_op_s[d]
            row = self._wait_between(waited, a, d, ops_s)
            self._put_copied(np.repeat(row, len(inside)), inside, self._copy_s[inside])
            again = inside[self._recompute_s[inside] > 0]
            row = self._wait_between(waited, a, d, 0.0)
            p.put(np.repeat(row, len(again)), self._again[again], self._recompute_s[again])
            for i in again[(since[again] == a) & (self._due[again] == d)].tolist():  # either, not half of each
                row = self._wait_between(waited, a, d, 0.0)
                self._put_copied(row, np.array([i]), np.maximum(self._copy_s[[i]] - ops_s, 0.0))
                p.put(row, self._again[[i]], self._recompute_s[i])

    def keep_apart(self, ops_s: float, tensors: Collection[int]) -> None:
        """Constraint: first copies of these tensors overlap neither these ops nor one another."""
        copied = np.array(
            [i for i, s in enumerate(self._chain.intervals) if s.is_before_first_use and s.tensor in tensors],
            dtype=np.int64,
        )
        row = self.program.at_most(np.array([sum(self._chain.op_s) - ops_s]))
        self.program.put(np.repeat(row, len(self._wait_s)), self._wait_s, -1)
        self._put_copied(np.repeat(row, len(copied)), copied, self._copy_s[copied])

    def _wait_between(self, waited: Ints, after: int, by: int, ops_s: float) -> Ints:
        """Constraint: copies between two moments take at most the waits between them and `ops_s`. Returns the row."""
        row = self.program.at_most(np.array([ops_s]))
        self.program.put(row, waited[[by]], -1)
        self.program.put(row, waited[[after]], 1)
        return row

    def _compute_again(self) -> Ints | None:
        """Constraints: recomputation between two uses takes its time. Returns its seconds per window, if there is
        any."""
        p, chain = self.program, self._chain
        some = np.flatnonzero(self._recompute_s)
        if not len(some):
            return None
        spent = p.variables(chain.moments, 0, self._most_s)
        ahead = p.variables(chain.moments + 1, 0, np.array([0.0, *[self._most_s] * chain.moments]))
        rows = p.at_most(np.zeros(chain.moments))  # recomputation done by a moment, less the part that is due
        p.put(rows, ahead[1:], 1)
        p.put(rows, ahead[:-1], -1)
        p.put(rows, spent, -1)
        p.put(rows[self._due[some] - 1], self._again[some], self._recompute_s[some])
        rows = p.at_most(np.zeros(chain.moments))
        p.put(rows, spent, 1)
        p.put(rows, self._wait_s, -1)
        return spent

    def _loose_ops(self, again: Ints | None) -> None:
        """Constraints: ops that certainly run before a moment, or after it, do not overlap recomputation."""
        chain, p = self._chain, self.program
        if not chain.unordered:
            return
        before, following = np.zeros(chain.moments + 1), np.zeros(chain.moments + 1)
        for after, by, op_s in chain.unordered:
            before[by:] += op_s
            following[: after + 1] += op_s
        passed = p.variables(chain.moments, 0, self._most_s * chain.moments)
        rows = p.equal(np.zeros(chain.moments))
        p.put(rows, passed, 1)
        p.put(rows[1:], passed[:-1], -1)
        p.put(rows, self._wait_s, -1)
        if again is not None:
            p.put(rows, again, 1)
        p.put(p.at_most(-before[1:]), passed, -1)
        rows = p.at_most(-following[:-1])
        p.put(rows, np.repeat(passed[-1], len(rows)), -1)
        p.put(rows[1:], passed[:-1], 1)


def _column(intervals: Sequence[UseInterval], name: str) -> Floats:
    return np.array([getattr(s, name) for s in intervals], dtype=np.float64)


def _densities(density: Floats, copy_s: Floats) -> Floats:
    """Return ascending densities with about equal copy time between them."""
    if not len(density):
        return density
    order = np.argsort(density)
    passed = np.cumsum(copy_s[order]) / copy_s.sum()
    at = np.searchsorted(passed, np.arange(DENSITIES) / DENSITIES).clip(max=len(order) - 1)
    return np.unique([*density[order][at], density.max()])
