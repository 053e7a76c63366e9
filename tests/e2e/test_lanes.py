"""Two compute lanes in the real server: answers as the model's own, memory as planned, both lanes busy at once."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from cohabit.runtime.binding.program import Program
from cohabit.server.deploy.load import PartitionedMemory
from tests.support.e2e.serving import Running, eventually, serving
from tests.support.e2e.stacks import Stacks, answer, controlled, held, is_answer_of, under_load

LANES = 2
SEEDS = {name: seed for seed, name in enumerate("abcd")}


@pytest.fixture
def repository(stacks: Stacks, tmp_path: Path) -> Path:
    for name, seed in SEEDS.items():
        stacks.put(tmp_path / "models", name, seed)
    return tmp_path / "models"


def lanes_of(server: Running) -> dict[str, int]:
    return {placed.key.name: placed.lane for placed in server.placement.models.values()}


def byte_ranges(memory: PartitionedMemory) -> dict[str, set[tuple[int, int]]]:
    """Where each model's programs copy parameters to."""
    found: dict[str, set[tuple[int, int]]] = {}
    for placed in memory.models.values():
        programs: list[Program] = list(placed.servable.programs.values())
        steps = [step for program in programs for step in (*program.swap_ins, *program.residents)]
        found[placed.key.name] = {(step.offset, step.offset + step.nbytes) for step in steps}
    return found


def assert_copies_stay_in_their_own_bytes(server: Running) -> None:
    """Copies go to the own partition, or to the workspace of the own lane."""
    memory = server.placement.memory
    each = memory.partitions.workspace_bytes
    for placed in memory.models.values():
        own = memory.partitions.held[placed.partition_id]
        rooms = [(placed.lane * each, (placed.lane + 1) * each), (own.offset, own.end)]
        for start, end in byte_ranges(memory)[placed.key.name]:
            assert any(low <= start and end <= high for low, high in rooms), (placed.key.name, start, end)
    extents = [memory.partitions.workspaces, *memory.partitions.held.values()]
    assert not any(a.overlaps(b) for i, a in enumerate(extents) for b in extents[:i])
    assert extents[0].nbytes == LANES * each


def side_by_side(server: Running, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Let the next execution on each lane wait for the other's; returns a function that tells whether they met."""
    met = threading.Barrier(LANES, timeout=120)
    together = threading.Event()
    for executor in server.placement.memory.executors:
        run = executor.run

        def meet(*arguments: Any, run: Callable[..., Any] = run, **options: Any) -> Any:
            if not together.is_set():
                met.wait()
                together.set()
            return run(*arguments, **options)

        monkeypatch.setattr(executor, "run", meet)
    return together.is_set


def test_models_of_two_lanes_swap_and_compute_side_by_side_with_the_models_answers(
    repository: Path, plans: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = tmp_path / "spans.json"
    tracing = {"trace": {"file": str(trace), "rate": "1"}}
    with serving(repository, "9MiB", plans, batch_sizes=(1, 2), compute_lanes=LANES, **tracing) as server:
        assert set(lanes_of(server).values()) == {0, 1}
        assert_copies_stay_in_their_own_bytes(server)
        memory = server.placement.memory
        met = side_by_side(server, monkeypatch)
        with under_load(server, SEEDS) as wrong:
            eventually(met)
        assert wrong == []
        use = server.placement.use()
        assert use.lane_busy_s.keys() == {"swap_in_0", "swap_in_1"}
        assert all(seconds > 0 for seconds in use.lane_busy_s.values())
        assert use.workspace_bytes + use.partition_bytes + use.free_bytes == memory.partitions.arena_bytes
        extents = sorted((extent for extent in use.extents if extent.nbytes), key=lambda extent: extent.offset)
        assert [extent.use for extent in extents[:LANES]] == ["workspace"] * LANES
        assert {extent.model.name for extent in extents if extent.model} == SEEDS.keys()
        ends = [extent.offset + extent.nbytes for extent in extents]
        assert [0, *ends[:-1]] == [extent.offset for extent in extents], "the map has every byte once"
        assert ends[-1] == memory.partitions.arena_bytes
        assert "lane" in server.placement.memory_map.splitlines()[1]
        lanes = lanes_of(server)
    events = [e for e in json.loads(trace.read_text()) if e["ph"] == "X"]
    assert {(e["args"].get("model", e["name"]), e["tid"] // 3) for e in events if e["pid"] == 2} == lanes.items()


def test_models_come_change_and_go_on_both_lanes_and_the_workspaces_grow_while_they_are_asked(
    repository: Path, plans: Path
) -> None:
    """The workspaces that suit one model are smaller than those that suit four, so everybody moves."""
    changes = {"compute_lanes": LANES, "load_models": ("a",), "batch_sizes": (1, 2)}
    with controlled(repository, "8MiB", plans, **changes) as (server, client):
        partitions = server.placement.memory.partitions
        workspace, partition = partitions.workspace_bytes, held(server)["a"]
        with under_load(server, {"a": 0}) as wrong:
            for name in "bcd":
                client.load_model(name)
                assert_copies_stay_in_their_own_bytes(server)
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
        server.until_planned()
        assert_copies_stay_in_their_own_bytes(server)
        assert set(lanes_of(server).values()) == {0, 1}
        assert all(is_answer_of(seed, answer(server, name)) for name, seed in SEEDS.items())


def test_a_resident_model_that_needs_larger_workspaces_than_there_are_is_refused_with_the_way_out(
    stacks: Stacks, plans: Path, tmp_path: Path
) -> None:
    stacks.put(tmp_path, "small", 0)
    stacks.put(tmp_path, "large", 1)
    (tmp_path / "small" / "config.pbtxt").write_text("max_batch_size: 1")
    changes = {"compute_lanes": LANES, "load_models": ("small",), "layout": "resident", "batch_sizes": None}
    with controlled(tmp_path, "20MiB", plans, **changes) as (server, client):
        with pytest.raises(InferenceServerException, match=r"each of the 2 lanes has .* load this model when the"):
            client.load_model("large")
        assert is_answer_of(0, answer(server, "small"))
        client.load_model("large", config='{"max_batch_size": 1}')
        assert is_answer_of(1, answer(server, "large"))
