"""Turns a choice on a chain into tensors that leave and fates of gaps: from Beaumont's model to graphs.

Weights stay in memory, as in the paper, if enough remains for the chain. Otherwise, as for inference in less memory
than the weights take, some weights are prefetched for each use (`prefetching`), and several divisions of the memory
between weights and chain are tried. That extends the paper."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from cohabit.planner.papers.beaumont.grouping import (
    Grouped,
    alive_bytes,
    grouped,
    short_layers,
    turn,
    virtual_layers,
)
from cohabit.planner.papers.beaumont.layers import LayerChain
from cohabit.planner.papers.beaumont.offload import relaxed_s
from cohabit.planner.papers.beaumont.prefetching import WeightChain, fetching_s
from cohabit.planner.problem import Problem
from cohabit.planner.sequence.gaps import Fate, Gap, Gaps

SHORT_LAYERS: Final = 200
CHAIN_SHARES: Final = (1.0, 0.3, 0.1, 0.02)
"""Where between its least and its peak the chain's memory lies when weights have to leave, too."""
SMALL_SHARE: Final = 0.05
"""Of the memory; where no more depends on the division, the chain has its peak."""
BEST: Final = 4
"""Choices with streamed weights per memory that are worth a plan."""

Offload = Callable[[LayerChain, float], Sequence[Sequence[bool]]]
"""Choices on a chain for an amount of memory that is at least the chain's least, the best first."""
Keep = Callable[[WeightChain], Sequence[Sequence[bool]]]


@dataclass(frozen=True, slots=True)
class Choice:
    """Tensors that leave: activations and inputs over the turn, weights between any two uses.

    With `lingers`, weights stay over gaps that are shorter than copying them takes.
    """

    offloaded: tuple[int, ...]
    streamed: tuple[int, ...] = ()
    lingers: bool = False


