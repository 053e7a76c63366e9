"""A node of an ONNX graph, its call, and the table of operators."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cohabit.server.errors import ImportFailed
from cohabit.server.importing.onnx.known import Known, sizes

Value = torch.Tensor | Known


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One node. Inputs that it leaves out are empty names."""

    op: str
    """With its domain, unless it is ONNX's own: `com.microsoft.Gelu`."""
    name: str
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"operator {self.op} (opset {self.opset}) of node {self.name or self.outputs[0]}"


@dataclass(frozen=True, slots=True)
class NodeCall:
    """A node with the values of its inputs."""

    node: OnnxNode
    values: Sequence[Value | None]
    constant: Sequence[bool]
    """Whether each input is the same in every call."""
    dtype: Callable[[int], torch.dtype]
    """Maps ONNX's types of elements to torch's."""

    def has(self, index: int) -> bool:
        return index < len(self.values) and self.values[index] is not None

    def value(self, index: int) -> Value:
        found = self.values[index] if index < len(self.values) else None
        if found is None:
            raise ImportFailed(f"its input {index} is missing")
        return found

    def tensor(self, index: int = 0) -> torch.Tensor:
        found = self.value(index)
        return found.tensor() if isinstance(found, Known) else found

    def optional(self, index: int) -> torch.Tensor | None:
        return self.tensor(index) if self.has(index) else None

    def tensors(self) -> list[torch.Tensor]:
        return [self.tensor(index) for index in range(len(self.values)) if self.has(index)]

    def attr(self, name: str, default: Any = None) -> Any:
        return self.node.attributes.get(name, default)

    def sizes(self, name: str, index: int) -> list[Any] | None:
        """Return numbers that are an attribute in older opsets, and an input in newer ones; None without either."""
        if self.has(index):
            return sizes(self.value(index), name)
        found = self.attr(name)
        return None if found is None else list(found)

    def number(self, name: str, index: int, default: Any) -> Any:
        """Return one number, given as `sizes` are."""
        if self.has(index):
            return sizes(self.value(index), name)[0]
        return self.attr(name, default)

    def require(self, condition: bool, what: str) -> None:
        """Raise ImportFailed for something that is not supported."""
        if not condition:
            raise ImportFailed(f"{what} is not supported")


Operator = Callable[[NodeCall], Value | tuple[Value | None, ...]]
OPERATORS: dict[str, Operator] = {}


def operator_of(*names: str) -> Callable[[Operator], Operator]:
    """Register a function as the operators of these names."""

    def register(function: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register
