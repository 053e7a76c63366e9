"""Models of a family in one partition: before a member runs, the residents of another one that differ are replaced."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cohabit.loadgen.zoo.exporting import save_model
from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import Copy
from cohabit.runtime.stores.host import LimitedStore, Links, RamStore
from tests.runtime.test_executor import evicting_plan
from tests.support.runtime import models
from tests.support.runtime.backends import (
    BACKENDS,
    ROOM_BYTES,
    Bench,
    cpu,
    fake_cuda,
    inline_cpu,
    opened,
)
from tests.support.runtime.plans import streaming_plan, with_room

MEMBERS, LAYERS, WIDTH = 4, 5, 264


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[Lowered]:
    """Models of one form. The first two differ in the last layer, each of the others in a layer of its own."""
    folder: Path = tmp_path_factory.mktemp("families")
    made = []
    for number in range(MEMBERS):
        torch.manual_seed(0)
        model = models.Wide(LAYERS, WIDTH)
        torch.manual_seed(number)
        if number:
            torch.nn.init.normal_(model.layers[-number].weight, std=0.06)  # type: ignore[arg-type]
        archive = folder / str(number) / "model.pt2"
        archive.parent.mkdir()
        models.export(model.eval(), {"x": torch.zeros(3, WIDTH)}, archive)
        made.append(lower(archive, f"member{number}", [2], folder / "cache"))
    return made


class CountingStore:
    """A store that counts the copies of each segment, and fails those that it is told to."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.copied: Counter[int] = Counter()
        self.failing: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def copy(self, segment: int, destination: Any) -> Copy:
        copy = self._store.copy(segment, destination)

        def counted() -> None:
            self.copied[segment] += 1
            if segment in self.failing:
                self.failing.discard(segment)
                raise OSError("the link is down")
            copy()

        return counted


@dataclass
class Family:
    """Members whose programs are bound to one partition, and what each answers alone."""

    bench: Bench
    lowered: Sequence[Lowered]
    stores: Sequence[CountingStore]
    expected: Sequence[torch.Tensor]

    def bound(self, plan: Plan, name: str, at: int = 0) -> list[Program]:
        """Return a program of each member. None is loaded."""
        backend: Backend = self.bench.backend
        roomy = with_room(plan, ROOM_BYTES)
        bases = Bases(at, at + roomy.memory.partition_bytes)
        return [
            replace(backend.build(lowered, roomy, None, self.bench.arena, bases, store), name=name)  # type: ignore[arg-type]
            for lowered, store in zip(self.lowered, self.stores, strict=True)
        ]

    def is_right(self, member: int, program: Program) -> bool:
        result = self.bench.executor.run(program, inputs(self.lowered[member]))
        return torch.equal(result.outputs[0], self.expected[member])


def inputs(lowered: Lowered) -> list[torch.Tensor]:
    return [tensor + 1 for tensor in lowered.examples(Bucket(2))]


def alone(bench: Bench, lowered: Lowered) -> torch.Tensor:
    """A member's answer in a partition of its own."""
    store = bench.backend.open_store("ram", lowered.weights_path, lowered.manifest)
    plan = with_room(resident_plan(lowered.graphs[Bucket(2)]), ROOM_BYTES)
    program = bench.backend.build(lowered, plan, None, bench.arena, Bases(0, plan.memory.partition_bytes), store)
    bench.executor.load(program)
    answer = bench.executor.run(program, inputs(lowered)).outputs[0].clone()
    bench.executor.release(program)
    store.close()
    return answer


@pytest.fixture(params=[case for case in BACKENDS if case.id != "cpu-packed"])
def family(request: pytest.FixtureRequest, members: list[Lowered]) -> Iterator[Family]:
    with family_on(request.param, members) as family:
        yield family


@contextmanager
def family_on(make: Callable[[], Backend], members: Sequence[Lowered]) -> Iterator[Family]:
    with opened(make, members[0]) as bench:
        expected = [alone(bench, lowered) for lowered in members]
        assert len({answer.numpy().tobytes() for answer in expected}) == MEMBERS
        stores = [bench.backend.open_store("ram", one.weights_path, one.manifest) for one in members]
        yield Family(bench, members, [CountingStore(store) for store in stores], expected)
        for store in stores:
            store.close()


def plans(family: Family, draws: random.Random) -> list[Plan]:
    graph = family.bench.graph
    some = frozenset(draws.sample(graph.parameters, 3))
    return [resident_plan(graph), evicting_plan(graph), streaming_plan(graph, some)]


def differing(family: Family, one: int, other: int) -> set[int]:
    count = len(family.lowered[0].manifest.segments)
    return {n for n in range(count) if family.stores[one].source(n) != family.stores[other].source(n)}


