"""HOME (He et al.): particle swarm optimisation of keeping, swapping and recomputing tensors.

A particle has one choice per gap (section 3.3: a placement action per feature map). The swarm moves by Algorithm 3:
each tensor's action becomes that of the last iteration's best particle or of the particle's own best one, whichever
costs less by Algorithm 2 (`planner.papers.home.cost`). Where the paper is silent, or unsuitable here:

- HOME decides about the feature maps of a training step, and all else stays. Here every tensor with a gap is decided
  about, since inference has mostly weights. Weights cannot be recomputed, but can be restored (`Choice.RESTORE`).
- The simulator ranks the particles; the cost model guides the updates.
- Random particles would not fit in a small memory. They begin with everything swapped, and take random actions
  while a random share of the memory lasts. One more takes those that save the most link time, and two give one
  tensor after the other the action with the least modelled cost.
- Choices that do not fit cost the more the more memory they need, so that particles find their way back.
- After ITERATIONS, or when nothing moves any more, a new swarm begins with the best particle and new random ones,
  unless the last one found nothing new.
- In graphs of thousands of ops, an update covers a random part of the tensors.
- Tensors that are tiny in total are always kept.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.papers.home.cost import evaluate
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.schedule.alap import KEEP, SWAP, Codes, Tables, alap, tables
from cohabit.planner.schedule.gaps import Gaps
from cohabit.planner.schedule.no_wait import schedule_of_choices
from cohabit.planner.schedule.serial import require_counted, serial_schedule
from cohabit.planner.schedule.table import COMPUTE, SWAP_IN, Schedule
from cohabit.planner.search.searcher import Searcher

PARTICLES: Final = 12
ITERATIONS: Final = 8
"""The paper's m and iters: 500 each there, which take minutes with 16 threads (sections 3.3 and 4.7)."""
SHARES: Final = (0.5, 1.0)
"""Least and largest fraction of the memory in which the first particles keep tensors. The rest is for swaps."""
TINY: Final = 0.01
"""Fraction of the memory: the smallest tensors are always kept, up to this in total."""
AT_ONCE: Final = 4_000_000
"""Evaluations times ops between batches of candidates: about a second, so that a limit in seconds is kept."""

OTHER: Final = 0.01
"""Weight of a second of the other time, period or latency, when particles are compared by the objective."""


