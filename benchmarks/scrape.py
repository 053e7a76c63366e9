"""What a running server says of itself: samples of its metrics."""

import socket
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families


def by_model(metrics_url: str, name: str) -> dict[str, float]:
    """Samples of one metric, by model; for batch 1 where there are several."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(get(metrics_url).decode()):
        for sample in family.samples:
            if sample.name.removesuffix("_total") == name and sample.labels.get("batch", "1") == "1":
                samples[sample.labels["model"]] = sample.value
    return samples


def get(url: str) -> bytes:
    with urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
