"""Predicted times, and what measurements make of them."""

import random

import pytest

from cohabit.server.scheduling.estimates import Estimate


def test_rows_take_the_time_of_the_batch_they_are_padded_to() -> None:
    estimate = Estimate({1: 1.0, 4: 2.0})
    assert [estimate.seconds(rows) for rows in (1, 2, 4, 8)] == [1.0, 2.0, 2.0, 4.0]


def test_without_predictions_measurements_alone_count() -> None:
    estimate = Estimate({})
    assert estimate.upper_estimate_s(1, 0.0) == 0.0, "nothing is known, so nothing is refused"
    for _ in range(20):
        estimate.measured(1, 0.25, 0.0)
    assert estimate.seconds(1) == pytest.approx(0.25)
    assert estimate.drain_estimate_s(4) == pytest.approx(1.0)


def test_careful_time_is_rarely_exceeded() -> None:
    rng = random.Random(0)
    estimate, exceeded = Estimate({1: 1.0}), 0
    for now in range(5000):
        seconds = rng.gauss(1.3, 0.1)
        exceeded += seconds > estimate.upper_estimate_s(1, now / 10)
        estimate.measured(1, seconds, now / 10)
    assert exceeded < 0.1 * 5000
    assert estimate.upper_estimate_s(1, 500.0) < 1.8


def test_one_hiccup_does_not_make_a_model_hopeless() -> None:
    estimate = Estimate({1: 1.0})
    for now in range(50):
        estimate.measured(1, 1.0, float(now))
    estimate.measured(1, 1000.0, 50.0)
    assert estimate.upper_estimate_s(1, 50.0) < 3.5
    assert estimate.upper_estimate_s(1, 80.0) == pytest.approx(1.0, rel=0.01)


def test_many_rows_drain_in_the_batches_that_pay_most() -> None:
    estimate = Estimate({1: 1.0, 8: 2.0})
    assert estimate.drain_estimate_s(0) == 0.0
    assert estimate.drain_estimate_s(1) == 1.0
    assert estimate.drain_estimate_s(80) == pytest.approx(20.0)
