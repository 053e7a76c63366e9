"""What a server's /metrics said at one moment, and what happened between two of them."""

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
        """A metric's values by one label; where several have it in common, their sum."""
        found: dict[str, float] = {}
        for (metric, labels), value in self.values.items():
            if metric == name and (key := dict(labels).get(label)) is not None:
                found[key] = found.get(key, 0.0) + value
        return found

    def of_model(self, model: str) -> "Samples":
        """One model's samples, without the labels that name it."""
        kept = {}
        for (name, labels), value in self.values.items():
            named = dict(labels)
            if named.pop("model", None) == model:
                named.pop("version", None)
                kept[name, frozenset(named.items())] = value
        return Samples(kept)

    def since(self, before: "Samples") -> "Samples":
        """How much every sample has grown; one that fell counts from zero, as its counter began anew."""
        grown = {}
        for key, value in self.values.items():
            then = before.values.get(key, 0.0)
            grown[key] = value - then if value >= then else value
        return Samples(grown)

    def quantile(self, histogram: str, share: float) -> float | None:
        """Estimate a quantile, by a straight line within its bucket; None without any observation."""
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
            # The parser appends `_total` to the names of counters, which have none here.
            name = sample.name.removesuffix("_total") if family.type == "counter" else sample.name
            values[name, frozenset(sample.labels.items())] = sample.value
    return Samples(values)
