"""Models with one trunk and heads of their own share a partition: they come, go and move, and give their own bits."""

import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch.export import Dim

from cohabit.loadgen.zoo.exporting import save_model
from cohabit.runtime.errors import MemoryExceeded
from cohabit.server.deploy import lifecycle, replan
from cohabit.server.errors import LoadFailed
from tests.support.e2e.serving import Running, serving
from tests.support.e2e.stacks import WIDTH, Array, Stack, Stacks, X, answer, controlled, is_answer_of, under_load

CLASSES, MEMBERS = 16, "abcd"
TIGHT = "2.5MiB"
"""For a model of 4.1 MiB."""


class Headed(torch.nn.Module):
    def __init__(self, head: int, trunk: int = 0) -> None:
        super().__init__()
        self.trunk = Stack(trunk)
        draws = torch.Generator().manual_seed(100 + head)
        self.head = torch.nn.Parameter(torch.randn(CLASSES, WIDTH, generator=draws) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.trunk(x), self.head)


@cache
def archive(head: int, trunk: int, folder: Path) -> bytes:
    program = torch.export.export(
        Headed(head, trunk).eval(),
        (),
        kwargs={"x": torch.zeros(2, WIDTH)},
        dynamic_shapes={"x": {0: Dim("batch", min=1, max=8)}},
    )
    save_model(program, folder / f"{head}.pt2", {})
    return (folder / f"{head}.pt2").read_bytes()


def put(repository: Path, name: str, head: int, version: int = 1, trunk: int = 0) -> None:
    path = repository / name / str(version) / "model.pt2"
    path.parent.mkdir(parents=True)
    path.write_bytes(archive(head, trunk, repository.parent))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for head, name in enumerate(MEMBERS):
        put(folder, name, head)
    return folder


def is_heads(head: int, output: Array) -> bool:
    with torch.no_grad():
        expected = Headed(head).eval()(torch.from_numpy(X)).numpy()
    return np.allclose(output, expected, rtol=1e-4, atol=1e-4)


def is_right(server: Running, name: str, head: int) -> bool:
    return is_heads(head, answer(server, name))


def partitions(server: Running) -> dict[str, set[str]]:
    """The names of the models in each partition of the arena."""
    memory = server.placement.memory
    found: dict[str, set[str]] = {key: set() for key in memory.partitions.held}
    for model in memory.models.values():
        found[model.partition_id].add(model.key.name)
    return found


def test_a_family_has_one_partition_in_less_memory_than_a_member_and_each_gives_the_bits_it_has_alone(
    repository: Path, own_cache: Path
) -> None:
    alone = {}
    for name in MEMBERS:
        with controlled(repository, TIGHT, own_cache, load_models=(name,)) as (server, _):
            alone[name] = answer(server, name).tobytes()
    assert len(set(alone.values())) == len(MEMBERS)
    with controlled(repository, TIGHT, own_cache, load_models=tuple(MEMBERS)) as (server, _):
        assert list(partitions(server).values()) == [set(MEMBERS)]
        assert server.placement.memory.partitions.arena_bytes <= 2.5 * (1 << 20)
        for name in (MEMBERS * 3)[::-1] + MEMBERS:
            assert answer(server, name).tobytes() == alone[name]
        assert "a and 3 more" in server.placement.memory_map
        server.until_planned()
        for name in MEMBERS:
            assert answer(server, name).tobytes() == alone[name]


def test_members_come_and_go_while_others_are_asked_and_nothing_moves(repository: Path, own_cache: Path) -> None:
    put(repository, "a", 7, version=2)
    with controlled(repository, TIGHT, own_cache, load_models=("b", "c")) as (server, client):
        server.until_planned()
        (before,) = server.placement.memory.partitions.held.values()
        with under_load(server, {"b": 1, "c": 2}, is_heads) as wrong:
            for _ in range(3):
                client.load_model("a")
                assert is_right(server, "a", 7)
                client.load_model("d")
                assert is_right(server, "d", 3)
                client.unload_model("d")
                client.load_model("a", config='{"version_policy": {"specific": {"versions": [1]}}}')
                assert is_right(server, "a", 0)
                client.unload_model("a")
        assert wrong == []
        assert list(server.placement.memory.partitions.held.values()) == [before]
        for name in "bc":
            client.unload_model(name)
        assert server.placement.memory.partitions.held == {}


