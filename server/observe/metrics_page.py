"""The text of `/metrics`: the models, the device, the machine, and the engine's restarts."""

from collections.abc import Sequence

from server.ipc.catalog import ModelEntry
from server.ipc.statistics import EngineReport, ModelCounters, ModelStatistics
from server.observe.machine import Machine
from server.observe.model_metrics import ReadyModel, families_of
from server.observe.prometheus import single, written


def metrics_page(
    entries: Sequence[ModelEntry], report: EngineReport, machine: Machine | None, restarts: int, request_bytes: int
) -> bytes:
    """Write all metrics in Prometheus' text format. Any thread."""
    ready = [entry for entry in entries if entry.is_ready]
    views = [ReadyModel(e, report.models.get(e.key) or ModelCounters(ModelStatistics())) for e in ready]
    wanted = [entry for entry in entries if entry.wanted]
    text = "Times that the engine's process was started again"
    engine = single("cohabit_engine_restarts", "counter", text, restarts)
    text = "Shared memory that requests take which are not answered yet"
    requests = single("cohabit_request_memory_bytes", "gauge", text, request_bytes)
    rest = () if machine is None else machine.families(report.device)
    return written((*families_of(views, wanted), engine, requests, *rest))
