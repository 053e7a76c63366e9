"""Compiles the planner's inner loops, when building a container image or before a time-limited search."""

from contextlib import suppress

from cohabit.planner.errors import UnsupportedProblem
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import single_budget
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Link, Profile
from cohabit.planner.search.driver import search
from cohabit.planner.search.registry import SEARCHERS
from cohabit.planner.sizing.fitting import split_budget


def warm() -> None:
    """Plan a small chain with every searcher, so that numba's cache holds every loop that planning uses."""
    for searcher in SEARCHERS:
        for single in (False, True):
            with suppress(UnsupportedProblem):
                warm_up(searcher, single=single)


def warm_up(searcher: str, *, single: bool) -> None:
    """Plan a small chain, to compile one searcher's loops or to read them from numba's cache.

    Plans a single budget, or else a partition and a workspace. Raises UnsupportedProblem.
    """
    layers, nbytes = 6, 1 << 20
    tensors = [Tensor(f"weight{i}", nbytes, "parameter", 4096) for i in range(layers)]
    tensors.append(Tensor("input", 4096, "input"))
    tensors += [Tensor(f"hidden{i}", 4096, "activation") for i in range(layers)]
    ops = tuple(Op(f"layer{i}", "linear", (i, layers + i), (layers + i + 1,)) for i in range(layers))
    graph = Graph("warm", 1, "", tuple(tensors), ops, (2 * layers,))
    link = Link(1e-5, 2e8)  # slow, so that every searcher has something to improve
    profile = Profile(graph.fingerprint, "none", (1e-3,) * layers, link, link)
    if single:
        memory = single_budget(3 * nbytes)
    else:
        memory = split_budget({graph.bucket: graph}, {graph.bucket: profile}, 3 * nbytes)
    search(Problem(graph, profile, memory), searcher, limit=Limit(evaluations=200))
