"""The simulated server against queueing theory and hand-made schedules; `cohabit fit` on a repository."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cohabit.planner.memory import Memory
from cohabit.planner.profile import Link
from cohabit.planner.shapes import Bucket
from cohabit.server.capacity import fit as fit_module
from cohabit.server.capacity.fit import Candidate, Capacity, Fit, HighestRate, shared_out
from cohabit.server.capacity.report import fit_page
from cohabit.server.capacity.simulation import IDLE_AFTER_S, Overheads, SimulatedModel, poisson, simulate
from cohabit.server.cli import main
from cohabit.server.errors import ConfigError
from cohabit.server.scheduling.policy import Policy

pytestmark = pytest.mark.process

SERVICE_S = 0.003


def alone(name: str = "a", seconds: float = SERVICE_S, **fields: object) -> SimulatedModel:
    return SimulatedModel(name, {Bucket(1): seconds}, **fields)  # type: ignore[arg-type]


def latencies(models: list[SimulatedModel], arrivals: list[tuple[float, int]], **more: object) -> list[float]:
    times, wanted = zip(*arrivals, strict=True)
    played = simulate(models, np.array(times), np.array(wanted), **more)  # type: ignore[arg-type]
    return [round(float(seconds), 6) for seconds in played.latencies_s]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_model_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) service times."""
    times_s, wanted = poisson([load / SERVICE_S], 20_000)
    played = simulate([alone()], times_s, wanted)
    expected_s = SERVICE_S * (1 + load / (2 * (1 - load)))
    assert played.latencies_s.mean() == pytest.approx(expected_s, rel=0.03)
    assert played.busy == pytest.approx(load, rel=0.01)


def test_arrivals_are_poisson_in_the_rates_proportions() -> None:
    times_s, wanted = poisson([30.0, 10.0], 40_000)
    assert times_s[-1] == pytest.approx(1000.0, rel=0.02)
    assert np.std(np.diff(times_s)) == pytest.approx(1 / 40, rel=0.03)
    assert (wanted == 0).mean() == pytest.approx(0.75, abs=0.01)


def test_requests_wait_for_those_before_them() -> None:
    assert latencies([alone()], [(0.0, 0), (0.001, 0), (0.5, 0)]) == [0.003, 0.005, 0.003]


def test_overheads_delay_requests_and_executions() -> None:
    overheads = Overheads(request_s=0.01, execution_s=0.002)
    assert latencies([alone()], [(0.0, 0), (0.001, 0)], overheads=overheads) == [0.015, 0.019]


def test_executions_and_loads_take_longer_than_predicted_by_a_factor() -> None:
    models = [alone("a", load_s=0.001), alone("b", recovery_s=0.002)]
    overheads = Overheads(execution_s=0.001, execution_factor=2.0)
    assert latencies(models, [(0.0, 0), (1.0, 1), (1.0, 1)], overheads=overheads) == [0.009, 0.007, 0.018]


def test_requests_to_an_idle_server_take_longer_and_more_so_after_a_longer_pause() -> None:
    overheads = Overheads(request_s=0.001, idle_s=0.002)
    first, soon, later = latencies([alone()], [(0.0, 0), (0.01, 0), (1.0, 0)], overheads=overheads)
    assert (first, later) == (0.006, 0.006)
    assert soon == pytest.approx(0.004 + 0.002 * (1 - np.exp(-0.01 / IDLE_AFTER_S)), abs=1e-6)


@pytest.mark.parametrize("rate_per_s", [5.0, 50.0, 500.0])
def test_the_mean_share_of_idleness_is_that_of_poisson_arrivals(rate_per_s: float) -> None:
    times_s, _ = poisson([rate_per_s], 100_000)
    mean_s = Overheads(idle_s=1.0).of_requests(times_s).mean()
    assert mean_s == pytest.approx(1 / (1 + rate_per_s * IDLE_AFTER_S), rel=0.02)


