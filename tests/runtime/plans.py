"""Plans made by hand, independent of the planner's searchers."""

from itertools import accumulate

from cohabit.planner.schedule.plan_writer import PlanWriter
from cohabit.planner.schedule.sequence import Action, ActionKind, compute, drop, lay_out, swap_in, swap_out
from msgspec import structs

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, Step, SwapIn


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def streaming_plan(graph: Graph, resident: frozenset[int] = frozenset()) -> Plan:
    """Swap each parameter in right before every op that reads it and drop it right after.

    Parameters in flight lie one behind the other from the workspace's start, above the activations, each of which
    has bytes of its own.
    """
    window = max((sum(graph.tensors[i].nbytes for i in op.reads) for op in graph.ops), default=0)
    position = _up(window, 4096)
    places: dict[int, Address] = {}
    for i, tensor in enumerate(graph.tensors):
        if tensor.kind != "parameter":
            places[i] = Address("workspace", position)
            position += _up(tensor.nbytes, tensor.alignment)
    partition = 0
    residents = []
    for i in sorted(resident):
        residents.append(Placement(i, Address("partition", partition)))
        partition += graph.tensors[i].nbytes
    scratch = Address("workspace", position)
    position += max((op.scratch_bytes for op in graph.ops), default=0)
    steps: list[Step] = []
    computes: list[int] = []
    for n, op in enumerate(graph.ops):
        streamed = [i for i in op.reads if graph.tensors[i].kind == "parameter" and i not in resident]
        offset = 0
        waits = []
        for i in streamed:
            waits.append(len(steps))
            steps.append(SwapIn(i, Address("workspace", offset), tuple(computes[-1:])))
            offset += graph.tensors[i].nbytes
        computes.append(len(steps))
        steps.append(
            Compute(
                n, tuple(places[i] for i in op.writes), scratch if op.scratch_bytes else None, tuple(waits[-1:])
            )
        )
        steps += [Drop(i) for i in streamed]
    inputs = tuple(Placement(i, places[i]) for i, t in enumerate(graph.tensors) if t.kind == "input")
    return Plan(graph.fingerprint, "", partition, position, inputs, tuple(residents), tuple(steps))


def offloading_plan(graph: Graph, keep: frozenset[int] = frozenset()) -> Plan:
    """Every parameter is resident; every activation but those to keep leaves when the next op does not use it."""
    bare = without_parameters(graph)
    actions = _travels(bare, keep)
    placed = lay_out(bare, actions, ())
    at = {(s.tensor, s.span.first): o for s, o in zip(placed.ranges, placed.offsets, strict=True)}
    partition = sum(graph.tensors[i].nbytes for i in graph.parameters)
    starts = accumulate((graph.tensors[i].nbytes for i in graph.parameters), initial=0)
    inputs = {i: partition + at[i, 0] for i, t in enumerate(graph.tensors) if t.kind == "input"}
    writer = PlanWriter(
        graph, partition, placed.peak_bytes, inputs, dict(zip(graph.parameters, starts, strict=False))
    )
    for n, action in enumerate(actions):
        match action.verb:
            case ActionKind.COMPUTE:
                scratch = placed.scratch.get(n)
                outputs = [partition + at[t, n] for t in graph.ops[action.what].writes]
                arrived = graph.outputs if action.what == len(graph.ops) - 1 else ()
                arrived = tuple(t for t in arrived if t not in graph.ops[action.what].writes)
                writer.compute(action.what, outputs, None if scratch is None else partition + scratch, arrived)
            case ActionKind.SWAP_IN:
                writer.swap_in(action.what, partition + at[action.what, n])
            case ActionKind.SWAP_OUT:
                writer.swap_out(action.what, after_uses=True)
            case ActionKind.DROP:
                writer.drop(action.what)
    return writer.plan("")


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
        actions += [swap_in(t) for t in coming]
        actions.append(compute(k))
        here |= {*coming, *op.writes}
        saved -= set(op.mutates)
        for t in sorted(here):
            is_needed = t in graph.outputs or any(t in n for n in needed[k + 1 :])
            if is_needed and (t in keep or k == last or t in needed[k + 1] or graph.tensors[t].kind == "input"):
                continue
            if is_needed and t not in saved:
                actions.append(swap_out(t))
                saved.add(t)
            actions.append(drop(t))
            here.discard(t)
    return actions
