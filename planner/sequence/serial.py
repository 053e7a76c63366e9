"""The serial plan: everything leaves memory after each op and returns before the next op that needs it.

It needs the least memory of all single-model plans, and is the slowest. Searchers fall back on it.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from cohabit.planner.errors import InfeasibleBudget, UnsupportedProblem
from cohabit.planner.graph import SCRATCH_ALIGNMENT, Graph, aligned
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Problem
from cohabit.planner.sequence.sequence import (
    Action,
    ActionKind,
    Placed,
    compute,
    drop,
    swap_in,
    swap_out,
    tensor_ranges,
    write,
)


def least_bytes(graph: Graph) -> int:
    """Least partition without a workspace in which any plan fits."""
    return max(_needs(graph), default=0)


def require_single_budget(problem: Problem, searcher: str) -> None:
    """Raise UnsupportedProblem unless one model has all the memory, InfeasibleBudget unless that is enough."""
    if problem.workspace_bytes or problem.residents is not None:
        raise UnsupportedProblem(
            f"{searcher} plans a single model's budget, without a shared workspace or given residents"
        )
    needs = _needs(problem.graph)
    least = max(needs)
    if problem.memory_bytes < least:
        k = needs.index(least)
        op = problem.graph.ops[k].name if k < len(problem.graph.ops) else "the inputs"
        raise InfeasibleBudget(problem.graph.name, op, problem.memory_bytes, least)


def serial_plan(problem: Problem) -> Plan:
    """Return the serial plan of a single model's budget."""
    actions = serial(problem.graph)
    return write(problem, actions, (), _lay_out(problem.graph, actions))


def serial(graph: Graph) -> list[Action]:
    """Return the serial plan's actions, in order. No parameter is resident."""
    last_use = {t: k for k, op in enumerate(graph.ops) for t in op.touched}
    last_use |= {t: len(graph.ops) for t in graph.outputs}
    here = list(graph.inputs)
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
        needed = graph.needed[k]
        actions.extend(swap_in(t) for t in needed if t not in op.writes)
        actions.append(compute(k))
        here[:] = needed
        unsaved.update((*op.writes, *op.mutates))
    leave({t for t in graph.outputs if graph.tensors[t].kind != "parameter"}, len(graph.ops))
    actions += [swap_out(t) for t in here if t in unsaved and graph.tensors[t].kind == "state"]
    return actions


def _lay_out(graph: Graph, actions: Sequence[Action]) -> Placed:
    """Offsets in the least memory, in time linear in the actions.

    No tensor stays from one op to the next, so each op's tensors lie next to each other, coarsest alignment first.
    """
    ranges = tensor_ranges(graph, actions, ())
    op_at = list(accumulate((a.verb is ActionKind.COMPUTE for a in actions), initial=0))  # ops before each action
    together: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # per op: alignment, bytes, index
    for i, found in enumerate(ranges):
        tensor, first = graph.tensors[found.tensor], found.span.first
        at_start = first == 0 and tensor.kind == "input"
        together[-1 if at_start else op_at[first]].append((tensor.alignment, tensor.nbytes, i))
    scratch = {
        i: graph.ops[a.what].scratch_bytes
        for i, a in enumerate(actions)
        if a.verb is ActionKind.COMPUTE and graph.ops[a.what].scratch_bytes
    }
    for i, nbytes in scratch.items():
        together[op_at[i]].append((SCRATCH_ALIGNMENT, nbytes, len(ranges) + i))
    offsets = [0] * (len(ranges) + len(actions))
    peak = 0
    for blocks in together.values():
        top = 0
        for alignment, nbytes, i in sorted(blocks, reverse=True):
            offsets[i] = top
            peak = max(peak, top + nbytes)
            top += aligned(nbytes, alignment)
    return Placed(
        tuple(ranges), tuple(offsets[: len(ranges)]), {i: offsets[len(ranges) + i] for i in scratch}, peak
    )


def _needs(graph: Graph) -> list[int]:
    """Bytes that each op needs at once; last, those of all inputs, which arrive together."""
    needs = [_packed(graph, graph.needed[k]) + op.aligned_scratch_bytes for k, op in enumerate(graph.ops)]
    return [*needs, _packed(graph, graph.inputs)]


def _packed(graph: Graph, tensors: Sequence[int]) -> int:
    return sum(graph.tensors[t].aligned_bytes for t in tensors)
