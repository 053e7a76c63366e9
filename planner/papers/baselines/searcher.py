"""Base class of the baselines: schedules by a rule, or the serial one if none fits; programs that repeat ops."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from cohabit.planner.papers.beaumont.grouping import turn
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.gaps import Gap, Gaps
from cohabit.planner.schedule.no_wait import schedule_of_choices
from cohabit.planner.schedule.serial import require_counted, serial_schedule
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Action, Schedule, columns, counted
from cohabit.planner.search.searcher import Searcher


class Baseline(Searcher[int]):
    """Evaluates the schedules that a rule makes. A candidate is the index of one that fits.

    Weights stay in memory. The papers do not say what happens if a rule needs more memory than there is.
    """

    name: str

    def __init__(self, problem: Problem, seed: int) -> None:
        require_counted(problem, self.name)
        self.problem = problem
        self.evaluations = 10**12  # the search ends by itself
        self._gaps = Gaps(problem.graph)
        self._turn = turn(self._gaps)
        self._made: list[Schedule] = []
        self._steps = self._search()

    def _find(self) -> Iterator[Schedule | None]:
        """Yield the rule's schedules, None for one that does not fit. The graph has ops."""
        raise NotImplementedError

    def _search(self) -> Iterator[Sequence[int]]:
        for schedule in self._find() if self.problem.graph.ops else ():
            if schedule is not None:
                self._made.append(schedule)
                yield [len(self._made) - 1]
        if not self._made:
            self._made.append(serial_schedule(self.problem))
            yield [0]

    def _schedule(self, candidate: int) -> Schedule:
        return self._made[candidate]

    def _feature_maps(self) -> list[Gap]:
        """Return the gaps of inputs and activations between forward and backward uses, in order of their starts."""
        is_weight = self.problem.arrays.is_weight
        found = (g for g in self._gaps.all if g.last_use < self._turn <= g.next_use and not is_weight[g.tensor])
        return sorted(found, key=lambda g: g.last_use)

    def _schedule_of_choices(self, choices: Iterable[int]) -> Schedule | None:
        """Return the schedule of one choice per gap, with copies as early as memory allows."""
        return schedule_of_choices(self.problem, self._gaps, choices, delayed=True)

    def _schedule_of(
        self, program: Sequence[int], away: Mapping[int, int], stays: Collection[int] = ()
    ) -> Schedule | None:
        """Return the schedule of a program (see `actions_of`); None if it needs more than the memory."""
        weights = [t for t, uses in enumerate(self._gaps.uses) if uses and self.problem.arrays.is_weight[t]]
        actions = columns(actions_of(self._gaps, program, self._turn, away, stays))
        return counted(self.problem.arrays, *actions, weights, self.problem.memory.nbytes)


def actions_of(
    gaps: Gaps, program: Sequence[int], turn: int, away: Mapping[int, int], stays: Collection[int]
) -> list[Action]:
    """Return the actions of the forward ops, `program[:turn]`, then of backward ops with repeated ops before them.

    A choice per gap recomputes a tensor for one use. Here a recomputed tensor stays for all uses until it is recomputed
    again; repeated ops whose results have no use are skipped. `away` has tensors that leave after the given forward op
    (START: at once), except those in `stays`. Each returns for its first use after the turn, a layer ahead: before the
    first use of another of `away`.
    """
    graph = gaps.graph
    first = {k: row for row, k in reversed([*enumerate(program)])}
    needed = {t for t in graph.outputs if not graph.tensors[t].is_weight}
    drops: dict[int, list[int]] = {}  # after each row that runs
    back_for: dict[int, int] = {}  # the row for which each tensor returns
    for row in reversed(range(len(program))):
        op = graph.ops[program[row]]
        if row == first[program[row]] or not needed.isdisjoint(op.writes):
            used = [t for t in graph.needed[program[row]] if not graph.tensors[t].is_weight]
            drops[row] = [t for t in used if t not in needed]
            needed = needed.union(used).difference(op.writes)
            back_for |= {t: row for t in needed.intersection(used, away) if row >= turn}
    # tensors that are dropped there are recomputed
    back_for = {t: row for t, row in back_for.items() if t not in drops.get(away[t], ())}
    rows = sorted({*back_for.values()})
    issued_at = dict(zip(rows, [min((row for row in drops if row >= turn), default=turn), *rows], strict=False))
    leaving, returning = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for t in sorted(back_for.keys() - stays, key=lambda t: (back_for[t], t)):
        leaving[away[t]].append(t)
        returning[issued_at[back_for[t]]].append(t)
    actions = [(DROP, t) for t in graph.inputs if t not in needed]
    for row in (-1, *sorted(drops)):
        actions += [(SWAP_IN, t) for t in returning[row]]
        actions += [(COMPUTE, program[row])] if row >= 0 else []
        actions += [(DROP, t) for t in drops.get(row, ())]
        actions += [(verb, t) for t in leaving[row] for verb in (SWAP_OUT, DROP)]
    return actions
