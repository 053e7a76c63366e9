"""No served answer depends on padding, or on the requests that were served at the same time."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from tritonclient.utils import InferenceServerException

from tests.e2e.serving import Running, ask, eventually, infer, serving
from tests.runtime import models
from tests.runtime.mixing import Computed, Experts, Lookup

PLANNED, LARGEST = (1, 2, 4), 6
PREFERRED = (3, 3)
"""Sizes of requests that add up to the preferred batch size, which is the largest."""
Make = Callable[[], nn.Module]


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).softmax(-1)


INTERACTING: dict[str, Make] = {
    "mean": lambda: Computed(lambda x: x - x.mean(0)),
    "batch_norm": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "cumsum": lambda: Computed(lambda x: x.cumsum(0)),
    "sort": lambda: Computed(lambda x: x.sort(0).values),
    "batch_size": lambda: Computed(lambda x: x * x.shape[0]),
    "experts": lambda: Experts(capacity=0.3),
    "lookup": lambda: Lookup(7, lambda x: x.softmax(0)),
}
INDEPENDENT: dict[str, Make] = {
    "dense": Dense,
    "attention": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    "all_experts": lambda: Experts(capacity=None),
    "plain_lookup": lambda: Lookup(7, lambda x: x.cumsum(1)),
}


class Given(nn.Module):
    """A model with one input and one output of known names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.model(x)}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Given((INTERACTING | INDEPENDENT)[name]()).eval()


def rows(name: str, seed: int, batch: int) -> NDArray[Any]:
    draws = np.random.default_rng([seed, batch])
    if "lookup" in name:
        return draws.integers(0, 7, (batch, 6))
    return draws.normal(size=(batch, 6, 16)).astype(np.float32)


def put(
    repository: Path, name: str, model: nn.Module, example: NDArray[Any], config: str, dynamic: bool = True
) -> None:
    path = repository / name / "1" / "model.pt2"
    models.export(model, {"x": torch.from_numpy(example)}, path, dynamic=dynamic)
    (repository / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    repository = tmp_path_factory.mktemp("models")
    preferred = f"dynamic_batching {{ preferred_batch_size: {LARGEST} }}"
    for name in INTERACTING | INDEPENDENT:
        put(repository, name, made(name), rows(name, 0, 3), preferred)
    with serving(repository, "64MiB", tmp_path_factory.mktemp("cache"), batch_sizes=(*PLANNED, LARGEST)) as running:
        yield running


def infer_together(server: Running, name: str, requests: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Send requests, which are queued in this order before the first one is executed, and return the answers."""
    lanes = server.engine._lanes

    async def hold(held: bool) -> None:
        lanes.hold(name, held)

    answers = []
    with ThreadPoolExecutor(len(requests)) as clients:
        server.on_loop(hold(True))
        try:
            for n, x in enumerate(requests, 1):
                answers.append(clients.submit(infer, server.address, name, {"x": x}))
                eventually(lambda n=n: lanes.pending(name) == n or answers[-1].done())
        finally:
            server.on_loop(hold(False))
        return [answer.result()["y"] for answer in answers]


def executions(server: Running, name: str) -> int:
    status, found = ask(server.address, "GET", f"/v2/models/{name}/stats")
    assert status == 200
    return int(found["model_stats"][0]["execution_count"])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*INTERACTING, *INDEPENDENT])
def test_every_answer_is_that_of_the_request_s_own_rows(server: Running, name: str, seed: int) -> None:
    """Requests of every size that is taken wait together, and are batched only where that changes nothing."""
    others = [*PLANNED, LARGEST] * 2 if name in INTERACTING else [*range(1, LARGEST + 1)] * 2
    random.Random(seed).shuffle(others)
    sizes = [*(PREFERRED if name in INDEPENDENT else PLANNED), *others]
    requests = [rows(name, 100 * seed + n, batch) for n, batch in enumerate(sizes)]
    before = executions(server, name)
    answers = infer_together(server, name, requests)
    model = made(name)
    for x, answer in zip(requests, answers, strict=True):
        with torch.no_grad():
            expected = model(torch.from_numpy(x.copy()))["y"].numpy()
        np.testing.assert_allclose(answer, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
    made_here = executions(server, name) - before
    assert made_here == len(requests) if name in INTERACTING else made_here < len(requests)


@pytest.mark.parametrize("name", INTERACTING)
@pytest.mark.parametrize("batch", [3, 5])
def test_a_batch_size_that_is_not_planned_is_refused_where_padding_changes_answers(
    server: Running, name: str, batch: int
) -> None:
    with pytest.raises(InferenceServerException, match=r"one of \[1, 2, 4, 6\].*--batch-sizes"):
        infer(server.address, name, {"x": rows(name, 0, batch)})


def test_the_configuration_says_which_batch_sizes_a_model_takes(server: Running) -> None:
    for name, expected in (("mean", {"string_value": "1,2,4,6"}), ("dense", None)):
        status, config = ask(server.address, "GET", f"/v2/models/{name}/config")
        assert status == 200
        assert config["parameters"].get("cohabit.only_batch_sizes") == expected


def test_sums_of_many_addends_have_the_same_bits_every_time(tmp_path: Path) -> None:
    """With several threads, an `index_put` that accumulates adds in any order, unless torch is told otherwise."""

    def sums(x: torch.Tensor) -> torch.Tensor:
        expert = (x[:, 0] > 0).long()
        return torch.zeros(2, 64).index_put((expert,), x, accumulate=True)[expert]

    x = np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32)
    put(tmp_path / "models", "sums", Given(Computed(sums)), x, "", dynamic=False)
    with serving(tmp_path / "models", "256MiB", tmp_path / "cache", threads=2) as running:
        answers = [infer(running.address, "sums", {"x": x})["y"] for _ in range(20)]
    assert len({answer.tobytes() for answer in answers}) == 1
