"""The least memory of a single-model plan, and the plan that does with it.

Everything leaves after each op and comes back before the next that needs it. No plan is slower; none needs less.
"""

from planner.errors import InfeasibleBudget
from planner.graph import Graph
from planner.placement import SCRATCH_ALIGNMENT
from planner.problem import Problem
from planner.sequence import Action, compute, drop, swap_in, swap_out


def least_bytes(graph: Graph) -> int:
    """Least partition without a workspace in which any plan fits."""
    return max(_needs(graph), default=0)


def require(problem: Problem) -> None:
    """Raise InfeasibleBudget unless a single-model plan exists."""
    least = least_bytes(problem.graph)
    if problem.memory_bytes < least:
        needs = _needs(problem.graph)
        k = needs.index(least)
        op = problem.graph.ops[k].name if k < len(problem.graph.ops) else "the inputs"
        raise InfeasibleBudget(problem.graph.name, op, problem.memory_bytes, least)


def serial(graph: Graph) -> list[Action]:
    """What happens, in order, in the least memory. No parameter is resident."""
    last_use = {t: k for k, op in enumerate(graph.ops) for t in (*op.reads, *op.writes)}
    last_use |= {t: len(graph.ops) for t in graph.outputs}
    here = [i for i, t in enumerate(graph.tensors) if t.kind == "input"]
    actions: list[Action] = []
    unsaved = set(here)  # differs from its host copy, or has none

    def leave(keep: set[int], k: int) -> None:
        for t in here:
            if t not in keep:
                needed = last_use.get(t, -1) > k or graph.tensors[t].kind == "state"
                if t in unsaved and needed:
                    actions.append(swap_out(t))
                    unsaved.discard(t)
                actions.append(drop(t))
        here[:] = [t for t in here if t in keep]

    for k, op in enumerate(graph.ops):
        leave(set(), k - 1)
        needed = _needed(graph, k)
        actions.extend(swap_in(t) for t in needed if t not in op.writes)
        actions.append(compute(k))
        here[:] = needed
        unsaved.update((*op.writes, *op.mutates))
    leave({t for t in graph.outputs if graph.tensors[t].kind != "parameter"}, len(graph.ops))
    actions += [swap_out(t) for t in here if t in unsaved and graph.tensors[t].kind == "state"]
    return actions


def _needed(graph: Graph, k: int) -> list[int]:
    """Tensors that op k needs at once; all outputs are there when the last op ends."""
    outputs = graph.outputs if k == len(graph.ops) - 1 else ()
    return list(dict.fromkeys((*graph.ops[k].reads, *graph.ops[k].writes, *outputs)))


def _needs(graph: Graph) -> list[int]:
    """Bytes that each op needs at once, and at the end those of all inputs, which arrive together."""
    needs = [
        _packed(graph, _needed(graph, k)) + _aligned(op.scratch_bytes, SCRATCH_ALIGNMENT)
        for k, op in enumerate(graph.ops)
    ]
    return [*needs, _packed(graph, [i for i, t in enumerate(graph.tensors) if t.kind == "input"])]


def _packed(graph: Graph, tensors: list[int]) -> int:
    return sum(_aligned(graph.tensors[t].nbytes, graph.tensors[t].alignment) for t in tensors)


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
