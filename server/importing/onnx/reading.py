"""Reads an ONNX file: its nodes, constants, inputs and outputs. Nothing of it is run, and it is data like any other."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, inliner, numpy_helper

from cohabit.server.errors import ImportFailed
from cohabit.server.importing.folder_files import own_roots
from cohabit.server.importing.onnx.indexing import with_pairs
from cohabit.server.importing.onnx.known import Known
from cohabit.server.importing.onnx.operators import (
    arithmetic,
    layers,
    quantized,
    recurrent,
    resizing,
    shaping,
)
from cohabit.server.importing.onnx.registry import OPERATORS, OnnxNode
from cohabit.server.importing.subject import reason_of

REGISTERED = (arithmetic, layers, quantized, recurrent, resizing, shaping)
"""Modules that fill OPERATORS when they are imported."""
_OPSETS = range(11, 23)
_OWN_DOMAIN = ("", "ai.onnx")
_CONSTANT = "Constant"
_CONTROL_FLOW = ("If", "Loop", "Scan", "SequenceMap")
_OF_VALUES = ("NonMaxSuppression", "NonZero", "Unique", "Compress")
"""Operators whose results have sizes that depend on values."""
_MOST_NAMED = 3
TYPES = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.INT16: torch.int16,
    TensorProto.UINT32: torch.uint32,
    TensorProto.INT32: torch.int32,
    TensorProto.UINT64: torch.uint64,
    TensorProto.INT64: torch.int64,
    TensorProto.BOOL: torch.bool,
}


def type_of(element_type: int) -> torch.dtype:
    """Return torch's type of an element type. Raises ImportFailed."""
    if element_type not in TYPES:
        name = TensorProto.DataType.Name(element_type)
        raise ImportFailed(f"elements of type {name} are not supported")
    return TYPES[element_type]


@dataclass(frozen=True, slots=True)
class OnnxInput:
    name: str
    dtype: torch.dtype
    dims: tuple[int | None, ...]
    """None for dynamic dimensions."""


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """A model's graph. Nodes are in an order in which each comes after those that it reads."""

    path: Path
    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, torch.Tensor]
    inputs: tuple[OnnxInput, ...]
    outputs: tuple[str, ...]

    @property
    def names(self) -> dict[str, str]:
        """The names of inputs and outputs as Python and torch.export take them, by the graph's names."""
        names: dict[str, str] = {}
        for kind, given in (("input", [own.name for own in self.inputs]), ("output", self.outputs)):
            for name in given:
                new = re.sub(r"\W", "_", name)
                new = new if new.isidentifier() and not iskeyword(new) else f"{kind}_{new}"
                while new != name and (new in names.values() or new in self.outputs):
                    new = f"{new}_"
                names.setdefault(name, new)
        return names

    def pruned(self, outputs: Sequence[str]) -> "OnnxGraph":
        """Return the graph of some outputs, with the nodes, constants and inputs that they need."""
        needed, kept = set(outputs), list[OnnxNode]()
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.outputs):
                kept.append(node)
                needed.update(node.inputs)
        constants = {name: tensor for name, tensor in self.constants.items() if name in needed}
        inputs = tuple(given for given in self.inputs if given.name in needed)
        return OnnxGraph(self.path, tuple(reversed(kept)), constants, inputs, tuple(outputs))

    def require_supported(self) -> None:
        """Raise ImportFailed for operators that are not supported; it names the first."""
        unknown = [node for node in self.nodes if node.op not in OPERATORS]
        if not unknown:
            return
        reason = _reason(unknown[0].op)
        others = list(dict.fromkeys(node.op for node in unknown if node.op != unknown[0].op))
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        also = f"; nor are {', '.join(others[:_MOST_NAMED])}{more}" if others else ""
        raise ImportFailed(f"{self.path.name}: {unknown[0]} is not supported{reason}{also}")


def _reason(op: str) -> str:
    if op in _CONTROL_FLOW:
        return ", because it is control flow; export the model without it"
    if op in _OF_VALUES:
        return ", because the sizes of its results depend on values; leave it to the client (--outputs)"
    return ""


def read_graph(path: Path) -> OnnxGraph:
    """Read a file. Raises ImportFailed."""
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's, of several classes
        raise ImportFailed(f"{path} is not an ONNX model, or is cut short: {reason_of(error)}") from error
    if model.functions:
        model = inliner.inline_local_functions(model)
    opsets = _opsets(path, model)
    graph = model.graph
    constants = {tensor.name: _tensor(path, tensor) for tensor in graph.initializer}
    if graph.sparse_initializer:
        raise ImportFailed(f"{path.name}: sparse initializers are not supported")
    nodes = []
    for node in graph.node:
        if node.op_type == _CONSTANT and node.domain in _OWN_DOMAIN:
            constants[node.output[0]] = _constant(path, node)
        else:
            nodes.append(_node(path, node, opsets))
    inputs = tuple(_input(path, given) for given in graph.input if given.name not in constants)
    outputs = tuple(given.name for given in graph.output)
    _require_complete(path, nodes, {*constants, *(given.name for given in inputs)}, outputs)
    return OnnxGraph(path, tuple(with_pairs(nodes, constants)), constants, inputs, outputs)


