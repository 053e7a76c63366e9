"""Two compute lanes in the real server: answers as the model's own, memory as planned, both lanes busy at once."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tritonclient.utils import InferenceServerException

from planner.profile import Link, Profile
from runtime.binding.program import Program
from runtime.cpu import backend as cpu
from runtime.lowering.lower import Lowered
from server.placement.device_memory import House
from tests.e2e.serving import Running, ask, refused_start, serving
from tests.e2e.test_e2e_control import (
    Stacks,
    answer,
    controlled,
    eventually,
    held,
    is_answer_of,
    plans,
    stacks,
    under_load,
)

__all__ = ["plans", "stacks"]
LANES = 2
SEEDS = {name: seed for seed, name in enumerate("abcd")}


@pytest.fixture
def repository(stacks: Stacks, tmp_path: Path) -> Path:
    for name, seed in SEEDS.items():
        stacks.put(tmp_path, name, seed)
    return tmp_path


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned for is a device on which computing a layer takes as long as half a MiB."""
    measured = cpu.profile

    def as_if(lowered: Lowered, *others: Any, **options: Any) -> dict[int, Profile]:
        return {
            batch: structs.replace(
                profile,
                op_seconds=(100e-6,) * len(profile.op_seconds),
                swap_in=Link(5e-6, 5e9),
                compute_slowdown=1.0,
                swap_slowdown=1.0,
            )
            for batch, profile in measured(lowered, *others, **options).items()
        }

    monkeypatch.setattr(cpu, "profile", as_if)


def lanes_of(server: Running) -> dict[str, int]:
    return {tenant.name: tenant.lane for tenant in server.loaded.tenants.values()}


def byte_ranges(house: House) -> dict[str, set[tuple[int, int]]]:
    """Where each model's programs copy parameters to."""
    found: dict[str, set[tuple[int, int]]] = {}
    for tenant in house.tenants.values():
        programs: list[Program] = list(tenant.servable.programs.values())
        steps = [step for program in programs for step in (*program.swap_ins, *program.residents)]
        found[tenant.name] = {(step.offset, step.offset + step.nbytes) for step in steps}
    return found


def assert_nobody_is_in_anothers_bytes(server: Running) -> None:
    """Copies go to the own partition, or to the workspace of the own lane."""
    house = server.loaded.house
    each = house.partitions.workspace_bytes
    for tenant in house.tenants.values():
        own = house.partitions.held[tenant.holder]
        rooms = [(tenant.lane * each, (tenant.lane + 1) * each), (own.offset, own.end)]
        for start, end in byte_ranges(house)[tenant.name]:
            assert any(low <= start and end <= high for low, high in rooms), (tenant.name, start, end)
    extents = [house.partitions.workspaces, *house.partitions.held.values()]
    assert not any(a.overlaps(b) for i, a in enumerate(extents) for b in extents[:i])
    assert extents[0].nbytes == LANES * each