def test_a_model_waits_for_its_residents_only_directly_after_itself() -> None:
    models = [alone("a", recovery_s=0.002), alone("b")]
    assert latencies(models, [(0.0, 0), (0.0, 0)]) == [0.003, 0.008]
    assert latencies(models, [(0.0, 0), (0.0, 1)]) == [0.003, 0.006]
    assert latencies(models, [(0.0, 0), (0.004, 0)]) == [0.003, 0.004]  # half of it has passed
    assert latencies(models, [(0.0, 0), (1.0, 0)]) == [0.003, 0.003]


def test_models_that_take_turns_are_copied_when_they_change() -> None:
    models = [alone("a", load_s=0.1), alone("b", load_s=0.1)]
    assert latencies(models, [(0.0, 0), (1.0, 0), (2.0, 1), (3.0, 0)]) == [0.103, 0.003, 0.103, 0.103]


def test_requests_are_batched_as_the_server_does() -> None:
    model = SimulatedModel("a", {Bucket(1): 0.01, Bucket(4): 0.012}, max_rows=4)
    assert latencies([model], [(0.0, 0), (0.001, 0), (0.002, 0)]) == [0.01, 0.021, 0.02]
    alone_only = SimulatedModel("a", {Bucket(1): 0.01, Bucket(4): 0.012})
    assert latencies([alone_only], [(0.0, 0), (0.001, 0), (0.002, 0)]) == [0.01, 0.019, 0.028]


def test_a_batch_that_is_held_back_starts_after_its_delay() -> None:
    policy = Policy(batch_delay_s=0.005)
    model = SimulatedModel("a", {Bucket(1): 0.01, Bucket(4): 0.012}, max_rows=4, policy=policy)
    assert latencies([model], [(0.0, 0), (0.001, 0), (0.1, 0)]) == [0.017, 0.016, 0.015]


def test_what_the_policy_refuses_has_no_latency() -> None:
    limited = alone("a", policy=Policy(rate_per_s=1.0, burst=1))
    first, second = latencies([limited], [(0.0, 0), (0.001, 0)])
    assert first == 0.003
    assert np.isnan(second)


