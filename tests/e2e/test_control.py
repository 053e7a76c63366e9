"""Models are loaded, replaced and unloaded while others are served: no wrong answer, no lost request, no lost byte."""

import itertools
import json
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from cohabit.planner.memory import Memory
from cohabit.planner.sizing.problem import ModelDemand
from cohabit.runtime.binding.program import Program
from cohabit.server.cli import main
from cohabit.server.deploy import elastic as elastic_module
from cohabit.server.deploy import place, prepare
from cohabit.server.deploy.migrate import Bound
from cohabit.server.deploy.model import Model, Plans, PlansFound
from cohabit.server.errors import ConfigError
from cohabit.server.repository.sources import ModelSource
from tests.support.e2e.serving import eventually, repository_index, serving
from tests.support.e2e.stacks import WIDTH, Stacks, X, answer, controlled, expected, held, is_answer_of, under_load


def is_class_of(seed: int, client: triton.InferenceServerClient, model: str, output: str) -> bool:
    """Whether the largest value of an answer comes with its index and its label."""
    sent = triton.InferInput("x", list(X.shape), "FP32")
    sent.set_data_from_numpy(X)
    wanted = triton.InferRequestedOutput(output, class_count=1)
    (largest,) = client.infer(model, [sent], outputs=[wanted]).as_numpy(output).ravel()
    index = int(expected(seed).argmax())
    return bool(largest.decode().endswith(f":{index}:class {index}"))


