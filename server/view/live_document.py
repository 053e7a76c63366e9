"""A running server as the document that the page draws: the engine's report, and its changes within seconds."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from cohabit.page.document import (
    ArenaPart,
    Figure,
    LaneChart,
    LiveDocument,
    ModelRow,
    Phrase,
    State,
    StepPart,
    quantity,
    seconds,
    size,
)
from cohabit.planner.errors import format_bytes
from cohabit.server.activations import workspace_words
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.machine import resident_bytes
from cohabit.server.frontend.engine_client import EngineClient
from cohabit.server.frontend.ensembles import Ensembles, StepActivity
from cohabit.server.ipc.catalog import ModelEntry, ModelState
from cohabit.server.ipc.model import ArenaExtent, ModelFootprint, ModelKey
from cohabit.server.ipc.statistics import EngineReport, ModelCounters
from cohabit.server.observe.tracing import Tracer
from cohabit.server.protocol.descriptions import product_version

WINDOW_S = 10.0
"""Seconds that rates and latencies cover."""
_STATES: dict[ModelState, State] = {
    ModelState.ABSENT: "not loaded",
    ModelState.LOADING: "loading",
    ModelState.READY: "ready",
    ModelState.UNLOADING: "unloading",
    ModelState.UNAVAILABLE: "unavailable",
}


@dataclass(frozen=True, slots=True)
class ModelTotals:
    """Counters of one model since it was loaded."""

    answered: float = 0.0
    failed: float = 0.0
    refused: float = 0.0
    executions: float = 0.0
    copied_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Token:
    at_s: float
    waited_s: float
    """Seconds since the text was requested, or since the previous token."""
    first: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment."""

    at_s: float
    models: Mapping[ModelKey, ModelTotals]
    busy_s: Mapping[str, float]

    @classmethod
    def of(cls, at_s: float, report: EngineReport) -> "Reading":
        return cls(at_s, {key: _totals(model) for key, model in report.models.items()}, report.device.lane_busy_s)


def _totals(model: ModelCounters) -> ModelTotals:
    counted = model.statistics
    return ModelTotals(
        counted.answered.count,
        sum(counted.failures.values()),
        sum(counted.rejections.values()),
        counted.execution_count,
        counted.swapped_bytes,
    )


def latencies_of(latest: deque[tuple[float, float]], now_s: float) -> list[float]:
    """Return the latencies of the window in order, and drop older ones."""
    while latest and latest[0][0] < now_s - WINDOW_S:
        latest.popleft()
    return sorted(latency_s for _, latency_s in latest)


def live_document(
    config: ServeConfig,
    ensembles: Ensembles,
    tracer: Tracer,
    report: EngineReport,
    readings: Sequence[Reading],
    latencies: Mapping[ModelKey, Sequence[float]],
    tokens: Collection[Token],
    chart: LaneChart | None,
    uptime_s: float,
) -> LiveDocument:
    """Describe a server now. `readings` and `tokens` are of the window, the newest last; `latencies` ascend."""
    first, last = readings[0], readings[-1]
    span_s, client = last.at_s - first.at_s, ensembles.client
    entries = sorted(client.catalog, key=lambda entry: (entry.name, entry.version or 0))
    down = client.unavailable
    ascending = sorted(chain(*latencies.values()))
    rows = []
    for entry in entries:
        key = None if entry.version is None else entry.key
        grown = ModelTotals() if key is None else _growth(first, last, key)
        stages = [] if key is None else stages_of(key, ensembles, report)
        rows.append(_row(entry, report, grown, span_s, latencies.get(key, ()) if key else (), stages))
    return LiveDocument(
        version=product_version(),
        trouble=down or client.catalog.not_ready(),
        down=down is not None,
        restarts=client.restarts,
        layout=config.layout,
        uptime=seconds(uptime_s),
        window_s=WINDOW_S,
        figures=[
            *_figures(rows, first, last, ascending, _waiting(rows, client), _memory(config, report)),
            *_figures_of_texts(tokens, min(span_s, WINDOW_S)),
        ],
        arena=list(_arena(report.device.extents, entries)),
        models=rows,
        control=config.model_control == "explicit",
        tracing=_tracing(tracer),
        chart=chart,
    )


