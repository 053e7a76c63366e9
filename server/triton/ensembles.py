"""Entries without a program: ensembles, as Triton's `ensemble_scheduling` describes them, and tokenizers.

A request of an ensemble runs several models; one of a tokenizer turns texts into token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, NoReturn

from cohabit.server.errors import RepositoryError, did_you_mean
from cohabit.server.ipc.model import ENSEMBLE, TOKENIZER_BACKEND, ModelInfo, TensorSpec
from cohabit.server.protocol.datatypes import BYTES, DTYPES
from cohabit.server.protocol.embedding import TOKEN_TENSORS
from cohabit.server.triton.config_fields import truncates
from cohabit.server.triton.config_messages import DataType, ModelConfig

_ALLOWED = {
    *("name", "platform", "backend", "max_batch_size", "version_policy", "input", "output", "ensemble_scheduling"),
    *("optimization", "parameters", "response_cache", "metric_tags", "model_transaction_policy", "model_metrics"),
}
"""Fields of such a configuration. All others are about a program."""
_CONFIG_TYPES = {f"TYPE_{datatype}": datatype for datatype in DTYPES} | {"TYPE_STRING": BYTES}


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """A model of an ensemble, and the ensemble's tensors that it reads and writes."""

    number: int
    """Position in config.pbtxt, from 1."""
    model: str
    version: str | None
    """None for the highest READY version."""
    inputs: Mapping[str, str]
    """Tensors of the ensemble by the model's inputs."""
    outputs: Mapping[str, str]
    """Tensors of the ensemble by the model's outputs."""

    def __str__(self) -> str:
        return f"step {self.number} ('{self.model}')"


@dataclass(frozen=True, slots=True)
class EnsembleTensor:
    """An ensemble's tensor, where it is written."""

    writer: str
    datatype: str
    shape: tuple[int, ...]
    """With the batch dimension, if any."""


def is_tokenizer(config: ModelConfig) -> bool:
    return config.backend == TOKENIZER_BACKEND and not config.HasField("ensemble_scheduling")


def has_no_program(config: ModelConfig | None) -> bool:
    """Whether it is the configuration of an ensemble or of a tokenizer."""
    return config is not None and (
        config.HasField("ensemble_scheduling") or config.platform == ENSEMBLE or is_tokenizer(config)
    )


def steps_of(name: str, config: ModelConfig) -> tuple[EnsembleStep, ...]:
    """Return the steps of an ensemble, each after those whose outputs it reads; none for a tokenizer.

    Raises RepositoryError, naming the step and the tensor, for a configuration that no models could make valid.
    """
    if is_tokenizer(config):
        _check_tokenizer(config)
        return ()
    _check_fields(config)
    inputs, outputs = (_names(kind, getattr(config, kind)) for kind in ("input", "output"))
    steps = [_step(name, number, step) for number, step in enumerate(config.ensemble_scheduling.step, 1)]
    if not steps:
        _refuse("there is no step; name the models that it runs")
    writers: dict[str, EnsembleStep] = {}
    for step in steps:
        for output, tensor in step.outputs.items():
            if tensor in inputs:
                _refuse(f"{step}: output '{output}' writes tensor '{tensor}', which is an input of the ensemble")
            if tensor in writers:
                _refuse(f"{step}: output '{output}' writes tensor '{tensor}', which {writers[tensor]} writes")
            writers[tensor] = step
    for step in steps:
        for own, tensor in step.inputs.items():
            if tensor not in writers and tensor not in inputs:
                hint = did_you_mean(tensor, [*inputs, *writers])
                _refuse(
                    f"{step}: input '{own}' reads tensor '{tensor}', which is neither an input of the ensemble nor"
                    f" an output of a step{hint}"
                )
    read = {tensor for step in steps for tensor in step.inputs.values()}
    for tensor in inputs:
        if tensor not in read:
            _refuse(f"no step reads input '{tensor}'")
    for tensor in outputs:
        if tensor not in writers:
            _refuse(f"no step writes output '{tensor}'{did_you_mean(tensor, writers)}")
    return _ordered(steps, writers)


def description_of(
    name: str, version: int, config: ModelConfig, labels: Mapping[str, tuple[str, ...]]
) -> ModelInfo:
    """Describe an entry without a program to clients, as its configuration does.

    Raises RepositoryError for its tensors.
    """
    inputs = tuple(_spec("input", tensor) for tensor in config.input)
    outputs = tuple(_spec("output", tensor, labels.get(tensor.name, ())) for tensor in config.output)
    platform = TOKENIZER_BACKEND if is_tokenizer(config) else ENSEMBLE
    return ModelInfo(name, version, inputs, outputs, config.max_batch_size, platform)


