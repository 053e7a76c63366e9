"""Models come, change and go while others are asked: nobody gets a wrong answer, and nobody is forgotten."""

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http as triton
from numpy.typing import NDArray
from torch.export import Dim
from tritonclient.utils import InferenceServerException

from loadgen.zoo.exporting import save_model
from planner.sizing.fitting import Room
from runtime.binding.program import Program
from server.models import preparing as preparer
from server.models.known_models import Plans
from server.models.prepared import Prepared
from server.models.repository import ModelSource
from tests.e2e.serving import Running, ask, infer, repository_index, serving

WIDTH, LAYERS = 512, 4
PAUSE_S = 0.01
"""Between two requests of a client, so that searches for better plans get some of the processors meanwhile."""
WEIGHTS_MIB = 4
"""Of each model here: four layers of one MiB."""

Array = NDArray[np.float32]


class Stack(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)  # of its own: several threads make stacks
        weights = (torch.randn(WIDTH, WIDTH, generator=draws) / WIDTH**0.5 for _ in range(LAYERS))
        self.weights = torch.nn.ParameterList(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.relu(torch.nn.functional.linear(x, weight)) + 0.1
        return x


@dataclass(frozen=True)
class Stacks:
    """Archives of stacks, by seed."""

    root: Path

    def put(self, repository: Path, name: str, seed: int, version: int = 1) -> None:
        archive = self.root / f"{seed}.pt2"
        if not archive.exists():
            program = torch.export.export(
                Stack(seed).eval(),
                (),
                kwargs={"x": torch.zeros(2, WIDTH)},
                dynamic_shapes={"x": {0: Dim("batch", min=1, max=8)}},
            )
            save_model(program, archive, {})
        path = repository / name / str(version) / "model.pt2"
        path.parent.mkdir(parents=True)
        shutil.copy(archive, path)


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Stacks:
    return Stacks(tmp_path_factory.mktemp("stacks"))


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's cache."""
    return tmp_path_factory.mktemp("cache")


X = np.linspace(-1, 1, WIDTH, dtype=np.float32)[None]


@cache
def expected(seed: int) -> Array:
    with torch.no_grad():
        answer: Array = Stack(seed).eval()(torch.from_numpy(X)).numpy()
    return answer


def answer(server: Running, name: str) -> Array:
    (output,) = infer(server.address, name, {"x": X}).values()
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


def eventually(condition: Callable[[], bool], patience_s: float = 120.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@contextmanager
def under_load(server: Running, seeds: dict[str, int]) -> Iterator[list[str]]:
    """Ask some models all the time; yields what went wrong."""
    wrong: list[str] = []
    stop = threading.Event()

    def ask_on(name: str, seed: int) -> int:
        asked = 0
        while not stop.is_set() or asked == 0:
            asked += 1
            try:
                if not is_answer_of(seed, answer(server, name)):
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
    memory = server.loaded.memory
    return {t.name: memory.partitions.held[t.owner].nbytes for t in memory.placed_models.values()}


def test_models_are_loaded_and_unloaded_on_request_and_give_their_memory_back(
    stacks: Stacks, plans: Path, tmp_path: Path
) -> None:
    for number, name in enumerate("abc"):
        stacks.put(tmp_path, name, number)
    with controlled(tmp_path, "20MiB", plans, load_models=("a",)) as (server, client):
        free = server.loaded.memory.partitions.free_bytes
        assert client.is_server_ready()
        assert {n: e.get("state") for n, e in repository_index(server.address).items()} == {
            "a": "READY",
            "b": None,
            "c": None,
        }
        with under_load(server, {"a": 0}) as wrong:
            client.load_model("b")
            client.load_model("c")
            assert is_answer_of(1, answer(server, "b"))
            assert is_answer_of(2, answer(server, "c"))
            client.unload_model("b")
            client.unload_model("b")
            with pytest.raises(InferenceServerException, match="'b' has no available versions: unloaded"):
                answer(server, "b")
            client.load_model("b")
            assert is_answer_of(1, answer(server, "b"))
            client.unload_model("b")
            client.unload_model("c")
        assert wrong == []
        assert server.loaded.memory.partitions.free_bytes == free
        assert client.is_server_ready(), "nobody wants b and c any more"


def test_models_make_room_for_one_more_while_they_are_asked(stacks: Stacks, plans: Path, tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        stacks.put(tmp_path, name, number)
    with controlled(tmp_path, "9MiB", plans, load_models=("a", "b")) as (server, client):
        before = held(server)
        with under_load(server, {"a": 0, "b": 1}) as wrong:
            client.load_model("c")
            assert is_answer_of(2, answer(server, "c"))
            assert server.loaded.placement is not None
            searches = server.loaded.placement._tasks
            eventually(lambda: not searches)  # better plans are in use by now
            assert is_answer_of(2, answer(server, "c"))
        assert wrong == []
        after = held(server)
        assert set(after) == {"a", "b", "c"}
        assert sum(after.values()) + server.loaded.memory.partitions.workspace_bytes <= 9 << 20
        assert after["a"] + after["b"] < before["a"] + before["b"]


def test_a_model_that_comes_back_runs_the_very_plans_that_were_found_for_it(
    stacks: Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are checked, drafted and compiled already."""
    for number, name in enumerate("ab"):
        stacks.put(tmp_path / "repository", name, number)
    with controlled(tmp_path / "repository", "6MiB", tmp_path / "cache", load_models=("a",)) as (server, client):
        placement = server.loaded.placement
        assert placement is not None
        best_plans, found = placement.preparer.best_plans, list[Plans]()

        def noted(prepared: Prepared, room: Room) -> Plans:
            found.append(best_plans(prepared, room))
            return found[-1]

        monkeypatch.setattr(placement.preparer, "best_plans", noted)
        client.load_model("b")
        eventually(lambda: not placement._tasks)
        assert len(found) == 1
        client.unload_model("b")
        client.load_model("b")
        (placed,) = (t for t in server.loaded.memory.placed_models.values() if t.name == "b")
        assert all(program.plan is found[0][batch] for batch, program in placed.servable.programs.items())


def test_programs_of_models_that_have_moved_are_given_back(
    stacks: Stacks, plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate("abc"):
        stacks.put(tmp_path, name, number)
    with controlled(tmp_path, "9MiB", plans, load_models=("a", "b")) as (server, client):
        memory = server.loaded.memory
        bound: list[Program] = [p for t in memory.placed_models.values() for p in t.servable.programs.values()]
        dismissed: list[Program] = []
        monkeypatch.setattr(memory.backend.executor, "dismiss", dismissed.append)
        build = memory.backend.build

        def noted(*arguments: Any) -> Program:
            bound.append(build(*arguments))
            return bound[-1]

        monkeypatch.setattr(memory.backend, "build", noted)
        client.load_model("c")
        assert server.loaded.placement is not None
        searches = server.loaded.placement._tasks
        eventually(lambda: not searches)
        running = {id(p) for t in memory.placed_models.values() for p in t.servable.programs.values()}
        assert len(dismissed) >= 1, "a and b have moved, or have less"
        assert len({id(p) for p in dismissed}) == len(dismissed)
        assert {id(p) for p in bound} == running | {id(p) for p in dismissed}
        assert not running & {id(p) for p in dismissed}


def test_a_model_that_comes_back_is_opened_from_memory_unless_its_files_have_changed(
    stacks: Stacks, plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    prepare = preparer.prepare

    def noted(source: ModelSource, *arguments: Any) -> Prepared:
        opened.append(source.name)
        return prepare(source, *arguments)

    monkeypatch.setattr(preparer, "prepare", noted)
    stacks.put(tmp_path, "a", 0)
    with controlled(tmp_path, "9MiB", plans) as (server, client):
        for _ in range(3):
            client.load_model("a")
            assert is_answer_of(0, answer(server, "a"))
            client.unload_model("a")
        assert opened == ["a"]
        for path in plans.rglob("weights.bin"):
            os.utime(path, ns=(0, 0))
        client.load_model("a")
        assert opened == ["a", "a"], "the weights file may have been written, so its checksum is verified again"
        client.unload_model("a")
        shutil.rmtree(tmp_path / "a")
        stacks.put(tmp_path, "a", 1)
        client.load_model("a")
        assert is_answer_of(1, answer(server, "a"))
        assert opened == ["a", "a", "a"]


def test_what_does_not_fit_is_refused_with_the_least_that_would_and_disturbs_nobody(
    stacks: Stacks, plans: Path, tmp_path: Path
) -> None:
    for number, name in enumerate("ab"):
        stacks.put(tmp_path, name, number)
    with controlled(tmp_path, "4.2MiB", plans, load_models=("a",), layout="resident") as (server, client):
        with pytest.raises(
            InferenceServerException, match=r"load failed for model 'b'.*needs a budget of 8\.\d MiB"
        ):
            client.load_model("b")
        assert is_answer_of(0, answer(server, "a"))
        assert not client.is_server_ready(), "b was asked for"
        client.unload_model("b")
        assert client.is_server_ready()


def test_what_is_not_there_or_broken_is_refused_with_the_reason(
    stacks: Stacks, plans: Path, tmp_path: Path
) -> None:
    stacks.put(tmp_path, "a", 0)
    stacks.put(tmp_path, "broken", 0)
    (tmp_path / "broken" / "1" / "model.pt2").write_bytes(b"no archive")
    with controlled(tmp_path, "9MiB", plans) as (server, client):
        assert client.is_server_ready(), "nothing was asked for"
        with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
            client.load_model("nope")
        with pytest.raises(InferenceServerException, match="load failed for model 'broken'"):
            client.load_model("broken")
        with pytest.raises(InferenceServerException, match="not a ModelConfig in JSON"):
            client.load_model("a", config='{"max_batch_size": "many"}')
        with pytest.raises(InferenceServerException, match="max_batch_size 9"):
            client.load_model("a", config='{"max_batch_size": 9}')
        client.load_model("a", config='{"max_batch_size": 2}')
        assert client.get_model_config("a")["max_batch_size"] == 2
        assert is_answer_of(0, answer(server, "a"))


@pytest.mark.parametrize("start", [True, False], ids=["at the start", "later"])
def test_more_instances_than_one_are_mentioned_once_per_load(
    stacks: Stacks, plans: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, start: bool
) -> None:
    for name, count in (("one", 1), ("many", 3)):
        stacks.put(tmp_path, name, 0)
        (tmp_path / name / "config.pbtxt").write_text(f"max_batch_size: 4 instance_group {{ count: {count} }}")
    with controlled(tmp_path, "20MiB", plans, load_models=("*",) if start else ()) as (server, client):
        if not start:
            client.load_model("one")
            client.load_model("many")
        (record,) = (r for r in caplog.records if "one instance serves" in r.message)
        assert record.levelname == "WARNING"
        assert record.fields == {"model": "many", "instance_group.count": 3}  # type: ignore[attr-defined]
        assert is_answer_of(0, answer(server, "many"))


def test_client_that_leaves_does_not_stop_what_it_has_ordered(stacks: Stacks, plans: Path, tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        stacks.put(tmp_path, name, number)
    with controlled(tmp_path, "9MiB", plans, load_models=("a", "b")) as (server, client):
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as impatient:
            impatient.sendall(b"POST /v2/repository/models/c/load HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            eventually(lambda: repository_index(server.address)["c"].get("state") in ("LOADING", "READY"))
        eventually(lambda: client.is_model_ready("c"))
        for seed, name in enumerate("abc"):
            assert is_answer_of(seed, answer(server, name))


@pytest.mark.parametrize("memory", ["20MiB", "5MiB"])
def test_new_version_takes_over_without_losing_a_request(
    stacks: Stacks, plans: Path, tmp_path: Path, memory: str
) -> None:
    """With memory for both versions, no request is refused either."""
    stacks.put(tmp_path, "a", 0)
    with (
        controlled(tmp_path, memory, plans, load_models=("a",)) as (server, client),
        ThreadPoolExecutor(1) as clients,
    ):
        stop = threading.Event()

        def ask_on() -> list[int | str]:
            seen: list[int | str] = []
            while not stop.is_set():
                try:
                    output = answer(server, "a")
                    seen.append(0 if is_answer_of(0, output) else 1 if is_answer_of(1, output) else "wrong")
                except InferenceServerException as error:
                    seen.append(str(error))
            return seen

        asked = clients.submit(ask_on)
        try:
            stacks.put(tmp_path, "a", 1, version=2)
            client.load_model("a")
            assert is_answer_of(1, answer(server, "a"))
        finally:
            stop.set()
        seen = asked.result()
        assert client.get_model_metadata("a")["versions"] == ["2"]
        assert seen[0] == 0
        refused = {entry for entry in seen if isinstance(entry, str)}
        assert all("is not ready" in entry for entry in refused)
        assert memory == "5MiB" or not refused
        order = [entry for entry in seen if not isinstance(entry, str)]
        assert order == sorted(order)
        assert list(held(server)) == ["a"]


def test_without_control_nothing_is_loaded_or_unloaded(stacks: Stacks, plans: Path, tmp_path: Path) -> None:
    stacks.put(tmp_path, "a", 0)
    with controlled(tmp_path, "9MiB", plans, model_control="none") as (server, _client):
        for order in ("load", "unload"):
            status, refusal = ask(server.address, "POST", f"/v2/repository/models/a/{order}", {})
            assert status == 503
            assert "not allowed" in refusal["error"]
        assert is_answer_of(0, answer(server, "a"))


def test_repository_is_followed(stacks: Stacks, plans: Path, tmp_path: Path) -> None:
    stacks.put(tmp_path, "a", 0)
    with controlled(tmp_path, "20MiB", plans, model_control="poll", poll_interval_s=0.1) as (server, client):
        stacks.put(tmp_path, "b", 1)
        eventually(lambda: client.is_model_ready("b"))
        assert is_answer_of(1, answer(server, "b"))
        stacks.put(tmp_path, "a", 2, version=2)
        eventually(lambda: is_answer_of(2, answer(server, "a")))
        shutil.rmtree(tmp_path / "b")
        eventually(lambda: not client.is_model_ready("b"))
        assert repository_index(server.address)["b"]["reason"] == "unloaded"
        with pytest.raises(InferenceServerException, match="not allowed"):
            client.unload_model("a")