class Chooser:
    """Choices for one problem in any assumed memory."""

    def __init__(self, problem: Problem, gaps: Gaps, offload: Offload, keep: Keep) -> None:
        self._graph, self._profile, self._gaps = problem.graph, problem.profile, gaps
        self._memory_bytes = problem.memory_bytes
        self._offload, self._keep = offload, keep
        self._turn = turn(gaps)
        self._nbytes = [t.aligned_bytes for t in problem.graph.tensors]
        self._weights = frozenset(t for t, w in enumerate(self._graph.tensors) if w.is_weight and gaps.uses[t])
        self._alive = alive_bytes(gaps)
        self._begin_s: list[float] = [0.0, *np.cumsum(self._profile.op_seconds).tolist()]
        """When each op starts if none waits, and when the last one ends."""
        self._trains = any(gaps.uses[t][0] < self._turn <= gaps.uses[t][-1] for t in self._weights)
        """Whether some weight is used both before and after the turn."""

    def choices(self, share: float) -> list[Choice]:
        """For this share of the memory, from chains of virtual and of short layers.

        Weights are streamed where they do not fit together with the chains. Where they fit in all of the memory but
        not in the share, both are tried.
        """
        memory_bytes = share * self._memory_bytes
        weights = sum(self._nbytes[t] for t in self._weights)
        found, fitting = list[Choice](), False
        for shape in self._shapes:
            least = shape.chain.least_bytes()
            fitting |= least <= memory_bytes - weights
            if least <= self._memory_bytes - weights:
                found += map(Choice, self._offloaded(shape, max(memory_bytes - weights, least)))
        if not fitting:
            guessed = {choice: guess_s for choice, guess_s in self._streaming(memory_bytes) if guess_s < math.inf}
            found += sorted(guessed, key=lambda c: guessed[c])[:BEST]
        return list(dict.fromkeys(found))

    def fates(self, choice: Choice) -> list[Fate]:
        offloaded, streamed = frozenset(choice.offloaded), frozenset(choice.streamed)
        return [
            Fate.SWAP
            if (gap.tensor in offloaded and gap.last_use < self._turn <= gap.next_use)
            or (gap.tensor in streamed and not (choice.lingers and self._is_short(gap)))
            else Fate.KEEP
            for gap in self._gaps.all
        ]

    @cached_property
    def _shapes(self) -> list[Grouped]:
        ends = virtual_layers(self._gaps, self._turn), short_layers(self._turn, SHORT_LAYERS)
        return [grouped(self._gaps, self._profile, self._turn, e) for e in ends]

    def _is_short(self, gap: Gap) -> bool:
        if gap.wraps:
            return False
        between_s = self._begin_s[gap.next_use] - self._begin_s[gap.last_use + 1]
        return between_s < self._profile.swap_in.seconds(self._nbytes[gap.tensor])

    def _offloaded(self, shape: Grouped, memory_bytes: float) -> list[tuple[int, ...]]:
        """The tensors that each choice offloads."""
        return [
            tuple(t for tensors, leave in zip(shape.saved, leaves, strict=False) if leave for t in tensors)
            for leaves in self._offload(shape.chain, memory_bytes)
        ]

    def _streaming(self, memory_bytes: float) -> Iterator[tuple[Choice, float]]:
        """Choices for several divisions of the memory between chain and weights, with their latencies as guessed."""
        shape = next((s for s in self._shapes if s.chain.least_bytes() <= memory_bytes), None)
        if shape is None:
            return
        least, peak = shape.chain.least_bytes(), shape.chain.peak_bytes()
        shares = CHAIN_SHARES if peak - least > SMALL_SHARE * memory_bytes else CHAIN_SHARES[:1]
        for chain_bytes in (least + share * (peak - least) for share in shares):
            if chain_bytes > memory_bytes:
                continue
            offloaded = self._offloaded(shape, chain_bytes)[0]
            out = [sum(self._nbytes[t] for t in ts if t in offloaded) for ts in shape.saved[:-1]]
            wait_s = relaxed_s(shape.chain, chain_bytes, out) - shape.chain.compute_s
            for streamed in self._streamed(memory_bytes, chain_bytes):
                for lingers in (False, True) if self._trains else (False,):
                    choice = Choice(offloaded, streamed, lingers)
                    yield choice, wait_s + self._guess_s(choice, memory_bytes, chain_bytes)

    def _streamed(self, memory_bytes: float, chain_bytes: float) -> Iterator[tuple[int, ...]]:
        for last in (False, True) if self._trains else (False,):
            line, weights = self._line(memory_bytes, chain_bytes, last)
            for keeps in self._keep(line):
                yield tuple(t for ts, keep in zip(weights, keeps, strict=True) if not keep for t in ts)

    def _guess_s(self, choice: Choice, memory_bytes: float, chain_bytes: float) -> float:
        """Latency when streamed weights are fetched for every use that they do not linger for."""
        fetched = np.zeros((len(self._graph.ops), 2))
        streamed = frozenset(choice.streamed)
        for t in streamed:
            fetched[self._gaps.uses[t][0]] += self._nbytes[t], self._profile.swap_in.seconds(self._nbytes[t])
        for gap in self._gaps.all:
            if gap.tensor in streamed and not gap.wraps and not (choice.lingers and self._is_short(gap)):
                nbytes = self._nbytes[gap.tensor]
                fetched[gap.next_use] += nbytes, self._profile.swap_in.seconds(nbytes)
        kept = sum(self._nbytes[t] for t in self._weights - streamed)
        line, _ = self._line(memory_bytes - kept, chain_bytes, last=False)
        pairs = [(nbytes, seconds) for nbytes, seconds in fetched.tolist()]
        return fetching_s(line.op_s, pairs, line.room_bytes, line.bytes_per_s)

    def _line(self, memory_bytes: float, chain_bytes: float, last: bool) -> tuple[WeightChain, list[list[int]]]:
        """All ops with the weights they are the first to use, or the backward ones with those last used there."""
        graph, profile = self._graph, self._profile
        start = self._turn if last else 0
        here: list[list[int]] = [[] for _ in graph.ops[start:]]
        for t in sorted(self._weights):
            uses = self._gaps.uses[t]
            at = next((u for u in uses if u >= start), None)
            here[at - start if at is not None else 0].append(t)
        alive = np.minimum(self._alive, chain_bytes)[start:]
        line = WeightChain(
            profile.op_seconds[start:],
            [float(sum(self._nbytes[t] for t in ts)) for ts in here],
            [sum(profile.swap_in.seconds(self._nbytes[t]) for t in ts) for ts in here],
            (memory_bytes - alive).tolist(),
            profile.swap_in.bandwidth_bytes_per_s / profile.swap_slowdown,
        )
        return line, here
