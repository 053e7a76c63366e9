"""What every way to search has in common: candidates are asked for, judged, and told back."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from planner.plan import Plan
from planner.problem import Cost

C = TypeVar("C")


class Searcher(Protocol[C]):
    """One search over one problem, seeded when it is made. Candidates are plain data that can be pickled.

    `judge` and `write` depend on nothing but the problem and the candidate, so that other threads and processes can do
    them.
    """

    evaluations: int
    """Candidates that are enough where nobody sets a limit."""
    is_compiled: bool
    """Whether judging what was asked for last is compiled code, beside which other threads run."""

    def ask(self) -> Sequence[C]:
        """Candidates to judge next, independent of one another; none when the search is over."""
        ...

    def tell(self, candidates: Sequence[C], costs: Sequence[Cost]) -> None:
        """What the candidates that were asked for last cost; fewer than those when a limit came before the rest."""
        ...

    def judge(self, candidate: C, good_s: float) -> Cost:
        """Simulate a candidate; its period only if its latency is at most `good_s`."""
        ...

    def write(self, candidate: C) -> Plan:
        """The plan that a candidate stands for, without provenance."""
        ...


AnySearcher = Searcher[Any]
