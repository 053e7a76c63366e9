"""Divides memory among models by their curves of latency over partition size. Quick: it does no planning."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    partition_bytes: int
    latency_s: float


Curve = tuple[Point, ...]
"""Points, ascending in bytes."""


def latency_weights(rates_per_s: Sequence[float], compute_s: Sequence[float]) -> list[float]:
    """Return the cost of a second of each model's latency, to its own requests and to those that wait for them.

    This is the derivative of an M/G/1 queue's mean response time (Pollaczek and Khinchine) by the model's service time,
    at half of the load that all-resident models can bear. Only the proportions of the rates count.
    """
    rates = [max(rate, 1e-9) for rate in rates_per_s]
    seconds = [max(s, 1e-9) for s in compute_s]
    mean = sum(r * s for r, s in zip(rates, seconds, strict=True)) / sum(rates)
    square = sum(r * s * s for r, s in zip(rates, seconds, strict=True)) / sum(rates)
    waiting = 1 + square / (2 * mean * mean)
    return [r * (waiting + s / mean) for r, s in zip(rates, seconds, strict=True)]


def share_out(curves: Sequence[Curve], weights: Sequence[float], memory_bytes: int) -> list[Point]:
    """Choose a point of each curve: memory goes where it saves the most weighted time per byte.

    Every model gets at least its smallest size; these must fit.
    """
    at = [0] * len(curves)
    left = memory_bytes - sum(curve[0].partition_bytes for curve in curves)

    def best_step(i: int) -> tuple[float, int]:
        """Return the largest saving per byte among a model's steps that fit, and its point; 0 if none saves."""
        now, best = curves[i][at[i]], (0.0, at[i])
        for j in range(at[i] + 1, len(curves[i])):
            more = curves[i][j].partition_bytes - now.partition_bytes
            saved = (now.latency_s - curves[i][j].latency_s) * weights[i]
            if 0 < more <= left and saved / more > best[0]:
                best = (saved / more, j)
        return best

    steps = [best_step(i) for i in range(len(curves))]
    while steps:
        i = max(range(len(steps)), key=lambda i: steps[i][0])
        saved, j = steps[i]
        if saved <= 0:
            break
        more = curves[i][j].partition_bytes - curves[i][at[i]].partition_bytes
        if more <= left:
            left -= more
            at[i] = j
        steps[i] = best_step(i)  # from the new point, or with less memory left
    return [curve[k] for curve, k in zip(curves, at, strict=True)]


def weighted_latency_s(points: Sequence[Point], weights: Sequence[float]) -> float:
    return sum(weight * point.latency_s for weight, point in zip(weights, points, strict=True))
