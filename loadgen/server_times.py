"""Times of a run as measured by the server: queue, inputs, compute and outputs."""

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
    """Mean seconds over the requests answered by the server, from Triton's statistics of a model."""

    requests: int
    queue_s: float
    """From a request's arrival to the start of its execution."""
    input_s: float
    compute_s: float
    """Execution of the request's batch, including waits for parameters."""
    output_s: float
    stall_s: float | None
    """Waits for parameters per execution, from Cohabit's metrics; None if the server has no such metric."""


class Counters(msgspec.Struct, frozen=True):
    """A server's counters at one moment."""

    models: Mapping[str, Mapping[str, float]]
    stall_s: Mapping[str, float]
    restarts: float = 0.0
    """Restarts of Cohabit's engine, which reset its counters."""
    lanes_s: Mapping[str, float] = {}
    """Seconds computed by each of Cohabit's compute lanes, without waits for parameters."""
    at_s: float = 0.0


async def read_counters(client: Client) -> Counters:
    """Read a server's counters; empty if it keeps no statistics."""
    stall_s: dict[str, float] = {}
    metrics = await client.metrics()
    for found in _STALL.finditer(metrics):
        stall_s[found["model"]] = stall_s.get(found["model"], 0.0) + float(found["value"])
    restarts = sum(float(found["value"]) for found in _RESTARTS.finditer(metrics))
    lanes_s = {found["lane"]: float(found["value"]) for found in _LANES.finditer(metrics)}
    return Counters(_by_model(await client.statistics()), stall_s, restarts, lanes_s, time.perf_counter())


def lane_share_between(before: Counters, after: Counters) -> float | None:
    """Return the fraction of the time that the busiest compute lane computed; None if the server does not report it."""
    seconds = after.at_s - before.at_s
    if after.restarts != before.restarts or seconds <= 0:
        return None
    shares = [(busy_s - before.lanes_s.get(lane, 0.0)) / seconds for lane, busy_s in after.lanes_s.items()]
    return max(shares, default=None)


def times_between(before: Counters, after: Counters) -> dict[str, ServerTimes]:
    """Return each model's mean times between two moments.

    Leaves out models without requests in between, and models loaded again, which resets their counters. Empty if the
    engine was restarted.
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
    """Sum the versions of each model. gRPC's JSON has integers as strings, and omits zeros."""
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
