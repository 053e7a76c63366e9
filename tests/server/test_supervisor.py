"""An engine that dies, hangs, or cannot be started: what becomes of the requests that it had."""

import asyncio
import gc
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from cohabit.server.errors import EngineUnavailable, ModelNotFound, Refused, RequestTimedOut
from cohabit.server.frontend.memory import RequestMemory
from cohabit.server.ipc.catalog import ModelEntry, ModelState
from cohabit.server.ipc.messages import EntryChanged
from cohabit.server.ipc.model import Array, ModelKey
from cohabit.server.ipc.shared_memory import HEARTBEAT
from cohabit.server.process import supervisor
from cohabit.server.process.engine_connection import EngineConnection
from tests.support.server import fake_engine, frontends
from tests.support.server.frontends import FrontEnd, rows, until_entered
from tests.support.server.server_fakes import identity, refused

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", str(tmp_path))


@pytest.fixture
async def front_end(tmp_path: Path) -> AsyncIterator[FrontEnd]:
    async with frontends.process(tmp_path) as made:
        yield made
        await made.all_released()


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[FrontEnd]:
    async with frontends.process(tmp_path, watchdog_s=2.0) as made:
        yield made
        await made.all_released()


def send(front_end: FrontEnd, number: signal.Signals) -> None:
    assert front_end.supervisor is not None
    assert front_end.supervisor.pid is not None
    os.kill(front_end.supervisor.pid, number)


async def until_restarted(front_end: FrontEnd, times: int = 1) -> None:
    while front_end.client.restarts < times or front_end.client.unavailable:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def test_a_request_that_was_under_way_in_one_death_is_answered_by_the_next_engine(
    front_end: FrontEnd,
) -> None:
    held = asyncio.create_task(front_end.double(fake_engine.HELD, 2))
    await until_entered()
    waiting = [asyncio.create_task(front_end.double(float(k + 20))) for k in range(5)]
    await asyncio.sleep(0)
    send(front_end, signal.SIGSEGV)
    await until_entered(2)
    fake_engine.open_gate()
    np.testing.assert_array_equal(await held, rows(fake_engine.HELD, 2) * 2)
    for k, answer in enumerate(waiting):
        np.testing.assert_array_equal(await answer, rows(float(k + 20)) * 2)
    assert front_end.client.restarts == 1


async def test_a_request_that_was_under_way_in_two_deaths_is_not_tried_again(front_end: FrontEnd) -> None:
    held = asyncio.create_task(front_end.double(fake_engine.HELD))
    await until_entered()
    waiting = asyncio.create_task(front_end.double(3))
    await asyncio.sleep(0)
    send(front_end, signal.SIGKILL)
    await until_entered(2)
    send(front_end, signal.SIGKILL)
    with refused("EngineFailed", match=r"died twice while it executed this request \(it was ended by SIGKILL"):
        await held
    np.testing.assert_array_equal(await waiting, rows(3) * 2)
    assert front_end.client.restarts == 2


async def test_an_engine_that_dies_idle_is_started_again_with_all_versions(front_end: FrontEnd) -> None:
    before = list(front_end.client.catalog)
    send(front_end, signal.SIGKILL)
    while front_end.client.restarts < 1:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert front_end.client.unavailable == "the engine is being restarted"
    assert all(entry.info is not None for entry in front_end.client.catalog), "models stay described meanwhile"
    np.testing.assert_array_equal(await front_end.double(1), rows(1) * 2)
    for version, sign in (("2", -1), ("3", 1)):
        answer = await front_end.infer("adder", version=version, a=rows(1), b=rows(2))
        np.testing.assert_array_equal(answer["sum"], sign * (rows(1) + rows(2)))
    assert list(front_end.client.catalog) == before
    assert [entry.version for entry in before if entry.name == "adder"] == [2, 3]
    assert front_end.client.unavailable is None


