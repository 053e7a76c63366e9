import statistics

import msgspec
import numpy as np
import pytest

from cohabit.loadgen.arrivals import RequestArrival
from cohabit.loadgen.openloop import NOT_SENT, Outcome, RequestFailed
from cohabit.loadgen.report import Report, RunDescription, findings, make_report, runs_table, spread
from cohabit.loadgen.server_times import Counters, lane_share_between, times_between

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


@pytest.mark.long
def test_a_saturated_run_and_an_outage_are_said() -> None:
    run = msgspec.structs.replace(RUN, rate_per_s=100.0, duration_s=10.0, warmup_s=0.0)
    arrivals = [k / 100 for k in range(1000)]
    behind = make_report(run, [answered(at_s, 0.01 + at_s) for at_s in arrivals], ["a"])  # half as fast as asked
    (said,) = findings(behind)
    assert said.startswith("saturated: 50.0 of 100 requests/s were answered, and latencies grew from")
    assert said.endswith("as long as the load lasts")
    (said,) = findings(msgspec.structs.replace(behind, lane_share=0.973))
    assert said.endswith("; the compute lane was 97% busy")
    gone = [failed(at_s, "connection") if 3 <= at_s < 6 else answered(at_s, 0.01) for at_s in arrivals]
    (said,) = findings(make_report(run, gone, ["a"]))
    assert said == "outage: of the 300 requests that were due from 3.0 to 6.0 s, 3.0 s, none was answered"
    assert findings(make_report(run, [answered(at_s, 0.01) for at_s in arrivals], ["a"])) == []


def counters(requests: float, nanoseconds: float, restarts: float = 0.0) -> Counters:
    parts = dict.fromkeys(("queue", "input", "compute", "output"), nanoseconds)
    return Counters({"a": {"requests": requests, "executions": requests, **parts}}, {"a": 0.0}, restarts)


def test_counters_that_began_anew_say_nothing_of_a_run() -> None:
    (found,) = times_between(counters(10, 1e9), counters(20, 3e9)).values()
    assert (found.requests, found.compute_s) == (10, pytest.approx(0.2))
    assert times_between(counters(100, 9e9), counters(150, 2e9)) == {}, "the model was replaced"
    assert times_between(counters(10, 1e9), counters(20, 3e9, restarts=1.0)) == {}, "the engine was restarted"


def test_a_sweep_is_compared_in_one_table() -> None:
    reports = [
        make_report(msgspec.structs.replace(RUN, rate_per_s=r), [answered(2, 0.05)], ["a"]) for r in (10, 20)
    ]
    assert runs_table(reports).row_count == 2


def test_the_busiest_compute_lane_counts_between_two_moments() -> None:
    before, after = (
        msgspec.structs.replace(counters(1, 1.0), lanes_s={"compute_0": a, "compute_1": b}, at_s=at_s)
        for a, b, at_s in ((5.0, 1.0, 10.0), (6.0, 4.0, 14.0))
    )
    assert lane_share_between(before, after) == 0.75
    assert lane_share_between(before, msgspec.structs.replace(after, restarts=1.0)) is None
    assert lane_share_between(counters(1, 1.0), msgspec.structs.replace(counters(2, 1.0), at_s=1.0)) is None
