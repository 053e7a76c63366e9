"""Graphs, profiles and plans that a reader can check by hand, and random ones."""

import random
from collections.abc import Sequence

from msgspec import structs

from cohabit.planner.graph import Graph, Op, Tensor, TensorKind
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.order import predecessors
from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, SwapIn
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Link, Profile
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Action

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
    """The plan of chain([PAGE] * 3) with W0 resident and one page of window, after a pool of two for activations.

    steps:  0 in W1 | 1 op0 | 2 drop A0 | 3 op1 | 4 drop W1 | 5 drop A1 | 6 in W2 | 7 op2 | 8 drop W2 | 9 drop A2
    """
    window = Address("workspace", 2 * PAGE)
    return Plan(
        graph=graph.fingerprint,
        profile=profile.fingerprint,
        memory=Memory(3 * PAGE, PAGE),
        pool_bytes=2 * PAGE,
        residents=(Placement(0, Address("partition", 0)),),
        steps=(
            SwapIn(1, window),
            Compute(0),
            Drop(3),
            Compute(1, after=(0,)),
            Drop(1),
            Drop(4),
            SwapIn(2, window, after=(3,)),
            Compute(2, after=(6,)),
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


def any_graph(rng: random.Random) -> Graph:
    """An inference or a training step."""
    return random_training_graph(rng) if rng.random() < 0.5 else random_graph(rng)


def counted_problem(seed: int) -> Problem:
    """An inference or a training step in one budget, from the least to more than enough."""
    rng = random.Random(seed)
    graph = any_graph(rng)
    room = sum(t.nbytes for t in graph.tensors)
    memory = least_bytes(graph) + rng.choice((0, 100, PAGE, 3 * PAGE, room // 4, room // 2, 2 * room))
    profile, objective = random_profile(rng, graph), rng.choice(("latency", "latency", "period"))
    return Problem(graph, profile, single_budget(memory), objective=objective)


def served_problem(seed: int) -> Problem:
    """An inference in a partition and a workspace, from the least in which activations stay."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    partition = PAGE * rng.randint(0, 16)
    workspace = Footprint.of(graph).least_workspace_bytes(partition) + PAGE * rng.choice((0, 0, 1, 3, 9))
    return Problem(graph, random_profile(rng, graph), Memory(workspace, partition))


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


def random_actions(rng: random.Random, graph: Graph) -> tuple[list[Action], frozenset[int]]:
    """A legal sequence of actions in a random order of the ops, and the residents that it starts and ends with.

    Whatever may be copied or dropped is, for no reason; some ops run again. Residents are used before they are dropped.
    """
    return _RandomActions(rng, graph).made()


class _RandomActions:
    def __init__(self, rng: random.Random, graph: Graph) -> None:
        self._rng, self._graph = rng, graph
        weights = [t for t, tensor in enumerate(graph.tensors) if tensor.is_weight]
        self._residents = frozenset(t for t in weights if rng.random() < 0.4)
        self._here = {*graph.inputs, *self._residents}
        self._fresh = set(self._residents)  # not read by an op yet
        self._on_host = set(weights)
        self._unsaved = {t for t in self._residents if graph.tensors[t].kind == "state"}
        self._changing = {t for op in graph.ops for t in op.mutates}
        self._producer = {t: k for k, op in enumerate(graph.ops) for t in op.writes}
        self._left = self._topological_order()
        self._issued: list[int] = []
        self._actions: list[Action] = []

    def made(self) -> tuple[list[Action], frozenset[int]]:
        graph = self._graph
        while self._left:
            self._do_something(self._rng.choice((0, 0, 1, 3, 6)))
            k = self._left[0]
            outputs = graph.outputs if len(self._left) == 1 else ()
            for t in (*graph.ops[k].reads, *outputs):
                if t not in graph.ops[k].writes:
                    self._bring(t)
            for t in graph.ops[k].reads:  # a recomputation may have dropped one
                self._bring(t)
            self._left.pop(0)
            self._compute(k)
        for t in sorted(self._unsaved - self._residents):
            self._swap_out(t)
        for t in sorted(self._residents - self._here):
            self._swap_in(t)
        for t in sorted(self._here - self._residents - set(graph.outputs)):
            if self._rng.random() < 0.5 and t not in self._unsaved:
                self._drop(t)
        return self._actions, self._residents

    def _topological_order(self) -> list[int]:
        before, order = predecessors(self._graph), list[int]()
        while len(order) < len(before):
            ready = [k for k in range(len(before)) if k not in order and before[k] <= set(order)]
            order.append(self._rng.choice(ready) if self._rng.random() < 0.3 else ready[0])
        return order

    def _do_something(self, count: int) -> None:
        graph, rng = self._graph, self._rng
        for _ in range(count):
            match rng.choice(("in", "out", "drop", "drop", "again")):
                case "in" if absent := sorted(self._on_host - self._here):
                    self._swap_in(rng.choice(absent))
                case "out" if rest := [t for t in sorted(self._here) if graph.tensors[t].kind != "parameter"]:
                    self._swap_out(rng.choice(rest))
                case "drop" if idle := [t for t in sorted(self._here) if self._may_leave(t)]:
                    self._drop(rng.choice(idle))
                case "again" if again := [k for k in self._issued if self._can_run_again(k)]:
                    self._compute(rng.choice(again))

    def _may_leave(self, t: int) -> bool:
        if t in self._fresh or t in self._unsaved:
            return False
        needed = t in self._graph.outputs or any(t in self._graph.ops[k].touched for k in self._left)
        return not needed or t in self._on_host or self._is_cheap(t)

    def _is_cheap(self, t: int) -> bool:
        """Whether a tensor can be made again from parameters and inputs that never leave for good."""
        k = self._producer.get(t)
        if k is None or self._changing.intersection(self._graph.ops[k].touched):
            return False
        op = self._graph.ops[k]
        return len(op.writes) == 1 and all(self._graph.tensors[r].kind == "parameter" for r in op.reads)

    def _can_run_again(self, k: int) -> bool:
        op = self._graph.ops[k]
        return (
            not self._changing.intersection(op.touched)
            and self._here.issuperset(op.reads)
            and self._here.isdisjoint(op.writes)
        )

    def _bring(self, t: int) -> None:
        if t in self._here:
            return
        if t in self._on_host:
            self._swap_in(t)
            return
        k = self._producer[t]
        for r in self._graph.ops[k].reads:
            self._bring(r)
        self._compute(k)

    def _compute(self, k: int) -> None:
        op = self._graph.ops[k]
        self._actions.append((COMPUTE, k))
        self._issued.append(k)
        self._here.update(op.writes)
        self._fresh.difference_update(op.reads)
        self._on_host.difference_update(op.mutates)
        self._unsaved.update(t for t in op.mutates if self._graph.tensors[t].kind == "state")

    def _swap_in(self, t: int) -> None:
        self._actions.append((SWAP_IN, t))
        self._here.add(t)

    def _swap_out(self, t: int) -> None:
        self._actions.append((SWAP_OUT, t))
        self._on_host.add(t)
        self._unsaved.discard(t)

    def _drop(self, t: int) -> None:
        self._actions.append((DROP, t))
        self._here.discard(t)