async def test_a_load_that_was_under_way_in_a_death_is_refused(front_end: FrontEnd) -> None:
    problems: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    send(front_end, signal.SIGSTOP)
    load = asyncio.create_task(front_end.client.load("double", None))
    abandoned = asyncio.create_task(front_end.client.load("double", None))
    await asyncio.sleep(0)
    abandoned.cancel()
    send(front_end, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match="the engine's process ended: it was ended by SIGKILL"):
        await load
    await asyncio.gather(abandoned, return_exceptions=True)
    await until_restarted(front_end)
    gc.collect()
    assert not problems, "nobody is told of the end of what was abandoned"


async def test_rejections_do_not_disturb_an_engine_that_starts(front_end: FrontEnd) -> None:
    send(front_end, signal.SIGKILL)
    while front_end.client.restarts < 1 or front_end.client.unavailable:
        front_end.client.count_rejection(ModelKey("double", 1), "queue_full")
        await asyncio.sleep(0.001)
    np.testing.assert_array_equal(await front_end.double(1), rows(1) * 2)
    assert front_end.client.restarts == 1


async def test_a_stopped_engine_is_killed_and_started_again(watched: FrontEnd) -> None:
    send(watched, signal.SIGSTOP)
    np.testing.assert_array_equal(await watched.double(1), rows(1) * 2)
    assert watched.client.restarts == 1


async def test_a_model_that_hangs_twice_is_served_no_more(watched: FrontEnd) -> None:
    held = asyncio.create_task(watched.double(fake_engine.HELD))
    await until_entered()
    waiting = asyncio.create_task(watched.double(6))
    with refused("EngineFailed", match=r"an execution of model 'double' takes longer than 2 s"):
        await held
    with pytest.raises(ModelNotFound, match="one of its requests hung twice"):
        await waiting
    assert watched.client.restarts == 2
    await until_restarted(watched, 2)
    np.testing.assert_array_equal((await watched.infer("adder", a=rows(1), b=rows(2)))["sum"], rows(1) + rows(2))
    entry = watched.client.catalog.get("double", 1)
    assert entry is not None
    assert entry.state is ModelState.UNAVAILABLE
    assert "load the model again" in entry.reason


async def test_requests_are_refused_when_the_engine_cannot_be_started_again(front_end: FrontEnd) -> None:
    fake_engine.break_starts()
    send(front_end, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match="the engine cannot be started again: it ended with status 3"):
        await front_end.double(1)
    fake_engine.mend_starts()
    await until_restarted(front_end)
    np.testing.assert_array_equal(await front_end.double(1), rows(1) * 2)


async def test_a_first_start_that_crashes_is_tried_again(tmp_path: Path) -> None:
    fake_engine.break_one_start()
    async with frontends.process(tmp_path) as front_end:
        np.testing.assert_array_equal(await front_end.double(1), rows(1) * 2)
        assert front_end.client.restarts == 0


