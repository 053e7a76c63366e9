"""The whole server under hostile traffic, on damaged disks and without memory: right bits, or a reason. Minutes."""

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from benchmarks.attacks import Target, attack_until
from cohabit.runtime.stores import host
from cohabit.runtime.stores.direct import read_fully
from cohabit.runtime.stores.pages import Bytes
from tests.support.e2e.machine import as_root, disk_in_a_file, memory_cgroup, tmpfs
from tests.support.e2e.serving import READY_S, Process, ask, eventually, infer, process, serving
from tests.support.e2e.stacks import Stacks, X, is_answer_of
from tests.support.e2e.stacks import answer as stack_answer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stacks(run_folder: Path) -> Stacks:
    return Stacks(run_folder / "stacks")


@pytest.fixture
def server(stacks: Stacks, tmp_path: Path) -> Iterator[Process]:
    for seed, name in enumerate("ab"):
        stacks.put(tmp_path / "models", name, seed)
    flags = ("--store", "file", "--batch-sizes", "1")
    with process(tmp_path / "models", "5MiB", tmp_path / "cache", *flags) as running:
        running.until_ready()
        yield running


def answers(server: Process) -> dict[str, bytes]:
    return {name: next(iter(infer(server.address, name, {"x": X}).values())).tobytes() for name in "ab"}


def test_a_store_that_is_overwritten_is_made_anew(server: Process, tmp_path: Path) -> None:
    before = answers(server)
    for path in sorted(tmp_path.glob("cache/weights/*/weights-*.bin")):
        good = path.read_bytes()
        with path.open("r+b") as file:
            file.write(bytes(len(good)))
        assert answers(server) == before
        eventually(lambda path=path, good=good: path.read_bytes() == good)  # type: ignore[misc]


@contextmanager
def storm(server: Process, seconds: float) -> Iterator[threading.Event]:
    """Attack both ports; the event is set when the time is up."""
    target, stop = Target(server.address, server.grpc_address, "a"), threading.Event()
    timer = threading.Timer(seconds, stop.set)
    with ThreadPoolExecutor(4) as threads:
        attackers = [threads.submit(attack_until, stop, target, seed, 20.0) for seed in range(4)]
        timer.start()
        try:
            yield stop
        finally:
            stop.set()
    assert sum(attacker.result().total() for attacker in attackers) > seconds


def test_valid_requests_are_answered_to_the_bit_during_a_storm(server: Process) -> None:
    before = answers(server)
    with storm(server, 20.0) as over:
        while not over.is_set():
            assert answers(server) == before
    assert answers(server) == before
    assert "engine's process has died" not in server.log_text()


def asked(server: Process, right: dict[str, bytes]) -> str | None:
    """Ask once: the reason of a refusal, or None for the right bits; there is nothing else."""
    try:
        assert answers(server) == right
    except (InferenceServerException, OSError) as error:
        return str(error)
    return None


def test_a_storm_where_memory_is_scarce_does_not_end_the_server(stacks: Stacks, tmp_path: Path) -> None:
    """The limit leaves room for the request memory; what exceeds it, the kernel takes from whom it chooses."""
    stacks.put(tmp_path / "models", "a", 0)
    stacks.put(tmp_path / "models", "b", 1)
    flags = ("--store", "file", "--batch-sizes", "1", "--queue-memory", "96MiB")
    with (
        memory_cgroup() as cgroup,
        process(tmp_path / "models", "5MiB", tmp_path / "cache", *flags, cgroup=cgroup) as server,
    ):
        server.until_ready()
        right = answers(server)
        used_bytes = int((cgroup / "memory.usage_in_bytes").read_text())
        (cgroup / "memory.limit_in_bytes").write_text(str(used_bytes + (160 << 20)))
        with storm(server, 30.0) as over:
            while not over.is_set():
                asked(server, right)
        assert server.popen.poll() is None
        eventually(lambda: asked(server, right) is None)


