"""Samples of a server's /metrics, and what changed between two readings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Samples:
    values: Mapping[Key, float]

    def get(self, name: str, **labels: str) -> float | None:
        return self.values.get((name, frozenset(labels.items())))

    def labelled(self, name: str, label: str) -> dict[str, float]:
        """Return a metric's values by one label, summed over its other labels."""
        found: dict[str, float] = {}
        for (metric, labels), value in self.values.items():
            if metric == name and (key := dict(labels).get(label)) is not None:
                found[key] = found.get(key, 0.0) + value
        return found

    def total(self, name: str, label: str = "model") -> float:
        return sum(self.labelled(name, label).values())

    def of_model(self, model: str, version: str) -> "Samples":
        """Return the samples of a version of a model, without the labels that say so."""
        kept = {}
        for (name, labels), value in self.values.items():
            named = dict(labels)
            if (named.pop("model", None), named.pop("version", None)) == (model, version):
                kept[name, frozenset(named.items())] = value
        return Samples(kept)

    def since(self, before: "Samples") -> "Samples":
        """Return the growth of every sample; one that fell is a counter that was reset, and counts from zero."""
        grown = {}
        for key, value in self.values.items():
            then = before.values.get(key, 0.0)
            grown[key] = value - then if value >= then else value
        return Samples(grown)

    def quantile(self, histogram: str, share: float) -> float | None:
        """Estimate a quantile by linear interpolation within its bucket; None without observations."""
        buckets = sorted(
            (math.inf if bound == "+Inf" else float(bound), count)
            for bound, count in self.labelled(f"{histogram}_bucket", "le").items()
        )
        total = buckets[-1][1] if buckets else 0.0
        if total <= 0:
            return None
        low, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= share * total and count > below:
                return low if bound == math.inf else low + (bound - low) * (share * total - below) / (count - below)
            low, below = bound, count
        return low


def parse(text: str) -> Samples:
    """Read Prometheus' text format. Raises ValueError."""
    values: dict[Key, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser appends `_total` to the names of Triton's counters, which have none.
            name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
            values[name, frozenset(sample.labels.items())] = sample.value
    return Samples(values)
