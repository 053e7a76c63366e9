"""Fusion: a convolution or linear layer, the sum and the activation function after it become one op.

One pass for every library of kernels. A table has the activation functions, and `LayerKernels` says which patterns a
library computes. The fused op stands where the last op of the pattern stood, so whatever lies between must not change
its operands: a pattern with an op in between that changes anything in place is left alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from runtime.lowering import packing
from runtime.lowering.fused_ops import conv_add_relu, conv_relu
from runtime.lowering.model import FxModel, same_form

aten = torch.ops.aten

_DEFAULTS = (None, [1, 1], [0, 0], [1, 1], 1)
"""Of a 2-d convolution's arguments after the weight: bias, stride, padding, dilation, groups."""
LEAST_MULTIPLICATIONS = 1 << 20
"""A linear layer with fewer in its smallest batch stays plain: entering oneDNN takes ten times as long as a small
product."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function in the words of oneDNN's operators."""

    name: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


RELU = Activation("relu")


def _clamp(node: fx.Node) -> Activation | None:
    numbers = tuple(float(b) for b in node.args[1:] if isinstance(b, int | float))
    return Activation("hardtanh", numbers) if len(numbers) == 2 and not node.kwargs else None


def _hardtanh(node: fx.Node) -> Activation | None:
    given: list[Any] = [*node.args[1:], *(-1.0, 1.0)[len(node.args) - 1 :]]
    return Activation("hardtanh", (float(given[0]), float(given[1])))


def _leaky_relu(node: fx.Node) -> Activation | None:
    return Activation("leaky_relu", (float((*node.args, 0.01)[1]),))  # type: ignore[arg-type]


def _gelu(node: fx.Node) -> Activation | None:
    return Activation("gelu", algorithm=str(node.kwargs.get("approximate", "none")))


ACTIVATIONS: dict[Any, Callable[[fx.Node], Activation | None]] = {
    aten.relu.default: lambda _: RELU,
    aten.relu6.default: lambda _: Activation("hardtanh", (0.0, 6.0)),
    aten.hardtanh.default: _hardtanh,
    aten.clamp.default: _clamp,
    aten.leaky_relu.default: _leaky_relu,
    aten.sigmoid.default: lambda _: Activation("sigmoid"),
    aten.tanh.default: lambda _: Activation("tanh"),
    aten.hardswish.default: lambda _: Activation("hardswish"),
    aten.hardsigmoid.default: lambda _: Activation("hardsigmoid"),
    aten.silu.default: lambda _: Activation("swish"),
    aten.gelu.default: _gelu,
}
"""Operators that kernels compute with the layer before them."""


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """A layer and what follows it, with no other reader in between."""

    layer: fx.Node
    total: fx.Node | None = None
    residual: fx.Node | None = None
    """The other summand of `total`."""
    last: fx.Node | None = None
    activation: Activation | None = None
    """What `last` computes."""

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for node in (self.layer, self.total, self.last) if node is not None]


class LayerKernels(Protocol):
    """The fused kernels of one library."""

    def takes(self, model: FxModel, layer: fx.Node) -> bool:
        """Whether there are kernels for a layer."""
        ...

    def best(self, found: LayerPattern) -> LayerPattern | None:
        """Return as much of a pattern as one kernel computes; None if that is not worth it."""
        ...

    def call(self, model: FxModel, pattern: LayerPattern) -> tuple[Any, tuple[Any, ...]]:
        """Return the fused op and its arguments."""
        ...


def fuse(model: FxModel, kernels: LayerKernels) -> None:
    """Replace each pattern that nothing else reads by one op.

    Runs after the rewrite that makes in-place ops plain, and before the one that makes plain ops in-place. Later layers
    come first: of two that are summed, the other is computed by then.
    """
    for layer in reversed(list(model.graph.nodes)):
        if layer.op != "call_function" or not kernels.takes(model, layer):
            continue
        pattern = kernels.best(_pattern(layer))
        if pattern is None:
            continue
        weight, (target, arguments) = layer.args[1], kernels.call(model, pattern)
        end = pattern.nodes[-1]
        with model.graph.inserting_before(end):
            fused = model.graph.call_function(target, arguments)
        fused.meta = dict(end.meta)
        end.replace_all_uses_with(fused)
        for node in reversed(pattern.nodes):
            model.graph.erase_node(node)
        model.drop_unused_weight(weight)