def mismatch(info: ModelInfo, steps: Sequence[EnsembleStep], infos: Sequence[ModelInfo]) -> str | None:
    """Return how an ensemble contradicts the models of its steps, or None. Both have the same order."""
    if info.platform == TOKENIZER_BACKEND:
        return None
    written = {
        tensor.name: EnsembleTensor(
            f"input '{tensor.name}' of the ensemble", tensor.datatype, info.wire_shape(tensor)
        )
        for tensor in info.inputs
    }
    for step, model in zip(steps, infos, strict=True):
        if (reason := _step_mismatch(info, step, model, written)) is not None:
            return f"{step}: {reason}"
        for tensor in model.outputs:
            if tensor.name in step.outputs:
                writer = f"output '{tensor.name}' of {step}"
                shape = model.wire_shape(tensor)
                written[step.outputs[tensor.name]] = EnsembleTensor(writer, tensor.datatype, shape)
    for tensor in info.outputs:
        if (reason := _difference(written[tensor.name], tensor.datatype, info.wire_shape(tensor))) is not None:
            return f"output '{tensor.name}' of the ensemble {reason}"
    return None


def _refuse(reason: str) -> NoReturn:
    raise RepositoryError(f"config.pbtxt: {reason}")


def _check_tokenizer(config: ModelConfig) -> None:
    """Raise RepositoryError unless a tokenizer has texts as inputs, and the tensors of their tokens as outputs."""
    truncates(config)
    for field, _ in config.ListFields():
        if field.name not in _ALLOWED or field.name == "platform":
            _refuse(f"a tokenizer has no {field.name}; leave it out")
    if len(_names("input", config.input)) > 2:
        _refuse(f"a tokenizer takes a text, or two for pairs of texts; it has {len(config.input)} inputs")
    _names("output", config.output)
    batched = config.max_batch_size > 0
    for tensor in config.input:
        if (datatype := DataType.Name(tensor.data_type)) != "TYPE_STRING":
            _refuse(f"input '{tensor.name}' is {datatype}; a tokenizer takes texts, which are TYPE_STRING")
        if len(tensor.dims) != 1 or (batched and tensor.dims[0] != 1):
            form = "[1] for the text of a row" if batched else "[-1] for any number of texts"
            _refuse(f"input '{tensor.name}' has dims {list(tensor.dims)}; they must be {form}")
    for tensor in config.output:
        if tensor.name not in TOKEN_TENSORS:
            _refuse(f"a tokenizer has no output '{tensor.name}'; it has {', '.join(TOKEN_TENSORS)}")
        if (datatype := DataType.Name(tensor.data_type)) not in ("TYPE_INT32", "TYPE_INT64"):
            _refuse(f"output '{tensor.name}' is {datatype}; it can be TYPE_INT64 or TYPE_INT32")
        if len(tensor.dims) != 2 - batched or tensor.dims[-1] != config.output[0].dims[-1]:
            form = "[-1], or [N] for N tokens" if batched else "[-1, -1], or [-1, N] for N tokens"
            _refuse(
                f"output '{tensor.name}' has dims {list(tensor.dims)}; they must be {form}, alike for all outputs"
            )


def _check_fields(config: ModelConfig) -> None:
    if not config.HasField("ensemble_scheduling"):
        _refuse(f"platform is '{ENSEMBLE}', but there are no steps; add ensemble_scheduling")
    if config.platform != ENSEMBLE:
        _refuse(f"platform is '{config.platform}'; an ensemble has no program: say platform: \"{ENSEMBLE}\"")
    for field, _ in config.ListFields():
        if field.name not in _ALLOWED or field.name == "backend":
            _refuse(f"an ensemble has no {field.name}; set it for the models of its steps")


def _names(kind: str, tensors: Sequence[Any]) -> list[str]:
    """Return the names of inputs or outputs, checked."""
    names: list[str] = []
    for tensor in tensors:
        spec = _spec(kind, tensor)
        if spec.name in names:
            _refuse(f"{kind} '{spec.name}' is there twice")
        names.append(spec.name)
    if not names:
        _refuse(f"there is no {kind}; the tensors of an entry without a program must be listed")
    return names


