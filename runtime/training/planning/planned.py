"""Observes a recorded step, has a searcher plan it, and hands its advice to what moves saved tensors."""

import logging
from collections.abc import Callable, Sequence

from cohabit.planner.errors import CohabitError
from cohabit.planner.profile import Link
from cohabit.runtime.errors import UnusableTraining
from cohabit.runtime.training.planning.background import BackgroundSearch, SearchRequest
from cohabit.runtime.training.planning.step_graph import StepProblem, StepUpdate, step_problem
from cohabit.runtime.training.record import Advice, ObservedStep, Record
from cohabit.runtime.training.saved import SavedTensors
from cohabit.runtime.training.state import OptimizerState

_log = logging.getLogger("cohabit.training")


class StepPlanner:
    """Has one searcher plan the recorded step, once ops are no longer seen. The caller holds a lock."""

    def __init__(self, searcher: str, saved: SavedTensors, bytes_per_s: Callable[[bool], float | None]) -> None:
        """`bytes_per_s` returns the measured speed of copies out (False) and in (True)."""
        self._searcher, self._saved, self._bytes_per_s = searcher, saved, bytes_per_s
        self._states: Sequence[OptimizerState] = ()
        self._goals: Sequence[int] = ()
        """Bytes of each optimizer's state that are out between steps, without a plan."""
        self._search: BackgroundSearch | None = None
        self.problem: StepProblem | None = None

    @property
    def _record(self) -> Record:
        return self._saved.record

    def begin(self, states: Sequence[OptimizerState]) -> None:
        """Observe the next step that follows the record, and plan it."""
        self.close()
        self._states, self._goals = states, [state.out_goal for state in states]
        self._record.observed = ObservedStep()

    def step_ends(self, memory_bytes: int, updating_bytes: int) -> None:
        """`updating_bytes` are in memory during an update, beside state and what the update itself makes."""
        try:
            if self._search is not None and self.problem is not None:
                plan = self._search.poll()
                if plan is not None:
                    self.follow(self.problem.advice(plan))
                    self._end_search()
            elif (observed := self._record.finish_observing()) is not None:
                self._start(observed, memory_bytes, updating_bytes)
        except (CohabitError, OSError) as error:
            self._end_search()
            _log.warning(
                "search='%s' has no plan of this loop's steps, so what was saved first leaves first: %s",
                self._searcher,
                error,
            )

    def follow(self, advice: Advice | None) -> None:
        """Follow a plan from the next step on. None: what was saved first leaves first."""
        self._saved.advice = advice
        for number, (state, goal) in enumerate(zip(self._states, self._goals, strict=True)):
            state.out_goal = goal if advice is None else advice.state_out_bytes.get(number, 0)

    def close(self) -> None:
        """Follow no plan, and search none."""
        self._record.observed = self._saved.advice = None
        self._end_search()

    def after_fork(self) -> None:
        """Continue in a forked process: the search is the parent's."""
        self._search = self._record.observed = self._saved.advice = None

    def _start(self, observed: ObservedStep, memory_bytes: int, updating_bytes: int) -> None:
        step = self._record.step
        assert step is not None
        out, back = self._bytes_per_s(False), self._bytes_per_s(True)
        if out is None or back is None:
            raise UnusableTraining("nothing moved in the step that was observed, so the link's speed is unknown")
        updates = [
            StepUpdate(number, state_bytes, updating_bytes + taken)
            for number, state in enumerate(self._states)
            for state_bytes, taken in state.updates()
            if state_bytes
        ]
        self.problem = step_problem(step, observed, updates, memory_bytes, Link(0.0, back), Link(0.0, out))
        problem = self.problem
        self._search = BackgroundSearch(
            SearchRequest(self._searcher, problem.graph, problem.profile, problem.memory)
        )

    def _end_search(self) -> None:
        if self._search is not None:
            self._search.close()
        self._search = None
