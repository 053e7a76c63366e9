"""The events that lowering puts between streams are enough, and none of them is too many.

Every legal order of the fake device's streams gives eager PyTorch's bits; leave out any one wait, and some order
does not.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from msgspec import structs

from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Compute, Plan
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Link, Profile
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.draft import SwapStep
from cohabit.runtime.cuda import program as cuda_program
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.commands import (
    FORK,
    Commands,
    Forecast,
    IssueSchedule,
    Joining,
    joined,
    schedule,
)
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.lower import Lowered
from tests.runtime.test_executor import evicting_plan, partition_plan
from tests.support.planner.graphs import profile_of
from tests.support.runtime import models
from tests.support.runtime.backends import Bench, fake_cuda, fake_staged, fake_streams, opened
from tests.support.runtime.plans import streaming_plan

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = range(25)


@pytest.fixture(scope="module")
def lowered(narrow: Lowered) -> Lowered:
    return narrow


@pytest.fixture(scope="module")
def expected(lowered: Lowered) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return models.Wide(5, 264).eval()(*lowered.examples(Bucket(2)))


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


@pytest.mark.long
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
    waits = [n for n, command in enumerate(commands) if command.verb == "wait"]
    return tuple(command for n, command in enumerate(commands) if n != waits[left_out])


def schedule_of(lowered: Lowered, plan: Plan) -> IssueSchedule:
    found: list[IssueSchedule] = []
    with lowering(lambda s: found.append(s) or s), small(fake_cuda, lowered) as bench:
        bench.program(plan)
    return found[0]


@pytest.mark.parametrize("name", ["streaming", "half resident", "searched"])
def test_without_any_one_wait_some_order_goes_wrong(name: str, lowered: Lowered, expected: torch.Tensor) -> None:
    plan = PLANS[name](lowered.graphs[Bucket(2)])
    commands = schedule_of(lowered, plan).inference
    for left_out in needed_waits(commands):
        with lowering(lambda s, n=left_out: replace(s, inference=without(s.inference, n))):
            assert goes_wrong(lowered, plan, expected), f"wait {left_out} of {name} is not needed"


def needed_waits(commands: Commands) -> list[int]:
    """Numbers of the waits, without that for the start: by it the copies join a capture; streams do without."""
    waits = [command for command in commands if command.verb == "wait"]
    needed = [number for number, wait in enumerate(waits) if wait.index != FORK]
    assert len(needed) > 1
    return needed


def goes_wrong(lowered: Lowered, plan: Plan, expected: torch.Tensor) -> bool:
    for seed in range(200):
        try:
            with small(fake_streams, lowered, seed) as bench:
                if wrong_runs(bench, plan, expected):
                    return True
        except (AssertionError, DeviceError):  # bytes that are not there when it is tried
            return True
    return False


def test_a_run_waits_for_the_epilogue_of_its_model_s_last(lowered: Lowered, expected: torch.Tensor) -> None:
    """Without that wait, which the executor adds, a run reads what is still on its way back."""
    plan = evicting_plan(lowered.graphs[Bucket(2)])
    wrong = 0
    for seed in SEEDS:
        with small(fake_cuda, lowered, seed) as bench:
            program, driver = bench.program(plan), bench.backend.driver
            transfers = bench.executor._transfers
            transfers.submit = transfers.issue  # all at once: the thread would wait for each piece's end
            bench.run(program)
            driver.skip_waits = {driver.waits + 1}
            wrong += not torch.equal(bench.run(program).outputs[0], expected)
    assert wrong


def test_each_event_is_recorded_once_and_before_it_is_waited_for(lowered: Lowered) -> None:
    for name, make in PLANS.items():
        commands = schedule_of(lowered, make(lowered.graphs[Bucket(2)])).inference
        recorded = [c.index for c in commands if c.verb == "record"]
        waited = [c.index for c in commands if c.verb == "wait"]
        assert len(set(recorded)) == len(recorded)
        assert set(recorded) == set(waited), name
        position = [(c.verb, c.index) for c in commands].index
        assert all(position(("record", event)) < position(("wait", event)) for event in waited)


def test_the_plan_s_waits_are_issued_as_they_stand(lowered: Lowered) -> None:
    """The plan's writer leaves out what others imply; here one is implied, and nothing leaves it out again."""
    with small(fake_cuda, lowered) as bench:
        program = bench.program(streaming_plan(bench.graph))
    counts = {2: 3, 3: 2, 4: 5}  # the fourth op waits for a copy that has ended before the third op's
    computes = tuple(replace(c, swap_ins_before=counts.get(n, 0)) for n, c in enumerate(program.computes))
    swap_ins = tuple(replace(s, step=0, computes_before=0) for s in program.swap_ins)
    commands = schedule(replace(program, computes=computes, swap_ins=swap_ins)).inference
    assert [c.lane for c in commands if c.verb == "wait"] == ["swap_in", "compute", "compute", "compute"]


def test_residents_travel_in_copies_as_large_as_the_link_wants_them(tmp_path: Path) -> None:
    lowered = models.lowered(models.Wide(8, 280), {"x": torch.zeros(3, 280)}, tmp_path, "wide", [2])
    graph = lowered.graphs[Bucket(2)]
    everything = frozenset(graph.parameters)
    plan = streaming_plan(graph, everything)
    scheduled = schedule_of(lowered, plan)
    assert [scheduled.copies[copy].nbytes for copy in scheduled.residents] == [
        sum(graph.tensors[i].nbytes for i in graph.parameters)
    ]
    assert not any(isinstance(s, Compute) and s.after for s in plan.steps)