def _pattern(layer: fx.Node) -> LayerPattern:
    """The longest pattern that starts with a layer."""
    total = residual = last = activation = None
    end = _only_reader(layer)
    if end is not None and end.target is aten.add.Tensor and (other := _summand(end, layer)) is not None:
        total, residual = end, other
        end = _only_reader(total)
    if end is not None and end.target in ACTIVATIONS:
        activation = ACTIVATIONS[end.target](end)
        last = end if activation is not None else None
    while _something_changes(layer, last or total or layer):
        if last is not None:
            last = activation = None
        else:
            total = residual = None
    return LayerPattern(layer, total, residual, last, activation)


def _only_reader(node: fx.Node) -> fx.Node | None:
    """The op that is a value's only reader, and reads it once."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    return reader if reader.op == "call_function" and sum(a is node for a in reader.args) == 1 else None


def _summand(total: fx.Node, layer: fx.Node) -> fx.Node | None:
    """What a sum adds to a layer's result, if that is of the same form."""
    other = total.args[1] if total.args[0] is layer else total.args[0]
    if total.kwargs or not isinstance(other, fx.Node) or not same_form(layer, other):
        return None
    return other


def _something_changes(start: fx.Node, end: fx.Node) -> bool:
    """Whether an op between two nodes changes what it reads."""
    node = start
    while node is not end:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return True
        node = node.next
    return False


def _is_image_convolution(node: fx.Node) -> bool:
    """Whether a node is a convolution of a batch of images."""
    if node.target is not aten.conv2d.default or node.kwargs:
        return False
    image = node.args[0].meta.get("val")  # type: ignore[union-attr]
    return isinstance(image, torch.Tensor) and image.dim() == 4


def _window(conv: fx.Node) -> list[Any]:
    """Stride, padding, dilation and groups of a convolution, with a number per dimension."""
    given = [*conv.args, *_DEFAULTS[len(conv.args) - 2 :]][3:]
    return [[n[0], n[0]] if isinstance(n, list | tuple) and len(n) == 1 else n for n in given]


def _bias(layer: fx.Node) -> Any:
    return layer.args[2] if len(layer.args) > 2 else None


class CudnnKernels:
    """cuDNN's: `relu(conv2d(x) [+ residual])`. Where it has none, plain kernels compute the fused op."""

    def takes(self, model: FxModel, layer: fx.Node) -> bool:
        return _is_image_convolution(layer)

    def best(self, found: LayerPattern) -> LayerPattern | None:
        return found if found.activation == RELU else None

    def call(self, model: FxModel, pattern: LayerPattern) -> tuple[Any, tuple[Any, ...]]:
        x, weight = pattern.layer.args[:2]
        rest = (_bias(pattern.layer), *_window(pattern.layer))
        if pattern.residual is None:
            return conv_relu, (x, weight, *rest)
        return conv_add_relu, (x, weight, pattern.residual, *rest)