async def test_an_engine_whose_process_cannot_be_made_is_started_once_it_can(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert front_end.supervisor is not None
    with monkeypatch.context() as patched:
        patched.setattr(front_end.supervisor, "_command", ("/no/such/interpreter",))
        send(front_end, signal.SIGKILL)
        with pytest.raises(EngineUnavailable, match=r"cannot be started again: .*No such file or directory"):
            await front_end.double(1)
    await until_restarted(front_end)
    np.testing.assert_array_equal(await front_end.double(1), rows(1) * 2)


async def test_the_end_of_supervision_is_known(front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reason: str) -> None:
        raise RuntimeError("it was not foreseen")

    assert front_end.supervisor is not None
    monkeypatch.setattr(front_end.client, "died", fail)
    assert not front_end.supervisor.failed.is_set()
    send(front_end, signal.SIGKILL)
    async with asyncio.timeout(20):
        await front_end.supervisor.failed.wait()


async def test_only_what_was_served_is_loaded_after_a_death(front_end: FrontEnd) -> None:
    """A load that was under way is not taken up again, and neither is one that had failed."""
    catalog = front_end.client.catalog
    catalog.update(ModelEntry("late", 1, ModelState.LOADING))
    catalog.update(ModelEntry("broken", 1, ModelState.UNAVAILABLE, "its archive is damaged"))
    catalog.update(ModelEntry("leaving", 1, ModelState.UNLOADING, wanted=False))
    send(front_end, signal.SIGKILL)
    np.testing.assert_array_equal(await front_end.double(1), rows(1) * 2)
    assert fake_engine.requested() == ["adder", "adder", "double", "empty", "slow"]
    found = {name: catalog.find(name) for name in ("late", "broken", "leaving")}
    assert {entry.state for entry in found.values()} == {ModelState.UNAVAILABLE}
    assert "ended while it was being loaded; load it again" in found["late"].reason
    assert found["broken"].reason == "its archive is damaged"
    assert (found["leaving"].reason, found["leaving"].wanted) == ("unloaded", False)


async def test_an_engine_that_dies_while_it_loads_for_the_first_time_fails_the_start(tmp_path: Path) -> None:
    fake_engine.break_starts()
    with pytest.raises(EngineUnavailable, match="ended while it loaded: it ended with status 3"):
        async with frontends.process(tmp_path):
            raise AssertionError("the engine has started")


async def test_a_deadline_counts_while_there_is_no_engine() -> None:
    now_s = 100.0
    memory = RequestMemory(1 << 16)
    client = EngineConnection(memory, clock=lambda: now_s)
    info = identity("double", "FP32").info
    client._received(EntryChanged(ModelEntry("double", 1, ModelState.READY, info=info)))
    front_end = FrontEnd(client, memory, None, lambda: now_s)
    urgent = asyncio.create_task(front_end.double(1, timeout_s=2.0))
    patient = asyncio.create_task(front_end.double(2))
    await asyncio.sleep(0)
    now_s = 101.9
    client.shed()
    assert not urgent.done()
    now_s = 102.1
    client.shed()
    with pytest.raises(RequestTimedOut, match="cannot answer within 2000 ms"):
        await urgent
    leaving = asyncio.create_task(front_end.double(3, timeout_s=2.0))
    await asyncio.sleep(0)
    now_s = 105.0
    client.shed()
    leaving.cancel()  # shed and cancelled before its task runs again
    with pytest.raises(asyncio.CancelledError):
        await leaving
    client.give_up("it is broken")
    with pytest.raises(EngineUnavailable, match="it is broken"):
        await patient
    assert memory.used_bytes == 0
    memory.close()


def test_only_an_execution_far_beyond_its_prediction_is_stuck() -> None:
    memory = RequestMemory(1 << 16)
    now_s = 100.0
    client = EngineConnection(memory, clock=lambda: now_s)

    async def ask() -> None:
        nonlocal now_s
        info = identity("double", "FP32").info
        client._received(EntryChanged(ModelEntry("double", 1, ModelState.READY, info=info)))
        task = asyncio.create_task(FrontEnd(client, memory, None).double(1))
        await asyncio.sleep(0)
        (pending,) = client._pending.values()
        now_s = 1000.0
        assert client.hang_reason(10.0) is None, "it waits"
        pending.request.mark(1000.0, 2.0)
        for time_s, stuck in ((1011.0, False), (1039.0, False), (1041.0, True)):
            now_s = time_s
            assert (client.hang_reason(10.0) is not None) == stuck
        pending.request.mark(1000.0, 0.1)
        for time_s, stuck in ((1009.0, False), (1011.0, True)):
            now_s = time_s
            assert (client.hang_reason(10.0) is not None) == stuck
        assert client.hang_reason(math.inf) is None
        client.give_up("over")
        with pytest.raises(EngineUnavailable):
            await task

    asyncio.run(ask())
    memory.close()


async def test_a_model_fails_after_two_hangs_however_often_each_is_seen() -> None:
    """The watchdog looks again while a killed process ends, and a stopped process is not a hang of a model."""
    memory, now_s = RequestMemory(1 << 16), 100.0
    client = EngineConnection(memory, clock=lambda: now_s)
    client._received(EntryChanged(ModelEntry("double", 1, ModelState.READY, info=identity("double", "FP32").info)))
    front_end = FrontEnd(client, memory, None)

    async def hang_twice(beat_s: float) -> asyncio.Task[Array]:
        task = asyncio.create_task(front_end.double(1))
        await asyncio.sleep(0)
        (pending,) = client._pending.values()
        for _ in range(2):
            pending.request.mark(now_s - 50.0, 0.1)
            memory.array(0, HEARTBEAT, (1,))[0] = beat_s
            for _ in range(3):
                assert "takes longer than 10 s" in (client.hang_reason(10.0) or "")
            client.died("it hung")
            assert pending.future.done() == (pending.deaths == 2)
        return task

    with refused("EngineFailed", match="died twice"):
        await (await hang_twice(beat_s=now_s - 20.0))
    assert client.catalog.find("double").state is ModelState.READY, "it was stopped"
    with pytest.raises((Refused, ModelNotFound)):
        await (await hang_twice(beat_s=now_s))
    assert client.catalog.find("double").state is ModelState.UNAVAILABLE
    assert memory.used_bytes == 0
    memory.close()


@pytest.mark.parametrize("given", [None, "4"])
async def test_an_engine_has_one_heap_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """Freed activations stay in the heap of the thread that made them."""
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if given is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", given)
    async with frontends.process(tmp_path) as made:
        assert made.supervisor is not None
        assert psutil.Process(made.supervisor.pid).environ()["MALLOC_ARENA_MAX"] == (given or "1")


async def test_nothing_is_left_of_an_engine_that_was_stopped(tmp_path: Path) -> None:
    async with frontends.process(tmp_path) as made:
        supervisor = made.supervisor
        assert supervisor is not None
        pid = supervisor.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("grpc_port", "unused"), [(0, "transformers"), (None, "grpc")])
