import statistics

import msgspec
import numpy as np
import pytest

from cohabit.loadgen.arrivals import RequestArrival
from cohabit.loadgen.openloop import NOT_SENT, Outcome, RequestFailed
from cohabit.loadgen.report import Report, RunDescription, make_report, spread

RUN = RunDescription(url="u", seed=0, batch=1, rate_per_s=10, duration_s=10.0, warmup_s=1.0, slo_s=0.1)


def answered(at_s: float, latency_s: float, model: str = "a") -> Outcome:
    return Outcome(RequestArrival(at_s, model), 0.0, latency_s)


def failed(at_s: float, kind: str, model: str = "a") -> Outcome:
    return Outcome(RequestArrival(at_s, model), 0.0, 0.5, RequestFailed(kind, f"{kind} happened"))


def test_percentiles_agree_with_the_standard_library() -> None:
    samples_s = np.random.default_rng(0).exponential(0.01, 500).tolist()
    thousandths = statistics.quantiles(samples_s, n=1000, method="inclusive")
    s = spread(samples_s)
    assert s is not None
    expected = [thousandths[499], thousandths[899], thousandths[989], thousandths[998]]
    assert [s.p50_s, s.p90_s, s.p99_s, s.p999_s] == pytest.approx(expected)
    assert (s.mean_s, s.max_s) == pytest.approx((statistics.fmean(samples_s), max(samples_s)))


def test_no_samples_have_no_spread() -> None:
    assert spread([]) is None


def test_the_warm_up_is_in_none_of_the_numbers() -> None:
    report = make_report(RUN, [answered(0.5, 9.0), failed(0.9, "timeout"), answered(1.5, 0.01)], ["a"])
    assert (report.sent, report.completed, report.errors) == (1, 1, {})
    assert report.latency is not None
    assert report.latency.max_s == 0.01


def test_goodput_counts_answers_within_the_slo() -> None:
    report = make_report(RUN, [answered(2, 0.05), answered(3, 0.1), answered(4, 0.2)], ["a"])
    assert report.goodput_per_s == pytest.approx(2 / 10)
    assert report.achieved_per_s == pytest.approx(3 / 10)


def test_an_overloaded_server_achieves_what_it_answered_until_it_was_done() -> None:
    report = make_report(RUN, [answered(10.9, 10.1)], ["a"])
    assert report.achieved_per_s == pytest.approx(1 / 20)


def test_errors_are_counted_by_kind_and_model() -> None:
    outcomes = [failed(2, "timeout"), failed(3, "HTTP 503", "b"), failed(4, NOT_SENT), answered(5, 0.01, "b")]
    report = make_report(RUN, outcomes, ["a", "b", "idle"])
    assert report.errors == {"HTTP 503": 1, NOT_SENT: 1, "timeout": 1}
    assert report.error_examples["timeout"] == "timeout happened"
    assert [m.sent for m in report.models] == [1, 2, 0]
    assert report.models[1].errors == {"HTTP 503": 1}
    assert report.models[0].latency is None
    assert not report.all_answered


def test_a_run_without_answers_is_not_a_success() -> None:
    assert not make_report(RUN, [], ["a"]).all_answered


def test_a_late_generator_is_noticed() -> None:
    late = Outcome(RequestArrival(2, "a"), lag_s=0.02, latency_s=0.03)
    assert make_report(RUN, [late], ["a"]).generator_was_late
    assert not make_report(RUN, [answered(2, 0.03)], ["a"]).generator_was_late


def test_a_report_survives_json() -> None:
    report = make_report(RUN, [answered(2, 0.05), failed(3, "timeout", "b")], ["a", "b"])
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
