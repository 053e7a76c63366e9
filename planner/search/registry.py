"""Searchers by name. The module of a searcher is imported on its first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from cohabit.planner.errors import UnknownSearcher, UnsupportedProblem

if TYPE_CHECKING:  # commands import this module to list searchers in their help
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
"""Searchers for one budget in which everything is counted: module below planner, and class."""

_SERVING: Final = {
    "best": "search.portfolio:Best",
    "streaming": "streaming.searcher:Streaming",
    "offloading": "offloading.searcher:Offloading",
    "genetic": "papers.swapadvisor.serving:ServingGenetic",
}
"""Searchers for a partition and a workspace."""

_BASELINES: Final = {
    "vdnn_all": "papers.baselines.layers:VdnnAll",
    "vdnn_conv": "papers.baselines.layers:VdnnConv",
    "superneurons": "papers.baselines.layers:SuperNeurons",
    "tflms": "papers.baselines.layers:Tflms",
    "autoswap": "papers.baselines.scores:AutoSwap",
    "capuchin": "papers.baselines.scores:Capuchin",
    "sqrt_checkpointing": "papers.baselines.checkpointing:SqrtCheckpointing",
    "chain_checkpointing": "papers.baselines.checkpointing:ChainCheckpointing",
}
"""Earlier systems for comparison, also for one budget."""

COUNTED: Final = tuple(_COUNTED)
SERVING: Final = tuple(_SERVING)
SEARCHERS: Final = tuple(dict.fromkeys((*SERVING, *COUNTED)))
"""Names of searchers: for one budget, for a partition and a workspace, and all."""
BASELINES: Final = tuple(_BASELINES)
"""Names of the baselines, which are not among the searchers."""


def make(searcher: str, problem: "Problem", seed: int) -> "AnySearcher":
    """Return a new search for a problem. Raises UnknownSearcher, UnsupportedProblem, and errors of the searcher."""
    if searcher not in (*SEARCHERS, *BASELINES):
        raise UnknownSearcher(searcher, (*SEARCHERS, *BASELINES))
    counted = problem.memory.counted
    known, other = (_COUNTED | _BASELINES, "a partition and a workspace") if counted else (_SERVING, "one budget")
    if searcher not in known:
        raise UnsupportedProblem(f"{searcher} plans {other}; for this memory there are {', '.join(known)}")
    if problem.objective == "period" and not problem.memory.counted:
        raise UnsupportedProblem(
            "a partition and a workspace are planned for the latency; for the period, give one counted budget"
        )
    module, _, name = known[searcher].partition(":")
    made: AnySearcher = getattr(import_module(f"cohabit.planner.{module}"), name)(problem, seed)
    return made
