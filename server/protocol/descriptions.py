"""Descriptions of the server and its models, in the JSON formats of KServe v2 and Triton."""

from collections.abc import Container, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cohabit.server.ipc.catalog import ModelEntry
from cohabit.server.ipc.model import ModelInfo, ModelKey, TensorSpec
from cohabit.server.ipc.statistics import ModelCounters, ModelStatistics, StageTimes

_EXTENSIONS = (
    *("classification", "sequence", "model_repository", "model_repository(unload_dependents)", "schedule_policy"),
    *("model_configuration", "system_shared_memory", "cuda_shared_memory", "binary_tensor_data", "parameters"),
    *("statistics", "trace", "logging", "generate"),
)
"""Supported extensions of Triton, in Triton's order."""


def product_version() -> str:
    try:
        return version("cohabit")
    except PackageNotFoundError:  # run from a checkout
        return "0.0.0"


def server_metadata(without: Container[str]) -> dict[str, Any]:
    """Describe the server; `without` lists the disabled extensions."""
    extensions = [extension for extension in _EXTENSIONS if extension not in without]
    return {"name": "cohabit", "version": product_version(), "extensions": extensions}


def model_metadata(info: ModelInfo, versions: Iterable[int]) -> dict[str, Any]:
    return {
        "name": info.name,
        "versions": [str(version) for version in versions],
        "platform": info.platform,
        "inputs": [_tensor(info, tensor) for tensor in info.inputs],
        "outputs": [_tensor(info, tensor) for tensor in info.outputs],
    }


def repository_index(entries: Iterable[ModelEntry]) -> list[dict[str, str]]:
    return [
        {
            "name": entry.name,
            **({} if entry.version is None else {"version": str(entry.version)}),
            **({"state": entry.state.value} if entry.state.value else {}),
            **({"reason": entry.reason} if entry.reason else {}),
        }
        for entry in entries
    ]


def statistics(entries: Iterable[ModelEntry], reports: Mapping[ModelKey, ModelCounters]) -> dict[str, Any]:
    """Describe the models' counters; a model that the engine has not reported yet counts zero."""
    return {
        "model_stats": [
            _model_statistics(
                e.name, str(e.version), r.statistics if (r := reports.get(e.key)) else ModelStatistics()
            )
            for e in entries
        ]
    }


def _tensor(info: ModelInfo, tensor: TensorSpec) -> dict[str, Any]:
    described = {"name": tensor.name, "datatype": tensor.datatype, "shape": info.wire_shape(tensor)}
    return described if tensor.rows is None else described | {"parameters": index_range(tensor.rows)}


def index_range(rows: int) -> dict[str, int]:
    """Return the `parameters` of an input whose values index a table with `rows` rows."""
    return {"minimum": 0, "maximum": rows - 1}


def _model_statistics(name: str, model_version: str, s: ModelStatistics) -> dict[str, Any]:
    answered, nothing = s.answered.count, _total(0, 0.0)
    return {
        "name": name,
        "version": model_version,
        "last_inference": round(s.last_inference_s * 1e3),
        "inference_count": s.inference_count,
        "execution_count": s.execution_count,
        "inference_stats": {
            "success": _total(answered, s.success_s),
            "fail": _total(s.failed_count, s.failed_s),
            "queue": _total(answered, s.queue_s),
            **_stages(s.answered),
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "response_stats": {},
        "batch_stats": [{"batch_size": n, **_stages(times)} for n, times in sorted(s.batches.copy().items())],
        "memory_usage": [],
    }


def _stages(times: StageTimes) -> dict[str, dict[str, int]]:
    return {
        "compute_input": _total(times.count, times.prepare_s),
        "compute_infer": _total(times.count, times.compute_s),
        "compute_output": _total(times.count, times.output_s),
    }


def _total(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * 1e9)}
