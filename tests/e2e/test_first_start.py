"""The first start: models are served on quick plans, which are replaced by better ones."""

import asyncio
import json
import shutil
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from cohabit.planner import cache_file
from cohabit.planner import profile as profile_format
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.server.config.machine import available_cpus
from cohabit.server.deploy import place, replan
from cohabit.server.deploy import prepare as preparation
from cohabit.server.deploy.decide import Decider
from cohabit.server.deploy.partitions import Partitions
from cohabit.server.deploy.replan import Replanner
from cohabit.server.ipc.model import ModelKey
from cohabit.server.repository.sources import ModelSource
from tests.support.e2e.archives import Archives
from tests.support.e2e.serving import Running, eventually, infer, process, serving
from tests.support.e2e.stacks import Stacks, answer, is_answer_of

MODEL, BATCHES = "ranker", (1, 2)
NOT_IN_ENGINES = {"numba", "llvmlite", "scipy", "grpc", "aiohttp"}
"""Packages of the planner and of the transports: engines only read plans."""


def plans_of(server: Running) -> dict[Bucket, Plan]:
    return dict(server.placement.models[MODEL, 1].plans)


def evaluations(plans: dict[Bucket, Plan]) -> set[int]:
    return {plan.provenance.evaluations for plan in plans.values() if plan.provenance is not None}


@pytest.fixture(scope="module")
def repository(archives: Archives) -> Path:
    return archives.repository(MODEL)


