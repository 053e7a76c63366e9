"""Arrival times and models of all requests, drawn from a seed or read from a trace before the run."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cohabit.loadgen.errors import UsageError


@dataclass(frozen=True, slots=True)
class TextSize:
    """Length of a requested text."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RequestArrival:
    at_s: float
    """Intended send time, from the start of the run."""
    model: str
    text: TextSize | None = None
    """Length of the text, if the trace has it."""


def draw_arrivals(
    rate_per_s: float,
    duration_s: float,
    weights: Mapping[str, float],
    seed: int,
    cv: float = 1.0,
    bursts_s: tuple[float, float] | None = None,
) -> tuple[RequestArrival, ...]:
    """Draw arrivals with gamma-distributed gaps, each for a model chosen in proportion to its weight.

    `cv` is the coefficient of variation of the gaps: 1 is a Poisson process, 0 a constant gap. With `bursts_s`,
    (seconds on, seconds off), arrivals come only while on, at a rate that keeps the mean at `rate_per_s`.
    Times do not depend on the models, so runs with different models have the same times.
    """
    times_seed, models_seed = np.random.SeedSequence(seed).spawn(2)
    rng = np.random.default_rng(times_seed)
    if bursts_s is None:
        times_s = _times(rng, rate_per_s, duration_s, cv)
    else:
        on_s, off_s = bursts_s
        # Draw the times of the bursts without the pauses, then insert the pauses.
        dense_s = _times(rng, rate_per_s * (on_s + off_s) / on_s, duration_s, cv)
        spaced_s = (t + t // on_s * off_s for t in dense_s)
        times_s = [t for t in spaced_s if t < duration_s]
    choices = choose_models(weights, models_seed)
    return tuple(RequestArrival(t, next(choices)) for t in times_s)


def choose_models(weights: Mapping[str, float], seed: int | np.random.SeedSequence) -> Iterator[str]:
    """Yield models endlessly, each drawn in proportion to its weight."""
    names, shares = list(weights), np.array(list(weights.values()), dtype=np.float64)
    rng = np.random.default_rng(seed)
    while True:
        for k in rng.choice(len(shares), size=1024, p=shares / shares.sum()).tolist():
            yield names[k]


def read_trace(path: Path) -> tuple[RequestArrival, ...]:
    """Read arrivals from a CSV file with the columns `time` (seconds) and `model`. Times are shifted to begin at 0.

    For texts, the file may have the columns `prompt_tokens` and `output_tokens`, empty in rows of other models. Raises
    UsageError, naming the line, for an invalid file.
    """
    arrivals: list[RequestArrival] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if not {"time", "model"} <= set(rows.fieldnames or ()):
                raise UsageError(f"--trace {path}: its first line must name the columns time and model")
            for row in rows:
                at_s = float(row["time"])
                if not np.isfinite(at_s) or not row["model"]:
                    raise ValueError
                arrivals.append(RequestArrival(at_s, row["model"], _text_size(row)))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace {path}: {error}") from error
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"--trace {path}: line {rows.line_num} has no time in seconds, no model, or no numbers of tokens"
        ) from error
    if not arrivals:
        raise UsageError(f"--trace {path}: it has no requests")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    first_s = arrivals[0].at_s
    return tuple(RequestArrival(a.at_s - first_s, a.model, a.text) for a in arrivals)


def _text_size(row: Mapping[str, str | None]) -> TextSize | None:
    """Return a row's text size, if it has one. Raises ValueError for invalid numbers, or one without the other."""
    given = [row.get(column) or "" for column in ("prompt_tokens", "output_tokens")]
    if given == ["", ""]:
        return None
    prompt, output = map(int, given)
    if min(prompt, output) < 1:
        raise ValueError
    return TextSize(prompt, output)


def zipf_weights(models: Sequence[str], exponent: float) -> dict[str, float]:
    """Weigh the k-th model by 1 / k**exponent; exponent 0 is uniform."""
    return {model: k**-exponent for k, model in enumerate(models, start=1)}


def _times(rng: np.random.Generator, rate_per_s: float, duration_s: float, cv: float) -> list[float]:
    times_s: list[float] = []
    now_s = 0.0
    while True:
        for gap_s in _gaps(rng, rate_per_s, cv):
            now_s += gap_s
            if now_s >= duration_s:
                return times_s
            times_s.append(now_s)


def _gaps(rng: np.random.Generator, rate_per_s: float, cv: float) -> list[float]:
    mean_s = 1 / rate_per_s
    if cv == 0:
        return [mean_s] * 1024
    gaps_s = rng.exponential(mean_s, 1024) if cv == 1 else rng.gamma(cv**-2, mean_s * cv**2, 1024)
    return list(map(float, gaps_s))
