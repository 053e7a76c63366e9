"""The events that lowering puts between streams are enough, and none of them is too many.

Every legal order of the fake device's streams gives eager PyTorch's bits; leave out any one wait, and some order
does not.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Compute, Plan
from cohabit.planner.problem import Problem
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.runtime.cuda import program as cuda_program
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.schedule import FORK, Commands, Copy, Issue, IssueSchedule, Record, Wait, schedule
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.lower import Lowered, lower
from tests.planner.graphs import profile_of
from tests.runtime import models
from tests.runtime.backends import Bench, fake_cuda, fake_staged, fake_streams, opened
from tests.runtime.plans import streaming_plan
from tests.runtime.test_executor import evicting_plan, partition_plan

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = range(25)
WIDTH = 264  # the least whose layers' weights are segments of their own


@pytest.fixture(scope="module")
def model() -> models.Wide:
    torch.manual_seed(0)
    return models.Wide(5, WIDTH).eval()


@pytest.fixture(scope="module")
def lowered(model: models.Wide, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    folder = tmp_path_factory.mktemp("order")
    models.export(model, {"x": torch.zeros(3, WIDTH)}, folder / "model.pt2")
    return lower(folder / "model.pt2", "wide", [2], folder / "cache")


@pytest.fixture(scope="module")
def expected(model: models.Wide, lowered: Lowered) -> torch.Tensor:
    with torch.no_grad():
        return model(*lowered.examples(Bucket(2)))


def searched_plan(graph: Graph) -> Plan:
    """What serving uses: a partition for a part of the weights, and a workspace."""
    weights = graph.parameter_bytes
    workspace = max(sum(graph.tensors[i].nbytes for i in op.reads) for op in graph.ops) + (64 << 10)
    memory = Memory(workspace // 4096 * 4096, weights // 2 // 4096 * 4096)
    return search(Problem(graph, profile_of(graph), memory))


PLANS: dict[str, Callable[[Graph], Plan]] = {
    "streaming": streaming_plan,
    "half resident": lambda graph: streaming_plan(graph, frozenset({0, 2})),
    "evicting": evicting_plan,
    "partition": partition_plan,
    "searched": searched_plan,
}


def small(make: Callable[[int], CudaBackend], lowered: Lowered, seed: int = 0) -> AbstractContextManager[Bench]:
    return opened(lambda: make(seed), lowered, arena_bytes=10 << 20)


def wrong_runs(bench: Bench, plan: Plan, expected: torch.Tensor, count: int = 3) -> int:
    """How many of several runs in a row fail or answer something else."""
    program = bench.program(plan)
    wrong = 0
    for _ in range(count):
        try:
            wrong += not torch.equal(bench.run(program).outputs[0], expected)
        except DeviceError:
            wrong += 1
    return wrong


@pytest.mark.parametrize("make", [fake_cuda, fake_streams, fake_staged])
@pytest.mark.parametrize("name", PLANS)
def test_every_order_of_the_streams_gives_eager_pytorch_s_bits(
    name: str, make: Callable[[int], CudaBackend], lowered: Lowered, expected: torch.Tensor
) -> None:
    plan = PLANS[name](lowered.graphs[Bucket(2)])
    for seed in SEEDS:
        with small(make, lowered, seed) as bench:
            assert wrong_runs(bench, plan, expected) == 0, f"seed {seed}"


@contextmanager
def lowering(change: Callable[[IssueSchedule], IssueSchedule]) -> Iterator[None]:
    """Programs built inside of the block have their schedules changed."""
    original = cuda_program.schedule
    cuda_program.schedule = lambda program, *, join=True: change(schedule(program, join=join))
    try:
        yield
    finally:
        cuda_program.schedule = original


def without(commands: Commands, left_out: int) -> Commands:
    """The same commands without the wait of this number."""
    waits = [n for n, item in enumerate(commands.issues) if isinstance(item.command, Wait)]
    return Commands(tuple(item for n, item in enumerate(commands.issues) if n != waits[left_out]), commands.events)


def wait_count(commands: Commands) -> int:
    return sum(isinstance(item.command, Wait) for item in commands.issues)


def schedule_of(lowered: Lowered, plan: Plan) -> IssueSchedule:
    found: list[IssueSchedule] = []
    with lowering(lambda s: found.append(s) or s), small(fake_cuda, lowered) as bench:
        bench.program(plan)
    return found[0]


@pytest.mark.parametrize("make", [fake_cuda, fake_streams])
@pytest.mark.parametrize("name", ["streaming", "half resident", "searched"])
def test_without_any_one_wait_some_order_goes_wrong(
    name: str, make: Callable[[int], CudaBackend], lowered: Lowered, expected: torch.Tensor
) -> None:
    plan = PLANS[name](lowered.graphs[Bucket(2)])
    count = wait_count(schedule_of(lowered, plan).commands)
    assert count > 2
    fork = Issue("swap_in", Wait(FORK)) in schedule_of(lowered, plan).commands.issues
    first = 1 if fork and make is fake_streams else 0  # by it the copies join a capture; streams do without
    for left_out in range(first, count):
        with lowering(lambda s, n=left_out: replace(s, commands=without(s.commands, n))):
            assert goes_wrong(make, lowered, plan, expected), f"wait {left_out} of {name} is not needed"


def goes_wrong(make: Callable[[int], CudaBackend], lowered: Lowered, plan: Plan, expected: torch.Tensor) -> bool:
    for seed in range(200):
        try:
            with small(make, lowered, seed) as bench:
                if wrong_runs(bench, plan, expected):
                    return True
        except AssertionError:  # the device refused it: a capture that is not closed
            return True
    return False


def test_a_run_waits_for_the_epilogue_of_its_model_s_last(lowered: Lowered, expected: torch.Tensor) -> None:
    """Without that wait, which the executor adds, a run reads what is still on its way back."""
    plan = evicting_plan(lowered.graphs[Bucket(2)])
    wrong = 0
    for seed in SEEDS:
        with small(fake_cuda, lowered, seed) as bench:
            program = bench.program(plan)
            bench.run(program)
            driver = bench.backend.driver
            driver.skip_waits = {driver.waits + 1}
            wrong += not torch.equal(bench.run(program).outputs[0], expected)
    assert wrong


def test_a_replayed_inference_is_a_handful_of_calls(lowered: Lowered) -> None:
    plan = streaming_plan(lowered.graphs[Bucket(2)], frozenset({0}))
    with small(fake_cuda, lowered) as bench:
        program = bench.program(plan)
        driver = bench.backend.driver
        driver.calls.clear()
        bench.run(program)
        assert driver.calls == ["replay", "record", "synchronize"]


def test_events_are_recorded_only_where_somebody_waits(lowered: Lowered) -> None:
    for name, make in PLANS.items():
        commands = schedule_of(lowered, make(lowered.graphs[Bucket(2)])).commands
        recorded = [i.command.event for i in commands.issues if isinstance(i.command, Record)]
        waited = [i.command.event for i in commands.issues if isinstance(i.command, Wait)]
        assert len(set(recorded)) == len(recorded)
        assert set(recorded) == set(waited), name
        for item in (i.command for i in commands.issues if isinstance(i.command, Wait)):
            position = [i.command for i in commands.issues].index
            assert position(Record(item.event)) < position(item)


def test_no_lane_waits_for_what_it_has_waited_for(lowered: Lowered) -> None:
    plan = streaming_plan(lowered.graphs[Bucket(2)])
    commands = schedule_of(lowered, plan).commands
    swaps = sum(isinstance(i.command, Copy) for i in commands.issues)
    assert wait_count(commands) <= 2 * swaps + 1
    twice: list[Issue] = [i for i in commands.issues if isinstance(i.command, Wait)]
    assert len(twice) == len(set(twice))


def test_the_plan_s_waits_are_issued_as_they_stand(lowered: Lowered) -> None:
    """The plan's writer leaves out what others imply; here one is implied, and nothing leaves it out again."""
    with small(fake_cuda, lowered) as bench:
        program = bench.program(streaming_plan(bench.graph))
    counts = {2: 3, 3: 2, 4: 5}  # the fourth op waits for a copy that has ended before the third op's
    computes = tuple(replace(c, swap_ins_before=counts.get(n, 0)) for n, c in enumerate(program.computes))
    swap_ins = tuple(replace(s, step=0, computes_before=0) for s in program.swap_ins)
    issues = schedule(replace(program, computes=computes, swap_ins=swap_ins)).commands.issues
    assert [i.lane for i in issues if isinstance(i.command, Wait)] == ["swap_in", "compute", "compute", "compute"]


def test_small_neighbours_travel_together_and_large_ones_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models.export(models.Wide(8, 280), {"x": torch.zeros(3, 280)}, tmp_path / "model.pt2")
    lowered = lower(tmp_path / "model.pt2", "wide", [2], tmp_path / "cache")
    graph = lowered.graphs[Bucket(2)]
    everything = frozenset(graph.parameters)
    plan = streaming_plan(graph, everything)
    residents = schedule_of(lowered, plan).residents
    sizes = [graph.tensors[i].nbytes for i in graph.parameters]
    assert sum(c.nbytes for c in residents) == sum(sizes)
    assert len(residents) < len(sizes)
    assert all(c.nbytes <= 8 << 20 for c in residents)
    assert all(c.nbytes >= 2 << 20 for c in residents[:-1]), "all but the last are as large as a link wants them"
    assert not any(isinstance(s, Compute) and s.after for s in plan.steps)