def _growth(first: Reading, last: Reading, key: ModelKey) -> ModelTotals:
    """Return the increase of counters between two readings; a counter that fell was reset."""
    now, before = last.models.get(key, ModelTotals()), first.models.get(key, ModelTotals())
    if now.answered < before.answered or now.executions < before.executions:
        before = ModelTotals()
    return ModelTotals(
        now.answered - before.answered,
        max(0.0, now.failed - before.failed),
        max(0.0, now.refused - before.refused),
        now.executions - before.executions,
        max(0.0, now.copied_bytes - before.copied_bytes),
    )


def stages_of(key: ModelKey, ensembles: Ensembles, report: EngineReport) -> list[list[StepPart]]:
    """Describe an ensemble's steps. Of a model's queue, its own requests count as the first to wait."""
    waiting: Counter[str] = Counter()
    for model, counters in report.models.items():
        waiting[model.name] += counters.pending

    def part(step: StepActivity) -> StepPart:
        queued = min(step.under_way, waiting[step.model])
        return StepPart(step.model, step.under_way - queued, queued, seconds(step.took_s))

    return [[part(step) for step in stage] for stage in ensembles.stages(key)]


def _row(
    entry: ModelEntry,
    report: EngineReport,
    grown: ModelTotals,
    span_s: float,
    latencies: Sequence[float],
    stages: list[list[StepPart]],
) -> ModelRow:
    counters = report.models.get(entry.key) if entry.is_ready else None
    footprint = entry.footprint
    predicted = footprint.predicted_s
    is_missed = entry.wanted or entry.state is not ModelState.UNAVAILABLE  # and was not unloaded on request
    state = _STATES[entry.state] if is_missed else "not loaded"

    def rate(count: float) -> float | None:
        return count / span_s if counters is not None and span_s > 0 else None

    each = grown.copied_bytes / grown.executions if grown.executions else None
    return ModelRow(
        name=entry.name,
        version=entry.version,
        state=state,
        reason="" if state in ("ready", "not loaded") else entry.reason,
        answered=quantity(rate(grown.answered), "1/s"),
        waiting=quantity(None if counters is None else counters.pending, "count"),
        refused=quantity(rate(grown.refused), "1/s"),
        failed=quantity(rate(grown.failed), "1/s"),
        p50=seconds(_percentile(latencies, 0.50)),
        p99=seconds(_percentile(latencies, 0.99)),
        predicted=seconds(predicted[min(predicted)] if predicted else None),
        measured=quantity(_measured(counters) if predicted else None, "times"),
        resident=size(footprint.resident_bytes if entry.is_ready else None),
        parameters=size(footprint.parameter_bytes if entry.is_ready else None),
        copied=quantity(rate(grown.copied_bytes), "bytes/s"),
        copied_each=size(each),
        stages=stages,
    )


def _measured(counters: ModelCounters | None) -> float | None:
    """Return measured over predicted time; None while nothing was executed."""
    return None if counters is None or not counters.statistics.execution_count else counters.correction


def _percentile(ascending: Sequence[float], share: float) -> float | None:
    """Return the smallest value that is not exceeded by at least this share of all; None without values."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)] if ascending else None


def _waiting(rows: Sequence[ModelRow], client: EngineClient) -> float:
    """Return the number of requests that do not run yet; while the engine is down, those kept by the front end."""
    return client.waiting if client.unavailable else sum(row.waiting.value or 0.0 for row in rows)


def _memory(config: ServeConfig, report: EngineReport) -> float:
    """Return the memory of this process and of the engine's."""
    return resident_bytes() + (report.device.process_bytes if config.engine == "process" else 0)


