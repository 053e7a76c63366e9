"""Support for each field of Triton's ModelConfig: honoured, refused, or ignored with a warning on load."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from cohabit.server.errors import RepositoryError
from cohabit.server.ipc.model import ENSEMBLE, POOLINGS, TOKENIZER_BACKEND
from cohabit.server.triton.config_messages import ModelConfig, ModelInput, ModelInstanceGroup

_T = TypeVar("_T")

Treatment = Literal["honoured", "refused", "warned"]

LENGTHS = "cohabit.lengths"
"""Key of `parameters`: the input that gets the number of entries of growing states."""
PARAMETERS: Mapping[str, str] = {
    "precision": "float32, tf32, float16 or bfloat16",
    "weights": "float32, bfloat16 or int8: what weights are stored and copied as",
    "channels_last": "true or false",
    "fused": "true or false, on CUDA",
    "pooling": "mean, cls, lasttoken or max: how /v1/embeddings makes one vector of those of a text's tokens",
    "truncate": "true or false: whether a tokenizer cuts texts that are too long for its readers, or refuses them",
    "max_concurrency": "requests that may be under way; more are answered 429",
    "max_requests_per_second": "rate of requests; more are answered 429",
    "max_burst": "requests at once within that rate",
    LENGTHS: "the input that is told how many entries a sequence's growing states have",
    "cohabit.shape_buckets": "sizes to plan for, of each dynamic dimension other than the batch, or INPUT.AXIS=N,N,...",
}
"""Keys of `parameters`, for settings without a field."""
_OWN_PARAMETERS = "cohabit."
"""Prefix of parameters in the configuration that the server returns."""
_DEFAULT = "cohabit.default."
"""Prefix of parameters that fill omitted inputs."""


Applies = Callable[[Any, str], bool]


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A field, including its subfields. `note` has the supported part, or the reason and a remedy."""

    path: str
    treatment: Treatment
    note: str
    applies: Applies | None = None
    """Whether a value is refused or warned about on a device; others are honoured. None means every value."""

    def concerns(self, treatment: Treatment, value: Any, device: str) -> bool:
        """Whether this treatment applies to a value."""
        return self.treatment == treatment and (self.applies is None or self.applies(value, device))


def _honoured(path: str, note: str) -> ConfigField:
    return ConfigField(path, "honoured", note)


def _refused(path: str, note: str, applies: Applies | None = None) -> ConfigField:
    return ConfigField(path, "refused", note, applies)


def _warned(path: str, note: str, applies: Applies | None = None) -> ConfigField:
    return ConfigField(path, "warned", note, applies)


def _other_device(kind: int, device: str) -> bool:
    wanted = {ModelInstanceGroup.KIND_GPU: "cuda", ModelInstanceGroup.KIND_CPU: "cpu"}.get(kind, "")
    return not device.startswith(wanted)


_SHAPE_TENSOR = "only TensorRT has shape tensors; send the values as an input of their own"
_LINEAR = "only TensorRT has such formats; tensors here are contiguous"
_RESHAPE = "export the program with the shapes that clients send and expect"
_RAGGED = "requests are batched along the first dimension; export a program that takes padded inputs"
_PINNED = "pinned memory is used wherever the device is a GPU"
_SLOTS = "a batch takes the next request of every sequence that has one, so that sequences need no slots"
_QUEUE_POLICY = {
    "timeout_action": "REJECT answers 503 as soon as the request must be late, DELAY moves it to the end of the queue",
    "default_timeout_microseconds": "counted from arrival to the answer, not to the start of the execution",
    "allow_timeout_override": "a request may ask for less",
    "max_queue_size": "more are answered 503",
}

