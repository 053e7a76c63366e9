"""SwapAdvisor's worked examples: Figures 1, 3, 4 and 5 (in the thesis 4.1, 4.3, 4.5 and 4.6)."""

import numpy as np
import pytest

from benchmarks.planner.ablated import survival
from cohabit.planner.check import check
from cohabit.planner.genetic.schedules import cross_schedules
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import single_budget
from cohabit.planner.papers.swapadvisor.allocations import (
    Allocation,
    AllocationSpace,
    average,
    extend,
    raised,
    shrink,
)
from cohabit.planner.papers.swapadvisor.pool_schedule import schedule_of_pool
from cohabit.planner.papers.swapadvisor.pools import MemoryPool, TensorSizes, object_bytes, pool_of, uses_of
from cohabit.planner.papers.swapadvisor.searcher import THRESHOLD
from cohabit.planner.plan import Compute, Drop, Plan, SwapIn, SwapOut
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.schedule.write import write
from tests.support.planner.graphs import profile_of

MB = 2**20
LEFT = ("Data", "Conv1", "Conv2", "Conv3", "Conv4", "Concat")
RIGHT = ("Data", "Conv2", "Conv3", "Conv4", "Conv1", "Concat")
COARSE = ([1, 1], [5])
FINE = ([1, 2], [8, 1])


def figure_1() -> Graph:
    """The graph of Figure 1(a), and what makes its activations outlive it.

    The text fixes sizes, branches and parameters. It says that an activation "must be copied to CPU memory upon
    swap-out because it is needed in the backward pass", of which it shows nothing. Here, each op but Data has a
    backward op of zero seconds that reads the activations its forward op read (Concat's, A5 as well), in reverse
    order of the schedule. It reads no parameter: those are needed next in the next iteration, after all
    activations. The figure's weights are "initially in the CPU memory", so there is one pass and not two.
    """
    sizes = {"W1": 1, "W2": 1, "W3": 1, "W4": 1, "A0": 1, "A1": 1, "A2": 2, "A3": 1, "A4": 1, "A5": 2}
    tensors = [Tensor(n, mb * MB, "parameter" if n[0] == "W" else "activation", 1) for n, mb in sizes.items()]
    number = {name: i for i, name in enumerate(sizes)}
    reads = {
        "Data": (),
        "Conv1": ("A0", "W1"),
        "Conv2": ("A0", "W2"),
        "Conv3": ("A2", "W3"),
        "Conv4": ("A3", "W4"),
        "Concat": ("A1", "A4"),
    }
    ops = [
        Op(name, "any", tuple(number[t] for t in reads[name]), (number[f"A{i}"],)) for i, name in enumerate(LEFT)
    ]
    for name in LEFT[:0:-1]:
        again = [number[t] for t in reads[name] if t[0] == "A"] + ([number["A5"]] if name == "Concat" else [])
        ops.append(Op(f"{name}'", "any", tuple(again), (len(tensors),)))
        tensors.append(Tensor(f"{name}'", 0, "activation", 1))  # a gradient, which the figure leaves out
    graph = Graph("figure1", 1, "weights", tuple(tensors), tuple(ops), ())
    graph.validate()
    return graph


def one_pass(graph: Graph, profile: Profile, order: list[int], pool: MemoryPool) -> Plan:
    problem, (uses, _) = Problem(graph, profile, single_budget(pool.nbytes)), uses_of(graph, profile)
    schedule = schedule_of_pool(problem, uses, np.array(order), pool, THRESHOLD, double_pass=False)
    assert schedule is not None
    plan = write(problem, schedule, pool.nbytes)
    check(graph, profile, plan)
    return plan


Row = list[str | None]


def table(graph: Graph, profile: Profile, plan: Plan, until: str) -> dict[str, Row]:
    """What each lane does in t1, t2, ... up to and with op `until`, as in the tables of Figure 1."""

    def name(index: int) -> str:
        step = plan.steps[index]
        return graph.ops[step.op].name if isinstance(step, Compute) else graph.tensors[step.tensor].name

    spans = simulate(graph, plan, profile).spans
    length = next(round(s.end_s) for s in spans if name(s.step) == until)
    rows: dict[str, Row] = {lane: [None] * length for lane in ("compute", "swap_in", "swap_out")}
    for span in spans:
        for t in range(round(span.start_s), min(round(span.end_s), length)):
            rows[span.lane][t] = name(span.step)
    return rows


def run_figure_1(schedule: tuple[str, ...], allocation: tuple[list[int], list[int]]) -> dict[str, Row]:
    graph = figure_1()
    profile = profile_of(graph, [1.0] * 6 + [0.0] * 5, bandwidth=MB)
    names = [op.name for op in graph.ops]
    order = [names.index(n) for n in schedule] + [names.index(f"{n}'") for n in schedule[:0:-1]]
    _, sizes = uses_of(graph, profile)
    pool = pool_of(sizes, *map(np.array, allocation))
    assert pool.nbytes == 10 * MB
    plan = one_pass(graph, profile, order, pool)
    return table(graph, profile, plan, "Concat")


