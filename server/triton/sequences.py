"""Reads `sequence_batching` of a ModelConfig: a model's states and control inputs."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from cohabit.planner.shapes import Dimension, DynamicShape, names_in
from cohabit.server.errors import RepositoryError
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from cohabit.server.protocol.datatypes import DTYPES, config_type
from cohabit.server.protocol.tensors import filled
from cohabit.server.scheduling.sequences import Control, ControlKind, SequenceRules, State
from cohabit.server.triton.config_fields import LENGTHS, parameter_of
from cohabit.server.triton.config_messages import DataType, ModelConfig, ModelSequenceBatching

_IDLE_US = 1_000_000
"""Triton's default for `max_sequence_idle_microseconds`."""
_KINDS: Mapping[int, ControlKind] = {
    ModelSequenceBatching.Control.CONTROL_SEQUENCE_START: "start",
    ModelSequenceBatching.Control.CONTROL_SEQUENCE_END: "end",
    ModelSequenceBatching.Control.CONTROL_SEQUENCE_READY: "ready",
    ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID: "id",
}
_FALSE_TRUE = {"INT32": "int32_false_true", "FP32": "fp32_false_true", "BOOL": "bool_false_true"}


def state_names(config: ModelConfig) -> tuple[list[str], list[str]]:
    """Return the inputs, and the outputs, that a configuration hides from clients."""
    batching = config.sequence_batching
    inputs = [*(s.input_name for s in batching.state), *(c.name for c in batching.control_input)]
    return inputs, [state.output_name for state in batching.state]


def rules_of(config: ModelConfig | None, info: ModelInfo, files: Mapping[str, Path]) -> SequenceRules | None:
    """Read the rules of a model whose `info` has all its tensors; None for one without sequences.

    `files` has the files of initial states, by their names in the configuration. Raises RepositoryError, naming the
    field, for contradictions to the program.
    """
    if config is None or not config.HasField("sequence_batching"):
        return None
    batching = config.sequence_batching
    for kind, names in zip(("input", "output"), state_names(config), strict=True):
        if len(set(names)) != len(names):
            raise RepositoryError(f"config.pbtxt: sequence_batching names an {kind} twice: {', '.join(names)}")
    states = tuple(_state(state, info, files) for state in batching.state)
    controls = tuple(_control(control, info) for control in batching.control_input)
    grows, lengths = _growth(states, info), parameter_of(config, LENGTHS, str)
    if (lengths is None) != (grows is None):
        raise RepositoryError(
            f"config.pbtxt: parameter {LENGTHS} names the input that is told how far states have grown; give it if, and"
            " only if, a state has a dynamic size"
        )
    if lengths is not None:
        controls = (*controls, _length_control(lengths, info))
    idle_s = (batching.max_sequence_idle_microseconds or _IDLE_US) / 1e6
    least, most = (0, 0) if grows is None else (grows.least, grows.buckets[-1])
    return SequenceRules(states, controls, idle_s, least, most)


def with_sequences(info: ModelInfo, rules: SequenceRules | None) -> ModelInfo:
    """Return the description for clients, without the inputs and outputs that the server handles itself.

    Raises RepositoryError if clients have nothing left to send or receive, or if sizes of their inputs depend on
    states.
    """
    if rules is None:
        return info
    kept = [index for index, tensor in enumerate(info.inputs) if tensor.name not in rules.hidden_inputs]
    if not kept or len(rules.states) == len(info.outputs):
        raise RepositoryError("config.pbtxt: sequence_batching leaves no input for clients to send, or no output")
    own = [d for d in info.dynamic.dimensions if d.input in kept]
    hidden = {d.symbol for d in info.dynamic.dimensions} - {d.symbol for d in own}
    if any(size in hidden for index in kept for size in info.inputs[index].sizes):
        raise RepositoryError(
            "config.pbtxt: sequence_batching: the shape of an input must not depend on how far states have grown"
        )
    dimensions = tuple(replace(d, input=kept.index(d.input)) for d in own)
    return replace(
        info,
        inputs=tuple(info.inputs[index] for index in kept),
        outputs=tuple(tensor for tensor in info.outputs if tensor.name not in rules.hidden_outputs),
        dynamic=DynamicShape(
            dimensions, tuple(c for c in info.dynamic.constraints if hidden.isdisjoint(names_in(c)))
        ),
        sequences=True,
        context=rules.most_length,
    )