def _opsets(path: Path, model: ModelProto) -> dict[str, int]:
    """Return the version of each domain's operators. Raises ImportFailed if ONNX's own is not supported."""
    opsets = {"" if given.domain in _OWN_DOMAIN else given.domain: given.version for given in model.opset_import}
    own = opsets.setdefault("", 1)
    if own not in _OPSETS:
        raise ImportFailed(
            f"{path.name} has opset {own}; supported are {_OPSETS.start} to {_OPSETS.stop - 1}. Convert it with"
            " onnx.version_converter, or export it with another opset"
        )
    return opsets


def _require_complete(
    path: Path, nodes: Sequence[OnnxNode], given: Collection[str], outputs: Sequence[str]
) -> None:
    known = {*given, ""}
    for node in nodes:
        for name in node.inputs:
            if name not in known:
                raise ImportFailed(f"{path.name}: {node} reads {name}, which nothing before it computes")
        known.update(node.outputs)
    for name in outputs:
        if name not in known:
            raise ImportFailed(f"{path.name}: nothing computes its output {name}")


def _input(path: Path, given: onnx.ValueInfoProto) -> OnnxInput:
    if not given.type.HasField("tensor_type") or not given.type.tensor_type.HasField("shape"):
        raise ImportFailed(f"{path.name}: its input {given.name} is not a tensor with a known number of dimensions")
    tensor = given.type.tensor_type
    dims = tuple(dim.dim_value if dim.dim_value > 0 else None for dim in tensor.shape.dim)
    try:
        return OnnxInput(given.name, type_of(tensor.elem_type), dims)
    except ImportFailed as error:
        raise ImportFailed(f"{path.name}: its input {given.name}: {error}") from error


def _node(path: Path, node: NodeProto, opsets: Mapping[str, int]) -> OnnxNode:
    domain = "" if node.domain in _OWN_DOMAIN else node.domain
    op = f"{domain}.{node.op_type}" if domain else node.op_type
    bare = OnnxNode(op, node.name, opsets.get(domain, 1), tuple(node.input), tuple(node.output))
    if op not in OPERATORS:  # refused if it is needed
        return bare
    try:
        attributes = {given.name: _attribute(path, given) for given in node.attribute}
    except ImportFailed as error:
        raise ImportFailed(f"{path.name}: {bare}: {error}") from error
    outputs = list(node.output)
    while outputs and not outputs[-1]:
        outputs.pop()
    return OnnxNode(op, node.name, bare.opset, bare.inputs, tuple(outputs), attributes)


def _attribute(path: Path, given: AttributeProto) -> Any:
    if given.ref_attr_name or given.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        raise ImportFailed(f"its attribute {given.name} is not a value")
    value = onnx.helper.get_attribute_value(given)
    if isinstance(value, TensorProto):
        tensor = _tensor(path, value)
        return Known.of(tensor.tolist(), tensor.dtype)  # numbers, because torch.export follows tensors
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if given.type == AttributeProto.STRINGS:
        return [item.decode("utf-8", "replace") for item in value]
    return list(value) if given.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value


_CONSTANT_TYPES = {"value_float": torch.float32, "value_floats": torch.float32}


def _constant(path: Path, node: NodeProto) -> torch.Tensor:
    for given in node.attribute:
        value = onnx.helper.get_attribute_value(given)
        if given.name == "value":
            return _tensor(path, value)
        if given.name in ("value_int", "value_ints", "value_float", "value_floats"):
            return torch.tensor(value, dtype=_CONSTANT_TYPES.get(given.name, torch.int64))
    raise ImportFailed(f"{path.name}: the value of the constant {node.output[0]} is not a tensor of numbers")


def _tensor(path: Path, tensor: TensorProto) -> torch.Tensor:
    """Return a constant's value, read from the file or from one beside it. Raises ImportFailed."""
    try:
        dtype = type_of(tensor.data_type)
        if tensor.data_location == TensorProto.EXTERNAL:
            _read_external(path, tensor)
        array = numpy_helper.to_array(tensor)
        tensor.ClearField("raw_data")
        if dtype is torch.bfloat16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(array, order="C"))
    except (ImportFailed, ValueError, TypeError, OSError) as error:
        raise ImportFailed(f"{path.name}: constant {tensor.name}: {reason_of(error)}") from error


def _read_external(path: Path, tensor: TensorProto) -> None:
    """Read the bytes of a tensor that lie in another file of the model's folder."""
    given = {entry.key: entry.value for entry in tensor.external_data}
    location, offset = Path(given.get("location", "")), int(given.get("offset", 0))
    file = path.parent / location
    roots = own_roots(path.parent)
    if location.is_absolute() or ".." in location.parts or not any(file.resolve().is_relative_to(r) for r in roots):
        raise ImportFailed(f"its file '{location}' is not in the model's folder; copy it there")
    if not file.is_file():
        raise ImportFailed(f"its file '{location}' is missing in {path.parent}; copy it there, too")
    length = int(given.get("length", file.stat().st_size - offset))
    if offset < 0 or length < 0 or offset + length > file.stat().st_size:
        raise ImportFailed(f"its file '{location}' is cut short: it has {file.stat().st_size} bytes")
    with file.open("rb") as opened:
        opened.seek(offset)
        tensor.raw_data = opened.read(length)
    tensor.data_location = TensorProto.DEFAULT