def test_members_of_one_partition_answer_as_each_does_alone(family: Family) -> None:
    draws = random.Random(0)
    for number, plan in enumerate(plans(family, draws)):
        programs = family.bound(plan, f"family {number}", at=number * (1 << 20))
        family.bench.executor.load(programs[0])
        for _ in range(24):
            member = draws.randrange(MEMBERS)
            assert family.is_right(member, programs[member])
            if draws.random() < 0.1:
                family.bench.executor.invalidate(programs[draws.randrange(MEMBERS)])
            if draws.random() < 0.1:
                family.bench.executor.settle()
        for program in programs:
            family.bench.executor.release(program)


def test_only_what_differs_is_copied_for_another_member(family: Family) -> None:
    """A plan that keeps all parameters copies nothing else."""
    executor, draws = family.bench.executor, random.Random(1)
    programs = family.bound(resident_plan(family.bench.graph), "family")
    for member, program in enumerate(programs):
        executor.load(program)
        assert family.is_right(member, program)
    now = MEMBERS - 1
    for _ in range(24):
        member = draws.randrange(MEMBERS)
        for store in family.stores:
            store.copied.clear()
        assert family.is_right(member, programs[member])
        executor.settle()
        copied = family.stores[member].copied
        assert copied.keys() == (differing(family, now, member) if member != now else set())
        assert all(not store.copied for store in family.stores if store is not family.stores[member])
        now = member


def test_a_member_that_joins_copies_nothing_and_one_that_leaves_takes_nothing(members: list[Lowered]) -> None:
    with family_on(cpu, members) as family:
        executor, stores = family.bench.executor, family.stores
        first, second, *_ = family.bound(evicting_plan(family.bench.graph), "family")
        for program, in_place in ((first, False), (second, True)):
            for _ in executor.load_in_pieces([program], in_place=in_place):
                pass
        assert not stores[1].copied
        assert family.is_right(0, first)
        assert family.is_right(1, second)
        executor.release(second)
        stores[0].copied.clear()
        assert family.is_right(0, first)
        executor.settle()
        streamed = {step.tensor for step in first.swap_ins}
        assert stores[0].copied.keys() <= differing(family, 0, 1) | streamed


@pytest.mark.parametrize("make", [cpu, inline_cpu, fake_cuda])
def test_a_failed_exchange_is_an_error_of_its_run_at_most(
    make: Callable[[], Backend], members: list[Lowered]
) -> None:
    """The runs after it are right, those of the member that was there before among them."""
    with family_on(make, members) as family:
        draws, failed = random.Random(2), 0
        for number, plan in enumerate(plans(family, draws)):
            programs = family.bound(plan, f"family {number}", at=number * (1 << 20))
            for program in programs:
                family.bench.executor.load(program)
            for _ in range(40):
                member = draws.randrange(MEMBERS)
                if draws.random() < 0.3:
                    family.stores[member].failing.add(draws.choice(family.bench.graph.parameters))
                try:
                    assert family.is_right(member, programs[member])
                except DeviceError:
                    failed += 1
                family.stores[member].failing.clear()
            for member, program in enumerate(programs):
                assert family.is_right(member, program)
        assert failed


class WithTable(torch.nn.Module):
    """An output is a parameter that no op reads."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(64, 64)
        self.table = torch.nn.Parameter(torch.full((3, 1 << 18), float(number)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.table


def test_a_parameter_that_is_only_an_output_is_the_members_own(tmp_path: Path) -> None:
    """Its copy is on its way when the last op has ended."""
    made = []
    for number in range(2):
        archive = tmp_path / str(number) / "model.pt2"
        archive.parent.mkdir()
        program = torch.export.export(WithTable(number).eval(), (), kwargs={"x": torch.zeros(3, 64)})
        save_model(program, archive, {})
        made.append(lower(archive, f"table{number}", [3], tmp_path / "cache"))
    with opened(cpu, made[0]) as bench:
        plan = with_room(resident_plan(made[0].graphs[Bucket(3)]), ROOM_BYTES)
        bases, links, programs = Bases(0, plan.memory.partition_bytes), Links(), []
        for lowered in made:
            store: Any = RamStore(lowered.weights_path, lowered.manifest)
            late: Any = LimitedStore(store, 1e9, links)
            program = bench.backend.build(lowered, plan, None, bench.arena, bases, late)
            programs.append(replace(program, name="family"))
        bench.executor.load(programs[0])
        for number in (1, 0, 1, 1, 0):
            outputs = bench.executor.run(programs[number], made[number].examples(Bucket(3))).outputs
            (table,) = (output for output in outputs if output.shape[1] == 1 << 18)
            assert bool((table == number).all())
