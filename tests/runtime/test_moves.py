"""Models that move, load and leave while restores are late and inferences are begun ahead of others.

Nobody's bytes change but by its own copies, and every answer is that of its own inputs.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend, Result
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.executor import CudaExecutor
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import HostStore
from cohabit.runtime.stores.host import open_store
from tests.runtime.test_cuda_executor import MIB, driver_of
from tests.runtime.test_executor import evicting_plan
from tests.support.runtime import models
from tests.support.runtime.backends import (
    ROOM_BYTES,
    Bench,
    cpu,
    fake_cuda,
    fake_staged,
    fake_streams,
    inline_cpu,
    opened,
)
from tests.support.runtime.plans import streaming_plan, with_room

T = TypeVar("T")
PAGE_BYTES, PARTITIONS_AT, WORKSPACE_BYTES = 128 << 10, 16 << 20, 8 << 20
ARENA_BYTES = PARTITIONS_AT + (4 << 20)
VARIANTS = 3


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> list[Lowered]:
    """Two models of one form with other weights."""
    made = []
    for seed in range(2):
        folder: Path = tmp_path_factory.mktemp("moves")
        torch.manual_seed(seed)
        made.append(models.lowered(models.Wide(5, 264), {"x": torch.zeros(3, 264)}, folder, f"wide{seed}", [2]))
    return made


def inputs_of(lowered: Lowered, variant: int) -> list[torch.Tensor]:
    return [tensor + variant for tensor in lowered.examples(Bucket(2))]


@dataclass
class Placed:
    """A load of a model: its programs are bound to one range of the arena after another."""

    load_id: str
    lowered: Lowered
    lane: int
    program: Program
    extent: range
    expected: list[torch.Tensor]
    """By the inputs' variant."""
    before: tuple[Program, range] | None = None
    """What it was before its last move, if that can be taken back."""


@dataclass(eq=False)
class Begun:
    placed: Placed
    outcome: Result | Callable[[], Result]
    expected: torch.Tensor