def test_models_are_loaded_and_unloaded_on_request_and_give_their_memory_back(
    stacks: Stacks, plans: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, name in enumerate("abc"):
        stacks.put(tmp_path, name, number)
    (tmp_path / "c" / "config.pbtxt").write_text(
        "max_batch_size: 4 instance_group { count: 3 } response_cache { enable: true }"
    )
    stacks.put(tmp_path, "broken", 0)
    (tmp_path / "broken" / "1" / "model.pt2").write_bytes(b"no archive")
    with controlled(tmp_path, "20MiB", plans, load_models=("a",)) as (server, client):
        partitions = server.placement.memory.partitions
        free = partitions.free_bytes + partitions.workspace_bytes
        assert client.is_server_ready()
        states = {name: entry.get("state") for name, entry in repository_index(server.address).items()}
        assert states == {"a": "READY", "b": None, "c": None, "broken": None}
        stacks.put(tmp_path, "d", 0)
        assert {"name": "d"} in client.get_model_repository_index(), "it came after the start"
        with under_load(server, {"a": 0}) as wrong:
            client.load_model("b")
            client.load_model("c")
            assert is_answer_of(1, answer(server, "b"))
            assert is_answer_of(2, answer(server, "c"))
            name = client.get_model_metadata("b")["outputs"][0]["name"]
            client.unload_model("b")
            client.unload_model("b")
            client.unload_model("of no repository")
            assert not server.engine.lifecycle._locks, "nothing is kept of operations that have ended"
            with pytest.raises(InferenceServerException, match="'b' has no available versions: unloaded"):
                answer(server, "b")
            (tmp_path / "b" / "labels.txt").write_text("".join(f"class {index}\n" for index in range(WIDTH)))
            output = {"name": name, "data_type": "TYPE_FP32", "dims": [WIDTH], "label_filename": "labels.txt"}
            client.load_model("b", config=json.dumps({"max_batch_size": 2, "output": [output]}))
            assert is_class_of(1, client, "b", name)
            assert client.get_model_config("b")["max_batch_size"] == 2
            assert is_answer_of(1, answer(server, "b"))
            client.unload_model("b")
            client.unload_model("c")
        assert wrong == []
        assert partitions.free_bytes + partitions.workspace_bytes == free
        assert held(server).keys() == {"a"}
        assert client.is_server_ready(), "b and c are not requested any more"
        stacks.put(tmp_path, "twisted", 0)
        (tmp_path / "twisted" / "config.pbtxt").write_text("version_policy { specific { versions: 2 } }")
        for model, config, reason in (
            ("nope", None, "failed to load 'nope', failed to poll from model repository: it has no such folder"),
            (
                "twisted",
                None,
                "failed to load 'twisted', failed to poll from model repository: version_policy asks",
            ),
            ("broken", None, "load failed for model 'broken': version 1 is at UNAVAILABLE state: "),
            ("b", '{"max_batch_size": "many"}', "failed to load 'b', failed to poll .*not a ModelConfig in JSON"),
            (
                "b",
                '{"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}]}',
                "load failed for model 'b': ",
            ),
        ):
            with pytest.raises(InferenceServerException, match=reason) as caught:
                client.load_model(model, config=config)
            assert str(caught.value).count(f"'{model}'") == 1, "its name is there once"
            assert f" {model}: " not in str(caught.value)
    (record,) = (r for r in caplog.records if "have no effect" in r.message)
    assert record.levelname == "WARNING"
    fields: dict[str, str] = record.fields  # type: ignore[attr-defined]
    assert fields.keys() == {"model", "version", "instance_group.count", "response_cache.enable"}
    assert fields["model"] == "c"


def test_a_model_to_load_that_is_not_there_stops_the_start_and_the_one_like_it_is_named(
    stacks: Stacks, plans: Path, tmp_path: Path
) -> None:
    stacks.put(tmp_path, "ranker", 0)
    with (
        pytest.raises(ConfigError, match=r"--load-model: there is no model 'rankr' .*; did you mean 'ranker'\?"),
        controlled(tmp_path, "20MiB", plans, load_models=("rankr",)),
    ):
        pass


def test_the_cache_is_emptied_under_a_server_that_reads_from_it_and_loads_on(
    stacks: Stacks, own_cache: Path, tmp_path: Path
) -> None:
    repository, cache = tmp_path / "models", own_cache
    stacks.put(repository, "a", 0)
    stacks.put(repository, "b", 1)
    with controlled(repository, "20MiB", cache, load_models=("*",), store="file") as (server, client):
        client.unload_model("b")
        with under_load(server, {"a": 0}) as wrong:
            assert main(["cache", "rm", "--all", "--yes", "--cache", str(cache)]) == 0
            assert not any(cache.rglob("weights-*.bin"))
            client.load_model("b")
            assert is_answer_of(1, answer(server, "b"))
        assert wrong == []


def test_models_make_room_for_one_more_while_they_are_asked_and_although_its_client_leaves(
    stacks: Stacks, plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate("abc"):
        stacks.put(tmp_path, name, number)
    with controlled(tmp_path, "9MiB", plans, load_models=("a", "b")) as (server, client):
        memory, before = server.placement.memory, held(server)
        bound: list[Program] = [p for t in memory.models.values() for p in t.servable.programs.values()]
        released: list[Program] = []
        monkeypatch.setattr(memory.backend.executor, "release", released.append)
        bind = memory.bind

        def noted(*arguments: Any, **options: Any) -> None:
            bind(*arguments, **options)
            bound.extend(arguments[3].values())

        monkeypatch.setattr(memory, "bind", noted)
        host, port = server.address.split(":")
        with under_load(server, {"a": 0, "b": 1}) as wrong:
            with socket.create_connection((host, int(port))) as impatient:
                order = (
                    b"POST /v2/repository/models/c/load HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
                )
                impatient.sendall(order)
                eventually(lambda: repository_index(server.address)["c"].get("state") in ("LOADING", "READY"))
            eventually(lambda: client.is_model_ready("c"))
            assert is_answer_of(2, answer(server, "c"))
            server.until_planned()
            assert is_answer_of(2, answer(server, "c"))
        assert wrong == []
        after = held(server)
        assert set(after) == {"a", "b", "c"}
        assert sum(after.values()) + memory.partitions.workspace_bytes <= 9 << 20
        assert after["a"] + after["b"] < before["a"] + before["b"]
        running = {id(p) for t in memory.models.values() for p in t.servable.programs.values()}
        assert len(released) >= 1, "a and b have moved, or have less"
        assert len({id(p) for p in released}) == len(released)
        assert {id(p) for p in bound} == running | {id(p) for p in released}
        assert not running & {id(p) for p in released}


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_moves_under_requests_lose_none_and_change_no_bit(
    stacks: Stacks, plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Memory is divided again again and again, so that each of three models has the most of it in turn."""
    names = "abc"
    for number, name in enumerate(names):
        stacks.put(tmp_path, name, number)
    monkeypatch.setattr(elastic_module, "INTERVAL_S", 1e6)  # it checks when the test says so
    monkeypatch.setattr(
        elastic_module, "LEAST_GAIN", 1e-6
    )  # where copying takes as long as computing, less is gained
    with serving(tmp_path, "5MiB", plans, layout="elastic", batch_sizes=(1, 2), search="best") as server:
        server.until_planned()
        placement, before = server.placement, {name: answer(server, name).tobytes() for name in names}
        elastic = server.engine.lifecycle._elastic
        assert elastic is not None
        requests = dict.fromkeys(placement.memory.models, 0)  # by load id, which is also a partition's
        monkeypatch.setattr(elastic, "_requests", lambda: requests)
        monkeypatch.setattr(elastic, "_clock", itertools.count(step=10.0).__next__)
        moved: list[str] = []
        move = placement.migrator._move

        async def noted(found: PlansFound, bound: Bound) -> None:
            moved.extend(model.key.name for model, _ in bound)
            await move(found, bound)

        monkeypatch.setattr(placement.migrator, "_move", noted)
        monkeypatch.setattr(server.replanner, "begin", lambda models: None)  # it would move them, too
        stop, wrong = threading.Event(), list[str]()

        def ask_on(name: str) -> None:
            while not stop.is_set():
                try:
                    if answer(server, name).tobytes() != before[name]:
                        wrong.append(f"{name} gave other bits")
                except InferenceServerException as error:
                    wrong.append(f"{name}: {error}")
                time.sleep(0.01)

        with ThreadPoolExecutor(len(names)) as clients:
            for name in names:
                clients.submit(ask_on, name)
            try:
                for popular in itertools.islice(itertools.cycle(list(requests)), 3 * count // 2):
                    server.on_loop(elastic.check())  # a window begins
                    requests[popular] += 1000
                    server.on_loop(elastic.check())
                    sizes = held(server)
                    assert max(sizes, key=lambda name: sizes[name]) == popular.partition(":")[0]
                    if len(moved) >= count:
                        break
            finally:
                stop.set()
        assert wrong == []
        assert len(moved) >= count
        use = placement.memory.use()
        assert use.partition_bytes + use.workspace_bytes + use.free_bytes == placement.memory.partitions.arena_bytes
        assert server.engine.report().device.divisions == elastic.divisions > count // 4


def test_a_model_that_comes_back_runs_the_plans_that_were_found_for_it(
    stacks: Stacks, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate("ab"):
        stacks.put(tmp_path / "repository", name, number)
    with controlled(tmp_path / "repository", "6MiB", own_cache, load_models=("a",)) as (server, client):
        planner = server.placement.planner
        best_plans, found = planner.best_plans, list[Plans]()

        def noted(demand: ModelDemand, memory: Memory) -> Plans:
            found.append(best_plans(demand, memory))
            return found[-1]

        monkeypatch.setattr(planner, "best_plans", noted)
        client.load_model("b")
        server.until_planned()
        assert len(found) == 1
        client.unload_model("b")
        client.load_model("b")
        (placed,) = (t for t in server.placement.memory.models.values() if t.key.name == "b")
        assert all(program.plan == found[0][batch] for batch, program in placed.servable.programs.items())
        assert placed.searched
        server.until_planned()
        assert len(found) == 1, "they are not searched for again"


def test_a_model_that_comes_back_is_opened_from_the_cache_unless_its_files_have_changed(
    stacks: Stacks, plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered: list[str] = []
    fill = prepare._filled_by_worker

    def noted(call: Any, source: ModelSource, *arguments: Any, **options: Any) -> Any:
        lowered.extend([source.name] if options["quick"] else [])
        return fill(call, source, *arguments, **options)

    monkeypatch.setattr(prepare, "_filled_by_worker", noted)
    stacks.put(tmp_path, "a", 0)
    eventually(lambda: time.time_ns() - (tmp_path / "a" / "1" / "model.pt2").stat().st_ctime_ns > 1e9)
    with controlled(tmp_path, "9MiB", plans) as (server, client):
        for _ in range(3):
            client.load_model("a")
            assert is_answer_of(0, answer(server, "a"))
            client.unload_model("a")
        assert lowered == ["a"]
        for path in plans.rglob("weights-*.bin"):
            with path.open("r+b") as file:
                file.write(bytes(4096))
        client.load_model("a")
        assert lowered == ["a", "a"], "the checksum of the weights file is verified"
        assert is_answer_of(0, answer(server, "a"))
        client.unload_model("a")
        shutil.rmtree(tmp_path / "a")
        stacks.put(tmp_path, "a", 1)
        client.load_model("a")
        assert is_answer_of(1, answer(server, "a"))
        assert lowered == ["a", "a", "a"]


def test_a_model_that_another_server_removes_from_the_cache_before_it_is_opened_is_made_once_more(
    stacks: Stacks, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = 0
    fill = prepare.lowered_and_measured

    def removed(*arguments: Any, **options: Any) -> Model:
        nonlocal filled
        model = fill(*arguments, **options)
        filled += 1
        if filled == 1:
            shutil.rmtree(own_cache / "weights")
        return model

    monkeypatch.setattr(prepare, "lowered_and_measured", removed)
    stacks.put(tmp_path / "models", "a", 0)
    with serving(tmp_path / "models", "9MiB", own_cache, batch_sizes=(1,)) as server:
        assert is_answer_of(0, answer(server, "a"))
    assert filled == 2


def test_what_does_not_fit_is_refused_with_the_least_that_would_and_disturbs_no_other(
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


@pytest.mark.parametrize("memory", ["20MiB", "5MiB"])
def test_new_version_takes_over_without_losing_a_request(
    stacks: Stacks, plans: Path, tmp_path: Path, memory: str
) -> None:
    """Without memory for both versions, requests wait while the new one is loaded."""
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
        assert [entry for entry in seen if isinstance(entry, str)] == []
        order = [entry for entry in seen if isinstance(entry, int)]
        assert order == sorted(order)
        assert list(held(server)) == ["a"]


@pytest.mark.parametrize("control", ["poll", "explicit"])
def test_models_that_come_and_go_leave_nothing_behind(
    stacks: Stacks, plans: Path, tmp_path: Path, control: str
) -> None:
    """New names, new versions of a name, and a folder without a model; each is in the index while it has a folder."""
    stacks.put(tmp_path, "a", 0)
    changes: dict[str, Any] = {"load_models": ("a",)} if control == "explicit" else {"poll_interval_s": 0.1}
    with controlled(tmp_path, "20MiB", plans, model_control=control, **changes) as (server, client):
        registry = server.engine.registry

        def entries() -> set[tuple[str, int | None]]:
            return {(entry.name, entry.version) for entry in registry}

        for n in range(2):
            stacks.put(tmp_path, f"b{n}", 1)
            (tmp_path / f"broken{n}").mkdir()
            stacks.put(tmp_path, "a", 1, version=2 + n)
            if control == "explicit":
                client.load_model(f"b{n}")
                client.load_model("a")
            eventually(lambda n=n: client.is_model_ready(f"b{n}") and client.is_model_ready("a", f"{2 + n}"))
            assert {(f"b{n}", 1), ("a", 1 + n), ("a", 2 + n)} <= entries()
            assert is_answer_of(1, answer(server, f"b{n}"))
            if control == "explicit":
                client.unload_model(f"b{n}")
            for gone in (f"b{n}", f"broken{n}", f"a/{1 + n}"):
                shutil.rmtree(tmp_path / gone)
            if control == "explicit":
                client.load_model("a")
            eventually(lambda n=n: entries() == {("a", 2 + n)})
        assert registry._statistics.keys() == {("a", 3)}
        assert repository_index(server.address).keys() == held(server).keys() == {"a"}
        if control == "poll":
            with pytest.raises(InferenceServerException, match="not allowed"):
                client.unload_model("a")


def test_a_limited_number_of_models_is_prepared_at_a_time_while_others_are_served(
    stacks: Stacks, plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is smaller here than a server's: each of its processes takes seconds to import torch."""
    names, limit, gate, lock, under_way, most = "abc", 2, threading.Event(), threading.Lock(), list[str](), 0
    monkeypatch.setattr(place, "MOST_PREPARING", limit)
    opened = place.prepare

    def waiting(source: ModelSource, *arguments: Any, **options: Any) -> Model:
        nonlocal most
        with lock:
            under_way.append(source.name)
            most = max(most, len(under_way))
        gate.wait()
        try:
            return opened(source, *arguments, **options)
        finally:
            with lock:
                under_way.remove(source.name)

    for name in names:
        stacks.put(tmp_path, name, 0)
    with controlled(tmp_path, "40MiB", plans) as (server, _), ThreadPoolExecutor(len(names)) as clients:
        monkeypatch.setattr(place, "prepare", waiting)
        loads = [clients.submit(server.on_loop, server.engine.lifecycle.load(name, None)) for name in names]
        try:
            eventually(lambda: all(e.get("state") == "LOADING" for e in repository_index(server.address).values()))
            eventually(lambda: len(under_way) == limit)
            repository_index(server.address)  # the event loop has gone round
            assert len(under_way) == limit
        finally:
            gate.set()
        for load in loads:
            load.result()
        assert most == limit
        assert all(is_answer_of(0, answer(server, name)) for name in names)
