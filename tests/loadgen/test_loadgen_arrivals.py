from pathlib import Path

import numpy as np
import pytest

from cohabit.loadgen.arrivals import RequestArrival, TextSize, draw_arrivals, read_trace, zipf_weights
from cohabit.loadgen.errors import UsageError

UNIFORM = {"a": 1.0, "b": 1.0}


def test_the_same_seed_draws_the_same_arrivals() -> None:
    assert draw_arrivals(300, 5, UNIFORM, seed=7) == draw_arrivals(300, 5, UNIFORM, seed=7)
    assert draw_arrivals(300, 5, UNIFORM, seed=7) != draw_arrivals(300, 5, UNIFORM, seed=8)


def test_times_do_not_depend_on_the_models() -> None:
    few = draw_arrivals(100, 5, {"a": 1.0}, seed=3)
    many = draw_arrivals(100, 5, zipf_weights("abcdef", 1.2), seed=3)
    assert [a.at_s for a in few] == [a.at_s for a in many]


def test_times_are_in_order_and_within_the_duration() -> None:
    times_s = [a.at_s for a in draw_arrivals(1000, 3, UNIFORM, seed=0)]
    assert times_s == sorted(times_s)
    assert times_s[0] > 0
    assert times_s[-1] < 3


def test_gaps_are_exponential() -> None:
    times_s = np.array([a.at_s for a in draw_arrivals(200, 100, UNIFORM, seed=0)])
    gaps_s = np.sort(np.diff(times_s))
    assert gaps_s.mean() == pytest.approx(1 / 200, rel=0.03)
    # Kolmogorov-Smirnov distance to the exponential distribution, against its 0.1 % critical value.
    empirical = np.arange(1, len(gaps_s) + 1) / len(gaps_s)
    distance = np.abs(empirical - (1 - np.exp(-200 * gaps_s))).max()
    assert distance < 1.95 / np.sqrt(len(gaps_s))


def test_models_are_chosen_in_proportion_to_their_weights() -> None:
    chosen = [a.model for a in draw_arrivals(1000, 20, {"a": 3.0, "b": 1.0, "never": 0.0}, seed=0)]
    assert chosen.count("a") / len(chosen) == pytest.approx(0.75, abs=0.02)
    assert "never" not in chosen


def test_zipf_weights_fall_with_rank() -> None:
    assert zipf_weights(["a", "b", "c"], 1.0) == pytest.approx({"a": 1, "b": 1 / 2, "c": 1 / 3})
    assert zipf_weights(["a", "b"], 0.0) == UNIFORM


def test_a_gap_without_variation_is_constant() -> None:
    times_s = [a.at_s for a in draw_arrivals(100, 1, UNIFORM, seed=0, cv=0.0)]
    assert np.diff(times_s) == pytest.approx([0.01] * (len(times_s) - 1))


@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_gaps_have_the_mean_and_the_variation_asked_for(cv: float) -> None:
    gaps_s = np.diff([a.at_s for a in draw_arrivals(200, 200, UNIFORM, seed=0, cv=cv)])
    assert gaps_s.mean() == pytest.approx(1 / 200, rel=0.05)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.05)


def test_bursts_have_all_requests_at_the_mean_rate() -> None:
    times_s = np.array([a.at_s for a in draw_arrivals(200, 60, UNIFORM, seed=0, bursts_s=(1.0, 3.0))])
    assert (times_s % 4 < 1).all()
    assert len(times_s) == pytest.approx(200 * 60, rel=0.05)


def test_a_trace_is_replayed_from_its_first_request(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("model,time\nb,101.5\na,100\n")
    assert read_trace(tmp_path / "t.csv") == (RequestArrival(0.0, "a"), RequestArrival(1.5, "b"))


def test_a_trace_may_say_how_long_texts_are(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time,model,prompt_tokens,output_tokens\n0,a,,\n1,b,7,20\n")
    assert [arrival.text for arrival in read_trace(tmp_path / "t.csv")] == [None, TextSize(7, 20)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,model,prompt_tokens,output_tokens\n1,a,7,0\n", "line 2"),
        ("time,model,prompt_tokens,output_tokens\n1,a,7,\n", "line 2"),
        ("time,model,prompt_tokens\n1,a,many\n", "line 2"),
        ("when,model\n1,a\n", "columns time and model"),
        ("time,model\n1,a\nx,b\n", "line 3"),
        ("time,model\n", "no req"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_trace(tmp_path / "t.csv")
