"""Triton's ModelConfig: read from config.pbtxt, made from a model, written as JSON, compared with a model."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from msgspec.structs import replace

from cohabit.planner.shapes import Bucket
from cohabit.server.errors import RepositoryError
from cohabit.server.ipc.model import GraphCapture, ModelInfo, TensorSpec
from cohabit.server.protocol.datatypes import config_type
from cohabit.server.protocol.tensors import filled
from cohabit.server.triton.config_fields import LENGTHS, defaults_of
from cohabit.server.triton.config_messages import DataType as DataType
from cohabit.server.triton.config_messages import ModelConfig as ModelConfig
from cohabit.server.triton.config_messages import ModelInput, ModelInstanceGroup, ModelOutput
from cohabit.server.triton.config_messages import ModelWarmup as ModelWarmup

_LARGEST_FILE_BYTES = 1 << 20
_IDLE_US, _DELAY_US = 600_000_000, 10_000
"""Of generated entries with growing states: how long a sequence may be idle, and how long one that goes on waits for
others of the execution before, so that they are computed together again."""
_INDEXED = re.compile(r".*__(\d{1,4})", re.ASCII | re.DOTALL)
"""Triton's names for the tensors of PyTorch models, with their position."""


def read_config(path: Path) -> ModelConfig:
    """Parse a config.pbtxt. Raises RepositoryError with the line that is wrong."""
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise RepositoryError(f"{path.name} is over {_LARGEST_FILE_BYTES} bytes")
        return text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    except (OSError, UnicodeDecodeError) as error:
        raise RepositoryError(f"{path.name} cannot be read: {error}") from error
    except (text_format.ParseError, RecursionError) as error:
        raise RepositoryError(f"{path.name} is not a ModelConfig: {error}") from error


def parse_config(text: str) -> ModelConfig:
    """Read a ModelConfig from the JSON that a client sends. Raises RepositoryError."""
    try:
        return json_format.Parse(text, ModelConfig())
    except (json_format.ParseError, RecursionError, ValueError) as error:
        raise RepositoryError(f"the configuration is not a ModelConfig in JSON: {error}") from error


def config_of(
    info: ModelInfo,
    given: ModelConfig | None = None,
    captures: Mapping[Bucket, GraphCapture] | None = None,
    device: str = "cpu",
) -> ModelConfig:
    """Complete a config.pbtxt, all fields of which are optional, from the model and the device, as Triton does.

    The batch sizes of a model whose rows influence one another are a parameter, and so is how it is issued, where
    the device has graphs: Triton's clients expect any there.
    """
    config = ModelConfig()
    if given is not None:
        config.CopyFrom(given)
    config.name = info.name
    config.platform = config.platform or info.platform
    config.backend = config.backend or "pytorch"
    config.max_batch_size = info.max_batch_size
    for memory in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(memory):
            getattr(config.optimization, memory).enable = True
    if not config.instance_group:
        kind = ModelInstanceGroup.KIND_GPU if device.startswith("cuda") else ModelInstanceGroup.KIND_CPU
        config.instance_group.add(name=f"{info.name}_0", kind=kind, count=1)
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if not config.input:
        config.input.extend(ModelInput(**_fields(tensor)) for tensor in info.inputs)
    if not config.output:
        config.output.extend(ModelOutput(**_fields(tensor)) for tensor in info.outputs)
    if info.only_batches:
        parameter = config.parameters["cohabit.only_batch_sizes"]
        parameter.string_value = ",".join(map(str, info.only_batches))
    for bucket, capture in sorted((captures or {}).items()):
        parameter = config.parameters[f"cohabit.execution.batch_{bucket}"]
        parameter.string_value = execution_of(capture)
    return config


def config_text(
    info: ModelInfo,
    label_files: Mapping[str, str],
    images: Container[str],
    parameters: Mapping[str, str],
    states: Sequence[tuple[str, str]] = (),
) -> str:
    """Write a config.pbtxt for a model: its tensors, with the label files of outputs, and inputs that are images.

    `states` are the inputs, each with its output, that the server keeps for sequences; they grow.
    """
    config = ModelConfig(name=info.name, backend="pytorch", max_batch_size=info.max_batch_size)
    tensors = {tensor.name: tensor for tensor in (*info.inputs, *info.outputs)}
    kept = {name for pair in states for name in pair} | {parameters.get(LENGTHS, "")}
    for name, successor in states:
        given = {key: value for key, value in _fields(tensors[name]).items() if key != "name"}
        config.sequence_batching.state.add(input_name=name, output_name=successor, **given)
    if states:
        config.sequence_batching.max_sequence_idle_microseconds = _IDLE_US
        config.sequence_batching.oldest.max_queue_delay_microseconds = _DELAY_US
    for tensor in (tensor for tensor in info.inputs if tensor.name not in kept):
        layout = ModelInput.FORMAT_NCHW if tensor.name in images else ModelInput.FORMAT_NONE
        config.input.append(ModelInput(**_fields(tensor), format=layout))
    for tensor in (tensor for tensor in info.outputs if tensor.name not in kept):
        config.output.append(ModelOutput(**_fields(tensor), label_filename=label_files.get(tensor.name, "")))
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return str(text_format.MessageToString(config))


