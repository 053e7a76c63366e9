"""Parsers of numbers, durations and rates. Each takes text and raises ValueError if it is invalid."""

import math
from collections.abc import Callable
from pathlib import Path

from cohabit.planner.shapes import ShapeBuckets

LARGEST_BATCH = 1 << 16
MOST_SIZES = 64
"""Maximum number of sizes in one setting, equal to that of a model's buckets."""


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
            raise ValueError(f"'{text}' is not a whole number from {least} to {most}")
        return int(text)

    return parse


def positive(text: str, what: str, allow_zero: bool = False) -> float:
    """Return a finite number above 0; `what` is the noun of the error message."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        raise ValueError(f"'{text}' is not {what}")
    return value


def seconds(text: str) -> float:
    return positive(text, "a number of seconds over zero")


def seconds_or_zero(text: str) -> float:
    return positive(text, "a number of seconds", allow_zero=True)


def rate(text: str) -> float:
    return positive(text, "a rate in requests per second")


port = integer(0, 65535)


def port_or_off(text: str) -> int | None:
    return None if text == "off" else port(text)


def batches(text: str) -> tuple[int, ...]:
    """Read comma-separated sizes. Returns them in ascending order, without duplicates."""
    parse = integer(1, LARGEST_BATCH)
    if (count := text.count(",") + 1) > MOST_SIZES:
        raise ValueError(
            f"{count} sizes are named, the limit is {MOST_SIZES}; each has a plan of its own, so name fewer"
        )
    return tuple(sorted({parse(part.strip()) for part in text.split(",")}))


def shape_buckets(text: str) -> ShapeBuckets:
    """Read N,N,... for all dynamic dimensions, or INPUT[.AXIS]=N,N,... for one; `;` separates several."""
    plain: tuple[int, ...] = ()
    own: dict[str, tuple[int, ...]] = {}
    for part in text.split(";"):
        name, separator, sizes = part.strip().rpartition("=")
        if name in own or (not name and (separator or plain)):
            raise ValueError(f"'{text}' is not of the form N,N,... or INPUT.AXIS=N,N,... with each named once")
        if name:
            own[name] = batches(sizes)
        else:
            plain = batches(sizes)
    return ShapeBuckets(plain, tuple(own.items()))


def model_rates(text: str) -> dict[str, float]:
    """Read NAME=RATE, or a file of such lines, in which `#` begins a comment. Returns requests per second by model."""
    if "=" in text:
        return _model_rate(text)
    try:
        lines = Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"'{text}' is neither NAME=RATE nor a file of such lines: {error}") from error
    found: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        if stated := line.partition("#")[0].strip():
            try:
                found |= _model_rate(stated)
            except ValueError as error:
                raise ValueError(f"{text}, line {number}: {error}") from error
    return found


def _model_rate(text: str) -> dict[str, float]:
    name, separator, per_s = text.rpartition("=")
    if not separator or not name:
        raise ValueError(f"'{text}' is not of the form NAME=RATE")
    return {name: rate(per_s)}


def trace_option(text: str) -> dict[str, str]:
    """Read file=FILE, otlp=URL or rate=N, or Triton's form of these."""
    named = text.removeprefix("triton,").replace("opentelemetry,url=", "otlp=", 1)
    key, separator, value = named.partition("=")
    if not separator or not value or key not in ("file", "otlp", "rate"):
        raise ValueError(f"'{text}' is neither file=FILE nor otlp=URL nor rate=N")
    if key == "otlp" and not value.startswith(("http://", "https://")):
        raise ValueError(f"'{text}' has no URL of a collector, such as http://localhost:4318")
    if key == "rate":
        integer(1, 999_999_999)(value)
    return {key: value}
