"""The searchers `greedy` and `dynprog`: Beaumont et al.'s GREEDY and DYNPROG on a chain of virtual layers.

Both choose a set of activations in a relaxation of the problem; the schedule is the no-wait schedule that offloads
exactly these (sections 4 and 5.3). Weights stay in memory, as in the paper. If they do not fit next to the chain,
only the two candidates of least memory remain, LEAN and SERIAL."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from cohabit.planner.papers.beaumont.dynprog import optima
from cohabit.planner.papers.beaumont.grouping import Grouped, grouped, short_layers, turn, virtual_layers
from cohabit.planner.papers.beaumont.layers import LayerChain
from cohabit.planner.papers.beaumont.offload import greedy
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.schedule.no_wait import schedule_of_choices
from cohabit.planner.schedule.serial import require_counted, serial_schedule
from cohabit.planner.schedule.table import Schedule
from cohabit.planner.search.searcher import Searcher

SHORT_LAYERS: Final = 200

Offload = Callable[[LayerChain, float], Sequence[Sequence[bool]]]
"""Returns choices on a chain for a memory no smaller than the chain's least, the best first."""
Candidate = tuple[int, ...] | str
"""The activations and inputs that leave over the turn, or LEAN or SERIAL."""
LEAN: Final = "everything leaves over every gap"
SERIAL: Final = "everything leaves after every op"


class _ChainSearcher(Searcher[Candidate]):
    """Evaluates choices on a chain of virtual layers and on one of short layers, and then LEAN and SERIAL."""

    def __init__(self, name: str, problem: Problem, offload: Offload) -> None:
        require_counted(problem, name)
        self.problem = problem
        self._gaps = Gaps(problem.graph)
        self._turn = turn(self._gaps)
        self._offload = offload
        self._choices = list(dict.fromkeys(self._find_choices())) if problem.graph.ops else []
        self.evaluations = len(self._choices) + 2
        self._steps = self._search()

    def _search(self) -> Iterator[Sequence[Candidate]]:
        yield [*self._choices, LEAN, SERIAL]

    def _find_choices(self) -> Iterator[tuple[int, ...]]:
        """Yield the tensors that each choice offloads, for the memory that the weights leave."""
        graph, profile = self.problem.graph, self.problem.profile
        weights = (t for t, what in enumerate(graph.tensors) if what.is_weight and self._gaps.uses[t])
        memory_bytes = self.problem.memory.nbytes - sum(graph.tensors[t].aligned_bytes for t in weights)
        for ends in (virtual_layers(self._gaps, self._turn), short_layers(self._turn, SHORT_LAYERS)):
            shape: Grouped = grouped(self._gaps, profile, self._turn, ends)
            if shape.chain.least_bytes() <= memory_bytes:
                for leaves in self._offload(shape.chain, memory_bytes):
                    saved = zip(shape.saved, leaves, strict=False)
                    yield tuple(t for tensors, leave in saved if leave for t in tensors)

    def _schedule(self, candidate: Candidate) -> Schedule | None:
        if candidate == SERIAL:
            return serial_schedule(self.problem)
        if candidate == LEAN:
            return schedule_of_choices(self.problem, self._gaps, [Choice.SWAP] * len(self._gaps.all))
        leaves = frozenset(candidate)
        choices = [
            Choice.SWAP if gap.tensor in leaves and gap.last_use < self._turn <= gap.next_use else Choice.KEEP
            for gap in self._gaps.all
        ]
        return schedule_of_choices(self.problem, self._gaps, choices, delayed=True)


class Greedy(_ChainSearcher):
    """GREEDY: offloads the first activations."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__("greedy", problem, lambda chain, memory_bytes: [greedy(chain, memory_bytes)])


class DynProg(_ChainSearcher):
    """DYNPROG: offloads the set of activations that is best in the relaxation."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__("dynprog", problem, optima)