def test_a_cache_that_is_full_refuses_models_and_serves_the_others(stacks: Stacks, tmp_path: Path) -> None:
    stacks.put(tmp_path / "models", "a", 0)
    stacks.put(tmp_path / "models", "b", 1)
    flags = ("--store", "file", "--batch-sizes", "1", "--model-control", "explicit", "--load-model", "a")
    with (
        tmpfs(tmp_path / "cache", "10M") as cache,
        process(tmp_path / "models", "12MiB", cache, *flags) as server,
    ):
        server.until_ready()
        before = infer(server.address, "a", {"x": X})
        status, answer = ask(server.address, "POST", "/v2/repository/models/b/load", {})
        assert status == 400
        assert "No space left" in answer["error"]
        (cache / "filling").write_bytes(bytes(os.statvfs(cache).f_bavail * 4096))
        for name, output in infer(server.address, "a", {"x": X}).items():
            assert output.tobytes() == before[name].tobytes()
        (cache / "filling").unlink()
        as_root("mount", "-o", "remount,size=32M", cache)
        with triton.InferenceServerClient(server.address, network_timeout=READY_S) as client:
            client.load_model("b")
        assert is_answer_of(1, next(iter(infer(server.address, "b", {"x": X}).values())))


@pytest.fixture(params=[True, False], ids=["verified", "not verified"])
def on_disk(request: pytest.FixtureRequest, stacks: Stacks, tmp_path: Path) -> Iterator[tuple[Process, Path, bool]]:
    """A server with its cache on a disk, the image of that disk, and whether its reads are verified."""
    for seed, name in enumerate("ab"):
        stacks.put(tmp_path / "models", name, seed)
    flags = ("--store", "verified-file" if request.param else "file", "--batch-sizes", "1")
    with (
        disk_in_a_file(tmp_path / "cache", "64M") as image,
        process(tmp_path / "models", "5MiB", tmp_path / "cache", *flags) as server,
    ):
        server.until_ready()
        yield server, image, request.param


def outcomes(server: Process, right: dict[str, bytes]) -> set[str | None]:
    """What becomes of some requests: None is for the right bits."""
    found: set[str | None] = set()
    for _ in range(5):
        try:
            found.add(asked(server, right))
        except AssertionError:
            found.add("wrong bits")
    return found


def test_a_disk_that_fails_gives_no_wrong_answer(on_disk: tuple[Process, Path, bool]) -> None:
    server, image, _ = on_disk
    right = answers(server)
    os.truncate(image, 1 << 20)
    assert all("Input/output error" in str(outcome) for outcome in outcomes(server, right))
    assert server.popen.poll() is None


def test_a_disk_that_returns_other_bytes_gives_no_wrong_answer_where_reads_are_verified(
    on_disk: tuple[Process, Path, bool],
) -> None:
    """Neither sizes nor times tell."""
    server, image, verify_reads = on_disk
    right = answers(server)
    invert_weights(image)
    if verify_reads:
        assert "wrong bits" not in outcomes(server, right)
        eventually(lambda: asked(server, right) is None)
    else:
        assert outcomes(server, right) == {"wrong bits"}


def invert_weights(image: Path) -> None:
    """Change the weights files of a disk's image, block by block."""
    os.sync()
    disk = image.read_bytes()
    with image.open("r+b") as file:
        for path in image.with_suffix("").glob("weights/*/weights-*.bin"):
            weights = path.read_bytes()
            for start in range(0, len(weights), 4096):
                block = weights[start : start + 4096]
                file.seek(disk.index(block))
                file.write((np.frombuffer(block, np.float32) * -1).tobytes())


def test_reads_that_fail_now_and_then_fail_their_request_alone(
    stacks: Stacks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks.put(tmp_path / "models", "a", 0)
    reads = 0

    def failing(fd: int, destination: Bytes, offset: int) -> None:
        nonlocal reads
        reads += 1
        if reads % 7 == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        read_fully(fd, destination, offset)

    with serving(tmp_path / "models", "3MiB", tmp_path / "cache", store="file", batch_sizes=(1,)) as server:
        monkeypatch.setattr(host, "read_fully", failing)
        failures = []
        for _ in range(30):
            try:
                assert is_answer_of(0, stack_answer(server, "a"))
            except InferenceServerException as error:
                failures.append(str(error))
        monkeypatch.undo()
        assert 0 < len(failures) < 30
        assert all("Input/output error" in failure for failure in failures)
        assert is_answer_of(0, stack_answer(server, "a"))