def test_a_stranger_makes_a_family_smaller_and_its_members_move_together(
    stacks: Stacks, repository: Path, own_cache: Path
) -> None:
    stacks.put(repository, "stranger", 5)
    with controlled(repository, "5MiB", own_cache, load_models=tuple(MEMBERS)) as (server, client):
        server.until_planned()
        (before,) = server.placement.memory.partitions.held.values()
        with under_load(server, dict(zip(MEMBERS, range(4), strict=True)), is_heads) as wrong:
            client.load_model("stranger")
            assert is_answer_of(5, answer(server, "stranger"))
        assert wrong == []
        assert sorted(partitions(server).values(), key=len) == [{"stranger"}, set(MEMBERS)]
        (after,) = {server.placement.memory.extent_of(m).nbytes for m in members(server)}
        assert after < before.nbytes
        server.until_planned()
        for head, name in enumerate(MEMBERS):
            assert is_right(server, name, head)


def test_each_lane_has_a_part_of_the_family(repository: Path, own_cache: Path) -> None:
    with serving(repository, "5MiB", own_cache, compute_lanes=2, batch_sizes=(1,)) as server:
        assert sorted(map(sorted, partitions(server).values())) == [["a", "c"], ["b", "d"]]
        assert {model.key.name: model.lane for model in members(server)} in (
            {"a": 0, "b": 1, "c": 0, "d": 1},
            {"a": 1, "b": 0, "c": 1, "d": 0},
        )
        for head, name in enumerate(MEMBERS):
            assert is_right(server, name, head)


@pytest.mark.parametrize("stage", ["bind", "resident_load", "warm_up", "served"])
def test_a_member_that_cannot_be_loaded_takes_nothing_from_its_family(
    repository: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("unexpected")

    with controlled(repository, TIGHT, own_cache, load_models=("b", "c")) as (server, client):
        server.until_planned()
        held = dict(server.placement.memory.partitions.held)
        where: dict[str, Any] = {"warm_up": lifecycle, "served": server.engine.registry}
        with under_load(server, {"b": 1, "c": 2}, is_heads) as wrong:
            with monkeypatch.context() as patch:
                patch.setattr(where.get(stage, server.placement.memory), stage, fails)
                with pytest.raises(LoadFailed):
                    server.on_loop(server.engine.lifecycle.load("a"))
            assert server.placement.memory.partitions.held == held
            client.load_model("a")
            assert is_right(server, "a", 0)
        assert wrong == []


def members(server: Running) -> list[Any]:
    return [model for model in server.placement.memory.models.values() if model.key.name in MEMBERS]


def test_a_member_has_its_familys_plans_though_a_stranger_of_that_form_has_others(
    repository: Path, own_cache: Path
) -> None:
    """Residents that lie elsewhere would be other members' bytes."""
    put(repository, "a0", 4, trunk=9)
    with controlled(repository, "6.5MiB", own_cache, load_models=("a0", "b")) as (server, client):
        server.until_planned()
        stranger, member = server.placement.memory.models.values()
        assert (stranger.key.name, member.key.name) == ("a0", "b")
        assert member.partition_id != stranger.partition_id
        stranger.profiles, stranger.found = member.profiles, replace(member.found, searched=False)
        client.load_model("a")
        assert len({id(model.found) for model in members(server)}) == 1
        assert is_right(server, "a", 0)
        assert is_right(server, "b", 1)


def test_a_switch_that_fails_leaves_profiles_with_their_plans_so_that_members_can_join(
    repository: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryExceeded("no memory for it")

    with controlled(repository, TIGHT, own_cache, load_models=("a", "b")) as (server, client):
        server.until_planned()
        first, second = members(server)
        measured = {bucket: structs.replace(p, noise=p.noise + 0.01) for bucket, p in first.profiles.items()}
        with monkeypatch.context() as patch:
            patch.setattr(server.placement.memory, "bind", fails)
            with pytest.raises(MemoryExceeded):
                server.on_loop(server.placement.replan(first, first.plans, first.plans, measured))
        client.load_model("c")
        for head, name in enumerate("abc"):
            assert is_right(server, name, head)
        assert first.profiles == second.profiles != measured


def test_plans_that_are_found_after_the_first_member_has_left_are_the_others(
    repository: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replan, "_is_better", lambda *_: True)
    with controlled(repository, TIGHT, own_cache, load_models=("a", "b")) as (server, client):
        server.until_planned()
        first, second = members(server)
        for member in (first, second):
            member.found = replace(member.found, searched=False)
        planner, searching, left = server.placement.planner, threading.Event(), threading.Event()
        best_plans = planner.best_plans

        def late(*arguments: Any) -> Any:
            searching.set()
            assert left.wait(60)
            return best_plans(*arguments)

        monkeypatch.setattr(planner, "best_plans", late)
        server.loop.call_soon_threadsafe(server.replanner.begin, [first, second])
        assert searching.wait(60)
        client.unload_model("a")
        left.set()
        server.until_planned()
        assert second.searched
        assert is_right(server, "b", 1)