def test_the_front_end_loads_no_library_that_it_does_not_use(
    tmp_path: Path, grpc_port: int | None, unused: str
) -> None:
    """Everything that a front end imports is there after its start."""
    script = f"""
import asyncio, sys
from pathlib import Path
from cohabit.server.cli import main
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.serve import Server

async def start():
    folder, ports = Path({str(tmp_path)!r}), dict(http_port=0, grpc_port={grpc_port}, metrics_port=0)
    config = ServeConfig(repository=folder, memory=FixedSize(1), **ports)
    server = Server(config)
    await server.start()
    await server.plane.metrics()
    await server.stop()

asyncio.run(start())
heavy = {{name.partition('.')[0] for name in sys.modules}}
heavy &= {{'torch', 'numba', 'llvmlite', 'scipy', 'transformers', {unused!r}}}
words = {{f'cohabit.planner.{{name}}' for name in ('errors', 'free_list', 'memory', 'parts', 'shapes')}}
ours = {{name for name in sys.modules if name.startswith(('cohabit.planner.', 'cohabit.runtime'))}}
assert not heavy, heavy
assert ours == words, ours
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kills", "said"), [([0, 1], True), ([3, 3], False)], ids=["by the kernel", "by someone"])
async def test_a_kill_for_lack_of_memory_names_the_memory(
    kills: list[int], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = iter([*kills, *kills[1:] * 9])
    monkeypatch.setattr(supervisor, "memory_kills", lambda: next(counted))
    monkeypatch.setattr(supervisor, "available_memory", lambda: (96 << 20, "this process's cgroup"))
    client = EngineConnection(RequestMemory(1 << 20), strict_readiness=True)
    watching = supervisor.Supervisor(client, b"", 0.0)
    process = await asyncio.create_subprocess_exec("sleep", "600")
    process.kill()
    reason = await watching._died(process)
    assert reason.startswith("it was ended by SIGKILL")
    assert ("memory had run out: this process's cgroup has 96.0 MiB" in reason) == said
    assert ("--memory" in reason) == said
    await watching.close()
