"""HOME (He et al.): particle swarm optimisation of what to keep, what to swap and what to recompute.

A particle is a fate per gap (section 3.3: a placement action per feature map). The swarm moves by Algorithm 3: each
tensor's action becomes that of the last iteration's best particle or of the particle's own best one, whichever
Algorithm 2 (`planner.papers.home.cost`) finds less costly. Where the paper says nothing, or would not do here:

- HOME decides about the feature maps of a training step, and all else stays. Here whatever has a gap is decided
  about: inference has little but weights. They cannot be recomputed, but they can be restored (`Fate.RESTORE`).
- The simulator ranks the particles; the cost model guides the updates.
- Random particles would not fit in a small memory. They begin with everything swapped, and random actions are taken
  for as long as a random share of the memory lasts. One more takes those that save the most of the link, and two give
  one tensor after the other the action that the cost model likes best.
- Fates that do not fit cost the more the more they need, so that a particle finds its way back.
- After ITERATIONS, or when nothing moves any more, a new swarm begins with the best particle and new random ones,
  unless the last one found nothing new.
- In graphs of thousands of ops, an update goes through a random part of the tensors.
- Gaps of tensors that are tiny together are not decided about: they are kept.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.papers.home.cost import evaluate, seconds
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.search.searcher import Searcher
from cohabit.planner.sequence.alap import COMPUTE, KEEP, SWAP, SWAP_IN, Codes, Tables, alap, tables
from cohabit.planner.sequence.gaps import Fate, Gaps
from cohabit.planner.sequence.no_wait import fit
from cohabit.planner.sequence.serial import require_single_budget, serial_plan

PARTICLES: Final = 12
ITERATIONS: Final = 8
"""m and iters. The paper has 500 of both, which take it some minutes with 16 threads (sections 3.3 and 4.7)."""
SHARES: Final = (0.5, 1.0)
"""Of the memory, what the first particles keep things in: the least and the most. The rest is for swaps."""
PLACED: Final = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8)
"""Of the memory, what swap-ins may use in plans that keep to the times of swap-outs."""
CLOSE: Final = 1.03
"""By how much more than it was thought to a particle may take that could be placed as it was thought of."""
LESS: Final = 0.03
MORE: Final = 0.01
"""By how much the share of the memory that the cost model assumes falls if that is not so, and rises if it is."""
TINY: Final = 0.01
"""Tensors that make up no more of the memory than this, all together, are kept."""
AT_ONCE: Final = 4_000_000
"""Evaluations times ops between candidates that are handed out: a second or so, so that a limit in seconds is kept."""

NODES: Final = 3000
"""Partial placements that the best particles of a swarm are tried with."""
POLISHED: Final = 3
"""So many, of the best by the simulator and of the best by the cost model each."""
PERIOD: Final = 0.01
"""Weight of a second of the period relative to a second of latency when particles are compared."""


class Particle(NamedTuple):
    """The code of the fate of each gap, and how hard to try to place the tensors."""

    fates: bytes
    nodes: int = 0


class ParticleSwarm(Searcher[Particle]):
    """Moves a swarm of fates."""

    def __init__(self, problem: Problem, seed: int) -> None:
        require_single_budget(problem, "particle_swarm")
        self.problem = problem
        self.evaluations = PARTICLES * ITERATIONS + 2 * POLISHED
        self._gaps = Gaps(problem.graph)
        self._lean = np.full(len(self._gaps.all), SWAP, np.int8)
        self._rng = np.random.default_rng(seed)
        self._seconds = seconds(self._gaps, problem.profile)
        self._share = 1.0
        self._score_s: dict[bytes, float] = {}
        self._polished: set[bytes] = set()
        self._steps = self._search()

    def tell(self, candidates: Sequence[Particle], costs: Sequence[Cost]) -> None:
        for c, cost in zip(candidates, costs, strict=False):
            score_s = cost.latency_s + PERIOD * cost.period_s
            self._score_s[c.fates] = min(score_s, self._score_s.get(c.fates, math.inf))

    def _plan(self, candidate: Particle) -> Plan | None:
        """Where all is swapped, there is always a plan: at worst, the serial one."""
        fates, nodes = [Fate(code) for code in candidate.fates], candidate.nodes
        plan = fit(self.problem, self._gaps, fates, PLACED, delayed=True, nodes=nodes)
        plan = plan or fit(self.problem, self._gaps, fates, nodes=nodes)
        if plan is None and candidate.fates == self._lean.tobytes():
            plan = serial_plan(self.problem)
        return plan

    def _search(self) -> Iterator[Sequence[Particle]]:
        yield [Particle(self._lean.tobytes())]
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
            yield from self._polish()
            if len(self._score_s) == known:
                return
            first = self._best(self._score_s, self._score_s.__getitem__, 1)

    def _polish(self) -> Iterator[Sequence[Particle]]:
        """Try harder to place the best particles so far."""
        fresh = [c for c in self._score_s if c not in self._polished]
        tried = dict.fromkeys(
            p.tobytes()
            for score in (self._score_s.__getitem__, lambda c: self._cost(np.frombuffer(c, np.int8)))
            for p in self._best(fresh, score, POLISHED)
        )
        self._polished.update(tried)
        if tried:
            yield [Particle(c, NODES) for c in tried]

    def _best(self, fates: Iterable[bytes], score: Callable[[bytes], float], count: int) -> list[Codes]:
        return [np.frombuffer(c, np.int8) for c in sorted(fates, key=score)[:count]]

    def _fly(self, first: Sequence[Codes], start: "InitialParticles") -> Iterator[Sequence[Particle]]:
        """Algorithm 1, begun with some particles and random ones. The best of all is for the search to keep."""
        part = max(1, AT_ONCE // (2 * len(start.decided) * len(self.problem.graph.ops)))
        swarm = list(first)
        while len(swarm) < PARTICLES:
            swarm += [start.random(self._rng) for _ in range(min(part, PARTICLES - len(swarm)))]
            yield from self._new(swarm)
        own = list(swarm)
        for _ in range(ITERATIONS - 1):
            self._adjust(swarm)
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
        """As many of the gaps as can be tried at once, in order."""
        most = max(1, AT_ONCE // (2 * len(self.problem.graph.ops)))
        return decided if len(decided) <= most else np.sort(self._rng.choice(decided, most, replace=False))

    def _cost(self, particle: Codes) -> float:
        room_bytes = int(self._share * self.problem.memory_bytes)
        return evaluate(tables(self._gaps), self._seconds, particle, room_bytes)

    def _simulated_s(self, particle: Codes) -> float:
        return self._score_s.get(particle.tobytes(), math.inf)

    def _adjust(self, swarm: Sequence[Codes]) -> None:
        """Assume less memory if what should be the best particle could not be placed as it was thought of."""
        best = min(swarm, key=self._cost)
        if self._simulated_s(best) > CLOSE * self._cost(best):
            self._share = max(self._share - LESS, min(SHARES))
        else:
            self._share = min(self._share + MORE, 1.0)

    def _descended(self, particle: Codes, start: "InitialParticles") -> Codes:
        """Give one gap after the other the action that costs the least."""
        particle = particle.copy()
        for j in self._some(start.decided):
            costs = []
            for fate in self._gaps.all[j].fates:
                particle[j] = fate
                costs.append((self._cost(particle), particle[j]))
            particle[j] = min(costs)[1]
        return particle

    def _new(self, particles: Sequence[Codes]) -> Iterator[Sequence[Particle]]:
        """Those that were not evaluated yet."""
        new = [c for c in dict.fromkeys(p.tobytes() for p in particles) if c not in self._score_s]
        if new:
            yield [Particle(c) for c in new]


def updated(
    particle: Codes,
    last_best: Codes,
    own_best: Codes,
    cost: Callable[[Codes], float],
    decided: Sequence[int] | Ints,
) -> Codes:
    """Algorithm 3 for one particle; tensors whose actions are the same in both are not tried."""
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
    """First particles that fit."""

    def __init__(self, problem: Problem, gaps: Gaps) -> None:
        self.gaps = gaps
        self._memory_bytes = problem.memory_bytes
        self._tables = tables(gaps)
        nbytes = self._tables.nbytes[self._tables.tensor]
        lean = np.full(len(gaps.all), SWAP, np.int8)
        by_size = np.argsort(nbytes, kind="stable")
        tiny = by_size[: np.searchsorted(np.cumsum(nbytes[by_size]), TINY * problem.memory_bytes, side="right")]
        self._spans = np.array([(g.last_use, g.next_use, g.wraps) for g in gaps.all], dtype=np.int64).reshape(-1, 3)
        self.base = kept(self._tables, self._spans, lean, tiny, problem.memory_bytes)
        """Everything swapped but what is tiny."""
        self.decided: Ints = np.setdiff1d(np.arange(len(lean)), tiny)
        """Gaps that are decided about."""

    def random(self, rng: np.random.Generator) -> Codes:
        """Random actions for random gaps, while a random share of the memory lasts."""
        wanted = np.array([g.fates[i] for g, i in zip(self.gaps.all, self._picks(rng), strict=True)])
        order = rng.permutation(self.decided)[: rng.integers(len(self.decided) + 1)]
        memory_bytes = int(rng.uniform(*SHARES) * self._memory_bytes)
        return filled(self._tables, self.base, order, wanted.astype(np.int8), memory_bytes)

    def greedy(self, share: float) -> Codes:
        """Keep what saves the most of the link for the memory and the ops that it takes."""
        t, count = self._tables, len(self.gaps.graph.ops)
        held = [g.next_use - g.last_use + (count if g.wraps else 0) for g in self.gaps.all]
        copies = np.where(t.kind[t.tensor] == 0, 1, 2)
        order = self.decided[np.argsort((np.array(held) / copies)[self.decided], kind="stable")]
        return kept(self._tables, self._spans, self.base, order, int(share * self._memory_bytes))

    def _picks(self, rng: np.random.Generator) -> list[int]:
        """A fate for each gap, by its place among those that it can have, but not to be swapped."""
        return [(0, *range(2, len(g.fates)))[int(rng.integers(len(g.fates) - 1))] for g in self.gaps.all]


@compiled
def kept(t: Tables, spans: Ints, fates: Codes, order: Ints, memory_bytes: int) -> Codes:
    """In this order, keep tensors in gaps as far as memory allows; no gap may be recomputed or restored.

    `spans` [gaps, 3] has the last use, the next use, and whether the gap wraps. Same as `filled`, without a new
    sequence per gap: the bytes of a kept tensor are added to those of the ops in the gap.
    """
    fates = fates.copy()
    made, count = alap(t, fates), len(t.scratch_bytes)
    peak = np.zeros(count + 1, np.int64)  # before the first op, and during each op
    done = 0
    for i in range(len(made.verb)):
        if made.verb[i] == COMPUTE:
            done += 1
            peak[done] = made.held[i]
        elif done == 0 and made.verb[i] != SWAP_IN:
            peak[0] = max(peak[0], made.held[i])
    if not len(made.held) or made.held.max() > memory_bytes:
        return fates
    for gap in order:
        nbytes, after, until = t.nbytes[t.tensor[gap]], spans[gap, 0] + 2, spans[gap, 1] + 1
        parts = ((after, count + 1), (0, until)) if spans[gap, 2] else ((after, until), (0, 0))
        most = 0
        for low, high in parts:
            for p in range(low, high):
                most = max(most, peak[p])
        if fates[gap] == KEEP or most + nbytes > memory_bytes:
            continue
        fates[gap] = KEEP
        for low, high in parts:
            peak[low:high] += nbytes
    return fates


@compiled
def filled(t: Tables, fates: Codes, order: Ints, wanted: Codes, memory_bytes: int) -> Codes:
    """In this order, give gaps the fates that are wanted for them, as far as memory allows."""
    fates = fates.copy()
    for gap in order:
        before = fates[gap]
        fates[gap] = wanted[gap]
        held = alap(t, fates).held
        if not len(held) or held.max() > memory_bytes:
            fates[gap] = before
    return fates
