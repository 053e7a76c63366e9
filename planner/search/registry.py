"""The searchers by name. A searcher's module is imported when its name is first asked for."""

from importlib import import_module
from typing import Final

from cohabit.planner.errors import UnknownSearcher
from cohabit.planner.problem import Problem
from cohabit.planner.search.searcher import AnySearcher

_SEARCHERS: Final = {
    "best": "search.portfolio:Best",
    "streaming": "streaming.searcher:Streaming",
    "genetic": "papers.swapadvisor.genetic:Genetic",
    "particle_swarm": "papers.home.particle_swarm:ParticleSwarm",
    "greedy": "papers.beaumont.searcher:Greedy",
    "dynprog": "papers.beaumont.searcher:DynProg",
    "interval": "papers.tensile.searcher:Tensile",
    "on_demand": "papers.swapadvisor.on_demand:OnDemand",
}
"""Module below planner, and class."""

_WITH_WORKSPACE: Final = {
    "genetic": "papers.swapadvisor.serving:ServingGenetic",
    "offloading": "offloading.searcher:Offloading",
}
"""For a partition with a workspace: another class of the same searcher, and one that plans nothing else."""

SEARCHERS: Final = tuple(_SEARCHERS)


def make(searcher: str, problem: Problem, seed: int) -> AnySearcher:
    """Return a new search for a problem. Raises UnknownSearcher, and what the searcher raises."""
    known = _SEARCHERS | _WITH_WORKSPACE if problem.workspace_bytes else _WITH_WORKSPACE | _SEARCHERS
    if searcher not in known:
        raise UnknownSearcher(searcher, SEARCHERS)
    module, _, name = known[searcher].partition(":")
    made: AnySearcher = getattr(import_module(f"cohabit.planner.{module}"), name)(problem, seed)
    return made
