"""No served answer depends on padding, or on the requests that were served at the same time."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn
from tritonclient.utils import InferenceServerException

from cohabit.server.ipc.model import ModelKey
from tests.support.e2e.serving import Running, ask, eventually, infer, serving
from tests.support.runtime import models
from tests.support.runtime.mixing import Computed, Experts, Lookup

PLANNED, LARGEST = (1, 2, 4), 6
Make = Callable[[], nn.Module]


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).softmax(-1)


INTERACTING: dict[str, Make] = {
    "mean": lambda: Computed(lambda x: x - x.mean(0)),
    "experts": lambda: Experts(capacity=0.3),
    "lookup": lambda: Lookup(7, lambda x: x.softmax(0)),
}
INDEPENDENT: dict[str, Make] = {
    "dense": Dense,
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


def infer_together(
    server: Running, name: str, requests: Sequence[NDArray[Any]]
) -> list[NDArray[Any] | InferenceServerException]:
    """Send requests, which are queued in this order before the first one is executed; return answers or errors."""
    lane = server.engine.lane_of(ModelKey(name, 1))

    async def pause(paused: bool) -> None:
        (lane.pause if paused else lane.resume)(ModelKey(name, 1))

    def answer(x: NDArray[Any]) -> NDArray[Any] | InferenceServerException:
        try:
            return infer(server.address, name, {"x": x})["y"]
        except InferenceServerException as error:
            return error

    answers: list[Future[Any]] = []
    with ThreadPoolExecutor(len(requests)) as clients:
        server.on_loop(pause(True))
        try:
            for x in requests:
                answers.append(clients.submit(answer, x))
                eventually(lambda: lane.pending(ModelKey(name, 1)) + sum(a.done() for a in answers) == len(answers))
        finally:
            server.on_loop(pause(False))
        return [answer.result() for answer in answers]


def executions(server: Running, name: str) -> int:
    status, found = ask(server.address, "GET", f"/v2/models/{name}/stats")
    assert status == 200
    return int(found["model_stats"][0]["execution_count"])


def eager(name: str, x: NDArray[Any]) -> NDArray[Any]:
    with torch.no_grad():
        answer: NDArray[Any] = made(name)(torch.from_numpy(x.copy()))["y"].numpy()
    return answer


@settings(max_examples=8, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, LARGEST), min_size=2, max_size=12), seed=st.integers(0, 999))
@pytest.mark.parametrize("name", [*INTERACTING, *INDEPENDENT])
def test_every_answer_is_that_of_the_request_s_own_rows(
    server: Running, name: str, sizes: list[int], seed: int
) -> None:
    """Requests of all sizes wait together. Where padding changes answers, sizes that are not planned are refused."""
    requests = [rows(name, 100 * seed + n, batch) for n, batch in enumerate(sizes)]
    before, answered = executions(server, name), 0
    for x, answer in zip(requests, infer_together(server, name, requests), strict=True):
        if name in INTERACTING and len(x) not in (*PLANNED, LARGEST):
            assert isinstance(answer, InferenceServerException)
            assert re.search(r"one of \[1, 2, 4, 6\].*--batch-sizes", str(answer))
            continue
        answered += 1
        expected = eager(name, x)
        np.testing.assert_allclose(answer, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)
    if name in INTERACTING:
        assert executions(server, name) - before == answered, "alone"


@pytest.mark.parametrize("name", INDEPENDENT)
def test_requests_are_still_batched_where_that_changes_nothing(server: Running, name: str) -> None:
    before = executions(server, name)
    infer_together(server, name, [rows(name, n, LARGEST // 2) for n in range(2)])
    assert executions(server, name) - before == 1


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
