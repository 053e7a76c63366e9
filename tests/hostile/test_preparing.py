"""Preparing processes: limits in time and memory, few rights, and caches that are damaged."""

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cohabit.planner import cache_file
from cohabit.runtime.backend import Backend
from cohabit.runtime.lowering import archive
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.deploy import prepare as preparation
from cohabit.server.deploy import worker
from cohabit.server.deploy.prepare import lowered_and_measured, measured_profiles, open_backend, prepare
from cohabit.server.deploy.worker import WorkerFailed, WorkerProcesses, failed_stage
from cohabit.server.repository.scan import find
from cohabit.server.repository.sources import ModelSource
from tests.hostile.test_archives import with_equal_checksums
from tests.runtime.test_archive import read
from tests.support.e2e.calls import fail_unexpectedly, is_imported, open_device
from tests.support.e2e.serving import eventually
from tests.support.runtime import models


def test_a_call_that_never_ends_blocks_no_other() -> None:
    workers = WorkerProcesses(most=2)
    with ThreadPoolExecutor(1) as threads:
        endless = threads.submit(workers.call, signal.pause)
        assert workers.call(os.getpid) != os.getpid()
        assert workers.call(os.getpid) == workers.call(os.getpid), "a process is kept for the next call"
        assert not endless.done()
        workers.close()
        with pytest.raises(WorkerFailed):
            endless.result()


def test_a_call_has_a_limit_in_time() -> None:
    workers = WorkerProcesses(timeout_s=0.1)
    with pytest.raises(WorkerFailed, match=r"not prepared within 0\.1 s"):
        workers.call(signal.pause)
    workers.close()


def test_a_search_waits_until_no_lane_has_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, slept = [1, 0], 0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 1
        if slept == 3:
            waiting[:] = [0, 1]
        elif slept == 6:
            waiting[:] = [0, 0]

    monkeypatch.setattr(worker, "_waiting", waiting)
    monkeypatch.setattr(worker.time, "sleep", sleep)
    worker.wait_for_requests()
    assert slept >= 6
    before = slept
    worker.wait_for_requests()
    assert slept == before, "no request is waiting"


def test_processes_have_few_rights() -> None:
    workers = WorkerProcesses()
    assert "NoNewPrivs:\t1\n" in workers.call(Path.read_text, Path("/proc/self/status"))
    assert workers.call(Path.read_text, Path("/proc/self/oom_score_adj")).strip() == "1000"
    assert workers.call(os.nice, 0) == min(os.nice(0) + 10, 19), "19 is the least priority"
    workers.close()


def test_processes_are_started_before_they_are_needed_and_end_when_they_are_not() -> None:
    workers = WorkerProcesses(most=2)
    workers.start(["wave"], count=2)
    first = workers.call(os.getpid)
    assert workers.call(is_imported, "wave")
    assert not is_imported("wave")
    workers.release()
    assert workers.call(os.getpid) != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    workers.close()


def test_a_process_that_has_opened_a_cuda_device_ends_with_its_call_and_a_new_one_takes_its_place() -> None:
    """A context takes half a GB of the device, for as long as its process lives."""
    with closing(WorkerProcesses()) as workers:
        first = workers.call(open_device)
        with pytest.raises(ProcessLookupError):
            os.kill(first, 0)
        (idle,) = workers._idle
        assert not idle.holds_device
        assert workers.call(is_imported, open_device.__module__), "ready for the same functions"
        assert workers.call(os.getpid) == idle._process.pid


def test_what_can_wait_is_called_alone_in_processes_that_compile_the_planner() -> None:
    with closing(WorkerProcesses(most=2)) as workers, ThreadPoolExecutor(3) as threads:
        endless = threads.submit(workers.call_low_priority, signal.pause)
        eventually(lambda: bool(workers._busy))
        behind = threads.submit(workers.call_low_priority, os.getpid)
        assert workers.call(os.getenv, "COHABIT_INTERPRET") == "1", "what is waited for goes first"
        assert not endless.done()
        assert not behind.done()
        workers.close()
        for call in (endless, behind):
            with pytest.raises(WorkerFailed):
                call.result()
    with closing(WorkerProcesses()) as workers:
        assert workers.call_low_priority(os.getenv, "COHABIT_INTERPRET") is None
        assert workers.call_low_priority(os.getpid) != workers.call(os.getpid)


def test_a_call_here_is_made_in_this_process() -> None:
    workers = WorkerProcesses(inline=True)
    assert workers.call(os.getpid) == workers.call_low_priority(os.getpid) == os.getpid()
    with pytest.raises(ZeroDivisionError):
        workers.call(divmod, 1, 0)


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerProcesses]:
    """Their processes have imported torch once the first of these tests has run."""
    with closing(WorkerProcesses()) as workers:
        yield workers


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    models.export(models.Wide(2, 64), {"x": torch.zeros(3, 64)}, tmp_path / "wide" / "1" / "model.pt2")
    return find(tmp_path / "wide")


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    return replace(
        ServeConfig(tmp_path, FixedSize(1 << 20), cache=tmp_path / "cache", batch_sizes=(1,)),
        threads=torch.get_num_threads(),
    )


@pytest.fixture
def backend(config: ServeConfig) -> Iterator[Backend]:
    backend = open_backend(config)
    yield backend
    backend.close()


