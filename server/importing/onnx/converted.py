"""A module that computes an ONNX graph, node by node; torch.export traces it like any other module."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from cohabit.server.errors import ImportFailed
from cohabit.server.importing.onnx.known import MOST_NUMBERS, Known, evaluate
from cohabit.server.importing.onnx.reading import OnnxGraph, type_of
from cohabit.server.importing.onnx.registry import OPERATORS, NodeCall, OnnxNode, Value
from cohabit.server.importing.subject import Tensors, reason_of, with_signature

_MOST_FLOATS = 8
"""Maximum number of floats that may be settings of an operator, such as the scales of a Resize."""


class OnnxModule(nn.Module):
    """Takes a graph's inputs by name, and returns its outputs by name; the names are `OnnxGraph.names`.

    Floats of the graph are parameters, and integers are buffers, except for a few that are known as numbers.
    """

    def __init__(self, graph: OnnxGraph) -> None:
        super().__init__()
        self.weights = nn.Module()
        self._nodes, self._outputs, self._file = graph.nodes, graph.outputs, graph.path.name
        self._weights: dict[str, str] = {}
        self._known: dict[str, Known] = {}
        for name, tensor in graph.constants.items():
            self._add(name, tensor)
        self._constant = set(graph.constants)
        """Names of the values that depend on no input."""
        for node in graph.nodes:
            if self._constant.issuperset(filter(None, node.inputs)):
                self._constant.update(node.outputs)
        self._unread = _unread_after(graph)
        self._is_wide = any(tensor.dtype is torch.float64 for tensor in graph.constants.values())
        self._names = graph.names
        self.forward: Any = with_signature(partial(self._run), [self._names[given.name] for given in graph.inputs])

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        count, is_float = tensor.numel(), tensor.dtype.is_floating_point
        is_known = (
            count <= 1 or (tensor.dim() <= 1 and count <= _MOST_FLOATS) if is_float else count <= MOST_NUMBERS
        )
        weight = None
        if not is_known or (is_float and count > 1):
            own = re.sub(r"\W", "_", name)
            while hasattr(self.weights, own) or not own.isidentifier():
                own = f"w_{own}"
            weight = nn.Parameter(tensor, requires_grad=False) if is_float else tensor
            if isinstance(weight, nn.Parameter):
                self.weights.register_parameter(own, weight)
            else:
                self.weights.register_buffer(own, weight)
            self._weights[name] = own
        if is_known:
            values = tensor.double() if is_float else tensor
            self._known[name] = Known(_objects(values), tensor.dtype)

    def _run(self, /, **inputs: torch.Tensor) -> Tensors:
        values: dict[str, Value] = {name: inputs[own] for name, own in self._names.items() if own in inputs}
        for name, own in self._weights.items():
            values[name] = getattr(self.weights, own)
        for name, known in self._known.items():
            weight = values.get(name)
            assert not isinstance(weight, Known)
            values[name] = Known(known.numbers, known.dtype, weight)
        for number, node in enumerate(self._nodes):
            values.update(self._results(node, values))
            for name in self._unread[number]:
                values.pop(name, None)
        answer = {self._names[name]: values[name] for name in self._outputs}
        return {name: value.tensor() if isinstance(value, Known) else value for name, value in answer.items()}

    def _results(self, node: OnnxNode, values: Mapping[str, Value]) -> dict[str, Value]:
        given = [values[name] if name else None for name in node.inputs]
        constant = tuple(name in self._constant for name in node.inputs)
        known = [value for value in given if isinstance(value, Known)]
        try:
            # An elementwise operator has no attributes, but for `fmod` of Mod, which is 0 for integers.
            is_plain = bool(known) and len(known) == len(given) and not any(node.attributes.values())
            number = evaluate(node.op, known) if is_plain else None
            found = OPERATORS[node.op](NodeCall(node, given, constant, self._dtype)) if number is None else number
        except Exception as error:  # torch's, of any class
            if "data-dependent" in str(error):
                reason = "a size depends on values of the inputs, not only on their sizes"
            else:
                reason = reason_of(error)
            raise ImportFailed(f"{self._file}: {node}: {reason}") from error
        results = found if isinstance(found, tuple) else (found,)
        return {
            name: value for name, value in zip(node.outputs, results, strict=False) if name and value is not None
        }

    def _dtype(self, element_type: int) -> torch.dtype:
        """Return torch's type; in a copy of the module in float64, that of all floats."""
        dtype = type_of(element_type)
        is_copy = not self._is_wide and any(own.dtype is torch.float64 for own in self.parameters())
        return torch.float64 if is_copy and dtype.is_floating_point else dtype


def _objects(tensor: torch.Tensor) -> Any:
    return Known.of(tensor.tolist()).numbers.reshape(tuple(tensor.shape))


def _unread_after(graph: OnnxGraph) -> list[list[str]]:
    """Return, for each node, the names of the values that no later node reads."""
    read, unread = set(graph.outputs), list[list[str]]()
    for node in reversed(graph.nodes):
        unread.append([name for name in {*node.inputs, *node.outputs} if name not in read])
        read.update(node.inputs)
    return unread[::-1]
