"""What requests carry: inputs from files, tokens; and how their answers are compared."""

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from cohabit.loadgen.client import Credentials
from cohabit.loadgen.errors import UsageError
from cohabit.loadgen.inputs import file_of, read_requests
from cohabit.loadgen.load import Load
from cohabit.loadgen.openloop import Tally
from cohabit.loadgen.run import run_load
from tests.support.server.fake_kserve import FakeKServe, serving

LOAD = Load(rate_per_s=100, duration_s=0.15, warmup_s=0.0, slo_s=5.0, timeout_s=20.0, cv=0.0)
METADATA = {
    "name": "a",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 1]}],
}


def left_behind() -> list[Path]:
    """This process's shared memory."""
    return list(Path("/dev/shm").glob(f"loadgen-{os.getpid()}-*"))


def test_rows_of_an_npz_are_taken_in_turn(tmp_path: Path) -> None:
    rows = np.arange(20, dtype=np.float64).reshape(5, 4)
    np.savez(tmp_path / "a.npz", x=rows, y=rows[:, :1])
    first, second = read_requests(tmp_path / "a.npz", METADATA, [3, 4])
    assert first.inputs[0].values.dtype == np.float32
    assert first.inputs[0].values.tolist() == rows[:3].tolist()
    assert second.inputs[0].values.tolist() == rows[[3, 4, 0, 1]].tolist()
    assert second.expected["y"].tolist() == rows[[3, 4, 0, 1], :1].tolist()


def test_lines_of_json_are_requests_of_the_models_that_they_name(tmp_path: Path) -> None:
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    lines = [{"inputs": [x], "model": "a"}, {"inputs": [{**x, "data": [[9, 9, 9, 9]]}], "model": "b"}]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (request,) = read_requests(tmp_path / "all.jsonl", METADATA, [1])
    assert request.inputs[0].values.tolist() == [[1, 2, 3, 4]]


def test_a_repositorys_sample_is_a_models_request(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    ids = {"name": "ids", "datatype": "BYTES", "shape": [2], "data": ["one", "two"]}
    (tmp_path / "a" / "sample.json").write_text(json.dumps({"inputs": [ids]}))
    path = file_of(tmp_path, "a")
    assert path == tmp_path / "a" / "sample.json"
    assert file_of(tmp_path, "b") is None
    (request,) = read_requests(path, METADATA, [1])
    assert request.inputs[0].values.tolist() == [b"one", b"two"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [({"z": np.zeros((2, 4))}, "no array x, an input of a"), ({"x": np.zeros(0)}, r"have \[0\] rows")],
)
def test_a_file_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UsageError, match=message):
        read_requests(tmp_path / "a.npz", METADATA, [1])


async def test_every_request_carries_the_token() -> None:
    fake = FakeKServe()
    async with serving(fake) as url:
        await run_load(url, LOAD, Credentials(token="secret"))
    assert fake.authorizations == {"Bearer secret"}


async def test_batches_are_drawn_from_the_sizes_given() -> None:
    fake = FakeKServe(models=("a",))
    async with serving(fake) as url:
        await run_load(url, replace(LOAD, batch=(1, 3)))
    assert {body[body.index(b'"shape"') :][:13] for body in fake.received} == {b'"shape":[1,4]', b'"shape":[3,4]'}


async def test_inputs_in_shared_memory_are_named_and_not_sent() -> None:
    fake = FakeKServe(models=("a", "b"))
    async with serving(fake) as url:
        report = await run_load(url, replace(LOAD, batch=(1, 3), shared_memory="system"))
    assert report.all_answered
    windows = set()
    for body in fake.received:
        (given,) = json.loads(body)["inputs"]
        window = given["parameters"]
        assert "data" not in given
        assert window["shared_memory_byte_size"] == 4 * given["shape"][0] * given["shape"][1]
        windows.add((window["shared_memory_region"], window.get("shared_memory_offset", 0)))
    assert len(windows) > len(fake.regions) == 2, "one region for each model, a window for each request"
    assert sorted(fake.unregistered) == sorted(fake.regions)
    assert not left_behind()