class OneDnnKernels:
    """oneDNN's, with packed weights: `activation(layer(x))`, `layer(x) + residual`, and `relu(conv2d(x) + residual)`.

    Convolutions compute channels last, whatever comes in.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], symbols: Sequence[Mapping[str, int]]) -> None:
        """Weights of a model are packed for the shapes that these values of the symbols give."""
        self._symbols = symbols
        self._tied: dict[str, tuple[Any, ...]] = {
            name: (plain.data_ptr(), plain.shape, plain.stride(), plain.dtype)
            for name, plain in weights.items()
            if not packing.is_packed(plain)
        }
        """What tied weights have in common, by name: plain weights are released as they are packed."""
        self._packed: dict[tuple[Any, ...], torch.Tensor] = {}
        """By what identifies a plain weight and its use: tied weights stay tied."""

    def takes(self, model: FxModel, layer: fx.Node) -> bool:
        weight = model.weight_of(layer.args[1]) if len(layer.args) > 1 else None
        if weight is None or layer.kwargs or packing.is_packed(weight) or not packing.supports(weight.dtype):
            return False
        if _bias(layer) is not None and model.weight_of(_bias(layer)) is None:
            return False
        readers = list(layer.args[1].users)  # type: ignore[union-attr]
        sizes = [size for reader in readers for size in self._sizes(reader)]
        if not sizes or any(reader.target is not layer.target for reader in readers):
            return False
        if layer.target is aten.linear.default:
            return min(map(_rows, sizes)) * weight.numel() >= LEAST_MULTIPLICATIONS
        return all(_is_image_convolution(r) and _window(r) == _window(layer) for r in readers)

    def best(self, found: LayerPattern) -> LayerPattern | None:
        layer = found.layer
        if found.total is None:
            return found
        with_relu = found.activation in (None, RELU) and layer.target is aten.conv2d.default
        return found if with_relu else LayerPattern(layer, found.total, found.residual)

    def call(self, model: FxModel, pattern: LayerPattern) -> tuple[Any, tuple[Any, ...]]:
        layer, residual, activation = pattern.layer, pattern.residual, pattern.activation
        x, weight = layer.args[0], self._weight(model, layer)
        unary = ("none", [], "") if activation is None else _words(activation)
        if layer.target is aten.linear.default:
            if residual is None:
                return packing.LINEAR, (x, weight, _bias(layer), *unary)
            return packing.LINEAR_SUM, (x, residual, weight, _bias(layer), "add")
        stride, padding, dilation, groups = _window(layer)
        rest = (weight, _bias(layer), padding, stride, dilation, groups)
        if residual is None:
            return packing.CONVOLUTION, (x, *rest, *unary)
        after = (None, [], None) if activation is None else _words(activation)
        return packing.CONVOLUTION_SUM, (x, residual, *rest, "add", 1.0, *after)

    def _sizes(self, layer: fx.Node) -> list[tuple[int, ...]]:
        """The sizes of a layer's input in each shape; () where export does not tell."""
        value = layer.args[0].meta.get("val") if isinstance(layer.args[0], fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return []
        return [tuple(_at(d, symbols) for d in value.shape) for symbols in self._symbols]

    def _weight(self, model: FxModel, layer: fx.Node) -> fx.Node:
        """A placeholder of the packed weight."""
        node = layer.args[1]
        assert isinstance(node, fx.Node)
        plain = model.weights[node.name]
        window = None if layer.target is aten.linear.default else _window(layer)
        key = (*self._tied[node.name], str(window))
        if key not in self._packed:
            sizes = self._sizes(layer)
            if window is None:
                packed = packing.pack_linear(plain, [_rows(size) for size in sizes])
            else:
                stride, padding, dilation, groups = window
                packed = packing.pack_convolution(plain, padding, stride, dilation, groups, sizes)
            self._packed[key] = model.in_file(packed)
        return model.add_weight(f"{node.name}_packed", self._packed[key])


def _words(activation: Activation) -> tuple[str, list[float], str]:
    return activation.name, list(activation.scalars), activation.algorithm


def _rows(size: tuple[int, ...]) -> int:
    """How many vectors a linear layer gets."""
    return int(torch.Size(size[:-1]).numel())


def _at(dim: Any, symbols: Mapping[str, int]) -> int:
    """A dimension, given the values of the symbols in it."""
    if isinstance(dim, int):
        return dim
    expression = dim.node.expr
    return int(expression.subs({s: symbols[str(s)] for s in expression.free_symbols}))