H200 = Link(3.2e-6, 52.5e9)


def neighbours(sizes: list[int], waits: dict[int, int] | None = None) -> list[SwapStep]:
    """Swap-ins of segments in a row; `waits` says how many ops some of them wait for."""
    offsets = accumulate(sizes, initial=0)
    return [
        SwapStep("swap_in", n, n, nbytes, (waits or {}).get(n, 0), offset=at)
        for n, (nbytes, at) in enumerate(zip(sizes, offsets, strict=False))
    ]


def profile_with(link: Link) -> Profile:
    return Profile("", "a GPU", (), link, link)


@pytest.mark.parametrize(
    ("link", "target_bytes"),
    [(H200, 8 << 20), (Link(1e-6, 26e9), 2 << 20), (Link(4e-6, 26e9), 5_200_000), (Link(1e-3, 52e9), 8 << 20)],
)
def test_what_a_copy_costs_decides_how_large_joined_copies_are(link: Link, target_bytes: int) -> None:
    """Their time is fifty times what every copy costs: the link is used to 98 %. No copy of several exceeds 16 MiB."""
    joining = Joining.of(profile_with(link))
    assert joining.target_bytes == pytest.approx(target_bytes, rel=0.01)
    copies = joined(neighbours([300_000] * 400), 0, joining)
    assert sum(c.nbytes for c in copies) == 120_000_000
    assert all(joining.target_bytes <= c.nbytes <= 2 * joining.target_bytes <= 16 << 20 for c in copies[:-1])


def test_a_large_copy_is_not_joined_beyond_twice_what_is_enough() -> None:
    sizes = [1 << 20, 20 << 20, 1 << 20, 15 << 20]
    assert [c.nbytes for c in joined(neighbours(sizes), 0, Joining.of(profile_with(H200)))] == [
        1 << 20,
        20 << 20,
        16 << 20,
    ]


@pytest.mark.parametrize(
    ("count", "op_s", "waits", "sizes"),
    [
        pytest.param(10, 1e-6, {}, [2, 2, 2, 2, 2], id="the first op would wait for all of a joined copy"),
        pytest.param(10, 1e-3, {}, [2, 8], id="only the first op waits for its copy"),
        pytest.param(8, 1e-6, {3: 1}, [2, 1, 2, 2, 1], id="none waits for what its neighbour waits for"),
        pytest.param(8, 0.1, {3: 1}, [8], id="it is in time even then"),
        pytest.param(8, None, {}, [2, 2, 2, 2], id="without a profile every op is near"),
    ],
)
def test_copies_are_joined_where_no_op_waits_for_it(
    count: int, op_s: float | None, waits: dict[int, int], sizes: list[int], lowered: Lowered
) -> None:
    program = timed(lowered, [1 << 20] * count, op_s or 1.0, waits)
    if op_s is None:
        program = replace(program, draft=replace(program.draft, profile=None))
    copies = joined(program.swap_ins, 0, Joining.of(program.draft.profile), Forecast.of(program))
    assert [c.nbytes >> 20 for c in copies] == sizes


def timed(lowered: Lowered, sizes: list[int], op_s: float, waits: dict[int, int] | None = None) -> CudaProgram:
    """A program whose last ops read a segment each, in the given time of its ops."""
    graph = lowered.graphs[Bucket(2)]
    with small(fake_cuda, lowered) as bench:
        program = bench.program(streaming_plan(graph))
    count = len(program.computes)
    assert len(sizes) <= count
    needs = [max(0, n + 1 - (count - len(sizes))) for n in range(count)]
    profile = structs.replace(profile_with(H200), op_seconds=(op_s,) * count)
    return replace(
        program,
        computes=tuple(
            replace(c, step=2 * n + 1, swap_ins_before=k)
            for n, (c, k) in enumerate(zip(program.computes, needs, strict=True))
        ),
        swap_ins=tuple(replace(s, step=2 * s.computes_before) for s in neighbours(sizes, waits)),
        draft=replace(program.draft, profile=profile),
    )


def test_no_op_begins_later_because_copies_are_joined(lowered: Lowered) -> None:
    for op_s in (1e-6, 5e-5, 2e-4, 1e-3):
        program = timed(lowered, [1 << 20] * 10, op_s, {3: 1, 5: 2, 7: 4})
        forecast, joining = Forecast.of(program), Joining.of(program.draft.profile)
        free_s, latest = 0.0, 0
        for copy in joined(program.swap_ins, 0, joining, forecast):
            latest = max(latest, *(s.computes_before for s in program.swap_ins[copy.first : copy.last]))
            free_s = max(free_s, forecast.ends_s[latest]) + H200.seconds(copy.nbytes)
            if copy.nbytes > joining.target_bytes // 4:
                assert free_s <= forecast.latest_s[copy.first], op_s


def test_a_joined_copy_is_issued_before_the_op_of_its_first_part(lowered: Lowered) -> None:
    """A plan may name a copy late that could begin early; what it is joined with is needed before."""
    program = timed(lowered, [1 << 20] * 8, 0.1)
    late = replace(program.swap_ins[-1], step=2 * 8)
    program = replace(program, swap_ins=(*program.swap_ins[:-1], late))
    scheduled = schedule(program)
    (copy,) = [scheduled.copies[c.index] for c in scheduled.inference if c.verb == "copy"]
    assert copy.last - copy.first == 8
    assert [c.verb for c in scheduled.inference if c.lane == "swap_in"] == ["wait", "copy", "record"]
