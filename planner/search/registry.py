"""Searchers by name. The module of a searcher is imported on its first use."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Final

from cohabit.planner.errors import InfeasibleBudget, UnknownSearcher, UnsupportedProblem

if TYPE_CHECKING:  # commands import this module to list searchers in their help
    from cohabit.planner.problem import Problem
    from cohabit.planner.search.searcher import AnySearcher

_SEARCHERS: Final = {
    "best": ("search.portfolio:Portfolio", "offloading.best:Best"),
    "genetic": ("genetic.searcher:Genetic",),
    "offloading": ("offloading.searcher:Offloading",),
    "swapadvisor": ("papers.swapadvisor.searcher:SwapAdvisor",),
    "particle_swarm": ("papers.home.particle_swarm:ParticleSwarm",),
    "greedy": ("papers.beaumont.searcher:Greedy",),
    "dynprog": ("papers.beaumont.searcher:DynProg",),
    "interval": ("papers.tensile.searcher:Tensile",),
    "on_demand": ("papers.swapadvisor.on_demand:OnDemand",),
}
"""Module below planner, and class. A constructor raises UnsupportedProblem for problems that its class does not plan,
before any work; of two classes, the first that plans the problem does so."""

_BASELINES: Final = {
    "vdnn_all": ("papers.baselines.layers:VdnnAll",),
    "vdnn_conv": ("papers.baselines.layers:VdnnConv",),
    "superneurons": ("papers.baselines.layers:SuperNeurons",),
    "tflms": ("papers.baselines.layers:Tflms",),
    "autoswap": ("papers.baselines.scores:AutoSwap",),
    "capuchin": ("papers.baselines.scores:Capuchin",),
    "sqrt_checkpointing": ("papers.baselines.checkpointing:SqrtCheckpointing",),
    "chain_checkpointing": ("papers.baselines.checkpointing:ChainCheckpointing",),
}
"""Earlier systems for comparison."""

SEARCHERS: Final = tuple(_SEARCHERS)
"""Names of searchers."""
BASELINES: Final = tuple(_BASELINES)
"""Names of the baselines, which are not among the searchers."""


def make(searcher: str, problem: "Problem", seed: int) -> "AnySearcher":
    """Return a new search for a problem. Raises UnknownSearcher, UnsupportedProblem, and errors of the searcher."""
    classes = (_SEARCHERS | _BASELINES).get(searcher)
    if classes is None:
        raise UnknownSearcher(searcher, (*SEARCHERS, *BASELINES))
    for path in classes[:-1]:
        try:
            return _class_at(path)(problem, seed)
        except UnsupportedProblem:
            continue
    return _class_at(classes[-1])(problem, seed)


def can_plan(searcher: str, problem: "Problem") -> bool:
    """Whether a searcher plans this kind of problem, given enough memory."""
    try:
        make(searcher, problem, 0)
    except UnsupportedProblem:
        return False
    except InfeasibleBudget:
        return True
    return True


def _class_at(path: str) -> Callable[["Problem", int], "AnySearcher"]:
    module, _, name = path.partition(":")
    found: Callable[[Problem, int], AnySearcher] = getattr(import_module(f"cohabit.planner.{module}"), name)
    return found
