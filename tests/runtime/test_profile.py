"""Profiles are measured as models are served: in stretches where these run, and never mixed up with the others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime.cpu.backend
import runtime.cpu.segments
import runtime.profiling.stopwatch
from planner.profile import Link, Profile
from runtime.binding.calls import Call
from runtime.binding.draft import ComputeStep
from runtime.binding.program import Program
from runtime.cpu.backend import CpuBackend
from runtime.cpu.executor import CpuExecutor
from runtime.lowering.lower import Lowered
from runtime.profiling.stopwatch import shared_out
from tests.runtime.backends import Bench, cpu, opened, scripted_cpu


@pytest.fixture(autouse=True)
def _even_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.cpu.segments, "FEWEST_CALLS", 1)


@pytest.fixture
def bench(wide: Lowered) -> Iterator[Bench]:
    with opened(scripted_cpu, wide) as bench:
        yield bench


def steps(*lengths: int) -> list[ComputeStep[Call]]:
    return [ComputeStep(n, (), 0, length=length) for n, length in enumerate(lengths)]


def test_a_stretch_s_time_is_shared_out_as_its_ops_share_it_when_they_run_alone() -> None:
    alone = (1.0, 3.0, 5.0, 2.0, 2.0)
    assert shared_out(steps(2, 1, 2), (2.0, 6.0, 1.0), alone) == pytest.approx((0.5, 1.5, 6.0, 0.5, 0.5))
    assert shared_out(steps(1, 1, 1, 1, 1), alone, alone) == pytest.approx(alone)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of every run from now on the steps of its program in stretches, and whether each op was timed."""
    ran: list[tuple[int, bool]] = []
    run = CpuExecutor.run

    def note(self: CpuExecutor, program: Program, *args: Any, **options: Any) -> Any:
        ran.append((len(program.segments), options.get("traced", False)))
        return run(self, program, *args, **options)

    monkeypatch.setattr(CpuExecutor, "run", note)
    return ran


@pytest.mark.parametrize("scripted", [False, True])
def test_ops_are_measured_alone_and_as_they_are_served(
    scripted: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = noted(monkeypatch)
    monkeypatch.setattr(runtime.profiling.stopwatch, "_MEASURING_S", 0.0)
    backend = CpuBackend(scripted=scripted)
    profile = backend.measure(bench.lowered, bench.store, None, lambda text: None)[1][2]
    assert len(profile.op_seconds) == len(bench.graph.ops)
    assert min(profile.op_seconds) > 0
    assert any(traced for _, traced in ran)
    as_served = {stretched for stretched, traced in ran if not traced}
    if scripted:
        assert as_served == {1}
    else:
        assert as_served == {0}


def test_a_profile_of_one_way_is_not_taken_for_the_other(
    wide: Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is found in the cache by the other, and plans are made for one profile's fingerprint."""
    asked: list[bool] = []

    def measured(lowered: Lowered, device: str, *_: object) -> dict[int, Profile]:
        asked.append(device.endswith(", scripted"))
        link, ops = Link(1e-5, 1e9), lowered.graphs[2].ops
        return {2: Profile(lowered.graphs[2].fingerprint, device, (1e-3,) * len(ops), link, link)}

    monkeypatch.setattr(runtime.cpu.backend, "measure", measured)
    found = []
    for make in (cpu, scripted_cpu, cpu, scripted_cpu):
        with opened(make, wide) as bench:
            found.append(bench.backend.measure(wide, bench.store, tmp_path, lambda text: None)[1][2])
    assert asked == [False, True]
    assert found[0] == found[2] != found[1] == found[3]
    assert found[0].fingerprint != found[1].fingerprint
    assert found[1].device.endswith(", scripted")