def _state(given: Any, info: ModelInfo, files: Mapping[str, Path]) -> State:
    where = f"config.pbtxt: sequence_batching.state '{given.input_name}'"
    before = _tensor(where, "input", given.input_name, info.inputs)
    after = _tensor(where, "output", given.output_name, info.outputs)
    if (before.datatype, before.shape) != (after.datatype, after.shape) or before.shape.count(-1) > 1:
        raise RepositoryError(
            f"{where}: the program's input is {before.datatype} {list(before.shape)}, its output '{after.name}'"
            f" {after.datatype} {list(after.shape)}; one becomes the other, or is what it grows by in one size"
        )
    datatype = DataType.Name(given.data_type)
    if given.data_type and datatype != config_type(before.datatype):
        raise RepositoryError(f"{where}: data_type is {datatype}, the program's {config_type(before.datatype)}")
    dims = list(given.dims)
    if dims and dims != list(before.shape):
        raise RepositoryError(f"{where}: dims are {dims}, the program's {list(before.shape)}")
    axis = before.shape.index(-1) + (info.max_batch_size > 0) if -1 in before.shape else None
    return State(before.name, after.name, _initial(where, given, before, info, files), axis)


def _initial(where: str, given: Any, tensor: TensorSpec, info: ModelInfo, files: Mapping[str, Path]) -> Array:
    """Return the state before a sequence's first request: a file's bytes, or zeros."""
    sizes = tuple(max(size, 0) for size in tensor.shape)
    shape = (1, *sizes) if info.max_batch_size > 0 else sizes
    if not given.initial_state or not given.initial_state[0].data_file:
        return filled(0.0, tensor.datatype, shape)
    if -1 in tensor.shape:
        raise RepositoryError(f"{where}: a growing state is empty at first; leave its initial_state out")
    name = given.initial_state[0].data_file
    dtype = np.dtype(DTYPES[tensor.datatype])
    nbytes, own = files[name].stat().st_size, dtype.itemsize * math.prod(shape)
    if nbytes != own:
        raise RepositoryError(
            f"{where}: initial_state/{name} has {nbytes} bytes, a state of {tensor.datatype} {list(tensor.shape)} {own}"
        )
    return np.fromfile(files[name], dtype).reshape(shape)


def _control(given: Any, info: ModelInfo) -> Control:
    where = f"config.pbtxt: sequence_batching.control_input '{given.name}'"
    if len(given.control) != 1:
        raise RepositoryError(f"{where}: it has {len(given.control)} controls; give each an input of its own")
    (control,) = given.control
    tensor, kind = _tensor(where, "input", given.name, info.inputs), _KINDS[control.kind]
    shape = _fixed(where, tensor, info)
    if kind == "id":
        if np.dtype(DTYPES[tensor.datatype]).kind not in "iu":
            raise RepositoryError(f"{where}: the program's input is {tensor.datatype}; an id is an integer")
        zeros = filled(0.0, tensor.datatype, shape)
        return Control(tensor.name, kind, zeros, zeros)
    values = list(getattr(control, _FALSE_TRUE[tensor.datatype])) if tensor.datatype in _FALSE_TRUE else []
    if len(values) != 2:
        raise RepositoryError(
            f"{where}: the program's input is {tensor.datatype}; give its two values as"
            f" {_FALSE_TRUE.get(tensor.datatype, 'int32_false_true, of an input that is INT32, FP32 or BOOL')}"
        )
    off, on = (filled(float(value), tensor.datatype, shape) for value in values)
    return Control(tensor.name, kind, off, on)


def _tensor(where: str, kind: str, name: str, tensors: tuple[TensorSpec, ...]) -> TensorSpec:
    found = next((tensor for tensor in tensors if tensor.name == name), None)
    if found is None:
        raise RepositoryError(
            f"{where}: the program has no {kind} '{name}', but {', '.join(t.name for t in tensors)}"
        )
    return found


def _fixed(where: str, tensor: TensorSpec, info: ModelInfo) -> tuple[int, ...]:
    """Return the shape of a control input for one request."""
    if -1 in tensor.shape:
        raise RepositoryError(f"{where}: the program's input is {list(tensor.shape)}; a control has a fixed size")
    return (1, *tensor.shape) if info.max_batch_size > 0 else tensor.shape


def _length_control(name: str, info: ModelInfo) -> Control:
    where = f"config.pbtxt: parameter {LENGTHS}"
    tensor = _tensor(where, "input", name, info.inputs)
    if np.dtype(DTYPES[tensor.datatype]).kind not in "iu":
        raise RepositoryError(f"{where}: the program's input is {tensor.datatype}; a length is an integer")
    zeros = filled(0.0, tensor.datatype, _fixed(where, tensor, info))
    return Control(name, "length", zeros, zeros)


def _growth(states: Sequence[State], info: ModelInfo) -> Dimension | None:
    """Return the dimension along which all growing states grow; None if none grows."""
    names, axis_of = [tensor.name for tensor in info.inputs], {state.input: state.axis for state in states}
    growing = [d for d in info.dynamic.dimensions if axis_of.get(names[d.input]) == d.axis]
    if len(growing) > 1:
        raise RepositoryError("config.pbtxt: sequence_batching: all growing states must grow by the same size")
    if growing and (growing[0].step, growing[0].offset) != (1, 0):
        raise RepositoryError(
            "config.pbtxt: sequence_batching: a growing state must take every size, not multiples"
        )
    return growing[0] if growing else None
