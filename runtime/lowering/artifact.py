"""The cache file of a lowered model: ports, instructions and storages as JSON, so that a restart needs no archive.

Operators are written by name and looked up below `torch.ops` only. A program with sub-programs as arguments
(`torch.cond`) cannot be written; it is lowered again at every start.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from planner.errors import FormatError
from planner.graph import decode_as
from runtime.lowering import fused_ops, rewrite
from runtime.lowering.model import Port
from runtime.lowering.slots import Slot
from runtime.lowering.trace import Instruction, Storage, Trace, TracedOp
from runtime.lowering.weights import dtype_name, dtype_of

FORMAT_VERSION = 2

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "host_gather": rewrite.host_gather,
    **{f.__name__: f for f in fused_ops.PLAIN},
    **{f"operator.{f.__name__}": f for f in (operator.add, operator.sub, operator.mul, operator.truediv)},
    **{f"operator.{f.__name__}": f for f in (operator.floordiv, operator.neg, operator.lt, operator.le)},
    **{f"operator.{f.__name__}": f for f in (operator.gt, operator.ge, operator.eq, operator.ne)},
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_TORCH_CONSTANTS = (torch.layout, torch.memory_format)


class NotPlain(Exception):
    """A value of a program has no plain form."""


class PortRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int | None, ...]


class InstructionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    target: str
    args: Any
    kwargs: Any
    out: int
    op: int | None


class TraceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    batch: int
    instructions: tuple[InstructionRecord, ...]
    ops: tuple[TracedOp, ...]
    weight_slots: dict[int, str]
    input_slots: tuple[int, ...]
    output_slots: tuple[int, ...]
    output_storages: tuple[Storage, ...]
    input_bytes: tuple[int, ...]
    slots: int


class Artifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lowered model without its weights. `lowering` identifies the code and the archive that made it."""

    lowering: str
    inputs: tuple[PortRecord, ...]
    outputs: tuple[PortRecord, ...]
    batched: bool
    traces: tuple[TraceRecord, ...]
    format_version: int = FORMAT_VERSION


def encode(
    lowering: str, inputs: tuple[Port, ...], outputs: tuple[Port, ...], batched: bool, traces: dict[int, Trace]
) -> bytes | None:
    """The artifact's JSON, or None for a program that has no plain form."""
    try:
        records = tuple(_trace_record(trace) for _, trace in sorted(traces.items()))
    except NotPlain:
        return None
    return msgspec.json.encode(Artifact(lowering, _port_records(inputs), _port_records(outputs), batched, records))


def decode(raw: bytes, lowering: str) -> tuple[tuple[Port, ...], tuple[Port, ...], bool, dict[int, Trace]]:
    """Inputs, outputs, whether there is a batch, and traces by batch. Raises FormatError, also for another lowering."""
    artifact = decode_as(raw, Artifact, "lowered model", FORMAT_VERSION)
    if artifact.lowering != lowering:
        raise FormatError(f"lowered model was made by {artifact.lowering}, in use is {lowering}; lower it again")
    try:
        traces = {t.batch: _trace(t) for t in artifact.traces}
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise FormatError(f"lowered model is damaged: {error}") from error
    return _ports(artifact.inputs), _ports(artifact.outputs), artifact.batched, traces


def _port_records(ports: tuple[Port, ...]) -> tuple[PortRecord, ...]:
    return tuple(PortRecord(p.name, dtype_name(p.dtype), p.shape) for p in ports)


def _ports(files: tuple[PortRecord, ...]) -> tuple[Port, ...]:
    return tuple(Port(f.name, dtype_of(f.dtype), f.shape) for f in files)


def _trace_record(trace: Trace) -> TraceRecord:
    instructions = tuple(
        InstructionRecord(i.name, _target_name(i.target), _plain(i.args), _plain(i.kwargs), i.out, i.op)
        for i in trace.instructions
    )
    values = {name: getattr(trace, name) for name in TraceRecord.__struct_fields__}
    return TraceRecord(**values | {"instructions": instructions})


def _trace(record: TraceRecord) -> Trace:
    instructions = tuple(
        Instruction(i.name, _target(i.target), _value(i.args), _value(i.kwargs), i.out, i.op)
        for i in record.instructions
    )
    return Trace(**msgspec.structs.asdict(record) | {"instructions": instructions})


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if target in _NAMES:
        return _NAMES[target]
    raise NotPlain


def _target(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, packet, overload = name.split(".")
    target = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(target, torch._ops.OpOverload):
        raise FormatError(f"lowered model calls {name}, which is not an operator")
    return target


def _plain(value: Any) -> Any:
    """A JSON form of an argument. Lists stand for lists; whatever JSON lacks is an object with one key."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case Slot(index):
            return {"slot": index}
        case list():
            return [_plain(v) for v in value]
        case tuple():
            return {"tuple": [_plain(v) for v in value]}
        case dict():
            return {"dict": [[key, _plain(v)] for key, v in value.items()]}
        case torch.dtype():
            return {"dtype": dtype_name(value)}
        case torch.device():
            return {"device": str(value)}
        case torch.layout() | torch.memory_format():
            return {"torch": str(value).removeprefix("torch.")}
        case _:
            raise NotPlain


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(v) for v in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    match kind:
        case "slot":
            return Slot(content)
        case "float":
            return float(content)
        case "tuple":
            return tuple(_value(v) for v in content)
        case "dict":
            return {key: _value(v) for key, v in content}
        case "dtype":
            return dtype_of(content)
        case "device":
            return torch.device(content)
        case "torch":
            constant = getattr(torch, content)
            if isinstance(constant, _TORCH_CONSTANTS):
                return constant
    raise ValueError(f"unknown argument {plain!r}")
