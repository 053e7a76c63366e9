"""The serial schedule: all tensors leave memory after each op and return before the next op that needs them.

Of all schedules in which everything is counted, it needs the least memory and is the slowest. Searchers fall back on
it.
"""

from collections.abc import Sequence

from cohabit.planner.errors import InfeasibleBudget, UnsupportedProblem
from cohabit.planner.graph import Graph
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Action, Schedule, columns, counted


def least_bytes(graph: Graph) -> int:
    """Return the least memory in which any plan fits if everything is counted."""
    return max(_needs(graph), default=0)


def require_counted(problem: Problem, searcher: str) -> None:
    """Raise UnsupportedProblem for all but a single budget, InfeasibleBudget if it is too small."""
    memory = problem.memory
    if not memory.workspace_lasts or memory.partition_bytes or problem.residents is not None:
        raise UnsupportedProblem(
            f"{searcher} plans one budget in which everything is counted, without a partition or given residents"
        )
    needs = _needs(problem.graph)
    least = max(needs)
    if problem.memory.nbytes < least:
        k = needs.index(least)
        op = problem.graph.ops[k].name if k < len(problem.graph.ops) else "the inputs"
        raise InfeasibleBudget(problem.graph.name, op, problem.memory.nbytes, least)


def serial_schedule(problem: Problem) -> Schedule:
    """Return the serial schedule, which fits in every memory that `require_counted` accepts."""
    made = counted(problem.arrays, *columns(serial(problem.graph)), (), problem.memory.nbytes)
    assert made is not None
    return made


def serial(graph: Graph) -> list[Action]:
    """Return the serial schedule's actions, in order. No parameter is resident."""
    last_use = {t: k for k, op in enumerate(graph.ops) for t in op.touched}
    last_use |= {t: len(graph.ops) for t in graph.outputs}
    here = list(graph.inputs)
    actions: list[Action] = []
    unsaved = set(here)  # without an up-to-date host copy

    def leave(keep: set[int], k: int) -> None:
        for t in here:
            if t not in keep:
                needed = last_use.get(t, -1) > k or graph.tensors[t].kind == "state"
                if t in unsaved and needed:
                    actions.append((SWAP_OUT, t))
                    unsaved.discard(t)
                actions.append((DROP, t))
        here[:] = [t for t in here if t in keep]

    for k, op in enumerate(graph.ops):
        leave(set(), k - 1)
        needed = graph.needed[k]
        actions.extend((SWAP_IN, t) for t in needed if t not in op.writes)
        actions.append((COMPUTE, k))
        here[:] = needed
        unsaved.update((*op.writes, *op.mutates))
    leave({t for t in graph.outputs if graph.tensors[t].kind != "parameter"}, len(graph.ops))
    actions += [(SWAP_OUT, t) for t in here if t in unsaved and graph.tensors[t].kind == "state"]
    return actions


def _needs(graph: Graph) -> list[int]:
    """Return the bytes that each op needs at once; last, the bytes of all inputs, which arrive together."""
    needs = [_packed(graph, graph.needed[k]) + op.aligned_scratch_bytes for k, op in enumerate(graph.ops)]
    return [*needs, _packed(graph, graph.inputs)]


def _packed(graph: Graph, tensors: Sequence[int]) -> int:
    return sum(graph.tensors[t].aligned_bytes for t in tensors)