@pytest.fixture(scope="module")
def planned(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the model lowered, measured and planned. Not to be written to."""
    cache = tmp_path_factory.mktemp("planned") / "cache"
    with serving(repository, "50%", cache, engine="process", batch_sizes=BATCHES) as server:
        server.until_planned()
    return cache


def mapped_packages(pid: int) -> set[str]:
    """The packages whose shared libraries a process has mapped."""
    files = {Path(line.split()[-1]) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    return {part for file in files if ".so" in file.suffixes for part in file.parts}


def test_with_json_everything_on_stderr_is_a_record(archives: Archives, tmp_path: Path) -> None:
    """Of the front end, the engine, and the workers of a first start, one of whose models cannot be loaded."""
    repository = archives.repository(MODEL)
    (repository / "damaged" / "1").mkdir(parents=True)
    (repository / "damaged" / "1" / "model.pt2").write_bytes(b"not an archive")
    flags = ("--log-format", "json", "--no-strict-readiness", "--threads", str(available_cpus() + 1))
    with process(repository, "50%", tmp_path, *flags) as server:
        server.until_ready()
        eventually(lambda: '"ready"' in server.log_text())
        assert mapped_packages(server.engine().pid) & NOT_IN_ENGINES == set()
        server.popen.send_signal(signal.SIGTERM)
        assert server.popen.wait(60) == 0
        events = [json.loads(line) for line in server.log_text().splitlines()]
    assert all(event.keys() >= {"time", "level", "logger", "event"} for event in events)
    by_name = {event["event"]: event for event in events}
    assert (by_name["ready"]["served"], by_name["ready"]["models"]) == (1, 2)
    assert by_name["ready"]["url"] == f"http://{server.address}"
    (placed,) = by_name["memory map"]["placed"]
    assert placed["model"] == MODEL
    assert 0 <= placed["resident_bytes"] <= placed["parameter_bytes"]
    assert by_name["memory map"]["workspace_bytes"] > 0
    assert not any("\u2500" in json.dumps(event, ensure_ascii=False) for event in events), "no drawings"
    assert (by_name["models loaded"]["served"], by_name["models loaded"]["not_served"]) == (1, 1)
    assert any(event["event"].startswith("--threads and --compute-lanes ask for more") for event in events)
    assert "stopping" in by_name


@pytest.fixture
def may_measure(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Models are measured in the background once it is set."""
    allowed, measured = threading.Event(), replan.measured_profiles

    def measured_later(*arguments: Any, **options: Any) -> dict[Bucket, Profile]:
        assert allowed.wait(60)
        return measured(*arguments, **options)

    monkeypatch.setattr(replan, "measured_profiles", measured_later)
    return allowed


def test_a_model_is_served_on_quick_plans_until_it_is_measured_and_better_ones_are_found(
    archives: Archives, repository: Path, tmp_path: Path, may_measure: threading.Event
) -> None:
    inputs = archives.inputs(MODEL, 1)
    with serving(repository, "50%", tmp_path, engine="process", batch_sizes=BATCHES) as server:
        placed, quick = server.placement.models[MODEL, 1], plans_of(server)
        assert placed.is_provisional
        assert evaluations(quick) == {1}
        first = infer(server.address, MODEL, inputs)
        may_measure.set()
        server.until_planned()
        best = plans_of(server)
        assert not placed.is_provisional
        assert all(best[batch] is not quick[batch] for batch in map(Bucket, BATCHES))
        assert all(program.plan is best[batch] for batch, program in placed.servable.programs.items())
        for batch in map(Bucket, BATCHES):
            profile, provenance = placed.profiles[batch], best[batch].provenance
            assert provenance is not None
            assert best[batch].profile == profile.fingerprint
            assert provenance.latency_s <= provenance.baseline_s, "no worse than a quick plan by the same profile"
        again = infer(server.address, MODEL, inputs)
        assert {name: array.tobytes() for name, array in again.items()} == {
            n: a.tobytes() for n, a in first.items()
        }
        partition = placed.footprint.partition_bytes
    with serving(repository, "50%", tmp_path, engine="process", batch_sizes=BATCHES) as server:
        assert not server.replanner.is_busy, "a warm start has nothing to improve"
        assert not server.placement.models[MODEL, 1].is_provisional
        if server.placement.models[MODEL, 1].footprint.partition_bytes == partition:
            assert plans_of(server) == best


def test_a_start_after_a_kill_has_the_partitions_and_plans_that_were_in_use(
    stacks: Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends while its second model is still on a quick plan."""
    measured, repository, cache = replan.measured_profiles, tmp_path / "models", tmp_path / "cache"
    ended = threading.Event()

    def measured_first(model: Any, *arguments: Any, **options: Any) -> dict[Bucket, Profile]:
        if model.key.name == "b":
            ended.wait(60)
            raise OSError("the server has been killed")
        slow = measured(model, *arguments, **options)
        # As on a machine on which ops take other times than when traced.
        for path in (cache / "profiles").iterdir():
            kept = profile_format.decode(cache_file.read(path))
            if not kept.provisional:
                seconds = tuple(s * (20 if i % 2 else 1) for i, s in enumerate(kept.op_seconds))
                slower = replace(kept, op_seconds=seconds)
                cache_file.write(path, profile_format.encode(slower))
                slow = {b: slower if p.graph == slower.graph else p for b, p in slow.items()}
        return slow

    monkeypatch.setattr(replan, "measured_profiles", measured_first)
    stacks.put(repository, "a", 0)
    stacks.put(repository, "b", 1, layers=3)  # of another family than `a`, whose profile it would find

    def in_use(server: Running) -> dict[str, dict[Bucket, Plan]]:
        return {name: dict(server.placement.models[name, 1].plans) for name in "ab"}

    with serving(repository, "50%", cache, engine="process", batch_sizes=BATCHES) as server:
        eventually(lambda: server.placement.models["a", 1].searched)
        before = in_use(server)
        assert server.placement.models["b", 1].is_provisional
        ended.set()
    with serving(repository, "50%", cache, engine="process", batch_sizes=BATCHES) as server:
        assert in_use(server) == before
        assert server.placement.models["a", 1].searched
        assert server.placement.decider.is_divided_roughly, "the next start is still planned"


def test_once_every_size_is_planned_another_memory_finds_plans_and_no_search(
    archives: Archives,
    repository: Path,
    planned: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replan, "IDLE_S", 0.1)
    cache, inputs = shutil.copytree(planned, tmp_path / "cache"), archives.inputs(MODEL, 1)
    caplog.set_level("INFO", logger="cohabit")
    with serving(repository, "50%", cache, engine="process", batch_sizes=BATCHES) as server:
        answer = infer(server.address, MODEL, inputs)
        eventually(lambda: "every partition size is planned" in caplog.messages)
    for memory in ("40%", "75%"):
        caplog.clear()
        with serving(repository, memory, cache, engine="process", batch_sizes=BATCHES) as server:
            assert not server.replanner.is_busy
            assert server.placement.models[MODEL, 1].searched
            again = infer(server.address, MODEL, inputs)
            assert {n: a.tobytes() for n, a in again.items()} == {n: a.tobytes() for n, a in answer.items()}
        assert "quick plans are in use until better ones are found" not in caplog.messages


async def test_partition_sizes_wait_until_little_is_computed_and_no_other_search_is_in_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = None
    device, slept = SimpleNamespace(computed_s=0.0), list[float]()
    lanes: Any = [SimpleNamespace(device=device)]
    replanner, searched = Replanner(nothing, nothing, lanes), asyncio.Event()
    sleep = asyncio.sleep

    async def sleep_while_others_work(seconds: float) -> None:
        slept.append(seconds)
        device.computed_s += seconds * replan.IDLE_SHARE * (2.0 if len(slept) <= 3 else 0.5)
        if len(slept) == 5:
            searched.set()
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep_while_others_work)

    async def search() -> None:
        await searched.wait()

    replanner._background.keep("searching", search)
    await replanner._until_idle()
    assert slept == [replan.IDLE_S] * len(slept)
    assert len(slept) > 5
    searched.set()
    await replanner.close()


def test_a_model_that_cannot_be_measured_is_still_served(
    archives: Archives, stacks: Stacks, tmp_path: Path, may_measure: threading.Event
) -> None:
    """Its archive changes while the server runs, so that what a worker measures is another model."""
    repository, inputs = archives.repository(MODEL), archives.inputs(MODEL, 1)
    with serving(repository, "50%", tmp_path / "cache", engine="process", batch_sizes=BATCHES) as server:
        quick = plans_of(server)
        archive = repository / MODEL / "1" / "model.pt2"
        archive.unlink()
        stacks.put(tmp_path / "other", "a", 0)
        archive.symlink_to(tmp_path / "other" / "a" / "1" / "model.pt2")
        may_measure.set()
        server.until_planned()
        assert plans_of(server) == quick
        assert infer(server.address, MODEL, inputs)


def test_a_model_that_is_loaded_later_begins_with_quick_plans_too(
    archives: Archives, repository: Path, tmp_path: Path
) -> None:
    inputs = archives.inputs(MODEL, 1)
    with serving(repository, "8MiB", tmp_path, engine="process", model_control="explicit") as server:
        server.on_loop(server.engine.lifecycle.load(MODEL, None))
        (placed,) = server.placement.memory.models.values()
        answer = infer(server.address, MODEL, inputs)["score"]
        server.until_planned()
        assert not placed.is_provisional
        assert all(plan.profile == placed.profiles[batch].fingerprint for batch, plan in placed.plans.items())
        assert infer(server.address, MODEL, inputs)["score"].tobytes() == answer.tobytes()


def test_a_model_that_is_loaded_beside_an_equal_one_has_its_plans_without_the_planner(
    stacks: Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models"
    for seed, name in enumerate("ab"):
        stacks.put(repository, name, seed)
    changes: dict[str, Any] = {"model_control": "explicit", "load_models": ("*",), "batch_sizes": BATCHES}
    with serving(repository, "12MiB", tmp_path / "cache", engine="process", **changes) as server:
        server.until_planned()
        server.on_loop(server.engine.lifecycle.unload("b"))
        monkeypatch.setattr(server.placement.workers, "call", None)
        server.on_loop(server.engine.lifecycle.load("b", None))
        models = server.placement.models
        assert models["b", 1].plans is models["a", 1].plans
        assert is_answer_of(0, answer(server, "a"))
        assert is_answer_of(1, answer(server, "b"))


@pytest.mark.parametrize(
    ("free_bytes", "workspace_bytes", "found"),
    [
        (4096, 100, 4096),  # as much as the equal model has
        (8192, 100, None),  # more, in which the planner may find a better size
        (2048, 100, None),
        (65536, 100, 65536),  # all resident: no more is of use
        (1 << 20, 100, 65536),
        (4096, 200, None),  # its plans are for another workspace
    ],
)
def test_a_model_takes_an_equal_one_s_memory_if_no_other_would_be_better(
    free_bytes: int, workspace_bytes: int, found: int | None
) -> None:
    def model(profile: str, partition_bytes: int) -> Any:
        memory = Memory(100, partition_bytes)
        return SimpleNamespace(
            profiles=profile, most_batch=None, parameter_bytes=65536, found=SimpleNamespace(memory=memory)
        )

    loaded = {"a": model("equal", 4096), "b": model("other", 2048), "c": model("equal", 65536)}
    nothing: Any = SimpleNamespace(memory=None)
    memory: Any = SimpleNamespace(models=loaded)
    partitions = Partitions(workspace_bytes + free_bytes, workspace_bytes)
    chosen = Decider(nothing, nothing, memory, nothing)._memory_of_equals(model("equal", 0), partitions)
    assert chosen == (None if found is None else Memory(100, found))


def test_without_a_quick_start_models_are_measured_one_by_one_and_planned_before_they_are_served(
    stacks: Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that are prepared or measured meanwhile would be in the times."""
    models, steps = "ab", []

    def noted(step: str, function: Any, *arguments: Any, **options: Any) -> Any:
        steps.append(f"{step} begins")
        try:
            return function(*arguments, **options)
        finally:
            steps.append(f"{step} ends")

    for step in ("prepare", "measured_profiles"):
        monkeypatch.setattr(place, step, partial(noted, step, getattr(place, step)))
    repository, cache = tmp_path / "models", tmp_path / "cache"
    for seed, name in enumerate(models):
        stacks.put(repository, name, seed)
    with serving(repository, "50%", cache, engine="process", batch_sizes=BATCHES, quick_start=False) as server:
        assert not server.replanner.is_busy
        assert all(not server.placement.models[m, 1].is_provisional for m in models)
        workers = server.placement.workers
        assert not workers._idle, "nothing is left to prepare or to plan"
        assert not workers._busy
    assert steps[-4:] == ["measured_profiles begins", "measured_profiles ends"] * 2
    assert sorted(steps[:-4]) == ["prepare begins"] * 2 + ["prepare ends"] * 2


def test_a_noisy_profile_that_disagrees_is_measured_again_once_and_replaces_the_cached_one(
    archives: Archives, repository: Path, planned: Path, tmp_path: Path
) -> None:
    cache, inputs = shutil.copytree(planned, tmp_path / "cache"), archives.inputs(MODEL, 1)
    for path in (cache / "profiles").iterdir():
        kept = profile_format.decode(cache_file.read(path))
        wrong = replace(kept, op_seconds=tuple(s / 1000 for s in kept.op_seconds), noise=9.0)
        cache_file.write(path, profile_format.encode(wrong))
    with serving(repository, "50%", cache, engine="process", batch_sizes=BATCHES) as server:
        server.until_planned()
        placed = server.placement.models[MODEL, 1]
        before, answer = placed.profiles, infer(server.address, MODEL, inputs)["score"]
        for _ in range(20):
            infer(server.address, MODEL, inputs)
        replanner = server.replanner
        server.on_loop(replanner.check())
        measured = placed.profiles
        assert all(measured[b].fingerprint != before[b].fingerprint for b in before)
        assert all(measured[b].noise != 9.0 for b in before)
        assert all(measured[b].compute_s > before[b].compute_s / 2 for b in before)
        assert all(plan.profile == measured[b].fingerprint for b, plan in placed.plans.items())
        assert infer(server.address, MODEL, inputs)["score"].tobytes() == answer.tobytes()
        server.on_loop(replanner.check())
        assert placed.profiles is measured, "once per load"
    kept_profiles = [profile_format.decode(cache_file.read(path)) for path in (cache / "profiles").iterdir()]
    assert {p.fingerprint for p in measured.values()} <= {kept.fingerprint for kept in kept_profiles}


def test_a_family_whose_profile_is_in_doubt_is_measured_again_once(
    stacks: Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, cache = tmp_path / "models", tmp_path / "cache"
    for seed, name in enumerate("abc"):
        stacks.put(repository, name, seed)
    filled, measured = preparation._filled_by_worker, list[str]()

    def noted(call: Any, source: ModelSource, *arguments: Any, **options: Any) -> Any:
        measured.append(source.name)
        return filled(call, source, *arguments, **options)

    with serving(repository, "50%", cache, engine="process", batch_sizes=BATCHES) as server:
        server.until_planned()
        models = server.placement.models.values()
        for model in models:
            noisy = {b: replace(p, noise=9.0) for b, p in model.profiles.items()}
            model.profiles = noisy
        for path in (cache / "profiles").iterdir():
            kept = profile_format.decode(cache_file.read(path))
            if not kept.provisional:
                cache_file.write(path, profile_format.encode(replace(kept, noise=9.0)))
        monkeypatch.setattr(preparation, "_filled_by_worker", noted)
        server.on_loop(server.replanner.check())
        first, *others = (model.profiles for model in models)
    assert measured == ["a"]
    assert all(profiles == first != noisy for profiles in others)


@pytest.mark.parametrize(
    ("correction", "noise", "doubtful"),
    [
        (1.0, 0.0, False),
        (1.2, 0.2, False),
        (0.85, 0.0, False),
        (1.3, 0.0, True),
        (0.75, 0.0, True),
        (1.0, 0.3, True),
    ],
)
def test_a_profile_is_in_doubt_if_it_is_noisy_or_disagrees(
    correction: float, noise: float, doubtful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    improved: list[Any] = []

    async def improved_again(model: Any, *, again: bool) -> None:
        assert again
        improved.append(model)

    model = SimpleNamespace(partition_id="m.1", key=ModelKey("m", 1), lane=0, is_provisional=False, noise=noise)
    memory, workers = SimpleNamespace(models={"m.1": model}), SimpleNamespace(release=lambda: None)
    placed: Any = SimpleNamespace(memory=memory, workers=workers)
    lanes: Any = [SimpleNamespace(correction=lambda key: correction)]
    config: Any = None
    replanner = Replanner(config, placed, lanes)
    monkeypatch.setattr(replanner, "improve", improved_again)
    asyncio.run(replanner.check())
    assert improved == [model] * doubtful
