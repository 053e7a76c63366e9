"""A profile has a time for each op, and is read from the cache by the same device only."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import cohabit.runtime.cpu.backend
import cohabit.runtime.measure.stopwatch
from cohabit.planner import cache_file
from cohabit.planner import profile as profile_format
from cohabit.planner.graph import aligned
from cohabit.planner.plan import Span, Timeline
from cohabit.planner.profile import NOISY, Link, Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.lowering.allowed_ops import draws
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.lowering.weights import BLOCK_BYTES
from cohabit.runtime.measure.link import leading, segment_copies
from cohabit.runtime.measure.other_work import cpu_times, share_between
from cohabit.runtime.measure.profile import cached_profiles, without_extra
from cohabit.runtime.measure.stopwatch import ColdCaches, StepTimes, measure_ops
from cohabit.runtime.memory import StoreKind
from cohabit.server.deploy.notices import warn_of_noise, warn_of_random_ops
from cohabit.server.ipc.model import ModelKey
from tests.support.runtime import models
from tests.support.runtime.backends import Bench, cpu, opened
from tests.support.runtime.mixing import Computed

aten = torch.ops.aten


@pytest.fixture
def bench(wide: Lowered) -> Iterator[Bench]:
    with opened(cpu, wide) as bench:
        yield bench


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    folder = tmp_path_factory.mktemp("linear")
    return models.lowered(torch.nn.Linear(512, 512), {"input": torch.zeros(2, 512)}, folder, "m", [2])


def test_every_op_is_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohabit.runtime.measure.stopwatch, "_MEASURING_S", 0.0)
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

    monkeypatch.setattr(cohabit.runtime.cpu.backend, "measure", measured)
    found = []
    for bandwidth in (None, 1e9, None, 1e9):
        backend = CpuBackend(bandwidth)
        found.append(backend.measure(bench.lowered, bench.store, tmp_path, lambda text: None)[1][Bucket(2)])
    assert len(asked) == 2
    assert found[0] == found[2] != found[1] == found[3]


class ScriptedExecutor:
    """Runs of one op that take these seconds; the first is the warm-up."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.left = list(seconds)

    def run(self, *_: object, traced: bool = False) -> Any:
        latency_s = self.left.pop(0)
        return SimpleNamespace(timeline=Timeline((Span(0, "compute", 0.0, latency_s),), latency_s, None, 0))


@pytest.mark.parametrize(
    ("rounds", "latency_s", "noise", "unused"),
    [
        (((2.0, 2.2, 2.1), (1.0, 1.0, 1.0)), 2.1, 0.05, 3),
        (((2.0, 9.0, 4.0), (1.0, 1.1, 1.2)), 1.1, 0.1, 0),
        (((2.0, 9.0, 4.0), (2.0, 8.0, 3.0), (2.0, 7.0, 3.5), (1.0, 1.0, 1.0)), 3.0, 0.5, 3),
    ],
)
def test_ops_are_timed_again_while_their_runs_are_noisy_and_the_quietest_try_counts(
    rounds: Sequence[Sequence[float]], latency_s: float, noise: float, unused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohabit.runtime.measure.stopwatch, "_MEASURING_S", 0.0)
    executor = ScriptedExecutor([7.0, *(s for seconds in rounds for s in seconds)])
    program: Any = SimpleNamespace(computes=[None])
    times = measure_ops(program, list, cast(Any, executor), ColdCaches(0))
    assert times.latency_s == latency_s
    assert times.medians() == (latency_s,)
    assert times.noise == pytest.approx(noise)
    assert len(executor.left) == unused


def test_what_a_busy_machine_adds_to_every_op_is_subtracted_and_counts_as_noise(bench: Bench) -> None:
    sizes = [sum(bench.graph.tensors[t].nbytes for t in op.touched) for op in bench.graph.ops]
    cheap = [nbytes <= 16 << 10 for nbytes in sizes]
    assert any(cheap)
    assert not all(cheap)
    quiet = tuple(8e-6 if small else 1e-3 for small in cheap)
    assert without_extra(bench.graph, quiet, 1e-6) == (quiet, 0.0)
    op_seconds, share = without_extra(bench.graph, [s + 90e-6 for s in quiet], 1e-6)
    assert op_seconds == pytest.approx([s + 2e-6 for s in quiet])
    assert share == pytest.approx(88e-6 * len(quiet) / sum(op_seconds))