def _figures(
    rows: Sequence[ModelRow],
    first: Reading,
    last: Reading,
    latencies: Sequence[float],
    waiting: float,
    memory_bytes: float,
) -> Iterator[Figure]:
    # Models and their traffic.
    served = sum(row.state == "ready" for row in rows)
    yield Figure(
        "models served",
        quantity(served, "count"),
        (f"of {len(rows)} in the repository",),
        "Models that answer requests now.",
    )
    span_s = last.at_s - first.at_s
    rows = [row for row in rows if not row.stages]  # requests of ensembles are those of their steps
    within = (f"mean of {WINDOW_S:g} s",)
    yield Figure(
        "answers",
        quantity(sum(row.answered.value or 0.0 for row in rows), "1/s"),
        within,
        "Requests that were answered with a result.",
        is_followed=True,
    )
    yield Figure(
        "latency p99",
        seconds(_percentile(latencies, 0.99)),
        (f"of all models in {WINDOW_S:g} s",),
        "From a request's arrival to its answer, which 99 % of them do not exceed.",
        is_followed=True,
    )
    yield Figure(
        "waiting",
        quantity(waiting, "count"),
        ("requests queued now",),
        "Requests that have arrived and do not run yet.",
    )
    yield Figure(
        "refused or failed",
        quantity(sum((row.refused.value or 0.0) + (row.failed.value or 0.0) for row in rows), "1/s"),
        within,
        "Refused: full queue, missed deadline, rate limit, or a request that does not fit. Failed: an error.",
    )
    # Swapping, memory, and one figure per lane.
    yield Figure(
        "copied",
        quantity(sum(row.copied.value or 0.0 for row in rows), "bytes/s"),
        ("parameters swapped in",),
        "Parameters that had no place in device memory and were copied in for an execution.",
    )
    yield Figure(
        "memory",
        size(memory_bytes),
        ("RAM of the processes",),
        "Anonymous memory of the front end and the engine, and their pages of libraries and other files.",
        is_followed=True,
    )
    for lane, busy_s in sorted(last.busy_s.items()):
        busy = max(0.0, busy_s - first.busy_s.get(lane, 0.0)) / span_s if span_s > 0 else None
        yield Figure(
            f"{lane.replace('_', ' ')} busy",
            quantity(None if busy is None else min(busy, 1.0), "share"),
            within,
            "Share of the time in which the lane has something to do: a compute lane that is always busy is saturated.",
        )


def _figures_of_texts(tokens: Collection[Token], span_s: float) -> Iterator[Figure]:
    """Yield the figures of texts, if any were generated."""
    if not tokens or span_s <= 0:
        return
    yield Figure(
        "tokens",
        quantity(len(tokens) / span_s, "1/s"),
        (f"of all texts, mean of {WINDOW_S:g} s",),
        "Tokens that were generated for all texts together.",
        is_followed=True,
    )
    first, later = (sorted(t.waited_s for t in tokens if t.first is which) for which in (True, False))
    yield Figure(
        "first token p99",
        seconds(_percentile(first, 0.99)),
        ("then one in ", seconds(_percentile(later, 0.50))),
        "From a text's request to its first token, which 99 % of them do not exceed; then the median between tokens.",
        is_followed=True,
    )


def _arena(extents: Sequence[ArenaExtent], entries: Sequence[ModelEntry]) -> Iterator[ArenaPart]:
    """Yield the parts of the device's memory, by offset."""
    footprints = {entry.key: entry.footprint for entry in entries if entry.version is not None}
    activations = workspace_words(one for key, own in footprints.items() for one in own.activations(key.name))
    versions = Counter(extent.model.name for extent in extents if extent.model is not None)
    for extent in sorted((e for e in extents if e.nbytes), key=lambda extent: extent.offset):
        if extent.use == "partition" and extent.model is not None:
            name, version = extent.model
            own = footprints.get(extent.model, ModelFootprint())
            resident_bytes = min(own.resident_bytes, extent.nbytes)
            words: Phrase = (
                "partition ",
                size(extent.nbytes),
                ": ",
                size(resident_bytes),
                " resident parameters, ",
            )
            words = (*words, size(own.parameter_bytes - own.resident_bytes), " streamed")
            label = name if versions[name] == 1 else f"{name} version {version}"
            label += f" and {extent.others} more" if extent.others else ""
            yield ArenaPart("partition", label, extent.offset, extent.nbytes, resident_bytes, words)
        else:
            yield ArenaPart(
                extent.use, _NAMES[extent.use], extent.offset, extent.nbytes, 0, _words(extent, activations)
            )


_NAMES = {"workspace": "workspace", "shared": "shared by all models", "partition": "partition", "free": "free"}


def _words(extent: ArenaExtent, activations: str) -> tuple[str, ...]:
    nbytes = format_bytes(extent.nbytes)
    match extent.use:
        case "workspace":
            of_it = f": {activations}" if activations else ""
            return (f"{nbytes} for one inference at a time, and parameters in flight{of_it}",)
        case "free":
            return (f"{nbytes} for models that are loaded later",)
        case "shared":
            return (f"{nbytes} that all models share; what the others need is evicted",)
        case _:
            return (f"{nbytes} of a model that is being loaded or unloaded",)


def _tracing(tracer: Tracer) -> str:
    if not tracer.samples:
        return "Lanes are drawn while requests are traced. Start the server with --trace-config file=FILE."
    rate = tracer.settings.rate
    if rate == 1:
        return "Every request is traced (--trace-config rate=1)."
    return f"One of {rate} requests of each model is traced (--trace-config rate={rate}); the others are not drawn."