def test_a_damaged_cache_is_made_anew_by_a_worker(
    source: ModelSource,
    config: ServeConfig,
    backend: Backend,
    workers: WorkerProcesses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every file, truncated, changed by one digit, and removed; the archive is never read in this process."""
    monkeypatch.setattr(archive, "read", lambda file: pytest.fail("an archive was read in this process"))
    first = prepare(source, config, backend, workers)
    first.store.close()
    assert config.cache is not None
    files = [p for p in config.cache.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".bin", ".json"}
    good = {path: path.read_bytes() for path in files if path.parent.name != "profiles"}
    for path in files:
        for damage in (truncate, change_a_digit, Path.unlink):
            damage(path)
            again = prepare(source, config, backend, workers)
            again.store.close()
            assert again.lowered.manifest == first.lowered.manifest
            assert {path: path.read_bytes() for path in good} == good, (path, damage)
    assert [p for p in config.cache.rglob("*") if p.name.startswith(".")] == [], "nothing temporary is left"


def test_a_model_whose_checksums_are_another_s_has_weights_of_its_own(
    tmp_path: Path, config: ServeConfig, workers: WorkerProcesses
) -> None:
    """Loaded after it, again from the cache, and in place of it under the same name after a restart."""
    for path, name in zip(with_equal_checksums(tmp_path), ("one", "other"), strict=True):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        path.rename(tmp_path / "models" / name / "1" / "model.pt2")
    own = [
        read(tmp_path / "models" / name / "1" / "model.pt2")[0].state_dict["a.weight"] for name in ("one", "other")
    ]

    def weights(backend: Backend, name: str) -> torch.Tensor:
        prepared = prepare(find(tmp_path / "models" / name), config, backend, workers)
        prepared.store.close()
        start = prepared.lowered.manifest.segments[0].offset
        raw = prepared.lowered.weights_path.read_bytes()[start : start + own[0].nbytes]
        return torch.frombuffer(bytearray(raw), dtype=torch.float32).view(8, 8)

    config = replace(config, pack_weights=False)
    with closing(open_backend(config)) as backend:
        for _ in range(2):
            assert torch.equal(weights(backend, "one"), own[0])
            assert torch.equal(weights(backend, "other"), own[1])
    places = [tmp_path / "models" / name / "1" / "model.pt2" for name in ("one", "other")]
    shutil.copy2(places[1], tmp_path / "copy")
    (tmp_path / "copy").rename(places[0])
    with closing(open_backend(config)) as backend:
        assert torch.equal(weights(backend, "one"), own[1])


def test_an_unexpected_error_says_what_was_being_done_and_its_traceback_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(WorkerProcesses()) as workers, pytest.raises(WorkerFailed, match=UNEXPECTED) as failed:
        workers.call(fail_unexpectedly)
    assert "KeyError" not in str(failed.value)
    (record,) = caplog.records
    assert vars(record)["fields"]["incident"] in str(failed.value)
    logged = logging.Formatter().format(record)
    assert "in fail_unexpectedly" in logged
    assert "KeyError: 'p_weight'" in logged


UNEXPECTED = (
    r"^lowering model 'x' failed unexpectedly: internal error [0-9a-f]{12}; the server's log has the details$"
)


def test_a_cache_that_leads_to_an_unexpected_error_is_made_anew(
    source: ModelSource, config: ServeConfig, backend: Backend, workers: WorkerProcesses
) -> None:
    """A program with a sound checksum that names a weight which there is not, as a defect may have written it."""
    first = prepare(source, config, backend, workers)
    first.store.close()
    (path,) = first.lowered.weights_path.parent.glob("program-*.json")
    good = path.read_bytes()
    program = cache_file.read(path)
    assert b"p_layers_1_weight" in program
    cache_file.write(path, program.replace(b"p_layers_1_weight", b"p_nothing"))
    again = prepare(source, config, backend, workers)
    again.store.close()
    assert path.read_bytes() == good
    cache_file.write(path, program.replace(b"p_layers_1_weight", b"p_nothing"))
    prepare(source, config, backend, WorkerProcesses(inline=True)).store.close()
    assert path.read_bytes() == good, "in one process as well"


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_model_that_fails_unexpectedly_is_tried_again_only_if_the_cache_had_it(
    source: ModelSource, config: ServeConfig, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    if is_cached:
        lowered_and_measured(source, config, lambda *_: None)
    tries: list[Path] = []

    def broken(path: Path, *arguments: Any, **options: Any) -> None:
        tries.append(path)
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(preparation, "lower", broken)
    with pytest.raises(ZeroDivisionError) as failed:
        lowered_and_measured(source, config, lambda *_: None)
    assert failed_stage(failed.value) == "lowering model 'wide' failed unexpectedly"
    assert len(tries) == 1 + is_cached


def test_a_model_is_measured_in_another_process_than_the_one_that_lowered_it(
    source: ModelSource, config: ServeConfig, backend: Backend, workers: WorkerProcesses
) -> None:
    """That one keeps torch's exporter, and to measure takes memory for all weights."""
    model = prepare(source, config, backend, workers)
    model.store.close()
    assert model.is_provisional
    (lowering,) = workers._idle
    profiles = measured_profiles(model, config, backend, workers)
    assert not any(profile.provisional for profile in profiles.values())
    (measuring,) = set(workers._idle) - {lowering}
    assert measuring._process.pid != lowering._process.pid


def test_weights_that_changed_without_a_trace_are_made_anew_when_their_model_is_loaded_again(
    source: ModelSource, config: ServeConfig, backend: Backend, workers: WorkerProcesses
) -> None:
    """The file has the size and the time that it had; only the checksums tell."""
    first = prepare(source, config, backend, workers)
    first.store.close()
    path = first.lowered.weights_path
    good, before = path.read_bytes(), path.stat()
    with path.open("r+b") as file:
        file.write(bytes(4096))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    prepare(source, config, backend, workers).store.close()
    assert path.read_bytes() == good


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def change_a_digit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = next(n for n in range(len(data) // 2, len(data)) if path.suffix == ".bin" or data[n] in b"0123456")
    data[place] = (data[place] + 1) % 256
    path.write_bytes(data)