def test_large_ops_alone_show_no_extra(bench: Bench) -> None:
    large = [t.__class__(t.name, max(t.nbytes, 1 << 20), t.kind, t.alignment) for t in bench.graph.tensors]
    graph = replace(bench.graph, tensors=tuple(large))
    assert without_extra(graph, [1e-3] * len(graph.ops), 1e-6) == ((1e-3,) * len(graph.ops), 0.0)


def test_a_measurement_that_is_disturbed_alike_in_every_run_is_noisy(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    medians = StepTimes.medians
    monkeypatch.setattr(cohabit.runtime.measure.stopwatch, "_MEASURING_S", 0.0)
    monkeypatch.setattr(StepTimes, "medians", lambda times: tuple(s + 1.0 for s in medians(times)))
    profile = CpuBackend().measure(bench.lowered, bench.store, None, lambda text: None)[1][Bucket(2)]
    assert max(profile.op_seconds) < 1.0
    assert profile.noise > NOISY


STAT = """cpu  900 0 0 900 0 0 0 0 77 0
cpu0 {busy} 0 {system} {idle} {waiting} 0 0 {stolen} 77 0
cpu63 900 0 0 0 0 0 0 0 0 0
intr 5
"""


def test_other_processes_and_other_machines_count_on_the_cpus_that_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    stat, used = tmp_path / "stat", iter((10.0, 10.25))
    monkeypatch.setattr("os.times", lambda: SimpleNamespace(user=next(used), system=0.0))
    found = []
    for busy, system, idle, waiting, stolen in ((500, 100, 300, 100, 0), (525, 110, 345, 110, 10)):
        text = STAT.format(busy=busy, system=system, idle=idle, waiting=waiting, stolen=stolen)
        stat.write_text(text)
        found.append(cpu_times(stat))
    assert share_between(*found) == pytest.approx(0.2), "of 1 s: 0.55 s idle, 0.25 s this process's"
    assert cpu_times(tmp_path / "nothing") is None
    assert share_between(None, found[1]) == 0


@pytest.mark.parametrize(
    ("noise", "quick", "is_quiet", "times"),
    [(0.5, False, True, 2), (0.5, False, False, 1), (0.5, True, True, 1), (NOISY, False, True, 1)],
)
def test_a_profile_measured_beside_other_work_is_measured_again_once_the_machine_is_quiet(
    bench: Bench, tmp_path: Path, noise: float, quick: bool, is_quiet: bool, times: int
) -> None:
    link, count = Link(1e-5, 1e9), 0

    def measured() -> dict[Bucket, Profile]:
        nonlocal count
        count += 1
        seconds, now = (1e-3 / count,) * len(bench.graph.ops), noise if count == 1 else 0.0
        return {Bucket(2): Profile(bench.graph.fingerprint, "cpu", seconds, link, link, noise=now)}

    def profiles() -> dict[Bucket, Profile]:
        return cached_profiles(bench.lowered, "cpu", tmp_path, measured, quick=quick, is_quiet=lambda: is_quiet)

    first, again, third = profiles(), profiles(), profiles()
    assert count == times
    assert again == third
    assert (again == first) == (times == 1)


def test_a_noisy_profile_is_known_like_any_other(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members of a family take the profile of the first, also if the machine is quiet by then."""
    monkeypatch.setattr(cohabit.runtime.measure.stopwatch, "_MEASURING_S", 0.0)
    monkeypatch.setattr(cohabit.runtime.cpu.backend, "_is_quiet", lambda: True)
    backend = CpuBackend()
    _, measured = backend.measure(bench.lowered, bench.store, tmp_path, lambda text: None)
    (path,) = tmp_path.iterdir()
    cache_file.write(path, profile_format.encode(replace(measured[Bucket(2)], noise=9.0)))
    _, known = backend.measure(bench.lowered, bench.store, tmp_path, lambda text: None, known_only=True)
    assert known == {Bucket(2): replace(measured[Bucket(2)], noise=9.0)}
    _, again = backend.measure(bench.lowered, bench.store, tmp_path, lambda text: None)
    assert again != known


def test_one_line_of_the_log_names_all_models_with_noisy_measurements_and_what_will_happen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def model(name: str, noise: float) -> Any:
        return SimpleNamespace(key=ModelKey(name, 1), noise=noise)

    warn_of_noise([model("quiet", NOISY)], measured_again=True)
    assert caplog.records == []
    for measured_again, what in ((True, "once it is quiet"), (False, "after `cohabit cache remeasure MODEL`")):
        caplog.clear()
        several = [model("b", 0.31), model("quiet", NOISY), model("a", 0.25)]
        warn_of_noise(several, measured_again=measured_again)
        (record,) = caplog.records
        assert vars(record)["fields"] == {"models": ["a", "b"], "noise": 0.31, "limit": NOISY}
        assert what in record.message
        assert "delete" not in record.message, "the cache is not to be changed by hand"


def test_the_log_names_operators_that_draw_random_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Attention without a dropout draws none, although its operator could."""

    def computed(x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]

    for name, function in (("quiet", computed), ("random", lambda x: computed(x) + torch.rand_like(x))):
        models.export(Computed(function), {"x": torch.zeros(3, 16)}, tmp_path / f"{name}.pt2")
        warn_of_random_ops(lower(tmp_path / f"{name}.pt2", name, [2], tmp_path / "cache"))
    (record,) = (record for record in caplog.records if record.name == "cohabit.models")
    assert vars(record)["fields"] == {"model": "random", "operators": ["aten.rand_like.default"]}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((aten.scaled_dot_product_attention.default, (0, 0, 0), {}), False),
        ((aten._scaled_dot_product_flash_attention.default, (0, 0, 0), {}), False),
        ((aten._scaled_dot_product_flash_attention.default, (0, 0, 0, 0.1), {}), True),
        ((aten.lstm.input, (0, 0, [], True, 2, 0.0, False, False, False), {}), False),
        ((aten.dropout.default, (0, 0.5, True), {}), True),
        ((aten.alpha_dropout.default, (0, 0.5, False), {}), False),
        ((aten.bernoulli.p, (0, 0.5), {}), True),
        ((aten.relu.default, (0,), {}), False),
    ],
)
def test_calls_that_draw_random_numbers_are_told_from_those_that_do_not(
    call: tuple[Any, tuple[Any, ...], dict[str, Any]], expected: bool
) -> None:
    assert draws(*call) is expected