def _spec(kind: str, tensor: Any, labels: tuple[str, ...] = ()) -> TensorSpec:
    if not tensor.name:
        _refuse(f"an {kind} has no name")
    datatype = _CONFIG_TYPES.get(DataType.Name(tensor.data_type))
    if datatype is None:
        _refuse(f"{kind} '{tensor.name}' has no data_type")
    if datatype == BYTES and kind == "output":
        _refuse(f"output '{tensor.name}' is TYPE_STRING; only tokenizers take strings, and nothing writes them")
    if wrong := [size for size in tensor.dims if size < -1 or size == 0]:
        _refuse(f"{kind} '{tensor.name}' has dims {list(tensor.dims)}; {wrong[0]} is neither a size nor -1")
    if kind == "input" and tensor.optional:
        _refuse(f"input '{tensor.name}' is optional; an entry without a program needs all of its inputs")
    return TensorSpec(tensor.name, datatype, tuple(tensor.dims), labels)


def _step(ensemble: str, number: int, given: Any) -> EnsembleStep:
    version = str(given.model_version) if given.model_version > 0 else None  # 0 if it is left out
    step = EnsembleStep(number, given.model_name, version, dict(given.input_map), dict(given.output_map))
    if not step.model:
        _refuse(f"step {number} has no model_name")
    if step.model == ensemble:
        _refuse(f"{step} is the ensemble itself")
    if given.model_version < -1:
        _refuse(f"{step}: model_version is {given.model_version}; say a version, or -1 for the latest")
    for kind, tensors in (("input", step.inputs), ("output", step.outputs)):
        if not tensors:
            _refuse(f"{step}: {kind}_map is empty")
        for own, tensor in tensors.items():
            if not own or not tensor:
                _refuse(f"{step}: {kind}_map has no {'value' if own else 'key'} for '{own or tensor}'")
    return step


def _ordered(steps: Sequence[EnsembleStep], writers: Mapping[str, EnsembleStep]) -> tuple[EnsembleStep, ...]:
    """Sort steps by what they read. Raises RepositoryError for a cycle, naming a tensor of it."""
    reads = {
        step.number: {writers[tensor].number for tensor in step.inputs.values() if tensor in writers}
        for step in steps
    }
    try:
        return tuple(steps[number - 1] for number in TopologicalSorter(reads).static_order())
    except CycleError as error:
        first, second = (steps[number - 1] for number in error.args[1][:2])
        tensor = next(tensor for tensor in second.inputs.values() if writers.get(tensor) is first)
        _refuse(f"{second} reads tensor '{tensor}' of {first}, which needs an output of {second}: a cycle")


def _step_mismatch(
    info: ModelInfo, step: EnsembleStep, model: ModelInfo, written: Mapping[str, EnsembleTensor]
) -> str | None:
    if model.sequences:
        return "the model keeps state between requests (sequence_batching), which a step of an ensemble cannot"
    if 0 < model.max_batch_size < info.max_batch_size:
        return f"the model takes batches of up to {model.max_batch_size}, the ensemble {info.max_batch_size}"
    for kind, mapped, tensors in (("input", step.inputs, model.inputs), ("output", step.outputs, model.outputs)):
        names = [tensor.name for tensor in tensors]
        for own, tensor in mapped.items():
            if own not in names:
                return f"the model has no {kind} '{own}' for tensor '{tensor}'; it has {', '.join(names)}"
    for spec in model.inputs:
        if spec.name not in step.inputs:
            if spec.default is None:
                return f"input '{spec.name}' of the model is not in input_map"
            continue
        name = step.inputs[spec.name]
        source = written[name]
        reason = _difference(source, spec.datatype, model.wire_shape(spec))
        rows = source.shape[0] if source.shape else -1
        if reason is None and rows > model.max_batch_size > 0:
            reason = f"takes batches of up to {model.max_batch_size}, {source.writer} is a batch of {rows}"
        if reason is not None:
            return f"input '{spec.name}' {reason} (tensor '{name}')"
    return None


def _difference(tensor: EnsembleTensor, datatype: str, shape: Sequence[int]) -> str | None:
    """Return how a reader's datatype or shape differs from a tensor's, as the end of a sentence about the reader."""
    if datatype != tensor.datatype:
        return f"is {datatype}, but {tensor.writer} is {tensor.datatype}"
    agree = len(shape) == len(tensor.shape) and all(
        own in (-1, size) or size == -1 for own, size in zip(shape, tensor.shape, strict=True)
    )
    return None if agree else f"has shape {list(shape)}, but {tensor.writer} has {list(tensor.shape)}"
