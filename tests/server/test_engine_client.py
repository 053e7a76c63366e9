"""What every engine client promises, in a process of its own and in the front end's."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from cohabit.server.errors import ExecutionFailed, InvalidRequest, ModelNotFound, RequestTimedOut
from cohabit.server.ipc.catalog import ModelState
from cohabit.server.ipc.messages import AskReport, ToEngine
from cohabit.server.ipc.model import ModelInfo, ModelKey
from cohabit.server.process.engine_connection import EngineConnection
from tests.support.server import fake_engine, frontends
from tests.support.server.frontends import FrontEnd, rows, until_entered
from tests.support.server.server_fakes import refused

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.process]


@pytest.fixture(params=["process", "in_process"], scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("FAKE_ENGINE", str(folder))
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[FrontEnd]:
    is_process = folder.name.startswith("process")
    async with (frontends.process if is_process else frontends.in_process)(folder) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def front_end(engine: FrontEnd) -> AsyncIterator[FrontEnd]:
    """One for all tests, which leave nothing behind but counts."""
    yield engine
    fake_engine.close_gate()
    await engine.all_released()


async def answered(front_end: FrontEnd) -> int:
    """How many requests for `double` have been answered."""
    return (await front_end.client.report()).models["double", 1].statistics.answered.count


async def test_requests_of_any_batch_size_are_answered_side_by_side(front_end: FrontEnd) -> None:
    batches = [[float(100 * n + k) for k in range(1 + n % 8)] for n in range(40)]
    answers = await asyncio.gather(*(front_end.double(*values) for values in batches))
    for values, answer in zip(batches, answers, strict=True):
        np.testing.assert_array_equal(answer, rows(*values) * 2)


async def test_every_output_comes_by_its_name(front_end: FrontEnd) -> None:
    outputs = await front_end.infer("adder", a=rows(1, 2), b=rows(3, 5))
    np.testing.assert_array_equal(outputs["sum"], rows(1, 2) + rows(3, 5))
    np.testing.assert_array_equal(outputs["diff"], rows(1, 2) - rows(3, 5))


async def test_the_timing_says_what_the_execution_was(front_end: FrontEnd) -> None:
    timing = (await front_end.result("double", x=rows(1, 2, 3))).timing
    assert (timing.rows, timing.lane, timing.stall_s, timing.swapped_bytes) == (3, 0, 0.25, 1000)
    assert timing.queued_s <= timing.started_s


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (fake_engine.REFUSED, InvalidRequest, "^7 is outside of the table$"),
        (
            fake_engine.FAILS,
            ExecutionFailed,
            "model 'double' failed to execute: RuntimeError: the kernel has failed",
        ),
    ],
)
async def test_a_failed_request_fails_alone_and_with_the_models_words(
    front_end: FrontEnd, value: float, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await front_end.double(value)
    np.testing.assert_array_equal(await front_end.double(4), rows(4) * 2)


async def test_tensors_may_have_no_elements(front_end: FrontEnd) -> None:
    answer = (await front_end.infer("empty", x=np.zeros((3, 0), np.float32)))["y"]
    assert (answer.shape, answer.dtype) == ((3, 0), np.float32)


async def test_a_model_that_is_not_there_is_an_error(front_end: FrontEnd) -> None:
    info = front_end.client.catalog.require("double")
    unknown = ModelInfo("unknown", 1, info.inputs, info.outputs, 8)
    with front_end.memory.lease() as lease:
        request = replace(front_end.request(lease, info, x=rows(1)), model=unknown.key)
        with pytest.raises(ModelNotFound):
            await front_end.client.infer(request, unknown, lease)


async def test_what_cannot_be_answered_in_time_is_refused_on_arrival(front_end: FrontEnd) -> None:
    with pytest.raises(RequestTimedOut):
        await front_end.infer("slow", 0.1, x=rows(1))


async def test_a_cancelled_request_leaves_the_queue_and_gives_its_memory_back(front_end: FrontEnd) -> None:
    before = await answered(front_end)
    held = asyncio.create_task(front_end.double(fake_engine.HELD))
    await until_entered()
    waiting = asyncio.create_task(front_end.double(1))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await front_end.client.report()  # so that the engine has read the message before, too
    fake_engine.open_gate()
    np.testing.assert_array_equal(await held, rows(fake_engine.HELD) * 2)
    assert await answered(front_end) == before + 1


async def test_a_client_that_leaves_during_the_execution_gives_its_memory_back_at_its_end(
    front_end: FrontEnd,
) -> None:
    held = asyncio.create_task(front_end.double(fake_engine.HELD))
    await until_entered()
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    for _ in range(3):
        await front_end.client.report()  # so that the engine has had time to give the memory back too early
    assert front_end.memory.used_bytes > 0, "the execution reads its inputs and writes its mark"
    fake_engine.open_gate()
    np.testing.assert_array_equal(await front_end.double(5), rows(5) * 2)
    await front_end.all_released()


async def test_the_report_counts_requests_and_rejections(front_end: FrontEnd) -> None:
    rows_of = {"a": rows(1, 2), "b": rows(3, 5)}
    await front_end.infer("adder", version="2", **rows_of)
    front_end.client.count_rejection(ModelKey("adder", 2), "queue_full")
    statistics = (await front_end.client.report()).models["adder", 2].statistics
    assert (statistics.answered.count, statistics.inference_count) == (1, 2)
    assert statistics.rejections["queue_full"] == 1
    assert statistics.batches[2].count == 1


async def test_the_report_of_one_model_has_its_counters_only(front_end: FrontEnd) -> None:
    whole = await front_end.client.report()
    assert len(whole.models) > 1
    key = next(iter(whole.models))
    alone = await front_end.client.report(key)
    assert alone.models.keys() == {key}
    assert alone.models[key].statistics.answered.count == whole.models[key].statistics.answered.count


async def test_the_catalog_has_every_model(front_end: FrontEnd) -> None:
    states = {entry.name: entry.state for entry in front_end.client.catalog}
    assert states == dict.fromkeys(("adder", "double", "empty", "slow"), ModelState.READY)
    assert front_end.client.unavailable is None
    assert front_end.client.catalog.not_ready() is None


async def test_orders_are_refused_where_models_are_loaded_at_the_start_only(front_end: FrontEnd) -> None:
    with refused("ControlOff"):
        await front_end.client.load("double", None)
    with refused("ControlOff"):
        await front_end.client.unload("double")


@pytest.mark.parametrize("folder", ["process"], indirect=True)
async def test_reports_that_are_asked_for_together_are_fetched_together(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = front_end.client
    assert isinstance(client, EngineConnection)
    asked: list[object] = []
    send = client._send

    def noted(message: ToEngine) -> None:
        asked.append(message)
        send(message)

    before = await answered(front_end)
    monkeypatch.setattr(client, "_send", noted)
    await front_end.double(1)
    reports = await asyncio.gather(*(client.report() for _ in range(100)))
    assert {r.models["double", 1].statistics.answered.count for r in reports} == {before + 1}
    assert sum(isinstance(message, AskReport) for message in asked) == 1
    await front_end.double(1)
    assert await answered(front_end) == before + 2
