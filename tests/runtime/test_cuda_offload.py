"""Activations that leave a CUDA device's memory and come back: a third stream, and no wait too few or too many."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan, SwapIn
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.errors import DeviceError, MemoryExceeded
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from tests.runtime.test_cuda_order import (
    goes_wrong,
    lowering,
    needed_waits,
    schedule_of,
    small,
    without,
    wrong_runs,
)
from tests.support.planner.graphs import profile_of
from tests.support.runtime import models
from tests.support.runtime.backends import fake_cuda, fake_staged, fake_streams, opened
from tests.support.runtime.cuda_fake import FakeDriver
from tests.support.runtime.plans import offloading_plan

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = range(25)
WIDTH = 264


class Skips(nn.Module):
    """What the first layers make waits for the last ones, one of which looks at it through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
            skips.append(x)
        for layer in self.layers[3:]:
            skip = skips.pop()
            x = torch.tanh(layer(x) + (skip if skips else skip.view(-1, 2, WIDTH // 2).flatten(1)))
        return x


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    folder = tmp_path_factory.mktemp("skips")
    return models.lowered(Skips(), {"x": torch.zeros(3, WIDTH)}, folder, "skips", [2])


@pytest.fixture(scope="module")
def expected(lowered: Lowered) -> torch.Tensor:
    with small(fake_cuda, lowered) as bench:
        return bench.run(bench.program(resident_plan(bench.graph))).outputs[0]


def streaming_too(graph: Graph) -> Plan:
    """Parameters stream past activations that travel."""
    profile = profile_of(graph, 1.0, bandwidth=1e5)
    with pytest.raises(InfeasibleBudget) as caught:
        search(Problem(graph, profile, Memory(4096)), "offloading")
    return search(
        Problem(graph, profile, Memory(caught.value.least_bytes)), "offloading", limit=Limit(evaluations=1)
    )


PLANS: dict[str, Callable[[Graph], Plan]] = {"travelling": offloading_plan, "streaming too": streaming_too}


@pytest.mark.long
@pytest.mark.parametrize("make", [fake_cuda, fake_streams, fake_staged])
@pytest.mark.parametrize("name", PLANS)
def test_every_order_of_the_streams_gives_the_resident_run_s_bits(
    name: str, make: Callable[[int], CudaBackend], lowered: Lowered, expected: torch.Tensor
) -> None:
    plan = PLANS[name](lowered.graphs[Bucket(2)])
    for seed in SEEDS:
        with small(make, lowered, seed) as bench:
            assert wrong_runs(bench, plan, expected) == 0, f"seed {seed}"


@pytest.mark.parametrize("name", PLANS)
def test_without_any_one_wait_some_order_goes_wrong(name: str, lowered: Lowered, expected: torch.Tensor) -> None:
    plan = PLANS[name](lowered.graphs[Bucket(2)])
    commands = schedule_of(lowered, plan).inference
    assert {"copy_out", "deallocate", "allocate", "copy_back"} <= {command.verb for command in commands}
    for left_out in needed_waits(commands):
        with lowering(lambda s, n=left_out: replace(s, inference=without(s.inference, n))):  # type: ignore[misc]
            assert goes_wrong(lowered, plan, expected), f"wait {left_out} of {name} is not needed"


def test_places_are_pinned_under_the_cap_and_given_back(lowered: Lowered) -> None:
    driver = FakeDriver(0)
    with opened(lambda: CudaBackend(driver), lowered, arena_bytes=10 << 20) as bench:
        before = driver.pinned_bytes
        program = bench.program(offloading_plan(bench.graph))
        assert driver.pinned_bytes - before >= sum({s.tensor: s.nbytes for s in program.swap_outs}.values())
        bench.executor.release(program)
        assert driver.pinned_bytes == before


def test_places_beyond_the_cap_are_refused_with_the_numbers(lowered: Lowered) -> None:
    cap = lowered.manifest.file_bytes
    refused = pytest.raises(MemoryExceeded, match=r"activations that leave memory: pinning .* exceeds the cap")
    with opened(lambda: CudaBackend(FakeDriver(0), cap), lowered, arena_bytes=10 << 20) as bench, refused:
        bench.program(offloading_plan(bench.graph))


def test_a_timeline_has_all_three_lanes(lowered: Lowered) -> None:
    with small(fake_cuda, lowered) as bench:
        program = bench.program(offloading_plan(bench.graph))
        timeline = bench.run(program, traced=True).timeline
        assert timeline is not None
        outs = [span.step for span in timeline.spans if span.lane == "swap_out"]
        back = [span.step for span in timeline.spans if span.lane == "swap_in"]
        assert outs == [s.step for s in program.swap_outs]
        assert back == [i for i, s in enumerate(program.plan.steps) if isinstance(s, SwapIn)]


def test_a_kernel_that_fails_leaves_no_activation_behind(lowered: Lowered, expected: torch.Tensor) -> None:
    with small(fake_streams, lowered) as bench:
        program = bench.program(offloading_plan(bench.graph))
        driver = bench.backend.driver  # type: ignore[attr-defined]
        driver.kernel_bytes = 1 << 40
        with pytest.raises(DeviceError):
            bench.run(program)
        driver.kernel_bytes = 0
        assert [t._storage for t in program.offloaded] == [None] * len(program.offloaded)
        assert torch.equal(bench.run(program).outputs[0], expected)