class ParticleSwarm(Searcher[bytes]):
    """Moves a swarm of choices. A candidate has the code of each gap's choice."""

    particles = PARTICLES
    iterations = ITERATIONS

    def __init__(self, problem: Problem, seed: int) -> None:
        require_counted(problem, "particle_swarm")
        self.problem = problem
        self.evaluations = self.particles * self.iterations
        self._gaps = Gaps(problem.graph)
        self._lean = np.full(len(self._gaps.all), SWAP, np.int8)
        self._rng = np.random.default_rng(seed)
        self._score_s: dict[bytes, float] = {}
        self._steps = self._search()

    def tell(self, candidates: Sequence[bytes], costs: Sequence[Cost]) -> None:
        for c, cost in zip(candidates, costs, strict=False):
            self._score_s[c] = self.problem.seconds(cost) + OTHER * self.problem.other_seconds(cost)

    def _schedule(self, candidate: bytes) -> Schedule | None:
        """If everything is swapped, falls back on the serial schedule instead of None."""
        made = schedule_of_choices(self.problem, self._gaps, candidate, delayed=True)
        if made is None and candidate == self._lean.tobytes():
            made = serial_schedule(self.problem)
        return made

    def _search(self) -> Iterator[Sequence[bytes]]:
        yield [self._lean.tobytes()]
        start = InitialParticles(self.problem, self._gaps)
        if not len(start.decided):
            return
        for share in SHARES:
            yield from self._new([start.base, start.greedy(share)])
        first = [self._descended(start.greedy(sum(SHARES) / 2), start)]
        while True:
            known = len(self._score_s)
            yield from self._new(first)
            first.append(self._descended(start.random(self._rng), start))
            yield from self._fly(first, start)
            if len(self._score_s) == known:
                return
            first = [np.frombuffer(min(self._score_s, key=self._score_s.__getitem__), np.int8)]

    def _fly(self, first: Sequence[Codes], start: "InitialParticles") -> Iterator[Sequence[bytes]]:
        """Run Algorithm 1, starting with some particles and random ones. The driver keeps the best of all."""
        part = max(1, AT_ONCE // (2 * len(start.decided) * len(self.problem.graph.ops)))
        swarm = list(first)
        while len(swarm) < self.particles:
            swarm += [start.random(self._rng) for _ in range(min(part, self.particles - len(swarm)))]
            yield from self._new(swarm)
        own = list(swarm)
        for _ in range(self.iterations - 1):
            last = min(swarm, key=self._simulated_s)
            before, swarm = swarm, []
            for i in range(0, len(before), part):
                pairs = zip(before[i : i + part], own[i : i + part], strict=True)
                moved = [updated(p, last, o, self._cost, self._some(start.decided)) for p, o in pairs]
                yield from self._new(moved)
                swarm += moved
            own = [min(o, p, key=self._simulated_s) for o, p in zip(own, swarm, strict=True)]
            if all(np.array_equal(p, q) for p, q in zip(before, swarm, strict=True)):
                return

    def _some(self, decided: Ints) -> Ints:
        """Return the gaps, or a random part of them that can be tried at once, in order."""
        most = max(1, AT_ONCE // (2 * len(self.problem.graph.ops)))
        return decided if len(decided) <= most else np.sort(self._rng.choice(decided, most, replace=False))

    def _cost(self, particle: Codes) -> float:
        return evaluate(tables(self._gaps), self.problem.arrays, particle, self.problem.memory.nbytes)

    def _simulated_s(self, particle: Codes) -> float:
        return self._score_s.get(particle.tobytes(), math.inf)

    def _descended(self, particle: Codes, start: "InitialParticles") -> Codes:
        """Give one gap after the other the action with the least cost."""
        particle = particle.copy()
        for j in self._some(start.decided):
            costs = []
            for choice in self._gaps.all[j].choices:
                particle[j] = choice
                costs.append((self._cost(particle), particle[j]))
            particle[j] = min(costs)[1]
        return particle

    def _new(self, particles: Sequence[Codes]) -> Iterator[Sequence[bytes]]:
        """Yield the particles that were not evaluated yet."""
        new = [c for c in dict.fromkeys(p.tobytes() for p in particles) if c not in self._score_s]
        if new:
            yield new


def updated(
    particle: Codes,
    last_best: Codes,
    own_best: Codes,
    cost: Callable[[Codes], float],
    decided: Sequence[int] | Ints,
) -> Codes:
    """Apply Algorithm 3 to one particle; tensors with the same action in both best ones are not tried."""
    particle = particle.copy()
    for j in decided:
        if last_best[j] == own_best[j]:
            particle[j] = last_best[j]
            continue
        particle[j] = last_best[j]
        first = cost(particle)
        particle[j] = own_best[j]
        if first < cost(particle):
            particle[j] = last_best[j]
    return particle


class InitialParticles:
    """Initial particles that fit in memory."""

    def __init__(self, problem: Problem, gaps: Gaps) -> None:
        self.gaps = gaps
        self._memory_bytes = problem.memory.nbytes
        self._tables = tables(gaps)
        nbytes = self._tables.nbytes[self._tables.tensor]
        lean = np.full(len(gaps.all), SWAP, np.int8)
        by_size = np.argsort(nbytes, kind="stable")
        tiny = by_size[: np.searchsorted(np.cumsum(nbytes[by_size]), TINY * problem.memory.nbytes, side="right")]
        self._spans = np.array([(g.last_use, g.next_use, g.wraps) for g in gaps.all], dtype=np.int64).reshape(-1, 3)
        self.base = kept(self._tables, self._spans, lean, tiny, problem.memory.nbytes)
        """All tensors swapped, except tiny ones."""
        self.decided: Ints = np.setdiff1d(np.arange(len(lean)), tiny)
        """Gaps to decide about."""

    def random(self, rng: np.random.Generator) -> Codes:
        """Return random actions for random gaps, while a random share of the memory lasts."""
        wanted = np.array([g.choices[i] for g, i in zip(self.gaps.all, self._picks(rng), strict=True)])
        order = rng.permutation(self.decided)[: rng.integers(len(self.decided) + 1)]
        memory_bytes = int(rng.uniform(*SHARES) * self._memory_bytes)
        return filled(self._tables, self.base, order, wanted.astype(np.int8), memory_bytes)

    def greedy(self, share: float) -> Codes:
        """Keep tensors in the order of link time saved per byte and op of the gap."""
        t, count = self._tables, len(self.gaps.graph.ops)
        held = [g.next_use - g.last_use + (count if g.wraps else 0) for g in self.gaps.all]
        copies = np.where(t.kind[t.tensor] == 0, 1, 2)
        order = self.decided[np.argsort((np.array(held) / copies)[self.decided], kind="stable")]
        return kept(self._tables, self._spans, self.base, order, int(share * self._memory_bytes))

    def _picks(self, rng: np.random.Generator) -> list[int]:
        """Return a random choice other than SWAP for each gap, as an index into its choices."""
        return [(0, *range(2, len(g.choices)))[int(rng.integers(len(g.choices) - 1))] for g in self.gaps.all]


@compiled
def kept(t: Tables, spans: Ints, choices: Codes, order: Ints, memory_bytes: int) -> Codes:
    """Keep tensors in gaps, in this order, as far as memory allows; `choices` may not recompute or restore.

    `spans` [gaps, 3] has the last use, the next use, and whether the gap wraps. Like `filled`, without a new
    sequence per gap: the bytes of a kept tensor are added to those of the ops in the gap.
    """
    choices = choices.copy()
    made, count = alap(t, choices), len(t.scratch_bytes)
    peak = np.zeros(count + 1, np.int64)  # before the first op, and during each op
    done = 0
    for i in range(len(made.verb)):
        if made.verb[i] == COMPUTE:
            done += 1
            peak[done] = made.held[i]
        elif done == 0 and made.verb[i] != SWAP_IN:
            peak[0] = max(peak[0], made.held[i])
    if not len(made.held) or made.held.max() > memory_bytes:
        return choices
    for gap in order:
        nbytes, after, until = t.nbytes[t.tensor[gap]], spans[gap, 0] + 2, spans[gap, 1] + 1
        parts = ((after, count + 1), (0, until)) if spans[gap, 2] else ((after, until), (0, 0))
        most = 0
        for low, high in parts:
            for p in range(low, high):
                most = max(most, peak[p])
        if choices[gap] == KEEP or most + nbytes > memory_bytes:
            continue
        choices[gap] = KEEP
        for low, high in parts:
            peak[low:high] += nbytes
    return choices


@compiled
def filled(t: Tables, choices: Codes, order: Ints, wanted: Codes, memory_bytes: int) -> Codes:
    """Give gaps their wanted choices, in this order, as far as memory allows."""
    choices = choices.copy()
    for gap in order:
        before = choices[gap]
        choices[gap] = wanted[gap]
        held = alap(t, choices).held
        if not len(held) or held.max() > memory_bytes:
            choices[gap] = before
    return choices
