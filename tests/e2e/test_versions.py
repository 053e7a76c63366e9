"""Versions of a model come and go while others are served: no wrong answer, no lost request, memory of their own."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support.e2e.serving import Running, eventually
from tests.support.e2e.stacks import Stacks, X, answer, controlled, held, is_answer_of, under_load


def policy(text: str) -> str:
    return json.dumps({"version_policy": json.loads(text)})


def ready_versions(client: triton.InferenceServerClient, model: str = "a") -> list[str]:
    versions: list[str] = client.get_model_metadata(model)["versions"]
    return versions


def extents(server: Running) -> dict[int, tuple[int, int]]:
    """The bytes of each version of `a` in the arena."""
    memory = server.placement.memory
    placed = [t for t in memory.models.values() if t.key.name == "a"]
    return {
        t.key.version: (memory.partitions.held[t.partition_id].offset, memory.partitions.held[t.partition_id].end)
        for t in placed
    }


def assert_apart(server: Running, versions: list[int]) -> None:
    found = extents(server)
    assert sorted(found) == versions
    ordered = sorted(found.values())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
    assert all(end > start for start, end in ordered)
    placed_models = server.placement.memory.models.values()
    names = [{program.name for program in placed.servable.programs.values()} for placed in placed_models]
    assert len(set[str]().union(*names)) == len(names) == sum(map(len, names)), "executors keep their states apart"


def test_the_policy_of_a_load_adds_and_removes_versions_and_disturbs_no_other(
    stacks: Stacks, plans: Path, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        stacks.put(tmp_path, "a", version, version)
    with controlled(tmp_path, "24MiB", plans, load_models=("a",)) as (server, client):
        partitions = server.placement.memory.partitions
        assert ready_versions(client) == ["3"]
        third = [t for t in server.placement.memory.models.values() if t.key == ("a", 3)]
        with under_load(server, {"a/3": 3}) as wrong:
            client.load_model("a", config=policy('{"all": {}}'))
            assert ready_versions(client) == ["1", "2", "3"]
            assert_apart(server, [1, 2, 3])
            with under_load(server, {"a/1": 1}) as first_wrong:
                for version in (1, 2, 3):
                    assert is_answer_of(version, answer(server, "a", str(version)))
                client.load_model("a", config=policy('{"specific": {"versions": [1, 3]}}'))
                assert_apart(server, [1, 3])
                with pytest.raises(InferenceServerException, match="version 2 is not at ready state: unloaded"):
                    answer(server, "a", "2")
                given = client.get_model_config("a", "3")["version_policy"]
                assert given == {"specific": {"versions": [1, 3]}}
            assert first_wrong == []
            client.load_model("a", config=policy('{"latest": {"num_versions": 2}}'))
            assert_apart(server, [2, 3])
            client.load_model("a")
            assert_apart(server, [3])
            assert ready_versions(client) == ["3"]
        assert wrong == []
        same = [t for t in server.placement.memory.models.values() if t.key == ("a", 3)]
        assert same == third, "it was never loaded again"
        client.load_model("a", config=policy('{"all": {}}'))
        client.unload_model("a")
        assert held(server) == {}
        assert partitions.free_bytes == partitions.arena_bytes
        states = {row["version"]: (row["state"], row["reason"]) for row in client.get_model_repository_index()}
        assert states == dict.fromkeys("123", ("UNAVAILABLE", "unloaded"))


@pytest.mark.parametrize("layout", ["lru", "on_demand"])
def test_versions_that_share_memory_are_told_apart(
    stacks: Stacks, plans: Path, tmp_path: Path, layout: str
) -> None:
    for version in (1, 2, 3):
        stacks.put(tmp_path, "a", version, version)
    (tmp_path / "a" / "config.pbtxt").write_text("version_policy { all { } }")
    with controlled(tmp_path, "6MiB", plans, layout=layout, model_control="none") as (server, client):
        assert ready_versions(client) == ["1", "2", "3"]
        for version in (1, 2, 3, 1, 3, 2, 2, 1):
            assert is_answer_of(version, answer(server, "a", str(version)))


def test_a_version_that_fails_is_named_and_the_others_are_served(
    stacks: Stacks, plans: Path, tmp_path: Path
) -> None:
    stacks.put(tmp_path, "a", 1, 1)
    stacks.put(tmp_path, "a", 2, 2)
    (tmp_path / "a" / "3").mkdir()
    (tmp_path / "a" / "3" / "model.pt2").write_bytes(b"no archive")
    (tmp_path / "a" / "4").mkdir()
    with controlled(tmp_path, "24MiB", plans) as (server, client):
        with pytest.raises(InferenceServerException) as caught:
            client.load_model("a", config=policy('{"all": {}}'))
        message = str(caught.value)
        assert "load failed for model 'a': version 4 is at UNAVAILABLE state: it has no file model.pt2; " in message
        assert "; version 3 is at UNAVAILABLE state: " in message
        assert "not a .pt2 archive" in message
        states = {row["version"]: row["state"] for row in client.get_model_repository_index()}
        assert states == {"1": "READY", "2": "READY", "3": "UNAVAILABLE", "4": "UNAVAILABLE"}
        assert client.is_server_ready(), "versions of the model are"
        assert is_answer_of(2, answer(server, "a")), "the highest that is ready"
        with pytest.raises(InferenceServerException, match="version 4 is at UNAVAILABLE"):
            client.load_model("a", config=policy('{"specific": {"versions": [2, 4]}}'))
        assert ready_versions(client) == ["1", "2"], "nothing is unloaded by a load that fails"
        client.load_model("a", config=policy('{"specific": {"versions": [2]}}'))
        assert ready_versions(client) == ["2"]
        shutil.rmtree(tmp_path / "a" / "2")
        stacks.put(tmp_path, "a", 5, 2)
        client.load_model("a", config=policy('{"specific": {"versions": [2]}}'))
        assert is_answer_of(5, answer(server, "a", "2")), "its file was another one"


def test_version_folders_are_followed(stacks: Stacks, plans: Path, tmp_path: Path) -> None:
    stacks.put(tmp_path, "a", 1, 1)
    (tmp_path / "a" / "config.pbtxt").write_text("version_policy { latest { num_versions: 2 } }")
    with (
        controlled(tmp_path, "24MiB", plans, model_control="poll", poll_interval_s=0.1, grpc_port=0) as (
            server,
            client,
        ),
        triton_grpc.InferenceServerClient(server.grpc_address) as grpc,
    ):
        sent = triton_grpc.InferInput("x", list(X.shape), "FP32")
        sent.set_data_from_numpy(X)
        (name,) = (output["name"] for output in client.get_model_metadata("a")["outputs"])

        def by_grpc(version: str) -> bool:
            output = grpc.infer("a", [sent], version).as_numpy(name)
            return is_answer_of(int(version), output)

        with under_load(server, {"a/1": 1}) as wrong:
            (tmp_path / "a" / "2").mkdir()
            eventually(lambda: [row["version"] for row in client.get_model_repository_index()] == ["1", "2"])
            assert not client.is_model_ready("a", "2"), "its file is not there yet"
            shutil.rmtree(tmp_path / "a" / "2")
            stacks.put(tmp_path, "a", 2, 2)
            eventually(lambda: client.is_model_ready("a", "2"))
            assert by_grpc("1")
            assert by_grpc("2")
            assert_apart(server, [1, 2])
        assert wrong == []
        with under_load(server, {"a/2": 2, "a": {2, 3}}) as wrong:
            stacks.put(tmp_path, "a", 3, 3)
            eventually(lambda: ready_versions(client) == ["2", "3"])
            assert by_grpc("3")
            with pytest.raises(InferenceServerException, match="version 1 is not at ready state: unl") as caught:
                by_grpc("1")
            assert str(caught.value.status()) == "StatusCode.NOT_FOUND"
            shutil.rmtree(tmp_path / "a" / "3")
            eventually(lambda: ready_versions(client) == ["1", "2"])
            assert by_grpc("1")
        assert wrong == []
        shutil.rmtree(tmp_path / "a")
        eventually(lambda: held(server) == {})
