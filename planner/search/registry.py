"""The searchers by name. A searcher's module is imported when its name is first asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Final

from planner.errors import UnknownSearcher
from planner.problem import Problem
from planner.search.searcher import AnySearcher

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

_WITH_WORKSPACE: Final = {"offloading": "offloading.searcher:Offloading"}
"""Searchers that plan only for a partition with a workspace; `best` uses them there."""

SEARCHERS: Final = tuple(_SEARCHERS)


def maker(searcher: str) -> Callable[[Problem, int], AnySearcher]:
    """Return the searcher's class, which takes a problem and a seed. Raises UnknownSearcher."""
    known = _SEARCHERS | _WITH_WORKSPACE
    if searcher not in known:
        raise UnknownSearcher(searcher, SEARCHERS)
    module, _, name = known[searcher].partition(":")
    made: Callable[[Problem, int], AnySearcher] = getattr(import_module(f"planner.{module}"), name)
    return made