def execution_of(capture: GraphCapture) -> str:
    """Describe whether executions are launched as one graph, and if not, why."""
    if capture.refused is not None:
        return f"issued to the streams one by one: {capture.refused}"
    return f"one graph; {capture.graphs} of them take {capture.graph_bytes} bytes"


def config_as_json(config: ModelConfig) -> dict[str, Any]:
    """Write every field, defaults too, under its proto name, as Triton does."""
    written: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _write_numbers(written, config.DESCRIPTOR)
    return written


def config_names(given: Sequence[str], own: Sequence[str]) -> dict[str, str]:
    """Return the names that a config.pbtxt gives to a program's inputs, or outputs, by their own names.

    Tensors are told by name, if only the case differs, else by Triton's `NAME__INDEX`, else by order. Empty where
    that is not clear: if there are more or fewer of them, or a name is that of another tensor of the program.
    """
    if len(given) != len(own) or not all(given):
        return {}
    folded = {name.lower(): name for name in own}
    if len(folded) == len(own) and folded.keys() == {name.lower() for name in given}:
        return {folded[name.lower()]: name for name in given}
    indexed = {int(match[1]): name for name in given if (match := _INDEXED.fullmatch(name))}
    if indexed.keys() == set(range(len(own))):
        given = [indexed[index] for index in range(len(own))]
    names = dict(zip(own, given, strict=True))
    unclear = len(set(given)) != len(given) or any(new in names and new != old for old, new in names.items())
    return {} if unclear else names


def _write_numbers(written: dict[str, Any], kind: Descriptor) -> None:
    """Replace 64-bit integers, which protobuf writes as strings, by numbers, as Triton does."""
    for field in kind.fields:
        value = written.get(field.name)
        inner, many = field.message_type, isinstance(value, list)
        if value is None:
            continue
        if inner is None:
            if field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64):
                written[field.name] = [int(item) for item in value] if many else int(value)
            continue
        is_map = inner.GetOptions().map_entry
        inner = inner.fields_by_name["value"].message_type if is_map else inner
        if inner is not None:
            for message in value.values() if is_map else value if many else [value]:
                _write_numbers(message, inner)


def config_mismatch(config: ModelConfig, info: ModelInfo) -> str | None:
    """Return how a config.pbtxt contradicts the model, or None. Omitted fields agree."""
    if config.name and config.name != info.name:
        return f"config.pbtxt names the model '{config.name}', its folder '{info.name}'"
    if config.max_batch_size > info.max_batch_size:
        return (
            f"config.pbtxt has max_batch_size {config.max_batch_size}, the program takes at most"
            f" {info.max_batch_size}"
        )
    if (reason := _default_mismatch(config, info)) is not None:
        return reason
    batch_in_dims = config.max_batch_size == 0 and info.max_batch_size > 0
    return _tensors_mismatch("input", config.input, info.inputs, batch_in_dims) or _tensors_mismatch(
        "output", config.output, info.outputs, batch_in_dims
    )


def with_defaults(info: ModelInfo, config: ModelConfig | None) -> ModelInfo:
    """Return the description with what fills the optional inputs of a configuration, which agrees with it."""
    if config is None or not (defaults := defaults_of(config)):
        return info
    return replace(info, inputs=tuple(replace(tensor, default=defaults.get(tensor.name)) for tensor in info.inputs))


def _default_mismatch(config: ModelConfig, info: ModelInfo) -> str | None:
    for tensor in with_defaults(info, config).inputs:
        if tensor.default is None:
            continue
        if any(size < 0 for size in tensor.shape):
            return f"input '{tensor.name}' cannot be optional, because its shape {list(tensor.shape)} is not fixed"
        try:
            filled(tensor.default, tensor.datatype, ())
        except (ValueError, OverflowError):
            return f"the default of input '{tensor.name}', {tensor.default:g}, is no {tensor.datatype}"
    return None


def _tensors_mismatch(
    kind: str, given: Sequence[Any], actual: Iterable[TensorSpec], batch_in_dims: bool
) -> str | None:
    tensors = {tensor.name: tensor for tensor in actual}
    if given and len(given) != len(tensors):
        return (
            f"config.pbtxt has {len(given)} {kind}s ({', '.join(entry.name for entry in given)}), the program has"
            f" {len(tensors)} ({', '.join(tensors)})"
        )
    for entry in given:
        tensor = tensors.get(entry.name)
        if tensor is None:
            return f"config.pbtxt has {kind} '{entry.name}', the program has {', '.join(tensors)}"
        datatype = DataType.Name(entry.data_type)
        if datatype != config_type(tensor.datatype):
            return f"config.pbtxt says {datatype} for {kind} '{entry.name}', the program {config_type(tensor.datatype)}"
        shape = (-1, *tensor.shape) if batch_in_dims else tensor.shape
        if not _dims_agree(entry.dims, shape):
            return f"config.pbtxt says dims {list(entry.dims)} for {kind} '{entry.name}', the program {list(shape)}"
    twice = len({entry.name for entry in given}) != len(given)
    return f"config.pbtxt has an {kind} twice: {', '.join(entry.name for entry in given)}" if twice else None


def _dims_agree(given: Sequence[int], actual: Sequence[int]) -> bool:
    return len(given) == len(actual) and all(g in (-1, a) or a == -1 for g, a in zip(given, actual, strict=True))


def _fields(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": DataType.Value(config_type(tensor.datatype)), "dims": tensor.shape}
