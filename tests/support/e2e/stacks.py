"""Small models that stream well, servers whose models are loaded by request, and clients that keep asking."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import tritonclient.http as triton
from numpy.typing import NDArray
from torch.export import Dim
from tritonclient.utils import InferenceServerException

from cohabit.loadgen.zoo.exporting import save_model
from tests.support.e2e.serving import Process, Running, infer, serving
from tests.support.runtime.models import locked

WIDTH, LAYERS = 512, 4
PAUSE_S = 0.05
"""Between two requests of a client, so that searches for better plans get some of the processors meanwhile."""
WEIGHTS_MIB = 4
"""Of each model here: four layers of one MiB."""

Array = NDArray[np.float32]


class Stack(torch.nn.Module):
    def __init__(self, seed: int, layers: int = LAYERS) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)  # of its own: several threads make stacks
        weights = (torch.randn(WIDTH, WIDTH, generator=draws) / WIDTH**0.5 for _ in range(layers))
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.relu(torch.nn.functional.linear(x, weight)) + 0.1
        return x


@dataclass(frozen=True)
class Stacks:
    """Archives of stacks, by seed, in a folder that all workers of a run share."""

    root: Path

    def put(self, repository: Path, name: str, seed: int, version: int = 1, layers: int = LAYERS) -> None:
        """Stacks of as many layers share profiles and plans."""
        archive = self.root / f"{seed}-{layers}.pt2"
        with locked(archive.with_suffix(".lock")):
            if not archive.exists():
                program = torch.export.export(
                    Stack(seed, layers).eval(),
                    (),
                    kwargs={"x": torch.zeros(2, WIDTH)},
                    dynamic_shapes={"x": {0: Dim("batch", min=1, max=8)}},
                )
                save_model(program, archive, {})
        path = repository / name / str(version) / "model.pt2"
        path.parent.mkdir(parents=True)
        shutil.copy(archive, path)


X = np.linspace(-1, 1, WIDTH, dtype=np.float32)[None]


@cache
def expected(seed: int) -> Array:
    with torch.no_grad():
        answer: Array = Stack(seed).eval()(torch.from_numpy(X)).numpy()
    return answer


def answer(server: Running | Process, name: str, version: str = "") -> Array:
    (output,) = infer(server.address, name, {"x": X}, version).values()
    return output


def is_answer_of(seed: int, output: Array) -> bool:
    return np.allclose(output, expected(seed), rtol=1e-4, atol=1e-5)


@contextmanager
def controlled(
    repository: Path, memory: str, plans: Path, **changes: object
) -> Iterator[tuple[Running, triton.InferenceServerClient]]:
    settings = {"model_control": "explicit", "batch_sizes": (1,)} | changes
    with (
        serving(repository, memory, plans, **settings) as server,
        triton.InferenceServerClient(server.address, network_timeout=120) as client,
    ):
        yield server, client


@contextmanager
def under_load(
    server: Running,
    seeds: Mapping[str, int | set[int]],
    is_answer_of: Callable[[int, Array], bool] = is_answer_of,
) -> Iterator[list[str]]:
    """Ask some models, or versions such as `a/2`, all the time; yields what went wrong.

    With several seeds, the answer of any is right.
    """
    wrong: list[str] = []
    stop = threading.Event()

    def ask_on(name: str, seeds: int | set[int]) -> int:
        asked = 0
        while not stop.is_set() or asked == 0:
            asked += 1
            try:
                output = answer(server, *name.split("/"))
                if not any(is_answer_of(seed, output) for seed in ({seeds} if isinstance(seeds, int) else seeds)):
                    wrong.append(f"{name} gave another answer")
            except InferenceServerException as error:
                wrong.append(f"{name}: {error}")
            time.sleep(PAUSE_S)
        return asked

    with ThreadPoolExecutor(len(seeds)) as clients:
        asked = [clients.submit(ask_on, *item) for item in seeds.items()]
        try:
            yield wrong
        finally:
            stop.set()
        assert all(count.result() > 0 for count in asked)


def held(server: Running) -> dict[str, int]:
    """Bytes of each model's partition."""
    memory = server.placement.memory
    return {t.key.name: memory.partitions.held[t.partition_id].nbytes for t in memory.models.values()}
