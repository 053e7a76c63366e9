"""Graphs, profiles and plans that a reader can check by hand, and random ones."""

import random
from collections.abc import Sequence

from msgspec import structs

from cohabit.planner.graph import Graph, Op, Tensor, TensorKind
from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, SwapIn
from cohabit.planner.profile import Link, Profile

PAGE = 4096


def parameter(name: str, nbytes: int = PAGE) -> Tensor:
    return Tensor(name, nbytes, "parameter", PAGE)


def chain(parameter_bytes: Sequence[int], activation_bytes: int = PAGE, batch: int = 1) -> Graph:
    """op_i reads W_i and A_i and writes A_(i+1); A_0 is the input. Two activations are alive at a time."""
    count = len(parameter_bytes)
    tensors = [parameter(f"W{i}", n) for i, n in enumerate(parameter_bytes)]
    tensors.append(Tensor("A0", activation_bytes, "input"))
    tensors += [Tensor(f"A{i + 1}", activation_bytes, "activation") for i in range(count)]
    ops = [Op(f"op{i}", "conv", (i, count + i), (count + i + 1,)) for i in range(count)]
    return _graph("chain", batch, tensors, ops, (2 * count,))


def unet(levels: int = 5, level_bytes: int = 16 * PAGE) -> Graph:
    """Down and up again, past skip connections that wait for as long as it takes: large, and idle for most of the time.

    Each level has half of the pixels and twice the channels, so that its activations are as large as those above.
    """
    tensors = [parameter(f"W{i}", PAGE << min(i, 2 * levels - i)) for i in range(2 * levels + 1)]
    tensors.append(Tensor("X", PAGE, "input"))
    ops: list[Op] = []

    def add(name: str, reads: Sequence[int], nbytes: int) -> int:
        tensors.append(Tensor(name, nbytes, "activation"))
        ops.append(Op(name, "conv", tuple(reads), (len(tensors) - 1,)))
        return len(tensors) - 1

    value, skips = len(tensors) - 1, []
    for level in range(levels):
        skips.append(add(f"down{level}", (level, value), level_bytes))
        value = add(f"pool{level}", (skips[-1],), level_bytes // 4)
    value = add("bottom", (levels, value), level_bytes // 2)
    for level in reversed(range(levels)):
        value = add(f"up{level}", (2 * levels - level, value, skips[level]), level_bytes)
    return _graph("unet", 1, tensors, ops, (add("out", (value,), PAGE),))


def profile_of(
    graph: Graph,
    op_s: float | Sequence[float] = 1.0,
    bandwidth: float = PAGE,
    latency_s: float = 0.0,
    compute_slowdown: float = 1.0,
    swap_slowdown: float = 1.0,
    window_bytes: int = 0,
) -> Profile:
    """By default an op takes a second, and so does a page on the link."""
    seconds = [op_s] * len(graph.ops) if isinstance(op_s, float) else op_s
    link = Link(latency_s, bandwidth)
    return Profile(
        graph.fingerprint, "test", tuple(seconds), link, link, compute_slowdown, swap_slowdown,
        window_bytes=window_bytes,
    )  # fmt: skip


def hand_written_plan(graph: Graph, profile: Profile) -> Plan:
    """The plan of chain([PAGE] * 3) with W0 resident and one page of window, behind two of activations.

    steps:  0 in W1 | 1 op0 | 2 drop A0 | 3 op1 | 4 drop W1 | 5 drop A1 | 6 in W2 | 7 op2 | 8 drop W2 | 9 drop A2
    """
    low, high, window = (Address("workspace", i * PAGE) for i in range(3))
    return Plan(
        graph=graph.fingerprint,
        profile=profile.fingerprint,
        partition_bytes=PAGE,
        workspace_bytes=3 * PAGE,
        inputs=(Placement(3, low),),
        residents=(Placement(0, Address("partition", 0)),),
        steps=(
            SwapIn(1, window),
            Compute(0, (high,)),
            Drop(3),
            Compute(1, (low,), after=(0,)),
            Drop(1),
            Drop(4),
            SwapIn(2, window, after=(3,)),
            Compute(2, (high,), after=(6,)),
            Drop(2),
            Drop(5),
        ),
    )


def random_graph(rng: random.Random, most_ops: int = 12) -> Graph:
    """Branches, tied and empty parameters, ops without any, odd activation sizes, scratch."""
    parameters = [parameter(f"W{i}", PAGE * rng.choice((0, 1, 1, 2, 3, 5, 8))) for i in range(rng.randint(1, 9))]
    tensors = [*parameters, *(Tensor(f"X{i}", rng.randint(0, 9000), "input") for i in range(rng.randint(1, 2)))]
    values = list(range(len(parameters), len(tensors)))
    ops = []
    for k in range(rng.randint(1, most_ops)):
        reads = rng.sample(values[-4:], rng.randint(1, min(2, len(values[-4:]))))
        reads += rng.sample(range(len(parameters)), min(rng.choice((0, 1, 1, 1, 2, 3)), len(parameters)))
        writes = []
        for _ in range(rng.choice((1, 1, 1, 2))):
            writes.append(len(tensors))
            tensors.append(
                Tensor(f"A{len(tensors)}", rng.choice((0, 1, 100, 5000)), "activation", rng.choice((1, 64, 256)))
            )
        values += writes
        ops.append(Op(f"op{k}", "any", tuple(reads), tuple(writes), rng.choice((0, 0, 3000))))
    outputs = {values[-1], rng.choice(values)}
    if rng.random() < 0.1:
        outputs.add(0)
    return _graph("random", 1, tensors, ops, tuple(sorted(outputs)))


def random_training_graph(rng: random.Random, most_layers: int = 5) -> Graph:
    """Layers forward, then backward through the same activations; then every weight changes in place."""
    layers = rng.randint(1, most_layers)
    tensors = [Tensor(f"W{i}", PAGE * rng.choice((1, 2, 5)), "state", PAGE) for i in range(layers)]
    tensors.append(Tensor("X0", PAGE, "input"))
    ops: list[Op] = []

    def write(nbytes: int) -> int:
        tensors.append(Tensor(f"A{len(tensors)}", nbytes, "activation"))
        return len(tensors) - 1

    values = [layers]
    for i in range(layers):
        weight = rng.randrange(i + 1) if rng.random() < 0.2 else i
        reads = dict.fromkeys((weight, values[-1], rng.choice(values)))
        values.append(write(rng.choice((0, 1000, PAGE, 3 * PAGE))))
        ops.append(Op(f"forward{i}", "any", tuple(reads), (values[-1],), rng.choice((0, 0, 3000))))
    error = write(64)
    ops.append(Op("loss", "any", (values[-1],), (error,)))
    gradients: dict[int, int] = {}
    for i in reversed(range(layers)):
        below, gradients[i] = write(tensors[values[i]].nbytes), write(tensors[i].nbytes)
        reads = dict.fromkeys((i, values[i], values[i + 1], error))
        ops.append(Op(f"backward{i}", "any", tuple(reads), (below, gradients[i])))
        error = below
    for i, gradient in gradients.items():
        ops.append(Op(f"update{i}", "any", (i, gradient), (), 0, (i,)))
    return _graph("training", 1, tensors, ops, (rng.choice(values[1:]),))


def random_profile(rng: random.Random, graph: Graph) -> Profile:
    return profile_of(
        graph,
        [rng.choice((0.0, 0.5, 1.0, 3.0)) for _ in graph.ops],
        bandwidth=PAGE * rng.choice((0.3, 1.0, 4.0)),
        latency_s=rng.choice((0.0, 0.1)),
        compute_slowdown=rng.choice((1.0, 1.3)),
        swap_slowdown=rng.choice((1.0, 1.5)),
        window_bytes=PAGE * rng.choice((0, 0, 0, 8, 16)),
    )


def _graph(name: str, batch: int, tensors: Sequence[Tensor], ops: Sequence[Op], outputs: tuple[int, ...]) -> Graph:
    graph = Graph(name, batch, "weights", tuple(tensors), tuple(ops), outputs)
    graph.validate()
    return graph


def unrolled(
    layers: int, steps: int, weight_bytes: int, state_bytes: int = PAGE, kind: TensorKind = "parameter"
) -> Graph:
    """A recurrent network, time step by time step: each layer's weights are read in all of them."""
    tensors = [Tensor(f"W{i}", weight_bytes, kind, PAGE) for i in range(layers)]
    tensors += [Tensor(f"X{t}", 64, "input") for t in range(steps)]
    ops: list[Op] = []

    def run(name: str, *reads: int) -> int:
        tensors.append(Tensor(name, state_bytes, "activation"))
        ops.append(Op(name, "any", reads, (len(tensors) - 1,)))
        return len(tensors) - 1

    hidden: dict[int, int] = {}
    for t in range(steps):
        below = layers + t
        for i in range(layers):
            before = [hidden[i]] if i in hidden else []
            below = hidden[i] = run(f"h{i}.{t}", i, below, *before)
    return _graph("unrolled", 1, tensors, ops, (hidden[layers - 1],))


def unrolled_training(layers: int, steps: int, weight_bytes: int) -> Graph:
    """A recurrent network's step, which also changes the weights."""
    graph = unrolled(layers, steps, weight_bytes, 64, "state")
    updates = tuple(Op(f"update{i}", "any", (i, *graph.outputs), (), 0, (i,)) for i in range(layers))
    return structs.replace(graph, ops=(*graph.ops, *updates))
