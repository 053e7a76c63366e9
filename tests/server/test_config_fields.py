"""What becomes of each field of a ModelConfig."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from cohabit.server.errors import RepositoryError
from cohabit.server.ipc.model import ModelInfo, TensorSpec
from cohabit.server.repository.scan import scan
from cohabit.server.repository.sources import Unloadable
from cohabit.server.triton.config_fields import FIELDS, ConfigField, defaults_of, ignored_fields, refuse_fields
from cohabit.server.triton.model_config import (
    ModelConfig,
    config_as_json,
    config_mismatch,
    config_of,
    parse_config,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating-from-triton.md"


def config(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def paths(message: Any, prefix: str = "") -> Iterator[list[str]]:
    """Yield the way to each field that contains no other, as paths; a map's values have no name of their own."""
    for field in message.fields:
        path = prefix + field.name
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is None or not inner.fields:
            yield [path]
        else:
            for below in paths(inner, f"{path}."):
                yield [path, *below]


def test_every_field_of_the_message_is_in_the_table_once() -> None:
    entries = [[path for path in way if path in FIELDS] for way in paths(ModelConfig.DESCRIPTOR)]
    ways = [way[-1] for way in paths(ModelConfig.DESCRIPTOR)]
    assert [way for way, found in zip(ways, entries, strict=True) if len(found) != 1] == []
    assert {found[0] for found in entries if found} == set(FIELDS), "the table has fields that the message lacks"


def outcome(field: ConfigField) -> str:
    return field.treatment if field.applies is None else f"honoured or {field.treatment}"


def test_the_document_has_the_table() -> None:
    rows = [f"| `{field.path}` | {outcome(field)} | {field.note} |" for field in FIELDS.values()]
    assert "\n".join(rows) in DOCUMENT.read_text(), "\n".join(rows)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("sequence_batching { iterative_sequence: true }", "sequence_batching.iterative_sequence"),
        (
            "platform: 'ensemble' ensemble_scheduling { step { model_name: 'a' model_namespace: 'n' } }",
            "ensemble_scheduling.step.model_namespace 'n'",
        ),
        ("model_transaction_policy { decoupled: true }", "model_transaction_policy.decoupled"),
        ("instance_group { rate_limiter { priority: 2 } }", "instance_group.rate_limiter"),
        ("platform: 'tensorrt_plan'", "platform 'tensorrt_plan'"),
        ("backend: 'python'", "backend 'python'"),
        ("max_batch_size: -1", "max_batch_size -1"),
        ("input { name: 'x' reshape { } }", "input.reshape"),
        ("output { name: 'x' is_shape_tensor: true }", "output.is_shape_tensor"),
        ("batch_input { }", "batch_input"),
        ("model_repository_agents { agents { name: 'checksum' } }", "model_repository_agents"),
    ],
)
def test_what_would_change_answers_is_refused_by_name(tmp_path: Path, text: str, path: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.pt2").touch()
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    (model,) = scan(tmp_path)
    assert isinstance(model, Unloadable)
    assert model.reason.startswith(f"config.pbtxt: {path} is not supported: ")


@pytest.mark.parametrize(
    ("text", "device", "named"),
    [
        ("", "cpu", []),
        ("platform: 'pytorch_libtorch' backend: 'pytorch' max_batch_size: 8", "cpu", []),
        ("response_cache { enable: false } model_transaction_policy { decoupled: false }", "cpu", []),
        ("response_cache { enable: true }", "cpu", ["response_cache.enable"]),
        ("instance_group { kind: KIND_GPU count: 1 }", "cpu", ["instance_group.kind"]),
        ("instance_group { kind: KIND_GPU gpus: [ 0 ] }", "cuda:0", ["instance_group.gpus"]),
        ("instance_group { kind: KIND_CPU }", "cuda", ["instance_group.kind"]),
        ("instance_group { kind: KIND_AUTO } instance_group { count: 2 }", "cpu", ["instance_group.count"]),
        ("version_policy { latest { num_versions: 1 } }", "cpu", []),
        ("optimization { input_pinned_memory { enable: true } }", "cpu", []),
        ("optimization { input_pinned_memory { } priority: PRIORITY_MAX cuda { } }", "cpu", [
            "optimization.input_pinned_memory", "optimization.priority", "optimization.cuda"]),
        ("parameters { key: 'precision' value { } } parameters { key: 'INFERENCE_MODE' value { } }", "cpu",
         ["parameters[INFERENCE_MODE]"]),
        ("model_warmup { name: 'w' } metric_tags { key: 'a' value: 'b' }", "cpu", ["metric_tags"]),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_warned_of_by_name(text: str, device: str, named: list[str]) -> None:
    refuse_fields(config(text))
    ignored = ignored_fields(config(text), device)
    assert sorted(ignored) == sorted(named)
    assert all(ignored.values())


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_configuration_that_is_returned_may_be_sent_back(device: str) -> None:
    tensor = TensorSpec("x", "FP32", (4,))
    answered = config_as_json(config_of(ModelInfo("m", 1, (tensor,), (tensor,), 8), device=device))
    sent = parse_config(json.dumps(answered))
    refuse_fields(sent)
    assert ignored_fields(sent, device) == {}


DEFAULT = "parameters {{ key: 'cohabit.default.{}' value {{ string_value: '{}' }} }}"


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        ("", "input 'y' is optional, but an exported program takes every input; give the number"),
        (DEFAULT.format("y", "none"), "parameter cohabit.default.y: 'none' is not a number"),
        (DEFAULT.format("y", "inf"), "parameter cohabit.default.y: 'inf' is not a number"),
        (DEFAULT.format("y", "1") + DEFAULT.format("x", "1"), "there is no optional input 'x'"),
    ],
)
def test_an_optional_input_needs_a_number(parameter: str, reason: str) -> None:
    with pytest.raises(RepositoryError, match=reason):
        defaults_of(config("input { name: 'x' } input { name: 'y' optional: true }" + parameter))


@pytest.mark.parametrize(
    ("datatype", "shape", "value", "mismatch"),
    [
        ("FP32", (4,), "-1.5", None),
        ("BOOL", (4,), "1", None),
        ("BOOL", (4,), "2", "the default of input 'y', 2, is not a valid BOOL"),
        ("INT8", (4,), "0.5", "the default of input 'y', 0.5, is not a valid INT8"),
        ("UINT8", (4,), "-1", "the default of input 'y', -1, is not a valid UINT8"),
        ("FP32", (4, -1), "0", "input 'y' cannot be optional, because its shape [4, -1] is not fixed"),
    ],
)
def test_a_default_fits_its_input(datatype: str, shape: tuple[int, ...], value: str, mismatch: str | None) -> None:
    given = f"input {{ name: 'y' data_type: TYPE_{datatype} dims: {list(shape)} optional: true }}"
    info = ModelInfo("m", 1, (TensorSpec("y", datatype, shape),), (), 8)
    assert config_mismatch(config(f"max_batch_size: 8 {given} {DEFAULT.format('y', value)}"), info) == mismatch


def test_a_field_is_refused_wherever_it_stands() -> None:
    with pytest.raises(RepositoryError, match=r"input\.allow_ragged_batch is not supported"):
        refuse_fields(config("input { name: 'a' } input { name: 'b' allow_ragged_batch: true }"))