_FIELDS = (
    _honoured("name", "must be the folder's name"),
    _refused(
        "platform",
        "models are PyTorch programs (.pt2): leave it out, or say pytorch_pt2, pytorch_libtorch or ensemble",
        lambda value, device: value not in ("pytorch_pt2", "pytorch_libtorch", ENSEMBLE),
    ),
    _refused(
        "backend",
        "models are PyTorch programs (.pt2): leave it out, or say pytorch; or tokenizer, for a folder with"
        " tokenizer.json",
        lambda value, device: value not in ("pytorch", TOKENIZER_BACKEND),
    ),
    _warned("runtime", "the server executes every model itself"),
    _honoured("version_policy.latest.num_versions", "the highest ones, side by side; one without a policy"),
    _honoured("version_policy.all", "every version, side by side"),
    _honoured("version_policy.specific.versions", "those of them that have a folder, side by side"),
    _refused(
        "max_batch_size",
        "at most what the program takes; 0 leaves the limit to the program, a negative number is refused",
        lambda value, device: value < 0,
    ),
    _honoured("input.name", "compared with the program"),
    _honoured("input.data_type", "compared with the program"),
    _honoured("input.dims", "compared with the program"),
    _warned(
        "input.format",
        "FORMAT_NCHW is returned in the configuration; the program says how its inputs are laid out",
        lambda value, device: value == ModelInput.FORMAT_NHWC,
    ),
    _refused("input.reshape", _RESHAPE),
    _refused("input.is_shape_tensor", _SHAPE_TENSOR),
    _refused("input.allow_ragged_batch", _RAGGED),
    _honoured(
        "input.optional",
        "with the parameter cohabit.default.NAME, the number that fills the input where a request omits it",
    ),
    _refused("input.is_non_linear_format_io", _LINEAR),
    _honoured("output.name", "compared with the program"),
    _honoured("output.data_type", "compared with the program"),
    _honoured("output.dims", "compared with the program"),
    _refused("output.reshape", _RESHAPE),
    _honoured("output.label_filename", "a file of the model's folder, one class per line, at most 1 MiB"),
    _refused("output.is_shape_tensor", _SHAPE_TENSOR),
    _refused("output.is_non_linear_format_io", _LINEAR),
    _refused("batch_input", _RAGGED),
    _refused("batch_output", _RAGGED),
    _warned("optimization.graph", "operators are rewritten and fused in one way"),
    _warned("optimization.priority", "requests have priorities, models have none"),
    _warned("optimization.cuda", "executions on CUDA are captured as graphs wherever that is possible"),
    _warned("optimization.execution_accelerators", "none is used; the parameter precision chooses other kernels"),
    _warned("optimization.input_pinned_memory", _PINNED, lambda value, device: not value.enable),
    _warned("optimization.output_pinned_memory", _PINNED, lambda value, device: not value.enable),
    _warned("optimization.gather_kernel_buffer_threshold", "inputs are gathered in host memory"),
    _warned("optimization.eager_batching", "a batch is made when the device is free"),
    _honoured("dynamic_batching.preferred_batch_size", "planned, and dispatched as soon as they are reached"),
    _honoured("dynamic_batching.max_queue_delay_microseconds", "never at the cost of a deadline"),
    _honoured("dynamic_batching.preserve_ordering", "requests of a level are executed in order"),
    _honoured("dynamic_batching.priority_levels", "at most 1024"),
    _honoured("dynamic_batching.default_priority_level", "of requests without a priority"),
    *(_honoured(f"dynamic_batching.default_queue_policy.{name}", note) for name, note in _QUEUE_POLICY.items()),
    *(
        _honoured(f"dynamic_batching.priority_queue_policy.{name}", "as in default_queue_policy")
        for name in _QUEUE_POLICY
    ),
    _honoured(
        "sequence_batching.max_sequence_idle_microseconds",
        "a second without it; a sequence whose requests wait is not idle",
    ),
    _honoured("sequence_batching.control_input", "inputs that the server fills: START, END, READY and CORRID"),
    _honoured("sequence_batching.state.input_name", "the output `output_name` of the request before"),
    _honoured("sequence_batching.state.output_name", "kept for the sequence's next request, not sent"),
    _honoured("sequence_batching.state.data_type", "compared with the program"),
    _honoured(
        "sequence_batching.state.dims",
        "compared with the program; with the parameter cohabit.lengths, -1 is a size by which the state grows",
    ),
    _honoured("sequence_batching.state.initial_state", "zero_data, or data_file of the folder initial_state"),
    _warned("sequence_batching.state.use_same_buffer_for_input_output", "states are kept between executions only"),
    _refused("sequence_batching.state.use_growable_memory", "export the program with states of a fixed size"),
    _warned("sequence_batching.direct.minimum_slot_utilization", _SLOTS),
    _honoured("sequence_batching.direct.max_queue_delay_microseconds", "never at the cost of a deadline"),
    _warned("sequence_batching.oldest.max_candidate_sequences", _SLOTS),
    _honoured(
        "sequence_batching.oldest.preferred_batch_size", "planned, and dispatched as soon as they are reached"
    ),
    _honoured("sequence_batching.oldest.max_queue_delay_microseconds", "never at the cost of a deadline"),
    _honoured("sequence_batching.oldest.preserve_ordering", "requests are executed in the order of their arrival"),
    _refused("sequence_batching.iterative_sequence", "a request is executed once"),
    _honoured("ensemble_scheduling.step.model_name", "a model of the repository, or another ensemble"),
    _honoured("ensemble_scheduling.step.model_version", "-1 or nothing is the highest that is ready"),
    _honoured("ensemble_scheduling.step.input_map", "all inputs of the model, except for optional ones"),
    _honoured("ensemble_scheduling.step.output_map", "outputs that no step reads are not written"),
    _refused("ensemble_scheduling.step.model_namespace", "there is one repository, and it has one namespace"),
    _warned("ensemble_scheduling.max_inflight_requests", "a step is executed once per request"),
    _honoured("instance_group.name", "returned in the configuration"),
    _warned("instance_group.kind", "every model runs on the device of --device", _other_device),
    _warned(
        "instance_group.count",
        "one instance of a model serves, and requests that wait are batched",
        lambda value, device: value > 1,
    ),
    _refused(
        "instance_group.rate_limiter",
        "one inference at a time has the device; limit requests with the parameters max_requests_per_second and"
        " max_concurrency",
    ),
    _warned("instance_group.gpus", "every model runs on the device of --device"),
    _warned("instance_group.secondary_devices", "every model runs on the device of --device"),
    _warned("instance_group.profile", "only TensorRT has optimization profiles"),
    _refused("instance_group.passive", "every model that is loaded serves"),
    _warned("instance_group.host_policy", "threads are those of --threads"),
    _honoured("default_model_filename", "the program's file in the version's folder; model.pt2 without it"),
    _warned("cc_model_filenames", "one file serves on every device; see default_model_filename"),
    _warned("metric_tags", "metrics have the labels model and version"),
    _honoured("parameters", f"{', '.join(PARAMETERS)}; others are warned of by their key"),
    _honoured(
        "model_warmup", "before the model is ready; random_data is from 0 to 1, a file is one row's raw bytes"
    ),
    _refused("model_operations", "a program may call aten's operators only"),
    _refused("model_transaction_policy.decoupled", "a request has exactly one response"),
    _refused("model_repository_agents", "the repository is read as it is"),
    _warned("response_cache.enable", "every request is executed"),
    _warned("model_metrics", "histograms have fixed buckets"),
)