@dataclass
class Arena:
    """Loads, moves and releases models as `server.deploy.migrate` does, with each lane's calls on its own thread."""

    backend: Backend
    bench: Bench
    lanes: int
    draws: random.Random
    stores: dict[str, HostStore[Any]]
    expected: dict[str, list[torch.Tensor]]
    kinds: Sequence[Lowered]
    threads: list[ThreadPoolExecutor]
    live: list[Placed] = field(default_factory=list)
    loads: int = 0
    gates: dict[int, list[threading.Event]] = field(default_factory=lambda: {0: [], 1: []})
    begun: list[Begun] = field(default_factory=list)
    """Inferences whose answers nobody has taken."""
    ahead: int = 0
    """Number of inferences that were begun during another one of their lane."""

    def on(self, lane: int, call: Callable[..., T], *arguments: Any) -> T:
        return self.threads[lane].submit(call, *arguments).result()

    def executor(self, lane: int) -> Any:
        return self.backend.executors(self.lanes)[lane]

    def plan(self, lowered: Lowered) -> Plan:
        graph = lowered.graphs[Bucket(2)]
        resident = frozenset(self.draws.sample(range(5), self.draws.randrange(4)))
        makers = [evicting_plan, evicting_plan, resident_plan, lambda graph: streaming_plan(graph, resident)]
        return with_room(self.draws.choice(makers)(graph), ROOM_BYTES)

    def free(self, nbytes: int, own: Placed | None = None, near: int | None = None) -> range | None:
        """A range that no other model has, at `near` if possible; it may overlap a model's own."""
        starts = list(range(PARTITIONS_AT, ARENA_BYTES - nbytes + 1, PAGE_BYTES))
        self.draws.shuffle(starts)
        starts.sort(key=lambda start: start != near)
        taken = [extent for p in self.live if p is not own for extent in (p.extent, *(p.before or ())[1:])]
        for start in starts:
            if all(start >= other.stop or start + nbytes <= other.start for other in taken):
                return range(start, start + nbytes)
        return None

    def bound(self, lowered: Lowered, plan: Plan, extent: range, lane: int, load_id: str) -> Program:
        bases = Bases(extent.start, lane * WORKSPACE_BYTES)
        program = self.backend.build(lowered, plan, None, self.bench.arena, bases, self.stores[lowered.name])
        return replace(program, name=load_id)

    def bring_in(self, program: Program, lane: int) -> None:
        for _ in self.executor(lane).load_in_pieces([program]):
            pass

    def load(self, near: int | None = None) -> None:
        lowered, lane = self.draws.choice(self.kinds), self.draws.randrange(self.lanes)
        plan = self.plan(lowered)
        extent = self.free(plan.memory.partition_bytes, near=near)
        if extent is not None:
            self.loads += 1
            name = f"{lowered.name}#{self.loads}"
            program = self.bound(lowered, plan, extent, lane, name)
            self.on(lane, self.bring_in, program, lane)
            self.live.append(Placed(name, lowered, lane, program, extent, self.expected[lowered.name]))

    def run(self, placed: Placed) -> None:
        """Begin an inference of other inputs than the last one's, and take one or more of the answers of all."""
        variant = self.draws.randrange(VARIANTS)
        inputs = inputs_of(placed.lowered, variant)
        executor = self.executor(placed.lane)
        self.ahead += any(callable(b.outcome) and b.placed.lane == placed.lane for b in self.begun) and self.on(
            placed.lane, executor.launches_ahead, placed.program
        )
        outcome = self.on(placed.lane, executor.begin, placed.program, inputs)
        if callable(outcome):
            for tensor in inputs:
                tensor.fill_(torch.nan)
        self.begun.append(Begun(placed, outcome, placed.expected[variant]))
        while len(self.begun) > self.draws.randrange(4):
            self.answer(self.draws.choice(self.begun))

    def answer(self, begun: Begun) -> None:
        self.begun.remove(begun)
        outcome = begun.outcome
        result = self.on(begun.placed.lane, outcome) if callable(outcome) else outcome
        assert torch.equal(result.outputs[0], begun.expected), begun.placed.load_id

    def answer_all(self) -> None:
        while self.begun:
            self.answer(self.begun[0])

    def move(self, placed: Placed) -> None:
        """To another place, or with another plan; for a while it can be taken back."""
        self.settle_change(placed)
        plan = self.plan(placed.lowered)
        extent = self.free(plan.memory.partition_bytes, placed)
        if extent is not None:
            program = self.bound(placed.lowered, plan, extent, placed.lane, placed.load_id)
            if self.lanes > 1:  # with one lane, its order suffices
                self.on(placed.lane, self.executor(placed.lane).settle)
            self.on(placed.lane, self.bring_in, program, placed.lane)
            placed.before = placed.program, placed.extent
            placed.program, placed.extent = program, extent

    def settle_change(self, placed: Placed) -> None:
        """Take the last move back, or release what was before it."""
        if placed.before is None:
            return
        executor, (program, extent) = self.executor(placed.lane), placed.before
        placed.before = None
        if self.draws.random() < 0.4:
            self.on(placed.lane, executor.invalidate, program)
            program, placed.program = placed.program, program
            extent, placed.extent = placed.extent, extent
        if self.draws.random() < 0.5:
            # Its bytes are given away before it is released.
            if self.lanes > 1:
                self.on(placed.lane, executor.settle)
            self.load(extent.start)
        self.let_go()
        self.on(placed.lane, executor.release, program)

    def vacate(self, placed: Placed) -> None:
        """Another model gets the bytes before this one has moved."""
        self.settle_change(placed)
        self.delay()
        self.run(placed)
        if self.lanes > 1:
            self.on(placed.lane, self.executor(placed.lane).settle)
        program, start = placed.program, placed.extent.start
        placed.extent = range(0)
        self.load(start)
        self.move(placed)
        if placed.program is program:
            self.live.remove(placed)  # there was no room
        placed.before = None
        self.let_go()
        self.on(placed.lane, self.executor(placed.lane).release, program)

    def leave(self, placed: Placed) -> None:
        self.settle_change(placed)
        self.let_go()
        self.on(placed.lane, self.executor(placed.lane).release, placed.program)
        self.live.remove(placed)

    def delay(self) -> None:
        """All restores are late from now on."""
        for lane in range(self.lanes):
            executor = self.executor(lane)
            if isinstance(executor, CudaExecutor) and not self.gates[lane]:
                self.gates[lane].append(threading.Event())
                executor._transfers._thread.submit(self.gates[lane][-1].wait)

    def let_go(self) -> None:
        """Restores that are late are issued now."""
        for lane, gates in self.gates.items():
            for gate in gates:
                gate.set()
                self.executor(lane)._transfers._thread.submit(int).result()
            gates.clear()


