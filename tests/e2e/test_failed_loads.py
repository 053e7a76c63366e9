"""A load that fails, in whichever stage and for whatever reason, leaves what is served as it was, to the bit."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tritonclient.utils import InferenceServerException

from cohabit.planner.errors import InfeasibleBudget
from cohabit.runtime.errors import DeviceError
from cohabit.server import background
from cohabit.server.deploy import lifecycle, place
from cohabit.server.deploy.model import Programs
from cohabit.server.deploy.worker import WorkerFailed
from cohabit.server.errors import LoadFailed, Refused
from cohabit.server.process.polling import Poller
from cohabit.server.repository.scan import scan
from cohabit.server.repository.sources import by_name
from tests.support.e2e.serving import Running
from tests.support.e2e.stacks import Stacks, answer, controlled, is_answer_of
from tests.support.runtime import models

FAULTS: Mapping[str, Exception] = {
    "a refusal": InfeasibleBudget("a", None, 1, 2),
    "a full disk": OSError(28, "No space left on device", "/cache"),
    "no memory": MemoryError(),
    "a dead worker": WorkerFailed("the process that prepares models has died"),
    "a bug": RuntimeError("unexpected"),
}
ROOMY, TIGHT, CROWDED = "20MiB", "5.5MiB", "9MiB"
"""Memory for old and new at once; for one of them; and for a and b, of which a third model takes some."""


def state_of(server: Running) -> dict[str, Any]:
    """Where every model is, and what it runs."""
    memory = server.placement.memory
    return {
        "workspace": memory.partitions.workspace_bytes,
        "held": dict(memory.partitions.held),
        "plans": {owner: dict(model.plans) for owner, model in memory.models.items()},
        "serving": {key: model.load_id for key, model in server.engine.lifecycle.serving.items()},
        "held back": [
            key for lane in server.engine.lanes for key, m in lane._scheduler._models.items() if m.paused
        ],
    }


@contextmanager
def asked(server: Running, names: str) -> Iterator[list[str]]:
    """Ask models all the time, and compare every answer with the first; yields what was wrong."""
    first = {name: answer(server, name).tobytes() for name in names}
    stop, wrong, turns = threading.Event(), list[str](), dict.fromkeys(names, 0)

    def ask_on(name: str) -> None:
        while not stop.is_set() or not turns[name]:
            try:
                if answer(server, name).tobytes() != first[name]:
                    wrong.append(f"{name} gave other bits")
            except InferenceServerException as error:
                wrong.append(f"{name}: {error}")
            turns[name] += 1

    with ThreadPoolExecutor(len(names)) as clients:
        running = [clients.submit(ask_on, name) for name in names]
        try:
            yield wrong
        finally:
            stop.set()
        for client in running:
            client.result()


def load(server: Running, model: str, config: str | None = None) -> None:
    """Load as a client's order does, however long that takes."""
    server.on_loop(server.engine.lifecycle.load(model, config))


@dataclass
class Failing:
    """Takes the place of a function, and raises from a call on; the calls before reach the function."""

    function: Callable[..., Any]
    error: Exception
    first: int = 0
    calls: int = 0
    failed: int = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls > self.first:
            self.failed += 1
            raise self.error
        return self.function(*arguments, **options)


def copies(failing: Failing, load: Callable[..., Any]) -> Callable[..., Any]:
    """Return copies of residents of which the last piece fails, after all bytes but its own are there."""

    def resident_load(programs: Programs, lane: int, **options: Any) -> Callable[[], bool]:
        step = load(programs, lane, **options)

        def last_fails() -> bool:
            ended: bool = step()
            return ended and failing(ended)

        return last_fails

    return resident_load


def stages(server: Running, error: Exception) -> Iterator[tuple[str, Failing, Any, str, Any]]:
    """Yield each stage of a load, with the function that fails there, and where it is put."""
    placement = server.placement
    planner, memory = placement.planner, placement.memory
    copying = error if isinstance(error, DeviceError) else DeviceError(f"a copy failed: {error}")
    for stage, module, name, first in (
        ("preparing", place, "prepare", 0),
        ("finding memory", planner, "memory_for", 0),
        ("finding memory without the old one", planner, "memory_for", 1),
        ("dividing", planner, "division", 0),
        ("planning the first", planner, "known_plans", 0),
        ("planning the second", planner, "known_plans", 1),
        ("planning the third", planner, "known_plans", 2),
        ("binding the first", memory, "bind", 0),
        ("binding the second", memory, "bind", 1),
        ("binding the third", memory, "bind", 2),
        ("warming up", lifecycle, "warm_up", 0),
        ("serving", server.engine.registry, "served", 0),
    ):
        failing = Failing(getattr(module, name), error, first)
        yield stage, failing, module, name, failing
    for first in range(3):
        failing = Failing(lambda ended: ended, copying, first)
        yield f"copying model {first}", failing, memory, "resident_load", copies(failing, memory.resident_load)


