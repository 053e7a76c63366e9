"""Plans made by hand, independent of the planner's searchers."""

from planner.graph import Graph
from planner.plan import Address, Compute, Drop, Placement, Plan, Step, SwapIn


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
