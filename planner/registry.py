"""The searchers by name. Each is imported when it is first asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import Final

from planner.errors import UnknownSearcher
from planner.problem import Problem
from planner.searcher import AnySearcher

_HOMES: Final = {
    "best": "best.Best",
    "streaming": "streaming.Streaming",
    "genetic": "genetic.Genetic",
    "particle_swarm": "particle_swarm.ParticleSwarm",
    "greedy": "offloading.Greedy",
    "dynprog": "offloading.DynProg",
    "interval": "interval.Interval",
    "on_demand": "on_demand.OnDemand",
}
"""Module below planner.searchers, and class."""

_BESIDE_A_PARTITION: Final = {"travelling": "travelling.Travelling"}
"""Those that `best` asks where there is a workspace, and that can plan nothing else."""

SEARCHERS: Final = tuple(_HOMES)


def maker(searcher: str) -> Callable[[Problem, int], AnySearcher]:
    """What starts a search by this name for a problem and a seed. Raises UnknownSearcher."""
    homes = _HOMES | _BESIDE_A_PARTITION
    if searcher not in homes:
        raise UnknownSearcher(searcher, SEARCHERS)
    module, _, name = homes[searcher].partition(".")
    made: Callable[[Problem, int], AnySearcher] = getattr(import_module(f"planner.searchers.{module}"), name)
    return made
