"""The searchers by name. A searcher's module is imported when its name is first asked for."""

from importlib import import_module
from typing import Final

from cohabit.planner.errors import UnknownSearcher, UnsupportedProblem
from cohabit.planner.problem import Problem
from cohabit.planner.search.searcher import AnySearcher

_COUNTED: Final = {
    "best": "search.portfolio:Best",
    "genetic": "papers.swapadvisor.genetic:Genetic",
    "particle_swarm": "papers.home.particle_swarm:ParticleSwarm",
    "greedy": "papers.beaumont.searcher:Greedy",
    "dynprog": "papers.beaumont.searcher:DynProg",
    "interval": "papers.tensile.searcher:Tensile",
    "on_demand": "papers.swapadvisor.on_demand:OnDemand",
}
"""Module below planner, and class, of those that plan one budget in which everything is counted."""

_SERVING: Final = {
    "best": "search.portfolio:Best",
    "streaming": "streaming.searcher:Streaming",
    "offloading": "offloading.searcher:Offloading",
    "genetic": "papers.swapadvisor.serving:ServingGenetic",
}
"""Of those that plan a partition and a workspace."""

COUNTED: Final = tuple(_COUNTED)
SERVING: Final = tuple(_SERVING)
SEARCHERS: Final = tuple(dict.fromkeys((*SERVING, *COUNTED)))
"""Names of searchers: of one budget, of a partition and a workspace, and all."""


def make(searcher: str, problem: Problem, seed: int) -> AnySearcher:
    """Return a new search for a problem. Raises UnknownSearcher, and what the searcher raises."""
    if searcher not in SEARCHERS:
        raise UnknownSearcher(searcher, SEARCHERS)
    known, other = (_COUNTED, "a partition and a workspace") if problem.memory.counted else (_SERVING, "one budget")
    if searcher not in known:
        raise UnsupportedProblem(f"{searcher} plans {other}; for this memory there are {', '.join(known)}")
    if problem.objective == "period" and not problem.memory.counted:
        raise UnsupportedProblem(
            "a partition and a workspace are planned for the latency; for the period, give one counted budget"
        )
    module, _, name = known[searcher].partition(":")
    made: AnySearcher = getattr(import_module(f"cohabit.planner.{module}"), name)(problem, seed)
    return made
