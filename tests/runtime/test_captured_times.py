"""What a trainer of captured steps learns from the times of its steps."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from benchmarks.captured.capture import OpCall
from benchmarks.captured.cpu import CpuTraining, measure_contention
from benchmarks.captured.learn import learned
from benchmarks.captured.trainer import MEASURED_FIRST
from cohabit.planner.plan import Compute, SwapIn, SwapOut
from cohabit.planner.profile import Link, Profile
from cohabit.planner.schedule.simulate import simulate
from tests.support.runtime.captured_steps import assert_same, batches, eager, net, sgd, tensors_of, trainer_of

pytestmark = pytest.mark.slow  # benchmarks alone capture steps


def test_times_of_steps_lead_to_a_new_plan_where_they_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = sgd(model)
    trainer = trainer_of(model, optimizer, "60%")
    slow = [1e-3 * (k % 3) for k in range(len(trainer.graph.ops))]
    monkeypatch.setattr(
        "benchmarks.captured.trainer.learned",
        lambda profile, recording, weight: structs.replace(profile, op_seconds=tuple(slow)),
    )
    torch.manual_seed(2)
    losses = [trainer.step(*batch).item() for batch in batches()]
    assert trainer.prediction.resident_s == pytest.approx(sum(slow), rel=0.1)
    assert trainer.plan.profile == trainer.profile.fingerprint
    trainer.close()
    assert_same((losses, tensors_of(model, optimizer)), eager(sgd))


def test_after_the_first_steps_the_promise_is_what_they_took() -> None:
    """Also where that is so close to the first promise that the plan stays."""
    model = net()
    with trainer_of(model, sgd(model)) as trainer:
        first = trainer.prediction
        (batch,) = batches(1)
        while trainer._steps_measured < MEASURED_FIRST:
            trainer.step(*batch)
            trainer._finish()
        assert trainer.prediction.resident_s != first.resident_s
        timeline = simulate(trainer.graph, trainer.plan, trainer.profile)
        assert trainer.plan.profile == trainer.profile.fingerprint
        assert trainer.prediction.period_s == timeline.period_s


@pytest.mark.parametrize("slowdown", [1.0, 1.5])
def test_steps_teach_the_profile_that_they_ran_by(slowdown: float) -> None:
    """Steps are simulated by one profile; from another one, their times lead back to it."""
    model = net()
    with trainer_of(model, sgd(model), "50%") as trainer:
        graph, plan = trainer.graph, trainer.plan
    assert {type(step) for step in plan.steps} >= {Compute, SwapIn, SwapOut}
    link = Link(1e-5, 1e9)
    true = Profile(
        graph.fingerprint,
        "cpu",
        tuple(1e-4 * (1 + k % 5) for k in range(len(graph.ops))),
        link,
        link,
        slowdown,
        2 * slowdown,
    )
    wrong = structs.replace(
        true, op_seconds=(1e-3,) * len(graph.ops), swap_in=Link(2e-5, 5e8), swap_out=Link(5e-6, 2e9)
    )
    spans = simulate(graph, plan, true).spans
    recording: Any = SimpleNamespace(
        program=SimpleNamespace(plan=plan, graph=graph), measured=lambda start_s: spans
    )
    found = learned(wrong, recording, 1.0)
    assert found.op_seconds == pytest.approx(true.op_seconds)
    for side in (found.swap_in, found.swap_out):
        assert (side.latency_s, side.bandwidth_bytes_per_s) == pytest.approx((1e-5, 1e9))
    half = learned(wrong, recording, 0.5)
    assert half.op_seconds == pytest.approx(
        [(a + b) / 2 for a, b in zip(wrong.op_seconds, true.op_seconds, strict=True)]
    )


def test_contention_is_what_ops_and_copies_take_longer_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock by which an op takes three times as long while another thread copies, and a copy twice."""
    copied = threading.Event()

    def is_contended() -> bool:
        return any(thread.name == "busy-link" for thread in threading.enumerate())

    def seconds(run: Callable[[], Any]) -> float:
        run()
        if threading.current_thread().name == "busy-link":
            copied.set()
            return 2.0
        return 3.0 if is_contended() else 1.0

    calls_made: list[torch.Tensor] = []

    def op(x: torch.Tensor) -> torch.Tensor:
        calls_made.append(x)
        if is_contended():
            copied.wait()
        return x

    monkeypatch.setattr("benchmarks.captured.cpu._seconds", seconds)
    calls = [OpCall(op, (torch.zeros(4),), {}), OpCall(op, (torch.zeros(8),), {})]
    assert measure_contention(calls, [5.0, 1.0], CpuTraining("ram", tmp_path).store) == (3.0, 2.0)
    assert {len(x) for x in calls_made} == {4}, "the longest op has half of the time"