def test_rates_are_shared_out() -> None:
    assert shared_out(100.0, ["a", "b", "c"], {"a": 60.0}) == [60.0, 20.0, 20.0]
    assert shared_out(100.0, ["a", "b"], {}) == [50.0, 50.0]
    assert shared_out(5.0, ["a", "b"], {"a": 2.0, "b": 3.0}) == [2.0, 3.0]
    with pytest.raises(ConfigError, match=r"nothing is left of --rate 60 for b; give them a rate"):
        shared_out(60.0, ["a", "b"], {"a": 60.0})
    with pytest.raises(ConfigError, match="the models have 5 requests per second, --rate says 6"):
        shared_out(6.0, ["a", "b"], {"a": 2.0, "b": 3.0})


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name in ("left", "right"):
        layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))).eval()
        (folder / name / "1").mkdir(parents=True)
        dims = ({0: torch.export.Dim("batch", max=4)},)
        exported = torch.export.export(layers, (torch.zeros(2, 128),), dynamic_shapes=dims)
        torch.export.save(exported, folder / name / "1" / "model.pt2")
    (folder / "broken" / "1").mkdir(parents=True)
    (folder / "broken" / "1" / "model.pt2").write_bytes(b"no archive")
    return folder


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits of these tests are of a tenth of the requests."""
    monkeypatch.setattr(fit_module, "poisson", lambda rates_per_s, requests: poisson(rates_per_s, requests // 10))


def run(repository: Path, *flags: str) -> int:
    return main(
        ["fit", str(repository), "--cache", str(repository.parent / "cache"), "--batch-sizes", "1,4", *flags]
    )


def test_a_fit_says_what_fits_and_what_is_left_out(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "fit.html"
    assert run(repository, "--rate", "5", "--slo-ms", "10000", "--html", str(page), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["left_out"]) == ["broken"]
    curve = found["curve"]
    assert [model["name"] for model in curve[0]["models"]] == ["left", "right"]
    assert curve[0]["memory_bytes"] < curve[-1]["memory_bytes"]
    assert all(point["p99_s"] >= point["p50_s"] > 0 for point in curve)
    # With all weights there, an execution takes what it takes resident.
    assert curve[-1]["models"][0]["latency_s"] == pytest.approx(curve[-1]["models"][0]["resident_s"])
    assert found["fit"] == curve[0]  # the smallest that meets it
    assert "p99 over memory" in page.read_text()


def test_a_fit_in_some_memory_has_the_highest_rate(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(repository, "--rate", "5", "--slo-ms", "10000", "--memory", "150%") == 0
    printed = capsys.readouterr().out
    assert "2 models, partitioned, in" in printed
    assert "highest rate with p99 within" in printed


def test_an_slo_that_is_missed_is_a_status(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(repository, "--rate", "5", "--slo-ms", "0.0001") == 1
    printed = capsys.readouterr().out
    assert "No memory meets" in printed
    assert "Even a request that meets no other takes longer" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --rate R"),
        (["--rates", "FILE"], "has no model 'nobody' that can be served"),
        (["--rate", "5", "--memory", "1KiB"], "raise the memory"),
        (["--rates", "NEGATIVE"], "'-3' is not a rate"),
    ],
)
def test_what_cannot_be_fitted_is_said(
    flags: list[str], message: str, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = tmp_path / "rates.txt"
    rates.write_text("nobody=3\n")
    negative = tmp_path / "negative.txt"
    negative.write_text("left=-3\n")
    files = {"FILE": str(rates), "NEGATIVE": str(negative)}
    assert run(repository, *(files.get(flag, flag) for flag in flags)) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_highest_rate_meets_the_slo_and_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an M/D/1 queue in place of planning: beyond the rate that is found, p99 is over the SLO."""
    capacity = Capacity([], "partitioned")
    model = alone()

    class Planned:
        models = (model,)

    def fit(memory_bytes: int, rates_per_s: list[float], requests: int = 5_000) -> Fit:
        played = simulate([model], *poisson(rates_per_s, requests))
        p50_s, p99_s = np.percentile(played.latencies_s, (50, 99))
        mean_s = float(played.latencies_s.mean())
        return Fit("resident", 1, 0, rates_per_s[0], float(p50_s), float(p99_s), mean_s, played.busy, 0.0, ())

    monkeypatch.setattr(capacity, "_plans_in", lambda memory_bytes: Planned)
    monkeypatch.setattr(capacity, "fit", fit)
    highest = capacity.highest_rate(1, [1.0], 0.02).rate_per_s
    assert fit(1, [highest]).meets(0.02)
    assert not fit(1, [highest * 1.05]).meets(0.02)
    assert capacity.highest_rate(1, [1.0], SERVICE_S / 2).rate_per_s == 0.0, "slower than the SLO even alone"


@pytest.mark.parametrize(("window_bytes", "load_s"), [(0, 0.001), (4096, 0.002)])
def test_a_whole_model_is_copied_through_ram_even_if_its_profile_copies_in_the_cache(
    window_bytes: int, load_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_module, "_ram_bandwidth_bytes_per_s", lambda: 5e8)
    profile = SimpleNamespace(swap_in=Link(0.0, 1e9), window_bytes=window_bytes, compute_s=0.001)
    graph = SimpleNamespace(tensors=[SimpleNamespace(kind="parameter", nbytes=1_000_000)])
    demand: Any = SimpleNamespace(name="a", profiles={Bucket(1): profile}, graphs={Bucket(1): graph})
    model = Capacity([], "time_shared")._simulated_model(Candidate(demand, 0), Memory(0, 0))
    assert model.load_s == pytest.approx(load_s)


def test_a_page_without_a_fit_says_so() -> None:
    point = Fit("partitioned", 1 << 20, 0, 300.0, 0.1, 0.2, 0.1, 1.0, 0.1, ())
    page = fit_page("models", [point], None, 0.05, HighestRate(1 << 20, 120.0))
    assert "No memory meets 50.00 ms at this rate. 120 requests/s would, in 1.0 MiB" in page
