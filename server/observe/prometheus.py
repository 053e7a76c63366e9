"""Writes metrics in Prometheus' text format.

prometheus_client cannot write Triton's names: it declares a counter `nv_inference_count` as `nv_inference_count_total`,
even for metrics of a custom collector, and the sample without the suffix then has no type.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from cohabit.server.ipc.statistics import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]
Value = float | Histogram
Sample = tuple[Labels, Value]
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with all its samples."""

    name: str
    kind: Kind
    help: str
    samples: Iterable[Sample]


def single(name: str, kind: Kind, text: str, value: float) -> Family:
    """Return a metric with one sample, without labels."""
    return Family(name, kind, text, [({}, value)])


def written(families: Iterable[Family]) -> bytes:
    return "".join(line for family in families for line in _lines(family)).encode()


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n"
    for labels, value in family.samples:
        if isinstance(value, Histogram):
            yield from _histogram(family.name, labels, value)
        else:
            yield _line(family.name, labels, value)


def _histogram(name: str, labels: Labels, histogram: Histogram) -> Iterator[str]:
    total = 0
    for bound, total in histogram.cumulative():
        yield _line(f"{name}_bucket", {**labels, "le": bound}, total)
    yield _line(f"{name}_sum", labels, histogram.sum)
    yield _line(f"{name}_count", labels, total)


def _line(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {value:.17g}\n" if shown else f"{name} {value:.17g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
