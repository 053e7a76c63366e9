"""Ensembles for tests: their config.pbtxt, and repositories that have them beside models."""

from collections.abc import Mapping
from pathlib import Path

Steps = list[tuple[str, Mapping[str, str], Mapping[str, str]]]
"""A model, the ensemble's tensors by its inputs, and by its outputs."""


def tensor(kind: str, name: str, datatype: str = "FP32", dims: str = "4") -> str:
    return f"{kind} {{ name: '{name}' data_type: TYPE_{datatype} dims: [ {dims} ] }}\n"


def step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], version: int | None = -1) -> str:
    numbered = "" if version is None else f" model_version: {version}"
    maps = "".join(
        f" {kind}_map {{ key: '{own}' value: '{name}' }}"
        for kind, mapped in (("input", inputs), ("output", outputs))
        for own, name in mapped.items()
    )
    return f"step {{ model_name: '{model}'{numbered}{maps} }}\n"


def config_text(tensors: str, *steps: str, head: str = "platform: 'ensemble' max_batch_size: 8\n") -> str:
    return f"{head}{tensors}ensemble_scheduling {{ {''.join(steps)} }}\n"


def put(repository: Path, name: str, text: str) -> None:
    """Write an ensemble's folder, or replace its configuration."""
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    (repository / name / "config.pbtxt").write_text(text)


X, Y = tensor("input", "X"), tensor("output", "Y")
TWICE = config_text(X + Y, step("double", {"x": "X"}, {"y": "once"}), step("double", {"x": "once"}, {"y": "Y"}))
"""One after the other."""
DIAMOND = config_text(
    X + Y + tensor("output", "D"),
    step("adder", {"a": "left", "b": "right"}, {"sum": "Y", "diff": "D"}),
    step("double", {"x": "X"}, {"y": "left"}),
    step("double", {"x": "left"}, {"y": "right"}),
)
"""A tensor for two steps, and a step of two tensors, written before the steps that it reads."""
