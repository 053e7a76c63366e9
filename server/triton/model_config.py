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
from cohabit.server.ipc.model import TOKENIZER_BACKEND, GraphCapture, ModelInfo, TensorSpec
from cohabit.server.protocol.datatypes import config_type
from cohabit.server.protocol.tensors import filled
from cohabit.server.triton.config_fields import LENGTHS, defaults_of
from cohabit.server.triton.config_messages import DataType as DataType
from cohabit.server.triton.config_messages import ModelConfig as ModelConfig
from cohabit.server.triton.config_messages import ModelInput, ModelInstanceGroup, ModelOutput
from cohabit.server.triton.config_messages import ModelWarmup as ModelWarmup

_LARGEST_FILE_BYTES = 1 << 20
_IDLE_US, _DELAY_US = 600_000_000, 10_000
"""Defaults of generated entries with growing states: the idle limit of a sequence, and the batch delay. Within the
delay, a continuing sequence waits for the others of the last execution, to be batched with them again."""
_INDEXED = re.compile(r".*__(\d{1,4})", re.ASCII | re.DOTALL)
"""Triton's names for the tensors of PyTorch models, with their position."""


def read_config(path: Path) -> ModelConfig:
    """Parse a config.pbtxt. Raises RepositoryError with the faulty line."""
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise RepositoryError(f"{path.name} is over {_LARGEST_FILE_BYTES} bytes")
        return text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    except (OSError, UnicodeDecodeError) as error:
        raise RepositoryError(f"{path.name} cannot be read: {error}") from error
    except (text_format.ParseError, RecursionError) as error:
        raise RepositoryError(f"{path.name} is not a ModelConfig: {error}") from error


def parse_config(text: str) -> ModelConfig:
    """Read a ModelConfig from a client's JSON. Raises RepositoryError."""
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
    """Complete a config.pbtxt, whose fields are all optional, from the model and the device, as Triton does.

    `parameters` gets `cohabit.only_batch_sizes` if rows interact, and `cohabit.execution.*` on devices with graphs.
    Triton's clients accept any parameters.
    """
    config = ModelConfig()
    if given is not None:
        config.CopyFrom(given)
    config.name = info.name
    if info.platform != TOKENIZER_BACKEND:
        config.platform = config.platform or info.platform
    config.max_batch_size = info.max_batch_size
    if not config.HasField("version_policy"):
        config.version_policy.latest.num_versions = 1
    if not info.has_program:
        return config
    config.backend = config.backend or "pytorch"
    for memory in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(memory):
            getattr(config.optimization, memory).enable = True
    if not config.instance_group:
        kind = ModelInstanceGroup.KIND_GPU if device.startswith("cuda") else ModelInstanceGroup.KIND_CPU
        config.instance_group.add(name=f"{info.name}_0", kind=kind, count=1)
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
    """Write a config.pbtxt for a model: its tensors, the label files of outputs, and which inputs are images.

    `states` are pairs of an input and an output that the server keeps for sequences; they grow.
    """
    config = ModelConfig(name=info.name, backend="pytorch", max_batch_size=info.max_batch_size)
    tensors = {tensor.name: tensor for tensor in (*info.inputs, *info.outputs)}
    state_names = {name for pair in states for name in pair} | {parameters.get(LENGTHS, "")}
    for name, successor in states:
        given = {key: value for key, value in _fields(tensors[name]).items() if key != "name"}
        config.sequence_batching.state.add(input_name=name, output_name=successor, **given)
    if states:
        config.sequence_batching.max_sequence_idle_microseconds = _IDLE_US
        config.sequence_batching.oldest.max_queue_delay_microseconds = _DELAY_US
    for tensor in (tensor for tensor in info.inputs if tensor.name not in state_names):
        layout = ModelInput.FORMAT_NCHW if tensor.name in images else ModelInput.FORMAT_NONE
        config.input.append(ModelInput(**_fields(tensor), format=layout))
    for tensor in (tensor for tensor in info.outputs if tensor.name not in state_names):
        config.output.append(ModelOutput(**_fields(tensor), label_filename=label_files.get(tensor.name, "")))
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return str(text_format.MessageToString(config))


def execution_of(capture: GraphCapture) -> str:
    """Say whether executions are launched as one graph, and if not, why."""
    if capture.refused is not None:
        return f"issued to the streams one by one: {capture.refused}"
    return f"one graph; {capture.graphs} of them take {capture.graph_bytes} bytes"


def config_as_json(config: ModelConfig) -> dict[str, Any]:
    """Write every field, including defaults, under its proto name, as Triton does."""
    written: dict[str, Any] = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    _write_numbers(written, config.DESCRIPTOR)
    return written


def config_names(given: Sequence[str], own: Sequence[str]) -> dict[str, str]:
    """Return the config.pbtxt's names for a program's inputs, or outputs, by the program's own names.

    Matches tensors by name, ignoring case, else by Triton's `NAME__INDEX`, else by order. Empty if ambiguous: if the
    counts differ, or a name belongs to another tensor of the program.
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
    """Return the description with the default values of optional inputs. The configuration must agree with it."""
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
            return f"the default of input '{tensor.name}', {tensor.default:g}, is not a valid {tensor.datatype}"
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
