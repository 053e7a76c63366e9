"""Searchers by name. The module of a searcher is imported on its first use."""

from typing import TYPE_CHECKING, Final

from cohabit.planner.errors import InfeasibleBudget, UnknownSearcher, UnsupportedProblem
from cohabit.planner.parts import Part, PartRegistry

if TYPE_CHECKING:  # commands import this module to list searchers in their help
    from cohabit.planner.problem import Problem
    from cohabit.planner.search.searcher import AnySearcher

SEARCHERS: Final = PartRegistry(
    "cohabit.searchers",
    {
        "best": Part("cohabit.planner.offloading.best:best"),
        "genetic": Part("cohabit.planner.genetic.searcher:Genetic"),
        "offloading": Part("cohabit.planner.offloading.searcher:Offloading"),
    },
)
"""Each is called with a problem and a seed, and returns a search. It raises UnsupportedProblem, before any work, for
problems that it does not plan."""
BASELINES: Final = PartRegistry("cohabit.baselines", {})
"""Earlier systems for comparison, which are not among the searchers."""


def make(searcher: str, problem: "Problem", seed: int) -> "AnySearcher":
    """Return a new search for a problem. Raises UnknownSearcher, UnsupportedProblem, and errors of the searcher."""
    for registry in (SEARCHERS, BASELINES):
        if searcher in registry:
            made: AnySearcher = registry[searcher](problem, seed)
            return made
    raise UnknownSearcher(searcher, (*SEARCHERS, *BASELINES))


def can_plan(searcher: str, problem: "Problem") -> bool:
    """Whether a searcher plans this kind of problem, given enough memory."""
    try:
        make(searcher, problem, 0)
    except UnsupportedProblem:
        return False
    except InfeasibleBudget:
        return True
    return True
