"""A model whose activations alone exceed the memory given is served in it, with the bits of its resident run."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cohabit.loadgen.zoo.exporting import export_model, save_model
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.plan import SwapIn, SwapOut
from cohabit.planner.shapes import Bucket
from cohabit.runtime.memory import StoreKind
from tests.e2e.test_memory import NON_PARAMETERS, Deployed, FrameWatch, allocated_peak_bytes, deployed
from tests.support.e2e.serving import infer, serving
from tests.support.planner.reference import peak_bytes
from tests.support.runtime.observing import addresses, on_one_thread

LEVELS = 6
BATCH = 4
BUCKET = Bucket(BATCH)


class LongSkips(nn.Module):
    """A U-Net's skip connections, all of one size: each waits from its level's way down to its way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1) for n in range(LEVELS))
        self.up = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(LEVELS))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        skips = []
        for conv in self.down:
            x = torch.relu(conv(x))
            skips.append(x)
        for conv in self.up:
            x = torch.tanh(conv(x) + skips.pop())
        return {"y": x}


def skips() -> LongSkips:
    torch.manual_seed(0)
    return LongSkips().eval()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("travelling")
    example = {"x": torch.zeros(2, 3, 64, 64)}
    path = root / "skips" / "1" / "model.pt2"
    save_model(export_model(skips(), example), path, {})
    return root


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def resident(repository: Path, cache: Path) -> list[torch.Tensor]:
    """The outputs with all the memory that there could be use for."""
    with deployed(repository, "256MiB", cache) as device:
        plan = device.model("skips").plans[BUCKET]
        assert not any(isinstance(step, SwapIn | SwapOut) for step in plan.steps)
        return device.run("skips", BUCKET)


@pytest.fixture(scope="module")
def least(repository: Path, cache: Path) -> int:
    with pytest.raises(InfeasibleBudget) as caught, deployed(repository, "64KiB", cache, search="best"):
        pass
    return caught.value.least_bytes


@pytest.fixture(scope="module", params=["ram", "file"])
def small(request: pytest.FixtureRequest, repository: Path, cache: Path, least: int) -> Iterator[Deployed]:
    """The model in the least memory that will do."""
    store: StoreKind = request.param
    with deployed(repository, f"{least}B", cache, store=store, search="best") as device:
        yield device


def test_a_budget_below_the_activations_peak_gives_the_resident_run_s_bits(
    small: Deployed, resident: list[torch.Tensor]
) -> None:
    graph, plan = small.model("skips").lowered.graphs[BUCKET], small.model("skips").plans[BUCKET]
    assert small.placement.decider.memory_bytes < peak_activation_bytes(graph)
    assert any(isinstance(step, SwapOut) for step in plan.steps)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(small.run("skips", BUCKET), resident, strict=True))
    small.run("skips", Bucket(1))


def test_no_step_holds_more_than_the_plan_has_for_activations(small: Deployed) -> None:
    watch = FrameWatch(addresses(small.arena))
    for _ in range(3):
        small.run("skips", BUCKET, watch.observe)
        assert max(watch.held.values()) <= small.workspace_bytes


def test_torch_allocates_no_more_than_the_plan_counts(small: Deployed) -> None:
    servable, examples = small.model("skips").servable, small.model("skips").lowered.examples
    graph, plan = small.model("skips").lowered.graphs[BUCKET], small.model("skips").plans[BUCKET]
    # A profiler sees the allocations of one thread.
    program = on_one_thread(servable.programs[BUCKET])
    servable.executor.run(program, examples(BUCKET))
    allocated = allocated_peak_bytes(program, examples(BUCKET), servable)
    assert allocated <= peak_bytes(graph, plan, NON_PARAMETERS) <= small.workspace_bytes
    assert allocated < peak_activation_bytes(graph)


def test_it_is_served_in_the_least_memory_and_a_page_less_is_refused(
    repository: Path, cache: Path, least: int
) -> None:
    x = np.random.default_rng(0).random((BATCH, 3, 64, 64), np.float32)
    with serving(repository, f"{least}B", cache, batch_sizes=(1, BATCH), search="best") as server:
        y = infer(server.address, "skips", {"x": x})["y"]
    with torch.no_grad():
        expected = skips()(torch.from_numpy(x))["y"].numpy()
    np.testing.assert_allclose(y, expected, atol=1e-5)
    with pytest.raises(InfeasibleBudget), deployed(repository, f"{least - 4096}B", cache, search="best"):
        pass