@pytest.mark.parametrize(
    ("schedule", "pool", "compute", "swap_in", "swap_out"),
    [
        pytest.param(
            LEFT, COARSE,
            ["Data", "Conv1", "Conv2", "Conv3", "Conv4", "Concat"],
            ["W1", "W2", "W3", "W4", "A1", None],
            [None, None, "A1", "A0", None, None],
            id="b",
        ),
        pytest.param(
            RIGHT, COARSE,
            ["Data", "Conv2", "Conv3", "Conv4", None, "Conv1", "Concat"],
            ["W2", "W3", "W4", None, "W1", None, None],
            [None, None, None, "A2", "A2", None, None],
            id="c",
        ),
        pytest.param(
            RIGHT, FINE,
            ["Data", "Conv2", "Conv3", "Conv4", "Conv1", "Concat"],
            ["W2", "W3", "W4", "W1", None, None],
            [None, None, None, "A2", "A2", None],
            id="d",
        ),
        pytest.param(
            LEFT, FINE,
            ["Data", "Conv1", "Conv2", "Conv3", "Conv4", None, "Concat"],
            ["W1", "W2", "W3", "W4", None, None, None],
            [None, None, None, None, "A2", "A2", None],
            id="e",
        ),
    ],
)  # fmt: skip
def test_figure_1(
    schedule: tuple[str, ...],
    pool: tuple[list[int], list[int]],
    compute: Row,
    swap_in: Row,
    swap_out: Row,
) -> None:
    """Left or right branch first, in five objects of 2 MB or in objects of both sizes.

    As printed, but that what nothing reads any more stays until its place is needed, which the part shown does not.
    """
    found = run_figure_1(schedule, pool)
    assert found == {"compute": compute, "swap_in": swap_in, "swap_out": swap_out}


def test_figure_3_w1_makes_room_for_w3_and_w2_for_a3() -> None:
    """Four units of memory; op1 and op2 and their tensors fill it.

    The figure's graph is an image. The text fixes three ops with a parameter and a result each, and that W1 and W2
    leave while A1 and A2 stay: here, op3 reads both. Ops take a unit of time, as copies do.
    """
    tensors = [Tensor(f"W{i}", MB, "parameter") for i in (1, 2, 3)]
    tensors += [Tensor(f"A{i}", MB, "activation") for i in (1, 2, 3)]
    ops = (Op("op1", "any", (0,), (3,)), Op("op2", "any", (1, 3), (4,)), Op("op3", "any", (2, 3, 4), (5,)))
    graph = Graph("figure3", 1, "weights", tuple(tensors), ops, (5,))
    profile = profile_of(graph, bandwidth=MB)
    _, sizes = uses_of(graph, profile)
    plan = one_pass(graph, profile, [0, 1, 2], pool_of(sizes, np.array([1]), np.array([4])))
    assert not any(isinstance(step, SwapOut) for step in plan.steps)
    at = {(type(s), s.op if isinstance(s, Compute) else s.tensor): i for i, s in enumerate(plan.steps)}
    assert at[Compute, 0] < at[Drop, 0] < at[SwapIn, 2]
    assert at[Compute, 1] < at[Drop, 1] < at[Compute, 2]
    w3 = plan.steps[at[SwapIn, 2]]
    assert isinstance(w3, SwapIn)
    assert w3.after == (at[Compute, 0],)


def test_figure_4_children_begin_like_one_parent_and_go_on_like_the_other() -> None:
    """CR = 3. The text gives SCH_2[1..3] = [2, 3, 4] and SCH_C1; SCH_1 is an image, here the ops by number.

    Of SCH_2, 1 and 5 are left; of all graphs in which [2, 3, 4, 1, 5] is an order, both parents' are.
    """
    first, second = np.array([1, 2, 3, 4, 5]) - 1, np.array([2, 3, 4, 5, 1]) - 1
    children = cross_schedules(first, second, 3)
    assert [(c + 1).tolist() for c in children] == [[2, 3, 4, 1, 5], [1, 2, 3, 4, 5]]


def figure_5() -> tuple[AllocationSpace, Allocation, Allocation]:
    """Sizes of 1 to 4 MB in 12 MB. (The first parent's four objects of 4 MB take 16: the paper's slip.)"""
    mb = np.arange(1, 5) * MB
    sizes = TensorSizes(mb, np.ones(4, np.int64), np.full(4, 8), np.eye(4, dtype=np.int64))
    first = Allocation(np.array([1, 1, 1, 1]), np.array([4]))
    second = Allocation(np.array([1, 2, 2, 2]), np.array([8, 1]))
    return AllocationSpace(sizes, 12 * MB), first, second


def test_figure_5_step_by_step() -> None:
    _, first, second = figure_5()
    assert raised(np.array([1, 2, 1, 1])).tolist() == [1, 2, 2, 2]
    assert raised(np.array([1, 1, 2, 2])).tolist() == [1, 1, 2, 2]
    assert extend(first).tolist() == [4, 4, 4, 4]
    assert extend(second).tolist() == [8, 1, 1, 1]
    assert average(np.array([1, 2, 2, 2]), np.array([8, 1, 4, 4])).tolist() == [8, 3]
    assert shrink(np.array([8, 3]), np.array([1, 4]), 12, np.array([1, 1])).tolist() == [4, 2]


def test_figure_5_both_children() -> None:
    """C1 is in the text; C2 = [1, 1, 2, 2] with [4, 4, 1, 1] for its sizes makes [4, 1], which fits as it is."""
    space, first, second = figure_5()
    children = space.cross(first, second, 2)
    assert [(c.classes.tolist(), c.counts.tolist()) for c in children] == [
        ([1, 2, 2, 2], [4, 2]),
        ([1, 1, 2, 2], [4, 1]),
    ]
    assert all(object_bytes(space.sizes, c.classes) @ c.counts <= space.memory_bytes for c in children)


def test_equation_1_survival_is_the_softmax_of_normalised_times() -> None:
    weights = [1.0, np.exp(-1.0), np.exp(-2.0)]
    assert survival([2.0, 4.0, 6.0], 2.0).tolist() == pytest.approx([w / sum(weights) for w in weights])
