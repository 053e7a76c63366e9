"""Plans made by hand, independent of the planner's searchers."""

from itertools import accumulate

from msgspec import structs

from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, Step, SwapIn
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.table import (
    COMPUTE,
    DROP,
    NOTHING,
    SWAP_IN,
    SWAP_OUT,
    Action,
    columns,
    peak_bytes,
    scheduled,
)
from cohabit.planner.schedule.write import write
from tests.support.planner.graphs import profile_of


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def streaming_plan(graph: Graph, resident: frozenset[int] = frozenset()) -> Plan:
    """Swap each parameter in right before every op that reads it and drop it right after.

    Parameters in flight lie one behind the other above the pool, which has room for all activations at once.
    """
    window = max((sum(graph.tensors[i].nbytes for i in op.reads) for op in graph.ops), default=0)
    pool = sum(t.aligned_bytes for t in graph.tensors if t.kind != "parameter")
    pool = _up(pool + max((op.aligned_scratch_bytes for op in graph.ops), default=0), 4096)
    partition = 0
    residents = []
    for i in sorted(resident):
        residents.append(Placement(i, Address("partition", partition)))
        partition += graph.tensors[i].nbytes
    steps: list[Step] = []
    computes: list[int] = []
    for n, op in enumerate(graph.ops):
        streamed = [i for i in op.reads if graph.tensors[i].kind == "parameter" and i not in resident]
        offset = pool
        waits = []
        for i in streamed:
            waits.append(len(steps))
            steps.append(SwapIn(i, Address("workspace", offset), tuple(computes[-1:])))
            offset += graph.tensors[i].nbytes
        computes.append(len(steps))
        steps.append(Compute(n, tuple(waits[-1:])))
        steps += [Drop(i) for i in streamed]
    memory = Memory(pool + _up(window, 4096), partition)
    return Plan(graph.fingerprint, "", memory, pool, tuple(residents), tuple(steps))


def offloading_plan(graph: Graph, keep: frozenset[int] = frozenset()) -> Plan:
    """Every parameter is resident; every activation but those to keep leaves when the next op does not use it."""
    bare = without_parameters(graph)
    actions = _travels(bare, keep)
    starts = accumulate((graph.tensors[i].nbytes for i in graph.parameters), initial=0)
    homes = dict(zip(graph.parameters, starts, strict=False))
    pool = peak_bytes(Problem(bare, profile_of(bare), Memory(0)).arrays, *columns(actions))
    problem = Problem(
        graph, profile_of(graph), Memory(pool, sum(graph.tensors[i].nbytes for i in graph.parameters))
    )
    used, rows = dict[int, int](), []
    for verb, what in actions:
        if verb == COMPUTE:
            used |= dict.fromkeys(graph.ops[what].touched, what)
        # A swap-out waits for all uses so far.
        rows.append((verb, what, NOTHING, used[what] if verb == SWAP_OUT else NOTHING))
    return structs.replace(write(problem, scheduled(problem.arrays, rows, homes, pool), pool), profile="")


def with_room(plan: Plan, nbytes: int) -> Plan:
    """The plan with a pool larger by so much or a page more, above which the parameters lie that were above it."""
    nbytes = _up(nbytes, 4096)

    def moved(step: Step) -> Step:
        if isinstance(step, SwapIn) and step.address is not None and step.address.region == "workspace":
            return structs.replace(step, address=Address("workspace", step.address.offset + nbytes))
        return step

    memory = structs.replace(plan.memory, workspace_bytes=plan.memory.workspace_bytes + nbytes)
    return structs.replace(
        plan, memory=memory, pool_bytes=plan.pool_bytes + nbytes, steps=tuple(map(moved, plan.steps))
    )


def without_parameters(graph: Graph) -> Graph:
    """The same graph whose parameters take no bytes."""
    tensors = tuple(structs.replace(t, nbytes=0) if t.kind == "parameter" else t for t in graph.tensors)
    ops = tuple(
        structs.replace(o, reads=tuple(i for i in o.reads if tensors[i].kind != "parameter")) for o in graph.ops
    )
    outputs = tuple(i for i in graph.outputs if tensors[i].kind != "parameter")
    return structs.replace(graph, tensors=tensors, ops=ops, outputs=outputs)


def _travels(graph: Graph, keep: frozenset[int]) -> list[Action]:
    last = len(graph.ops) - 1
    needed = [set(op.reads) | (set(graph.outputs) if k == last else set()) for k, op in enumerate(graph.ops)]
    here = {i for i, t in enumerate(graph.tensors) if t.kind == "input"}
    saved: set[int] = set()
    actions: list[Action] = []
    for k, op in enumerate(graph.ops):
        coming = sorted(needed[k] - here - set(op.writes))
        actions += [(SWAP_IN, t) for t in coming]
        actions.append((COMPUTE, k))
        here |= {*coming, *op.writes}
        saved -= set(op.mutates)
        for t in sorted(here):
            is_needed = t in graph.outputs or any(t in n for n in needed[k + 1 :])
            if is_needed and (t in keep or k == last or t in needed[k + 1] or graph.tensors[t].kind == "input"):
                continue
            if is_needed and t not in saved:
                actions.append((SWAP_OUT, t))
                saved.add(t)
            actions.append((DROP, t))
            here.discard(t)
    return actions