FIELDS: Mapping[str, ConfigField] = {field.path: field for field in _FIELDS}


def refuse_fields(config: ModelConfig) -> None:
    """Raise RepositoryError, naming the field, for a configuration that cannot be served as written."""
    for field, note in refused_fields(config).items():
        raise RepositoryError(f"config.pbtxt: {field} is not supported: {note}")


def refused_fields(config: ModelConfig) -> dict[str, str]:
    """Return the fields, with short values, that prevent loading, and the reasons."""
    return {
        f"{field.path}{_shown(value)}": field.note
        for field, value in _present(config, "")
        if field.concerns("refused", value, "")
    }


def defaults_of(config: ModelConfig) -> dict[str, float]:
    """Return the number that fills each optional input. Raises RepositoryError unless exactly these have a number."""
    optional = {tensor.name for tensor in config.input if tensor.optional}
    given = {
        key.removeprefix(_DEFAULT): value for key, value in config.parameters.items() if key.startswith(_DEFAULT)
    }
    for name in sorted(optional - given.keys()):
        raise RepositoryError(
            f"config.pbtxt: input '{name}' is optional, but an exported program takes every input; give the number"
            f" that fills it where a request omits it as parameter {_DEFAULT}{name}"
        )
    for name in sorted(given.keys() - optional):
        raise RepositoryError(f"config.pbtxt: parameter {_DEFAULT}{name}: there is no optional input '{name}'")
    return {name: _number(name, value.string_value) for name, value in given.items()}