def side_by_side(server: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Let the next execution on each lane wait within its run for that of the other; says whether they met."""
    met = threading.Barrier(LANES, timeout=30)
    together = threading.Event()
    for executor in server.loaded.house.executors:
        run = executor.run

        def meet(*arguments: Any, run: Callable[..., Any] = run, **options: Any) -> Any:
            if not together.is_set():
                met.wait()
                together.set()
            return run(*arguments, **options)

        monkeypatch.setattr(executor, "run", meet)
    return together.is_set


def test_models_of_two_lanes_swap_and_compute_side_by_side_with_the_models_answers(
    repository: Path, plans: Path, unhurried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(repository, "9MiB", plans, batch_sizes=(1, 2), compute_lanes=LANES) as server:
        assert set(lanes_of(server).values()) == {0, 1}
        assert_nobody_is_in_anothers_bytes(server)
        house = server.loaded.house
        met = side_by_side(server, monkeypatch)
        with under_load(server, SEEDS) as wrong:
            eventually(met)
        assert wrong == []
        use = server.loaded.use()
        assert use.lane_busy_s.keys() == {"swap_in_0", "swap_in_1"}
        assert all(seconds > 0 for seconds in use.lane_busy_s.values())
        assert use.workspace_bytes + use.partition_bytes + use.free_bytes == house.partitions.arena_bytes
        assert "lane" in server.loaded.memory_map.splitlines()[2]


def test_models_come_change_and_go_on_both_lanes_and_the_workspaces_grow_while_they_are_asked(
    repository: Path, plans: Path, unhurried: None
) -> None:
    """The workspaces that suit one model are smaller than those that suit four, so everybody moves."""
    changes = {"compute_lanes": LANES, "load_models": ("a",)}
    with controlled(repository, "8MiB", plans, **changes) as (server, client):
        partitions = server.loaded.house.partitions
        workspace, partition = partitions.workspace_bytes, held(server)["a"]
        with under_load(server, {"a": 0}) as wrong:
            for name in "bcd":
                client.load_model(name)
                assert_nobody_is_in_anothers_bytes(server)
            for name, seed in SEEDS.items():
                assert is_answer_of(seed, answer(server, name))
        assert partitions.workspace_bytes > workspace
        assert held(server)["a"] < partition
        lane = lanes_of(server)["c"]
        client.load_model("c")
        assert lanes_of(server)["c"] == lane, "another version stays where the model was"
        with under_load(server, {"b": 1, "c": 2, "d": 3}) as wrong_of_others:
            client.unload_model("a")
            client.load_model("a")
            assert is_answer_of(0, answer(server, "a"))
        assert wrong == wrong_of_others == []
        assert server.loaded.housing is not None
        searches = server.loaded.housing._tasks
        eventually(lambda: not searches)  # better plans are in use by now
        assert_nobody_is_in_anothers_bytes(server)
        assert set(lanes_of(server).values()) == {0, 1}
        assert all(is_answer_of(seed, answer(server, name)) for name, seed in SEEDS.items())


def test_a_resident_model_that_needs_larger_workspaces_than_there_are_is_refused_with_the_way_out(
    stacks: Stacks, plans: Path, tmp_path: Path
) -> None:
    stacks.put(tmp_path, "small", 0)
    stacks.put(tmp_path, "large", 1)
    changes = {"compute_lanes": LANES, "load_models": ("small",), "layout": "resident"}
    with controlled(tmp_path, "20MiB", plans, **changes) as (server, client):
        with pytest.raises(InferenceServerException, match=r"each of the 2 lanes has .* load it at the start"):
            client.load_model("large", config='{"max_batch_size": 8}')
        assert is_answer_of(0, answer(server, "small"))
        client.load_model("large")
        assert is_answer_of(1, answer(server, "large"))


def test_layouts_with_one_region_have_one_lane(repository: Path, plans: Path) -> None:
    status, said = refused_start(repository, "20MiB", plans, "--layout", "lru", "--compute-lanes", "2")
    assert status == 2
    assert "--compute-lanes 2 needs a layout in which models have partitions; in lru they share one region" in said


def test_traces_say_on_which_lane_a_request_ran(repository: Path, plans: Path, tmp_path: Path) -> None:
    trace = tmp_path / "spans.json"
    with serving(
        repository, "9MiB", plans, batch_sizes=(1,), compute_lanes=LANES, trace_file=trace, trace_rate=1
    ) as server:
        for name, seed in SEEDS.items():
            assert is_answer_of(seed, answer(server, name))
        expected = lanes_of(server)
        assert ask(server.address, "GET", "/v2/health/ready")[0] == 200
    events = [e for e in json.loads(trace.read_text()) if e["ph"] == "X"]
    of_models = {(e["args"].get("model", e["name"]), e["tid"] // 3) for e in events if e["pid"] == 2}
    assert of_models == set(expected.items())