async def test_a_server_without_shared_memory_is_named() -> None:
    async with serving(FakeKServe(has_shared_memory=False)) as url:
        with pytest.raises(UsageError, match="does not take the inputs of a in shared memory"):
            await run_load(url, replace(LOAD, shared_memory="system"))
    assert not left_behind()


async def test_answers_that_differ_are_wrong() -> None:
    async with serving(FakeKServe(models=("a",), value_of=lambda n: float(n == 7))) as url:
        report = await run_load(url, replace(LOAD, verify="close"))
    assert report.errors == {"wrong answer": 1}
    assert "output y differs" in report.error_examples["wrong answer"]


async def test_rounding_differs_in_bits_and_is_close() -> None:
    async with serving(FakeKServe(models=("a",), value_of=lambda n: 1 + 1e-6 * (n == 7))) as url:
        in_bits = await run_load(url, replace(LOAD, verify="bits"))
    async with serving(FakeKServe(models=("a",), value_of=lambda n: 1 + 1e-6 * (n == 7))) as url:
        close = await run_load(url, replace(LOAD, verify="close"))
    assert in_bits.errors == {"wrong answer": 1}
    assert close.all_answered


async def test_answers_are_compared_with_the_outputs_of_the_file(tmp_path: Path) -> None:
    for name, y in (("right", 0.5), ("other", 0.6)):
        np.savez(tmp_path / f"{name}.npz", x=np.ones((1, 4)), y=np.full((1, 1), y, np.float32))
    async with serving(FakeKServe(models=("a",), value_of=lambda n: 0.5)) as url:
        right = await run_load(url, replace(LOAD, verify="bits", inputs=str(tmp_path / "right.npz")))
        wrong = await run_load(url, replace(LOAD, verify="bits", inputs=str(tmp_path / "other.npz")))
    assert right.all_answered
    assert wrong.errors == {"wrong answer": wrong.sent}


async def test_the_servers_own_times_stand_beside_the_clients() -> None:
    zero = {name: {"count": 0, "ns": 0} for name in ("success", "queue", "compute_input", "compute_infer")}
    fake = FakeKServe(models=("a",), statistics=[{"name": "a", "execution_count": 0, "inference_stats": zero}])
    fake.metrics = 'cohabit_stall_seconds_total{model="a",version="1"} 1\n'

    def answer(n: int) -> float:
        times = {"success": {"count": n + 1}, "queue": {"ns": (n + 1) * 2_000_000}}
        stats = {**zero, **times, "compute_infer": {"ns": (n + 1) * 5_000_000}}
        fake.statistics = [{"name": "a", "execution_count": n + 1, "inference_stats": stats}]
        fake.metrics = f'cohabit_stall_seconds_total{{model="a",version="1"}} {1 + 0.004 * (n + 1)}\n'
        return 0.0

    fake.value_of = answer
    async with serving(fake) as url:
        report = await run_load(url, LOAD)
    (model,) = report.models
    assert model.server is not None
    assert model.server.requests == model.completed
    assert (model.server.queue_s, model.server.compute_s) == pytest.approx((0.002, 0.005))
    assert model.server.stall_s == pytest.approx(0.004)


async def test_an_interrupted_run_reports_what_there_is() -> None:
    fake = FakeKServe(models=("a",))
    async with serving(fake) as url:
        run = asyncio.create_task(run_load(url, replace(LOAD, duration_s=600.0), keep_interrupted=True))
        while len(fake.arrived) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        run.cancel()
        report = await run
    assert report.interrupted
    assert report.completed >= 9
    assert report.duration_s < 600


async def test_a_request_that_is_cut_off_counts_as_interrupted() -> None:
    fake, tally = FakeKServe(models=("a",), never_answers=("a",)), Tally()
    async with serving(fake) as url:
        run = asyncio.create_task(run_load(url, replace(LOAD, duration_s=600.0), keep_interrupted=True))
        while len(fake.arrived) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        run.cancel()
        report = await run
    assert tally.answered == report.completed == 0
    assert set(report.errors) == {"interrupted"}
