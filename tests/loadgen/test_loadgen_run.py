from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.demo import joined, verdict
from cohabit.loadgen.errors import ServerFailed, UsageError
from cohabit.loadgen.load import Load
from cohabit.loadgen.run import run_load, send_load
from tests.support.server.fake_kserve import FakeKServe, serving

LOAD = Load(
    rate_per_s=200,
    duration_s=0.5,
    slo_s=5.0,
    timeout_s=20.0,
    warmup_s=0.0,
    max_in_flight=1000,
)


async def test_every_request_is_answered_and_reported() -> None:
    fake = FakeKServe(models=("b", "a"))
    async with serving(fake) as url:
        report = await run_load(url, LOAD)
    assert report.all_answered
    assert report.sent == report.completed == len(fake.arrived) > 50
    assert {m.model: m.sent for m in report.models} == {m: fake.arrived.count(m) for m in ("a", "b")}


async def test_turns_are_one_run_without_their_warm_ups() -> None:
    load = replace(LOAD, duration_s=0.4, warmup_s=0.1)
    async with serving(FakeKServe(models=("a", "b"))) as url:
        turns = [await send_load(url, replace(load, seed=seed)) for seed in range(3)]
    together = joined(turns).report
    assert together.duration_s == pytest.approx(1.2)
    assert together.completed == sum(turn.report.completed for turn in turns) > 0
    assert together.goodput_per_s == pytest.approx(together.completed / 1.2)
    assert together.latency is not None
    latencies_s = [turn.report.latency.max_s for turn in turns if turn.report.latency is not None]
    assert together.latency.max_s == max(latencies_s)


def turn(p50_ms: float, p99_ms: float, lag_ms: float = 0.0) -> Any:
    """What the verdict reads of a turn's report."""
    spread = SimpleNamespace(p50_s=p50_ms / 1e3, p90_s=p50_ms / 500, p99_s=p99_ms / 1e3)
    return SimpleNamespace(latency=spread, generator_was_late=lag_ms > 5)


def test_the_demos_verdict_says_what_turns_show_and_what_they_do_not() -> None:
    """One bad turn of a busy machine does not decide, as it does in percentiles of all turns together."""
    shared = [turn(35, 80), turn(36, 90), turn(34, 85), turn(37, 160)]
    own = [turn(21, 82), turn(20, 70), turn(22, 88), turn(21, 176)]
    resident = [turn(20, 30), turn(20, 31), turn(20, 29), turn(20, 30)]
    turns = {"partitioned": own, "time_shared": shared, "resident": resident}
    against_shared, against_resident = verdict(turns, others=0.02)
    assert "p99 not to be told apart" in against_shared
    assert "p50 lower, 0.59 of it" in against_shared
    assert "p99 higher, 3." in against_resident
    *_, late, busy = verdict({**turns, "resident": [*resident[:3], turn(20, 30, lag_ms=9)]}, others=0.4)
    assert late.startswith("In 1 of 12 turns the load generator was late")
    assert "40% busy before anything was started: repeat this on a quiet machine" in busy


async def test_a_slow_server_slows_nothing_down() -> None:
    """No answer comes before 80 requests are there, though at most 2 are ever needed by a closed loop."""
    fake = FakeKServe(answer_after=80)
    async with serving(fake) as url:
        report = await run_load(url, LOAD)
    assert report.all_answered
    assert report.latency is not None
    # The first request waited for the 80th, which was due 0.4 s later.
    assert report.latency.max_s > 0.2


async def test_errors_are_counted_by_kind() -> None:
    fake = FakeKServe(
        models=("fine", "hung", "refusing", "silent"),
        status_of={"refusing": 503},
        never_answers=("silent",),
        hangs_up=("hung",),
    )
    async with serving(fake) as url:
        report = await run_load(url, replace(LOAD, rate_per_s=40, timeout_s=2.0))
    by_model = {m.model: m for m in report.models}
    assert by_model["fine"].errors == {}
    assert by_model["fine"].completed == by_model["fine"].sent > 0
    assert by_model["hung"].errors == {"connection": by_model["hung"].sent}
    assert by_model["refusing"].errors == {"HTTP 503": by_model["refusing"].sent}
    assert by_model["silent"].errors == {"timeout": by_model["silent"].sent}
    assert report.error_examples["HTTP 503"] == "refusing is out of order"


async def test_the_first_models_by_name_are_taken() -> None:
    async with serving(FakeKServe(models=("c", "b", "a"))) as url:
        report = await run_load(url, replace(LOAD, duration_s=0.1, model_count=2))
    assert [m.model for m in report.models] == ["a", "b"]


async def test_fewer_models_than_asked_for_is_an_error() -> None:
    async with serving(FakeKServe()) as url:
        with pytest.raises(UsageError, match="2 models ready, fewer than --models 3: a, b"):
            await run_load(url, replace(LOAD, model_count=3))


async def test_a_server_without_an_index_needs_names() -> None:
    async with serving(FakeKServe(has_index=False)) as url:
        with pytest.raises(UsageError, match="name them with --model"):
            await run_load(url, LOAD)
        report = await run_load(url, replace(LOAD, duration_s=0.1, weights={"b": 1.0}))
    assert [m.model for m in report.models] == ["b"]


async def test_an_unknown_model_is_an_error() -> None:
    async with serving(FakeKServe()) as url:
        with pytest.raises(UsageError, match="no model 'z'"):
            await run_load(url, replace(LOAD, weights={"z": 1.0}))


async def test_requests_carry_binary_tensors_of_the_batch() -> None:
    fake = FakeKServe()
    async with serving(fake) as url:
        await run_load(url, replace(LOAD, duration_s=0.1, batch=3))
    head, raw = fake.received[0][: -3 * 4 * 4], fake.received[0][-3 * 4 * 4 :]
    assert b'"shape":[3,4]' in head
    assert b'"binary_data_size":48' in head
    assert len(raw) == 48


async def test_no_server_is_an_error() -> None:
    async with serving(FakeKServe()) as url:
        pass
    with pytest.raises(ServerFailed, match="no server answers at"):
        await run_load(url, LOAD)
