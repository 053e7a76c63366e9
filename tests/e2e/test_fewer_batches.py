"""Models whose largest batches run as several smaller ones, and starts whose memory was never divided before."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import Dim

from cohabit.loadgen.zoo.exporting import save_model
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.sizing.problem import Division
from cohabit.server.deploy import replan
from cohabit.server.deploy.divide import Planner
from tests.support.e2e.serving import Running, ask, infer, serving
from tests.support.e2e.stacks import Stacks, answer, expected

WIDTH, COPIES, BATCHES = 64, 2048, (1, 2, 4, 8)
HUNGRY, STACKS = "hungry", {"a": 0, "b": 1}
ROW_BYTES = 4 * WIDTH * COPIES
"""Of an activation."""


class Hungry(torch.nn.Module):
    """Its activations are far larger than its parameters, and grow with the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        many = x[:, None] * torch.linspace(0.5, 1, COPIES)[:, None]
        return torch.relu(self.second(torch.relu(self.first(many)))).mean(1)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, stacks: Stacks) -> Path:
    folder = tmp_path_factory.mktemp("fewer") / "models"
    for name, seed in STACKS.items():
        stacks.put(folder, name, seed)
    path = folder / HUNGRY / "1" / "model.pt2"
    path.parent.mkdir(parents=True)
    dims = {"x": {0: Dim("batch", min=1, max=8)}}
    save_model(
        torch.export.export(Hungry().eval(), (), {"x": torch.zeros(2, WIDTH)}, dynamic_shapes=dims), path, {}
    )
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all servers here: the first of them lowers and measures the models."""
    return tmp_path_factory.mktemp("cache")


MEMORY = "6MiB"
"""Less than the activations of a batch of eight."""


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, WIDTH)).astype(np.float32)


def eager(x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        answered: np.ndarray = Hungry().eval()(torch.from_numpy(x)).numpy()
    return answered


def most_planned(server: Running, name: str) -> int:
    return max(server.placement.models[name, 1].plans).batch


def test_a_batch_that_is_left_out_runs_as_smaller_ones_and_clients_see_no_difference(
    repository: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "cohabit.placement"),
        serving(repository, MEMORY, cache) as server,
    ):
        assert most_planned(server, HUNGRY) < 8
        assert most_planned(server, "a") == 8
        assert server.placement.memory.partitions.workspace_bytes < 12 * ROW_BYTES
        _, config = ask(server.address, "GET", f"/v2/models/{HUNGRY}/config")
        assert config["max_batch_size"] == 8
        for count in (1, 2, 3, 5, 8):
            (found,) = infer(server.address, HUNGRY, {"x": rows(count)}).values()
            np.testing.assert_allclose(found, eager(rows(count)), rtol=1e-4, atol=1e-5)
        for name, seed in STACKS.items():
            np.testing.assert_allclose(answer(server, name), expected(seed), rtol=1e-4, atol=1e-5)
    (said,) = (vars(r)["fields"] for r in caplog.records if r.message.startswith("largest batches run as several"))
    assert said["largest"] == {HUNGRY: most_planned_of(said)}


def test_batch_sizes_of_the_flag_are_all_planned_or_the_least_memory_for_them_is_named(
    repository: Path, cache: Path
) -> None:
    """The largest default ones are left out in the same memory."""
    with (
        pytest.raises(InfeasibleBudget, match=rf"{HUNGRY}: .* at batch 8.*lower the batch") as refused,
        serving(repository, MEMORY, cache, batch_sizes=BATCHES),
    ):
        pass
    least = f"{refused.value.least_bytes}B"
    with serving(repository, least, cache, batch_sizes=BATCHES) as server:
        assert {most_planned(server, name) for name in (HUNGRY, *STACKS)} == {8}


def test_batch_sizes_are_those_of_the_flag_although_the_configuration_allows_more(
    repository: Path, cache: Path, tmp_path: Path
) -> None:
    """As for every imported model, whose config.pbtxt has its largest batch."""
    folder = tmp_path / "models"
    shutil.copytree(repository / HUNGRY, folder / HUNGRY)
    (folder / HUNGRY / "config.pbtxt").write_text(
        "max_batch_size: 8\ndynamic_batching { preferred_batch_size: [4] }\n"
    )
    memory = f"{3 * ROW_BYTES}B"  # far less than the activations of a batch of four
    with serving(folder, memory, cache, batch_sizes=(1,)) as server:
        assert [bucket.batch for bucket in server.placement.models[HUNGRY, 1].plans] == [1]
        _, config = ask(server.address, "GET", f"/v2/models/{HUNGRY}/config")
        assert config["max_batch_size"] == 8
        for count in (1, 3, 8):
            (found,) = infer(server.address, HUNGRY, {"x": rows(count)}).values()
            np.testing.assert_allclose(found, eager(rows(count)), rtol=1e-4, atol=1e-5)


def most_planned_of(said: dict[str, Any]) -> int:
    (most,) = said["largest"].values()
    assert most in BATCHES[:-1]
    return int(most)


@pytest.fixture
def divisions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Whether each division was rough, and whether it was made at low priority."""
    made: list[tuple[bool, bool]] = []
    original: Callable[..., Division] = Planner.division

    def division(
        self: Planner, *arguments: Any, low_priority: bool = False, rough: bool = False, **more: Any
    ) -> Division:
        made.append((rough, low_priority))
        return original(self, *arguments, low_priority=low_priority, rough=rough, **more)

    monkeypatch.setattr(Planner, "division", division)
    return made


def test_a_start_in_other_memory_is_divided_roughly_and_better_while_it_serves(
    repository: Path,
    cache: Path,
    tmp_path: Path,
    divisions: list[tuple[bool, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everything is measured already. What is divided later is moved to, here whatever it gains."""
    monkeypatch.setattr(replan, "LEAST_GAIN", -10.0)
    folder = tmp_path / "models"
    shutil.copytree(repository, folder)
    shutil.rmtree(folder / "a")
    with serving(folder, "40MiB", cache) as server:
        assert most_planned(server, HUNGRY) == 8, "where memory is enough"
    divisions.clear()
    with serving(folder, MEMORY, cache, engine="process") as server:
        assert divisions[0] == (True, False)
        first = {name: infer(server.address, name, given) for name, given in REQUESTS.items()}
        server.until_planned()
        assert divisions[1:] == [(False, True)]
        then = {name: infer(server.address, name, given) for name, given in REQUESTS.items()}
    for name, outputs in first.items():
        for output, array in outputs.items():
            np.testing.assert_allclose(then[name][output], array, rtol=1e-5, atol=1e-6)
    divisions.clear()
    with serving(folder, MEMORY, cache, engine="process") as server:
        assert not server.placement.decider.is_divided_roughly
        assert not server.replanner.is_busy, "the start before has planned this one"


REQUESTS = {HUNGRY: {"x": rows(8)}, "b": {"x": np.ones((1, 512), np.float32)}}
