"""A profile has a time for each op, and is read from the cache by the same device only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import runtime.cpu.backend
import runtime.profiling.stopwatch
from planner.profile import Link, Profile
from planner.shapes import Bucket
from runtime.cpu.backend import CpuBackend
from runtime.lowering.lower import Lowered
from tests.runtime.backends import Bench, cpu, opened


@pytest.fixture
def bench(wide: Lowered) -> Iterator[Bench]:
    with opened(cpu, wide) as bench:
        yield bench


def test_every_op_is_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.profiling.stopwatch, "_MEASURING_S", 0.0)
    profile = CpuBackend().measure(bench.lowered, bench.store, None, lambda text: None)[1][Bucket(2)]
    assert len(profile.op_seconds) == len(bench.graph.ops)
    assert min(profile.op_seconds) > 0


def test_a_profile_of_one_link_is_not_taken_for_another_s(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measured(lowered: Lowered, device: str, *_: object) -> dict[Bucket, Profile]:
        asked.append(device)
        link, ops = Link(1e-5, 1e9), lowered.graphs[Bucket(2)].ops
        return {Bucket(2): Profile(lowered.graphs[Bucket(2)].fingerprint, device, (1e-3,) * len(ops), link, link)}

    monkeypatch.setattr(runtime.cpu.backend, "measure", measured)
    found = []
    for bandwidth in (None, 1e9, None, 1e9):
        backend = CpuBackend(bandwidth)
        found.append(backend.measure(bench.lowered, bench.store, tmp_path, lambda text: None)[1][Bucket(2)])
    assert len(asked) == 2
    assert found[0] == found[2] != found[1] == found[3]
