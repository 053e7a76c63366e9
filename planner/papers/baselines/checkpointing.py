"""Checkpointing of a chain: the inputs of some layers are kept, and the layers after them are recomputed.

sqrt(n): Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, 2016, section
4: segments of sqrt(n) layers are recomputed, except the last, whose backward pass follows at once. Their search for
better segments (algorithm 3) is left out. Optimal: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal
Checkpointing for Heterogeneous Chains", Inria RR-9302, 2019: the fastest of all strategies that keep stored values
until their backward pass.

Layers are the virtual layers of `planner.papers.beaumont`. A graph that is not a chain has few layers, or one, so that
little is recomputed. Ops that change state, or read values that have changed since, run once, and their results stay.
The dynamic program assumes that a layer needs as much memory without saving as with it.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from cohabit.planner.arrays import Floats, Ints
from cohabit.planner.papers.baselines.searcher import Baseline
from cohabit.planner.papers.beaumont.grouping import grouped, virtual_layers
from cohabit.planner.papers.beaumont.layers import LayerChain
from cohabit.planner.schedule.table import Schedule

SLOTS: Final = 500
MOST_LAYERS: Final = 64
"""Size of the dynamic program: units of memory, as in the paper, and layers; neighbouring layers are merged."""
FORWARD, BACKWARD = range(2)
Step = tuple[int, int]
"""A direction and a layer."""


class SqrtCheckpointing(Baseline):
    name = "sqrt_checkpointing"

    def _find(self) -> Iterator[Schedule | None]:
        ends = virtual_layers(self._gaps, self._turn)
        size = math.isqrt(len(ends) - 1) + 1
        steps: list[Step] = []
        for start in reversed(range(0, len(ends), size)):
            if start + size < len(ends):
                steps += [(FORWARD, i) for i in range(start, start + size)]
            steps.append((BACKWARD, start))
        yield self._schedule_of_layers(ends, steps)

    def _schedule_of_layers(self, ends: Sequence[int], steps: Iterable[Step]) -> Schedule | None:
        """Return the schedule of the forward pass and these steps. A backward op belongs to the lowest layer that was
        the last forward user of one of its operands."""
        ops, gaps, turn = self.problem.graph.ops, self._gaps, self._turn
        layer = np.searchsorted(ends, range(turn))
        used_by = [max((layer[u] for u in uses if u < turn), default=turn) for uses in gaps.uses]
        program, p = [*range(turn)], turn
        for direction, i in steps:
            if direction == FORWARD:
                program += [k for k in range(turn) if layer[k] == i and gaps.repeatable_until[k] >= p]
                continue
            while p < len(ops) and all(used_by[t] >= i for t in ops[p].reads):
                program.append(p)
                p += 1
        return self._schedule_of([*program, *range(p, len(ops))], {})


class ChainCheckpointing(SqrtCheckpointing):
    name = "chain_checkpointing"

    def _find(self) -> Iterator[Schedule | None]:
        gaps, arrays, turn = self._gaps, self.problem.arrays, self._turn
        ends = virtual_layers(gaps, turn)
        ends = ends[:: -math.ceil(len(ends) / MOST_LAYERS)][::-1]
        chain = grouped(gaps, self.problem.profile, turn, ends).chain
        layer, kept = np.searchsorted(ends, range(turn)), np.zeros(len(ends))
        for t, k in gaps.producer.items():
            if k < turn:
                kept[layer[k] + 1 : layer[max(u for u in gaps.uses[t] if u < turn)] + 1] += arrays.nbytes[t]
        weights = sum(int(arrays.nbytes[t]) for t, uses in enumerate(gaps.uses) if uses and arrays.is_weight[t])
        memory_bytes = self.problem.memory.nbytes - weights - chain.x_bytes[0]
        # The sizes are those of a chain: ask for more memory first, then for less, until the plan fits.
        optimal = OptimalCheckpoints(chain, kept, 1.25 * max(memory_bytes, 1))
        before: list[Step] = []
        for slots in np.flatnonzero(optimal.seconds[0, chain.layers - 1] < math.inf)[::-5].tolist():
            steps = [*optimal.steps(slots)]
            if steps != before and (made := self._schedule_of_layers(ends, steps[chain.layers :])) is not None:
                yield made
                return
            before = steps


class OptimalCheckpoints:
    """The dynamic program (RR-9302, theorem 1). Layers are numbered from 0.

    `seconds[s, t]` has the time of layers s to t, forward and backward, by slots of memory without layer s's input.
    Either layer s runs and saves the tensors for its backward pass. Or layers s to k - 1 run, save only layer k's
    input, and are recomputed after the backward pass of layer k.
    """

    def __init__(self, chain: LayerChain, kept_bytes: Sequence[float] | Floats, memory_bytes: float) -> None:
        """`kept_bytes[i]` is the size of layer i's input; shape [layers]."""
        self._last, self._slot_bytes = chain.layers - 1, memory_bytes / SLOTS
        self._saved, self._kept = chain.x_bytes[1:], kept_bytes
        self.seconds = {(t + 1, t): np.zeros(SLOTS + 1) for t in range(chain.layers)}
        self._choice: dict[tuple[int, int], Ints] = {}
        y, run_s = chain.y_bytes, chain.forward_s
        forward = [n + extra for n, extra in zip(self._saved, chain.forward_extra_bytes, strict=True)]
        for s, t in ((s, s + length) for length in range(chain.layers) for s in range(chain.layers - length)):
            needs = max(y[t + 1] + forward[s], chain.backward_own_bytes(s) - chain.x_bytes[s])
            once_s = self._within(needs, self._saved[s], self.seconds[s + 1, t]) + run_s[s] + chain.backward_s[s]
            options = [once_s]
            for k in range(s + 1, t + 1):
                needs = y[t + 1] + max(forward[j] + (kept_bytes[j] if j > s else 0) for j in range(s, k))
                later_s = self._within(needs, kept_bytes[k], self.seconds[k, t])
                options.append(sum(run_s[s:k]) + later_s + self.seconds[s, k - 1])
            self.seconds[s, t], self._choice[s, t] = np.min(options, axis=0), np.argmin(options, axis=0)

    def steps(self, slots: int, s: int = 0, t: int | None = None) -> Iterator[Step]:
        """Yield the layers in execution order, including the forward pass."""
        t = self._last if t is None else t
        k = s + int(self._choice[s, t][slots])
        yield from ((FORWARD, i) for i in range(s, max(k, s + 1)))
        if k > s:
            yield from self.steps(slots - self._slots(self._kept[k]), k, t)
            yield from self.steps(slots, s, k - 1)
            return
        if s < t:
            yield from self.steps(slots - self._slots(self._saved[s]), s + 1, t)
        yield BACKWARD, s

    def _slots(self, nbytes: float) -> int:
        return min(max(math.ceil(nbytes / self._slot_bytes), 0), SLOTS + 1)

    def _within(self, needs_bytes: float, taken_bytes: float, seconds: Floats) -> Floats:
        """Return, by slots, the seconds after `taken_bytes` are taken; infinite below `needs_bytes`."""
        taken = self._slots(taken_bytes)
        found = np.concatenate([np.full(taken, np.inf), seconds[: SLOTS + 1 - taken]])
        found[: self._slots(needs_bytes)] = np.inf
        return found
