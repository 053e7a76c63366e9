"""The cache file of a lowered model: ports, instructions and storages as JSON, so that a restart needs no archive.

Operators are written by name and looked up below `torch.ops` only. Sub-programs (of `torch.cond`) are written as lists
of nodes and get new names when read: torch writes names into code.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, cast
from weakref import WeakValueDictionary

import msgspec
import torch
from torch import fx

from cohabit.planner.errors import FormatError
from cohabit.planner.graph import decode_as
from cohabit.planner.shapes import STATIC, Bucket, DynamicShape
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering import fused_ops
from cohabit.runtime.lowering.allowed_ops import NUMBER_FUNCTIONS, allows_lowered
from cohabit.runtime.lowering.encoding.choice import Encoding
from cohabit.runtime.lowering.model import Port
from cohabit.runtime.lowering.slots import Slot, filled
from cohabit.runtime.lowering.trace import Instruction, Storage, Trace, TracedOp
from cohabit.runtime.lowering.validation import Validation
from cohabit.runtime.lowering.weights import dtype_name, dtype_of

FORMAT_VERSION = 8

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in fused_ops.FUSED_OPS},
    **NUMBER_FUNCTIONS,
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_TORCH_CONSTANTS = (torch.layout, torch.memory_format)


class NotPlain(UnsupportedModel):
    """A value of a program has no JSON form."""

    def __init__(self, value: object) -> None:
        super().__init__(
            f"{str(value)[:80]!r} ({type(value).__name__}) in the program cannot be written to the cache"
        )


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
    sizes: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()


class LoweredProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a lowered model. `lowering` identifies the code and the archive that it came from."""

    lowering: str
    weights: str
    """Fingerprint of the manifest of the weights traced with. Which weights are packed may depend on the batch
    sizes."""
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    batched: bool
    traces: tuple[msgspec.Raw, ...]
    """`TraceRecord`s of all buckets, as `encode_traces` makes them."""
    interaction: str | None = None
    dynamic: DynamicShape = STATIC
    changed_inputs: tuple[str, ...] = ()
    validation: Validation | None = None
    encoding: Encoding | None = None
    saved_bytes: int = 0
    format_version: int = FORMAT_VERSION


_decoder = msgspec.json.Decoder(LoweredProgram, dec_hook=lambda kind, name: dtype_of(name))
_trace_decoder = msgspec.json.Decoder(TraceRecord)
_traces: WeakValueDictionary[str, Trace] = WeakValueDictionary()
"""Traces in use, by their digests."""


def encode(program: LoweredProgram) -> bytes:
    return msgspec.json.encode(program, enc_hook=dtype_name)


def decode(raw: bytes, lowering: str | None) -> tuple[LoweredProgram, dict[Bucket, Trace]]:
    """Decode a program and its traces. Raises FormatError, also for another `lowering`; None accepts any."""
    program = decode_as(raw, _decoder, "lowered model", FORMAT_VERSION)
    if lowering is not None and program.lowering != lowering:
        raise FormatError(f"lowered model was made by {program.lowering}, in use is {lowering}; lower it again")
    try:
        return program, {trace.bucket: trace for trace in map(_decoded, program.traces)}
    except (KeyError, AttributeError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise FormatError(f"lowered model is damaged: {error}") from error


def encode_traces(traces: Mapping[Bucket, Trace]) -> tuple[msgspec.Raw, ...]:
    """Return the JSON of traces, smallest bucket first. Raises UnsupportedModel for a program without a JSON form."""
    return tuple(msgspec.Raw(msgspec.json.encode(_trace_record(trace))) for _, trace in sorted(traces.items()))


def _decoded(raw: msgspec.Raw) -> Trace:
    """Return a trace. Models whose traces are equal, as those of a family, share one."""
    digest = hashlib.blake2b(raw, digest_size=32).hexdigest()
    if (trace := _traces.get(digest)) is None:
        trace = _trace(_trace_decoder.decode(raw))
        object.__setattr__(trace, "digest", digest)
        _traces[digest] = trace
    return trace


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
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target}"
    if target in _NAMES:
        return _NAMES[target]
    raise NotPlain(target)


def _target(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    target: Any = torch.ops
    for part in name.split("."):
        target = getattr(target, part)
    if not allows_lowered(target):
        raise FormatError(f"lowered model calls {name}, which is not an operator that a model may use")
    return cast(Callable[..., Any], target)


def _plain(value: Any) -> Any:
    """Return the JSON form of an argument. Lists stay lists; types that JSON lacks become objects with one key."""
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
        case fx.GraphModule():
            return {"graph": _graph_record(value)}
        case complex():
            return {"complex": [value.real, value.imag]}
        case _:
            raise NotPlain(value)


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
        case "complex":
            return complex(*content)
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
        case "graph":
            return _graph_module(content)
    raise ValueError(f"unknown argument {plain!r}")


def _graph_record(module: fx.GraphModule) -> list[Any]:
    """Return a sub-program's nodes in order: kind, operator, arguments; slots are indices of nodes."""
    slots: dict[fx.Node, Any] = {}
    records = []
    for index, node in enumerate(module.graph.nodes):
        slots[node] = Slot(index)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), slots.__getitem__)
        target = None
        if node.op == "call_function":
            target = _target_name(node.target)
        elif node.op == "get_attr":
            args = (getattr(module, node.target),)
        elif node.op not in ("placeholder", "output"):
            raise NotPlain(node)
        records.append([node.op, target, _plain(args), _plain(dict(kwargs))])
    return records


def _graph_module(records: list[Any]) -> fx.GraphModule:
    graph, attributes = fx.Graph(), {}
    nodes: list[fx.Node] = []
    for index, (kind, target_name, plain_args, plain_kwargs) in enumerate(records):
        args, kwargs = filled((_value(plain_args), _value(plain_kwargs)), lambda slot: nodes[slot.index])
        if not all(map(str.isidentifier, kwargs)):
            raise ValueError("an argument's name is not an identifier")
        match kind:
            case "placeholder":
                node = graph.placeholder(f"input_{index}")
            case "get_attr":
                (attributes[f"attribute_{index}"],) = args
                node = graph.get_attr(f"attribute_{index}")
            case "call_function":
                node = graph.call_function(_target(target_name), args, kwargs)
            case "output":
                node = graph.output(args[0])
            case _:
                raise ValueError(f"unknown node {kind!r}")
        nodes.append(node)
    return fx.GraphModule(attributes, graph)