@pytest.fixture
def arena(request: pytest.FixtureRequest, lowered: list[Lowered], lanes: int, seed: int) -> Iterator[Arena]:
    make = request.param
    with ExitStack() as stack:
        bench = stack.enter_context(
            opened(
                lambda: make(seed) if make in (fake_cuda, fake_staged, fake_streams) else make(),
                lowered[0],
                ARENA_BYTES,
            )
        )
        backend = bench.backend
        stores = {one.name: backend.open_store("ram", one.weights_path, one.manifest) for one in lowered}
        expected = {}
        for one in lowered:
            plan = with_room(resident_plan(one.graphs[Bucket(2)]), ROOM_BYTES)
            program = backend.build(one, plan, None, bench.arena, Bases(PARTITIONS_AT, 0), stores[one.name])
            backend.executor.load(program)
            results = [backend.executor.run(program, inputs_of(one, n)) for n in range(VARIANTS)]
            expected[one.name] = [result.outputs[0].clone() for result in results]
            backend.executor.release(program)
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(lanes)]
        made = Arena(backend, bench, lanes, random.Random(seed), stores, expected, lowered, threads)
        stack.callback(lambda: [store.close() for store in stores.values()])
        stack.callback(made.let_go)
        yield made
        for lane in range(lanes):
            for placed in [p for p in made.live if p.lane == lane]:
                made.leave(placed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    "arena",
    [pytest.param(make, id=make.__name__) for make in (cpu, inline_cpu, fake_cuda, fake_streams, fake_staged)],
    indirect=True,
)
def test_no_bytes_of_a_model_change_but_by_its_own_copies(arena: Arena) -> None:
    """Random runs, loads, moves, plans of other sizes, moves taken back and releases, with restores that are late."""
    for _ in range(30):
        placed = arena.draws.choice(arena.live) if arena.live else None
        if placed is None or (len(arena.live) < 3 and arena.draws.random() < 0.3):
            arena.load()
            continue
        match arena.draws.randrange(10):
            case 0 | 1:
                arena.run(placed)
            case 2 | 3 | 4:
                arena.delay()
                arena.run(placed)
                arena.move(placed)
            case 5 | 6:
                arena.settle_change(placed)
            case 7 | 8:
                arena.vacate(placed)
            case _:
                arena.leave(placed)
        if not any(arena.gates.values()):
            for placed in arena.live:
                arena.run(placed)
    arena.let_go()
    for _ in range(2):
        for placed in arena.live:
            arena.run(placed)
    arena.answer_all()
    for lane in range(arena.lanes):
        arena.on(lane, arena.executor(lane).settle)
    for placed in list(arena.live):
        arena.run(placed)
    arena.answer_all()
    if arena.backend.name == "fake" and arena.live:  # CPUs compute in the calling thread
        captured = all(p.program.admission.graph is not None for p in arena.live)  # type: ignore[attr-defined]
        assert (arena.ahead > 0) == captured


@pytest.fixture
def bench(lowered: list[Lowered]) -> Iterator[Bench]:
    with opened(fake_cuda, lowered[0], 16 * MIB) as bench:
        yield bench


def test_released_programs_leave_no_names(bench: Bench) -> None:
    executor = bench.executor
    assert isinstance(executor, CudaExecutor)
    for number in range(3):
        lowered = replace(bench.lowered, name=f"load {number}")
        program = bench.beside(lowered, evicting_plan(bench.graph), Bases(0, 4 * MIB))
        bench.run(program)
        executor.invalidate(program)
        executor.release(program)
    assert (executor._transfers._pending, dict(executor._contents)) == ({}, {})


def test_a_store_may_be_opened_while_a_lane_captures(bench: Bench) -> None:
    """By a load that fails, on another thread: it waits for no lane's streams."""
    plan = with_room(streaming_plan(bench.graph), 6 * MIB)
    program = bench.backend.build(bench.lowered, plan, None, bench.arena, Bases(0, 0), bench.store)
    errors: list[BaseException] = []

    def open_one() -> None:
        try:
            assert isinstance(bench.backend, CudaBackend)
            manifest = bench.lowered.manifest
            bench.backend.staged(open_store("ram", bench.lowered.weights_path, manifest), manifest)
        except BaseException as error:
            errors.append(error)

    done: list[bool] = []
    first: Callable[[], None] = program.copies[0]  # type: ignore[attr-defined]

    def copy() -> None:
        first()
        if driver_of(bench)._capture is not None and not done:
            done.append(True)
            thread = threading.Thread(target=open_one)
            thread.start()
            thread.join()

    program = replace(program, copies=(copy, *program.copies[1:]))  # type: ignore[attr-defined,call-arg]
    bench.executor.load(program)
    assert done
    assert not errors, repr(errors[0])
