"""The least memory of a single-model plan, and the plan that does with it.

Everything leaves after each op and comes back before the next that needs it. No plan is slower; none needs less.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from planner.errors import InfeasibleBudget
from planner.graph import Graph
from planner.layout.placement import SCRATCH_ALIGNMENT
from planner.problem import Problem
from planner.sequence.sequence import Action, Placed, Verb, compute, drop, stays, swap_in, swap_out


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


def lay_out_serial(graph: Graph, actions: Sequence[Action]) -> Placed:
    """Offsets for the serial plan, in the least memory and at once however long it is.

    No tensor stays from one op to the next, so each op's tensors lie one behind the other, coarsest alignment first.
    """
    found = stays(graph, actions, ())
    turns = list(accumulate((a.verb is Verb.COMPUTE for a in actions), initial=0))  # ops before each action
    together: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # per op: alignment, bytes, stay
    for i, stay in enumerate(found):
        tensor, first = graph.tensors[stay.tensor], stay.span.first
        at_start = first == 0 and tensor.kind == "input"
        together[-1 if at_start else turns[first]].append((tensor.alignment, tensor.nbytes, i))
    for i, action in enumerate(actions):
        if action.verb is Verb.COMPUTE and graph.ops[action.what].scratch_bytes:
            scratch_bytes = graph.ops[action.what].scratch_bytes
            together[turns[i]].append((SCRATCH_ALIGNMENT, scratch_bytes, len(found) + i))
    offsets = [0] * (len(found) + len(actions))
    peak = 0
    for blocks in together.values():
        top = 0
        for alignment, nbytes, i in sorted(blocks, reverse=True):
            offsets[i] = top
            peak = max(peak, top + nbytes)
            top += _aligned(nbytes, alignment)
    scratch = {
        i: offsets[len(found) + i]
        for i, a in enumerate(actions)
        if a.verb is Verb.COMPUTE and graph.ops[a.what].scratch_bytes
    }
    return Placed(tuple(found), tuple(offsets[: len(found)]), scratch, peak)


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
