"""Plans in which everything is counted run as they are: with the bits of the resident plan, and within the budget."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from cohabit.planner.memory import single_budget
from cohabit.planner.plan import Compute, Plan, SwapIn, SwapOut
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.errors import UnsupportedPlan
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import HostStore
from tests.support.planner.graphs import profile_of
from tests.support.planner.searchers import SINGLE
from tests.support.runtime import models
from tests.support.runtime.backends import Bench, cpu, fake_cuda, fake_staged, opened, packed
from tests.support.runtime.observing import addresses, note_held
from tests.support.runtime.plans import partly_addressed_plan, recomputing_plan


class Convolutions(nn.Module):
    """Two convolutions beside a residual connection, and a classifier. Each weight is a tensor of its own to plans."""

    def __init__(self, channels: int = 96) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.classes = nn.Linear(channels * 8 * 8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stem = self.stem(x)
        mixed = self.second(torch.relu(self.first(stem))) + stem
        return self.classes(nn.functional.avg_pool2d(mixed, 2).flatten(1))


class Transformer(nn.Module):
    """A layer of an encoder, its projections one by one."""

    def __init__(self, width: int = 264) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        weights = torch.softmax(self.query(y) @ self.key(y).transpose(1, 2), -1)
        x = x + self.out(weights @ self.value(y))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (Convolutions, (3, 16, 16)),
    "transformer": (Transformer, (12, 264)),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Lowered]:
    make, shape = MODELS[request.param]
    torch.manual_seed(0)
    made, folder = make().eval(), tmp_path_factory.mktemp("counted")
    return made, models.lowered(made, {"x": torch.randn(3, *shape)}, folder, request.param, [2])


@pytest.fixture(params=[cpu, fake_cuda], ids=["cpu", "fake-cuda"])
def bench(request: pytest.FixtureRequest, model: tuple[nn.Module, Lowered]) -> Iterator[Bench]:
    with opened(request.param, model[1]) as bench:
        yield bench


def program_of(bench: Bench, plan: Plan, store: HostStore | None = None) -> Program:
    """The plan as it is on the CPU; a CUDA pool has some room on top, as torch's allocator rounds."""
    if isinstance(bench.backend, CudaBackend):
        return bench.program(plan, store)
    program = bench.backend.build(bench.lowered, plan, None, bench.arena, Bases(0, 0), store or bench.store)
    bench.executor.load(program)
    return program


def most_held(bench: Bench, program: Program) -> int:
    """Run, and return the largest number of bytes that inputs, activations and parameters have before an op."""
    held: dict[int, int] = {}
    bench.run(note_held(held, program, addresses(bench.arena)))
    return max(held.values())


def moves(plan: Plan) -> tuple[int, int]:
    """How many tensors the plan copies in, and out."""
    return sum(isinstance(s, SwapIn) for s in plan.steps), sum(isinstance(s, SwapOut) for s in plan.steps)


@pytest.mark.parametrize("searcher", SINGLE)
def test_a_searcher_s_plan_runs_within_its_budget(
    bench: Bench, model: tuple[nn.Module, Lowered], searcher: str
) -> None:
    kept = bench.run(bench.program(resident_plan(bench.graph))).outputs[0]
    with torch.no_grad():
        torch.testing.assert_close(kept, model[0](*bench.lowered.examples(Bucket(2))), atol=1e-5, rtol=1e-5)
    least, whole = least_bytes(bench.graph), bench.graph.parameter_bytes + resident_plan(bench.graph).pool_bytes
    profile = profile_of(bench.graph, 1e-3, bandwidth=1e7)
    for share in (0.0, 0.3):
        memory = single_budget(least + int(share * (whole - least)) // 4096 * 4096)
        plan = search(Problem(bench.graph, profile, memory), searcher, limit=Limit(evaluations=20))
        program = program_of(bench, plan)
        for _ in range(3):
            assert torch.equal(bench.run(program).outputs[0], kept), share
        assert moves(plan)[0] > 0, f"nothing had to leave at {share:.0%}"
        if isinstance(bench.backend, CpuBackend):
            assert most_held(bench, program) <= memory.nbytes
        bench.executor.release(program)


def test_activations_are_computed_again(bench: Bench) -> None:
    kept = bench.run(bench.program(resident_plan(bench.graph))).outputs[0]
    plan = recomputing_plan(bench.graph)
    assert sum(isinstance(s, Compute) for s in plan.steps) > len(bench.graph.ops)
    program = program_of(bench, plan)
    for _ in range(3):
        assert torch.equal(bench.run(program).outputs[0], kept)
    if isinstance(bench.backend, CpuBackend):
        assert most_held(bench, program) <= plan.memory.nbytes


def test_only_some_parameters_may_have_addresses(bench: Bench) -> None:
    kept = bench.run(bench.program(resident_plan(bench.graph))).outputs[0]
    plan = partly_addressed_plan(bench.graph)
    assert plan.pooled
    assert {bench.graph.tensors[t].kind for t in plan.addressed} == {"parameter"}
    program = bench.program(plan)
    for _ in range(3):
        assert torch.equal(bench.run(program).outputs[0], kept)


def test_the_search_by_generations_sends_activations_out(bench: Bench) -> None:
    """So that the tests above are of plans that copy in both directions."""
    memory = single_budget(least_bytes(bench.graph))
    problem = Problem(bench.graph, profile_of(bench.graph, 1e-3, bandwidth=1e7), memory)
    assert moves(search(problem, "swapadvisor", limit=Limit(evaluations=20)))[1] > 0


def test_packed_weights_are_not_counted(model: tuple[nn.Module, Lowered]) -> None:
    lowered = packed(model[1])
    plan = recomputing_plan(lowered.graphs[Bucket(2)])
    with opened(cpu, lowered) as bench, pytest.raises(UnsupportedPlan, match="are packed; lower the model without"):
        program_of(bench, plan)


def test_counted_parameters_come_from_pinned_memory(model: tuple[nn.Module, Lowered]) -> None:
    with opened(fake_staged, model[1]) as bench, pytest.raises(UnsupportedPlan, match="pinned"):
        program_of(bench, recomputing_plan(bench.graph))
