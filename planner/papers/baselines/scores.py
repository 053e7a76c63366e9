"""Rules that choose tensors by a score: AutoSwap and Capuchin. Copies are as early as memory allows.

AutoSwap: Zhang, Yeung, Shu, He and Wang, "Efficient Memory Management for GPU-based Deep Learning Systems", arXiv
1903.06631, 2019. Capuchin: Peng, Shi, Dai, Jin, Ma, Xiong, Yang and Qian, "Capuchin: Tensor-based GPU Memory Management
for Deep Learning", ASPLOS 2020, section 4.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

import numpy as np

from cohabit.planner.arrays import Floats, Ints, ints
from cohabit.planner.papers.baselines.searcher import Baseline
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.alap import KEEP, RECOMPUTE, SWAP, Codes, alap, tables
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.schedule.table import COMPUTE, Schedule

GRID: Final = [weights for weights in product((0.0, 0.5, 1.0), repeat=4) if sum(weights) == 1]
"""Weights of AutoSwap's scores."""
LIMITS: Final = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.0)
"""Fractions of the memory that Capuchin plans for, in turn, until its choices fit."""


class Absences:
    """One choice per gap, and the resulting bytes in memory. Weights are kept: their gaps count as empty."""

    def __init__(self, problem: Problem, gaps: Gaps) -> None:
        g, tensor = problem.arrays, ints(gap.tensor for gap in gaps.all)
        self._first, self._end = ints(gap.last_use + 1 for gap in gaps.all), ints(gap.next_use for gap in gaps.all)
        self._first[g.is_weight[tensor]] = self._end[g.is_weight[tensor]] = 0
        self.nbytes, self._in_s, self._out_s = g.nbytes[tensor], g.swap_in_s[tensor], g.swap_out_s[tensor]
        self._op_s, self._start_s = g.op_s, np.concatenate([[0.0], np.cumsum(g.op_s)])
        self.choices: Codes = np.full(len(gaps.all), KEEP, np.int8)
        made = alap(tables(gaps), self.choices)
        self._load_bytes: Ints = made.held[made.verb == COMPUTE]

    def choose(self, i: int, choice: int) -> None:
        self.choices[i] = choice
        self._load_bytes[self._first[i] : self._end[i]] -= self.nbytes[i]

    def helpful(self, limit_bytes: float) -> Ints:
        """Return the kept gaps in which the load exceeds the limit."""
        over = np.concatenate([[0], np.cumsum(self._load_bytes > limit_bytes)])
        return np.flatnonzero((over[self._end] > over[self._first]) & (self.choices == KEEP))

    def weighted_s(self, limit_bytes: float) -> Floats:
        """Return the duration of each gap, weighted with the load over the limit."""
        sums = np.cumsum(self._op_s * np.maximum(self._load_bytes - limit_bytes, 0))
        sums = np.concatenate([[0.0], sums])
        return np.asarray(sums[self._end] - sums[self._first])

    def free_s(self) -> Floats:
        """Return the time that each gap's copies leave free, after earlier chosen copies; negative if ops wait."""
        first, end, swapped = self._first, self._end, self.choices == SWAP
        out_s = np.bincount(first[swapped], self._out_s[swapped], len(self._start_s))
        in_s = np.bincount(end[swapped], self._in_s[swapped], len(self._start_s))
        queued_s, ahead_s = np.cumsum(out_s), np.cumsum(in_s[::-1])[::-1]
        free_from_s = queued_s + np.maximum.accumulate(self._start_s - (queued_s - out_s))
        free_until_s = np.minimum.accumulate((self._start_s + ahead_s - in_s)[::-1])[::-1] - ahead_s
        return np.asarray(free_until_s[end] - self._in_s - free_from_s[first] - self._out_s)


class AutoSwap(Baseline):
    """Swaps the tensors of the highest priority until the peak fits.

    Four scores: a gap's duration minus its copies (DOA), that times the size (AOA), its duration weighted with the
    load over the limit (WDOA), and the same with the load after earlier choices (SWDOA). The paper weights them by
    Bayesian optimisation; here a small grid is tried, each score alone and in pairs, scaled by the largest. The
    paper's minimum tensor size, which depends on its link, is left out.
    """

    name = "autoswap"

    def _find(self) -> Iterator[Schedule | None]:
        tried = [self.chosen(weights, self.problem.memory.nbytes).tobytes() for weights in GRID]
        yield from map(self._schedule_of_choices, dict.fromkeys(tried))

    def chosen(self, weights: Sequence[float], limit_bytes: int) -> Codes:
        absences = Absences(self.problem, self._gaps)
        doa, wdoa = absences.free_s(), absences.weighted_s(limit_bytes)
        while len(helpful := absences.helpful(limit_bytes)):
            scores = np.array([doa, doa * absences.nbytes, wdoa, absences.weighted_s(limit_bytes)])[:, helpful]
            largest = np.abs(scores).max(axis=1, keepdims=True)
            priority = np.array(weights) @ (scores / np.where(largest > 0, largest, 1.0))
            absences.choose(int(helpful[priority.argmax()]), SWAP)
        return absences.choices


class Capuchin(Baseline):
    """Swaps tensors with the most free time; recomputes where a swap would make ops wait for longer.

    Measured access times, here the profile's, tell how much time the copies of a gap leave free. If none is left, the
    swap is compared with the recomputation that saves the most memory per second, which takes longer the more of its
    operands are recomputed, too. The paper adjusts copies by measured waits; its passive mode swaps in missing tensors
    on demand. Here, choices are made again for a lower limit if recomputations take too much memory themselves.
    """

    name = "capuchin"

    def _find(self) -> Iterator[Schedule | None]:
        for share in LIMITS:
            made = self._schedule_of_choices(self.chosen(share * self.problem.memory.nbytes))
            if made is not None:
                yield made
                return

    def chosen(self, limit_bytes: float) -> Codes:
        absences = Absences(self.problem, self._gaps)
        repeatable = {i for i, gap in enumerate(self._gaps.all) if Choice.RECOMPUTE in gap.choices}
        s_per_byte = dict.fromkeys(repeatable, 0.0)  # when last computed: it only grows
        while helpful := absences.helpful(limit_bytes).tolist():
            free_s = absences.free_s()
            best, choice = max(helpful, key=free_s.__getitem__), SWAP
            cheap, seen = repeatable.intersection(helpful) if free_s[best] < 0 else set[int](), set[int]()
            while cheap and (least := min(cheap, key=s_per_byte.__getitem__)) not in seen:
                seen.add(least)
                s_per_byte[least] = self._overhead_s(absences.choices, least) / max(absences.nbytes[least], 1)
            if cheap and s_per_byte[least] * absences.nbytes[least] < -free_s[best]:
                best, choice = least, RECOMPUTE
            absences.choose(best, choice)
        return absences.choices

    def _overhead_s(self, choices: Codes, i: int) -> float:
        """Return the seconds that recomputing in gap i adds."""
        total_s = []
        for choice in (KEEP, RECOMPUTE):
            choices[i] = choice
            made = alap(tables(self._gaps), choices)
            total_s.append(
                self.problem.arrays.op_s[made.what[made.verb == COMPUTE]].sum() if len(made.verb) else math.inf
            )
        choices[i] = KEEP
        return float(total_s[1] - total_s[0])