@pytest.mark.parametrize(
    ("kind", "bandwidth", "cache_bytes", "expected"),
    [
        ("ram", None, 6 << 20, 2 << 20),
        ("ram", None, 1 << 20, 0),
        ("ram", 1e9, 6 << 20, 0),
        ("file", None, 6 << 20, 0),
    ],
)
@pytest.mark.parametrize("quick", [False, True])
def test_parameters_from_ram_are_measured_in_the_last_level_cache(
    kind: StoreKind,
    bandwidth: float | None,
    cache_bytes: int,
    expected: int,
    quick: bool,
    linear: Lowered,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no other link limits the copies and every parameter fits."""
    monkeypatch.setattr(cohabit.runtime.measure.stopwatch, "_MEASURING_S", 0.0)
    monkeypatch.setattr(cohabit.runtime.cpu.backend, "last_level_cache_bytes", lambda: cache_bytes)
    backend = CpuBackend(bandwidth)
    store = backend.open_store(kind, linear.weights_path, linear.manifest)
    profile = backend.measure(linear, store, None, lambda text: None, quick=quick)[1][Bucket(2)]
    store.close()
    assert profile.window_bytes == expected
    assert profile.provisional is quick


@pytest.mark.parametrize("with_window", [False, True])
def test_a_link_is_timed_in_its_window_behind_the_segments(bench: Bench, with_window: bool) -> None:
    """Or where the segments lie."""
    manifest, found = bench.lowered.manifest, list[tuple[int, int]]()

    def taken(offset: int, nbytes: int) -> np.ndarray:
        found.append((offset, offset + nbytes))
        return np.empty(nbytes, np.uint8)

    arena: Any = SimpleNamespace(bytes=taken)
    window_bytes = 2 * max(aligned(s.nbytes, BLOCK_BYTES) for s in manifest.segments) * with_window
    copies = segment_copies(manifest, bench.store, arena, window_bytes)
    assert [end - start for start, end in found] == [s.nbytes for s in manifest.segments]
    assert len(copies) == len(found) > 1
    if with_window:
        assert min(found)[0] == manifest.segment_bytes
        assert max(end for _, end in found) <= manifest.segment_bytes + window_bytes < 2 * manifest.segment_bytes
    else:
        assert [start for start, _ in found] == [s.offset for s in manifest.segments]


def test_a_provisional_link_is_timed_with_the_first_segments(bench: Bench) -> None:
    manifest = bench.lowered.manifest
    first, second = manifest.segments[:2]
    assert leading(manifest, 0).segments == (first,)
    assert leading(manifest, second.offset + second.nbytes).segments == (first, second)
    assert leading(manifest, manifest.segment_bytes).segments == manifest.segments