@pytest.mark.parametrize(
    "every_fault", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["a fault per stage", "every fault"]
)
@pytest.mark.parametrize(
    ("memory", "served", "loaded", "least"),
    [(ROOMY, "ab", "a", 7), (TIGHT, "a", "a", 7), (CROWDED, "ab", "c", 14)],
    ids=["beside the old one", "in the old one's place", "where others make room"],
)
def test_a_stage_that_fails_takes_nothing_from_what_is_served(
    stacks: Stacks,
    plans: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory: str,
    served: str,
    loaded: str,
    least: int,
    every_fault: bool,
) -> None:
    for seed, name in enumerate("abc"):
        stacks.put(tmp_path, name, seed)
    with controlled(tmp_path, memory, plans, load_models=tuple(served)) as (server, _):
        server.until_planned()
        monkeypatch.setattr(server.replanner, "begin", lambda *_, **__: None)
        # As if no loaded model had the same program, so that the planner is asked.
        monkeypatch.setattr(server.placement.decider, "_equals", lambda model: iter(()))
        if loaded == "a":
            stacks.put(tmp_path, "a", 3, version=2)
        before, failed = state_of(server), set[str]()
        with asked(server, served) as wrong:
            for turn, (fault, error) in enumerate(FAULTS.items()):
                for number, (stage, failing, module, name, replacement) in enumerate(stages(server, error)):
                    if not every_fault and number % len(FAULTS) != turn:
                        continue
                    with monkeypatch.context() as patch:
                        patch.setattr(server.engine.registry, "served", Failing(lambda: None, error))
                        patch.setattr(module, name, replacement)
                        with pytest.raises(LoadFailed):
                            load(server, loaded)
                    failed |= {stage} if failing.failed else set()
                    assert state_of(server) == before, (fault, stage)
                    assert wrong == [], (fault, stage)
        assert len(failed) >= least, failed
        load(server, loaded)
        assert is_answer_of(3 if loaded == "a" else 2, answer(server, loaded))


class Complex(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, x)


@pytest.mark.parametrize(("control", "memory"), [("poll", ROOMY), ("explicit", TIGHT)])
def test_a_file_that_cannot_be_served_takes_nothing_from_what_is(
    stacks: Stacks, plans: Path, tmp_path: Path, control: str, memory: str
) -> None:
    repository = tmp_path / "models"
    stacks.put(repository, "a", 0)
    stacks.put(tmp_path / "other", "a", 1)
    models.export(Complex(), {"x": torch.zeros(2, 4)}, tmp_path / "complex.pt2")
    good, other = repository / "a/1/model.pt2", (tmp_path / "other/a/1/model.pt2").read_bytes()
    second, config = repository / "a/2/model.pt2", repository / "a/config.pbtxt"
    changes: dict[str, Any] = {"poll_interval_s": 1e6} if control == "poll" else {"load_models": ("a",)}
    sound = good.read_bytes()
    with controlled(repository, memory, plans, model_control=control, **changes) as (server, _):
        server.until_planned()
        engine = server.engine
        poller = Poller(repository, engine.lifecycle, engine.registry, by_name(scan(repository)))

        def reload(config: str | None = None, *, fails: bool = True) -> None:
            if control == "poll":
                server.on_loop(poller.poll())
                return
            with pytest.raises((LoadFailed, Refused)) if fails else nullcontext():
                load(server, "a", config)

        with asked(server, "a") as wrong:
            for path, content in (
                (good, b""),
                (good, other[: len(other) // 2]),
                (good, (tmp_path / "complex.pt2").read_bytes()),
                (second, other[:100_000]),
                (second, b""),
                (config, b"max_batch_size: -3 foo {"),
                (config, b'parameters { key: "precision" value { string_value: "float7" } }'),
                (config, b'max_batch_size: 4 model_warmup { name: "w" batch_size: 1 }'),
            ):
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
                reload()
                assert wrong == [], (path, content[:20])
                assert [key.version for key in server.engine.lifecycle.serving] == [1]
                if path == good:
                    good.write_bytes(sound)
                else:
                    path.unlink()
                    if path == second:
                        path.parent.rmdir()
                reload(fails=False)
                assert wrong == [], f"good again after {path}"
            if control == "explicit":
                reload('{"input": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}]}')
                assert wrong == []


def test_a_search_whose_process_cannot_start_is_made_again(
    stacks: Stacks,
    own_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.0)
    for seed, name in enumerate("ab"):
        stacks.put(tmp_path / "models", name, seed)
    with controlled(tmp_path / "models", "6MiB", own_cache) as (server, _):
        planner = server.placement.planner
        best, tries = planner.best_plans, list[str]()

        def failing_first(demand: Any, memory: Any) -> Any:
            tries.append(demand.name)
            if len(tries) == 1:
                raise OSError(12, "Cannot allocate memory")
            return best(demand, memory)

        monkeypatch.setattr(planner, "best_plans", failing_first)
        load(server, "a")
        load(server, "b")
        server.until_planned()
        assert all(model.searched for model in server.placement.memory.models.values())
        assert tries.count(tries[0]) == 2
    (record,) = (r for r in caplog.records if r.name == "cohabit.background")
    assert vars(record)["fields"]["task"] == "searching better plans"
