"""The server's own view of a run: where its requests spent their time."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cohabit.loadgen.client import Client

_STALL = re.compile(r'^cohabit_stall_seconds_total\{.*?model="(?P<model>[^"]*)".*\} (?P<value>\S+)$', re.MULTILINE)
_LANES = re.compile(
    r'^cohabit_lane_busy_seconds_total\{.*?lane="(?P<lane>compute[^"]*)".*\} (?P<value>\S+)$', re.MULTILINE
)
_RESTARTS = re.compile(r"^cohabit_engine_restarts_total(\{.*\})? (?P<value>\S+)$", re.MULTILINE)


class ServerTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Means over the requests that the server answered, seconds, from Triton's statistics of a model."""

    requests: int
    queue_s: float
    """From a request's arrival to the start of its execution."""
    input_s: float
    compute_s: float
    """Of the batch that a request was in; waits for parameters included."""
    output_s: float
    stall_s: float | None
    """Waits for parameters per execution, from Cohabit's metrics; None for servers that have no such metric."""


class Counters(msgspec.Struct, frozen=True):
    """What a server had counted at one moment, by model."""

    models: Mapping[str, Mapping[str, float]]
    stall_s: Mapping[str, float]
    restarts: float = 0.0
    """Of Cohabit's engine, whose counters are then reset."""
    lanes_s: Mapping[str, float] = {}
    """Seconds that Cohabit's compute lanes have computed, waits for parameters left out."""
    at_s: float = 0.0


async def read_counters(client: Client) -> Counters:
    """Read a server's statistics; without any, all is empty."""
    stall_s: dict[str, float] = {}
    metrics = await client.metrics()
    for found in _STALL.finditer(metrics):
        stall_s[found["model"]] = stall_s.get(found["model"], 0.0) + float(found["value"])
    restarts = sum(float(found["value"]) for found in _RESTARTS.finditer(metrics))
    lanes_s = {found["lane"]: float(found["value"]) for found in _LANES.finditer(metrics)}
    return Counters(_by_model(await client.statistics()), stall_s, restarts, lanes_s, time.perf_counter())


def lane_share_between(before: Counters, after: Counters) -> float | None:
    """Return the part of the time that the busiest compute lane has computed; None where the server does not say."""
    seconds = after.at_s - before.at_s
    if after.restarts != before.restarts or seconds <= 0:
        return None
    shares = [(busy_s - before.lanes_s.get(lane, 0.0)) / seconds for lane, busy_s in after.lanes_s.items()]
    return max(shares, default=None)


def times_between(before: Counters, after: Counters) -> dict[str, ServerTimes]:
    """Return each model's mean times between two moments; models without a request in between are left out.

    So are those whose counters were reset, because the model was loaded again; all, if the engine was restarted.
    """
    found: dict[str, ServerTimes] = {}
    if after.restarts != before.restarts:
        return found
    for model, counts in after.models.items():
        earlier = before.models.get(model, {})
        grown = {key: value - earlier.get(key, 0.0) for key, value in counts.items()}
        requests, executions = int(grown["requests"]), grown["executions"]
        stalled_s = after.stall_s.get(model, 0.0) - before.stall_s.get(model, 0.0)
        if requests <= 0 or stalled_s < 0 or any(value < 0 for value in grown.values()):
            continue
        means = {f"{part}_s": grown[part] / requests / 1e9 for part in ("queue", "input", "compute", "output")}
        stall_s = None
        if model in after.stall_s and executions > 0:
            stall_s = stalled_s / executions
        found[model] = ServerTimes(requests=requests, stall_s=stall_s, **means)
    return found


def _by_model(statistics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Add up the versions of each model. gRPC's JSON has integers as texts, and leaves out zeros."""
    models: dict[str, dict[str, float]] = {}
    for entry in statistics:
        stats = entry.get("inference_stats", {})
        counts = {"requests": float(stats.get("success", {}).get("count", 0))}
        counts["executions"] = float(entry.get("execution_count", 0))
        for part, field in (("queue", "queue"), ("input", "compute_input"), ("compute", "compute_infer")):
            counts[part] = float(stats.get(field, {}).get("ns", 0))
        counts["output"] = float(stats.get("compute_output", {}).get("ns", 0))
        total = models.setdefault(entry["name"], dict.fromkeys(counts, 0.0))
        for key, value in counts.items():
            total[key] += value
    return models