def parameter_of(config: ModelConfig | None, key: str, parse: Callable[[str], _T]) -> _T | None:
    """Parse one of `parameters`; None if it is not set. Raises RepositoryError naming it."""
    if config is None or key not in config.parameters:
        return None
    try:
        return parse(config.parameters[key].string_value)
    except ValueError as error:
        raise RepositoryError(f"config.pbtxt: parameter '{key}': {error}") from error


def pooling_of(config: ModelConfig | None) -> str:
    """Return the pooling of token states into embeddings. Raises RepositoryError."""
    return parameter_of(config, "pooling", _pooling) or POOLINGS[0]


def truncates(config: ModelConfig) -> bool:
    """Return whether a tokenizer cuts texts that are too long. Raises RepositoryError."""
    return parameter_of(config, "truncate", _boolean) or False


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(f"'{text[:40]}' is neither true nor false")
    return text == "true"


def _pooling(text: str) -> str:
    if text not in POOLINGS:
        raise ValueError(f"'{text[:40]}' is none of {', '.join(POOLINGS)}")
    return text


def _number(name: str, text: str) -> float:
    try:
        if math.isfinite(number := float(text)):
            return number
    except ValueError:
        pass
    raise RepositoryError(f"config.pbtxt: parameter {_DEFAULT}{name}: '{text[:40]}' is not a number")


def ignored_fields(config: ModelConfig, device: str) -> dict[str, str]:
    """Return the fields without effect on this device, with the reasons."""
    ignored = {
        f"parameters[{key}]": "no such parameter is known"
        for key in config.parameters
        if key not in PARAMETERS and not key.startswith(_OWN_PARAMETERS)
    }
    for field, value in _present(config, ""):
        if field.concerns("warned", value, device):
            ignored[field.path] = field.note
    return ignored


def _present(message: Message, prefix: str) -> Iterator[tuple[ConfigField, Any]]:
    """Yield the fields set in a message. A field missing from the table, of a newer Triton, counts as warned about."""
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        if path in FIELDS:
            yield FIELDS[path], value
            continue
        messages = _messages(descriptor, value)
        if not messages and not isinstance(value, Message):
            yield _warned(path, "this server does not know it"), value
        for inner in messages:
            yield from _present(inner, f"{path}.")


def _messages(descriptor: FieldDescriptor, value: Any) -> list[Message]:
    """Return the messages of a field: one, a list, or a map's values."""
    if descriptor.message_type is None:
        return []
    if isinstance(value, Message):
        return [value]
    is_map = descriptor.message_type.GetOptions().map_entry
    return [inner for inner in (value.values() if is_map else value) if isinstance(inner, Message)]


def _shown(value: Any) -> str:
    """Return a value's text, if it is short."""
    is_short = isinstance(value, str | int) and not isinstance(value, bool) and len(str(value)) < 80
    return f" {value!r}" if is_short else ""
