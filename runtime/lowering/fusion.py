"""Fusion: replaces a convolution or linear layer, and the sum and activation function after it, by one op.

One pass serves all kernel libraries. `ACTIVATIONS` lists the activation functions. `LayerKernels` says which patterns a
library computes. The fused op takes the position of the pattern's last op.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.fused_ops import (
    LEAST_BY_COLUMNS,
    conv1d,
    conv1d_add,
    conv1x1,
    conv1x1_add,
    conv_add_relu,
    conv_pixel,
    conv_relu,
    linear_by_columns,
    linear_transposed,
)
from cohabit.runtime.lowering.model import FxModel, is_linear_layer, same_shape_and_dtype
from cohabit.runtime.lowering.rewrites.linear_forms import Form, LayerShape, fastest

aten = torch.ops.aten

_DEFAULTS = (None, [1, 1], [0, 0], [1, 1], 1)
"""Defaults of a 2-d convolution's arguments after the weight: bias, stride, padding, dilation, groups."""
LEAST_MULTIPLICATIONS = 1 << 20
"""A linear layer with fewer multiplications than this in its smallest planned shape is not packed: a call of oneDNN
takes ten times as long as a small product."""


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function as oneDNN's operators name it."""

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
"""Operators that fused kernels compute together with the layer before them."""


_HIDES_NAN = ("relu", "hardtanh", "hardsigmoid")
"""Activation functions that oneDNN computes with min and max, which turn a NaN into a bound."""


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """A layer and the ops after it; intermediate results have no other reader."""

    layer: fx.Node
    total: fx.Node | None = None
    residual: fx.Node | None = None
    """The other summand of `total`."""
    last: fx.Node | None = None
    activation: Activation | None = None
    """The function that `last` computes."""

    @property
    def nodes(self) -> list[fx.Node]:
        return [node for node in (self.layer, self.total, self.last) if node is not None]


@dataclass(frozen=True, slots=True)
class FusedCall:
    """The op that replaces a pattern."""

    pattern: LayerPattern
    target: Any
    args: tuple[Any, ...]


class LayerKernels(Protocol):
    """The fused kernels of one library."""

    def takes(self, model: FxModel, layer: fx.Node) -> bool:
        """Whether there are kernels for a layer."""
        ...

    def fused(self, model: FxModel, found: LayerPattern) -> FusedCall | None:
        """Return a call that computes a pattern or a prefix of it; None if fusing does not pay."""
        ...


def fuse(model: FxModel, kernels: LayerKernels) -> None:
    """Replace each pattern by one op, if nothing else reads its intermediate results.

    Iterates backwards, so that a sum of two layers is fused into the later one: the other's result is ready by then.
    """
    for layer in reversed(list(model.graph.nodes)):
        if layer.op != "call_function" or not kernels.takes(model, layer):
            continue
        call = kernels.fused(model, _pattern(layer))
        if call is None:
            continue
        weight, nodes = layer.args[1], call.pattern.nodes
        with model.graph.inserting_before(nodes[-1]):
            fused = model.graph.call_function(call.target, call.args)
        fused.meta = dict(nodes[-1].meta)
        nodes[-1].replace_all_uses_with(fused)
        for node in reversed(nodes):
            model.graph.erase_node(node)
        model.drop_unused_weight(weight)


def _pattern(layer: fx.Node) -> LayerPattern:
    """Return the longest pattern that starts with a layer."""
    total = residual = last = activation = None
    end = _only_reader(layer)
    if end is not None and end.target is aten.add.Tensor and (other := _summand(end, layer)) is not None:
        total, residual = end, other
        end = _only_reader(total)
    if end is not None and end.target in ACTIVATIONS:
        activation = ACTIVATIONS[end.target](end)
        last = end if activation is not None else None
    return LayerPattern(layer, total, residual, last, activation)


def _only_reader(node: fx.Node) -> fx.Node | None:
    """Return the only op that reads a value, if it reads it once; else None."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    return reader if reader.op == "call_function" and sum(a is node for a in reader.args) == 1 else None


def _summand(total: fx.Node, layer: fx.Node) -> fx.Node | None:
    """Return the operand that a sum adds to a layer's result, if it has the same shape and dtype."""
    other = total.args[1] if total.args[0] is layer else total.args[0]
    if total.kwargs or not isinstance(other, fx.Node) or not same_shape_and_dtype(layer, other):
        return None
    return other


def _is_signal_convolution(node: fx.Node) -> bool:
    """Whether a node is a batched 1-d convolution."""
    if node.target is not aten.conv1d.default or node.kwargs:
        return False
    signal = node.args[0].meta.get("val")  # type: ignore[union-attr]
    return isinstance(signal, torch.Tensor) and signal.dim() == 3


def _is_image_convolution(node: fx.Node) -> bool:
    """Whether a node is a batched 2-d convolution."""
    if node.target is not aten.conv2d.default or node.kwargs:
        return False
    image = node.args[0].meta.get("val")  # type: ignore[union-attr]
    return isinstance(image, torch.Tensor) and image.dim() == 4


def _window(conv: fx.Node) -> list[Any]:
    """Return stride, padding, dilation and groups as for a 2-d convolution, with a number per dimension."""
    given = [*conv.args, *_DEFAULTS[len(conv.args) - 2 :]][3:]
    if conv.target is aten.conv1d.default:
        stride, padding, dilation = (n[-1] if isinstance(n, list | tuple) else n for n in given[:3])
        return [[1, stride], [0, padding], [1, dilation], given[3]]
    return [[n[0], n[0]] if isinstance(n, list | tuple) and len(n) == 1 else n for n in given]


def _onednn_window(conv: fx.Node) -> packing.Window:
    stride, padding, dilation, groups = _window(conv)
    return padding, stride, dilation, groups


def _bias(layer: fx.Node) -> Any:
    return layer.args[2] if len(layer.args) > 2 else None


class CudnnKernels:
    """cuDNN's fused kernel: `relu(conv2d(x) [+ residual])`. If cuDNN has none for an op, plain kernels compute it."""

    def takes(self, model: FxModel, layer: fx.Node) -> bool:
        return _is_image_convolution(layer)

    def fused(self, model: FxModel, found: LayerPattern) -> FusedCall | None:
        if found.activation != RELU:
            return None
        x, weight = found.layer.args[:2]
        rest = (_bias(found.layer), *_window(found.layer))
        if found.residual is None:
            return FusedCall(found, conv_relu, (x, weight, *rest))
        return FusedCall(found, conv_add_relu, (x, weight, found.residual, *rest))


class OneDnnKernels:
    """oneDNN's fused kernels on packed weights: `activation(layer(x))` if NaN propagates, `layer(x) + residual`.

    Convolutions use the channels-last layout, whatever their input's layout. If a weight's layout is not the one that
    oneDNN expects for a shape, oneDNN converts the weight in every call. Therefore a 1x1 convolution whose planned
    shapes need several layouts runs as a linear layer, which has one layout for all shapes.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], symbols: Sequence[Mapping[str, int]], *, measures: bool
    ) -> None:
        """`symbols` has the values of the dynamic sizes in each planned shape. Weights are packed for these shapes.

        `measures` says whether the fastest form and layout of a weight is measured. Otherwise, both follow from the
        shapes.
        """
        self._symbols = symbols
        self._measures = measures
        self._identities: dict[str, tuple[Any, ...]] = {
            name: (plain.data_ptr(), plain.shape, plain.stride(), plain.dtype)
            for name, plain in weights.items()
            if not packing.is_packed(plain)
        }
        """Identity of each plain weight, by name; the weights themselves are released once packed."""
        self._packed: dict[tuple[Any, ...], torch.Tensor] = {}
        """By a plain weight's identity and its use, so that tied weights stay tied."""

    def takes(self, model: FxModel, layer: fx.Node) -> bool:
        weight = model.weight_of(layer.args[1]) if len(layer.args) > 1 else None
        if weight is None or layer.kwargs or packing.is_packed(weight) or not packing.supports(weight.dtype):
            return False
        if _bias(layer) is not None and model.weight_of(_bias(layer)) is None:
            return False
        if layer.target is aten.linear.default and not is_linear_layer(model, layer):
            return False
        readers = list(layer.args[1].users)  # type: ignore[union-attr]
        sizes = [size for reader in readers for size in self._sizes(reader)]
        if not sizes or any(reader.target is not layer.target for reader in readers):
            return False
        if layer.target is aten.linear.default:
            return True
        convolves = _is_signal_convolution if layer.target is aten.conv1d.default else _is_image_convolution
        return all(convolves(r) and _window(r) == _window(layer) for r in readers)

    def fused(self, model: FxModel, found: LayerPattern) -> FusedCall | None:
        if found.residual is not None or (found.activation is not None and found.activation.name in _HIDES_NAN):
            found = LayerPattern(found.layer, found.total, found.residual)
        if found.layer.target is aten.linear.default:
            return self._linear(model, found, packing.LINEAR, packing.LINEAR_SUM)
        if self._has_one_pixel(model, found.layer):
            return FusedCall(LayerPattern(found.layer), conv_pixel, (*found.layer.args[:2], _bias(found.layer)))
        if _is_1x1(model, found.layer) and (found.total is None or self._layouts(model, found.layer) > 1):
            return self._linear(model, found, conv1x1, conv1x1_add)
        return self._convolution(model, found)

    def _linear(self, model: FxModel, found: LayerPattern, plain: Any, add: Any) -> FusedCall | None:
        layer, x, bias = found.layer, found.layer.args[0], _bias(found.layer)
        channels = 1 if layer.target is aten.conv2d.default else -1
        rows = [math.prod(size) // size[channels] for size in self._sizes(layer)]
        if layer.target is aten.linear.default:
            form = self._form(model, found, rows)
            if form == "plain":
                return self._plain(model, layer)
            if form == "transposed":
                transposed = self._packed_once(model, layer, "transposed", lambda w: w.t().contiguous())
                return FusedCall(LayerPattern(layer), linear_transposed, (x, transposed, bias))
        weight = self._packed_once(model, layer, "linear", lambda w: packing.pack_linear(w.flatten(1), rows))
        if found.total is None:
            return FusedCall(found, plain, (x, weight, bias, *_activation_arguments(found.activation)))
        return FusedCall(found, add, (x, found.residual, weight, bias, "add"))

    def _plain(self, model: FxModel, layer: fx.Node) -> FusedCall | None:
        """Return a layer's call on its weight as exported; None if it stays as it is."""
        x, weight, bias = layer.args[0], layer.args[1], _bias(layer)
        own = model.weight_of(weight)
        if own is None or own.numel() < LEAST_BY_COLUMNS:
            return None
        return FusedCall(LayerPattern(layer), linear_by_columns, (x, weight, bias))

    def _form(self, model: FxModel, found: LayerPattern, rows: Sequence[int]) -> Form:
        """Return the fastest form of a linear layer on this machine, packed or not."""
        weight, activation = model.weight_of(found.layer.args[1]), found.activation
        assert weight is not None
        packs = min(rows) * weight.numel() >= LEAST_MULTIPLICATIONS
        if not self._measures or weight.dtype is not torch.float32 or not weight.numel():
            return "packed" if packs else "plain"
        batch = model.batch_symbol
        batches = [1 if batch is None else symbols[batch] for symbols in self._symbols]
        lengths = {number: max(number // own, 1) for number, own in sorted(zip(rows, batches, strict=True))}
        shape = LayerShape(
            inputs=weight.shape[1],
            outputs=weight.shape[0],
            rows=tuple(lengths),
            lengths=tuple(lengths.values()),
            has_bias=_bias(found.layer) is not None,
            fused=None if activation is None else (activation.name, activation.scalars, activation.algorithm),
            adds=found.total is not None,
            packs=packs,
            threads=torch.get_num_threads(),
        )
        return fastest(shape)

    def _convolution(self, model: FxModel, found: LayerPattern) -> FusedCall:
        layer, residual = found.layer, found.residual
        x, window, sizes = layer.args[0], _onednn_window(layer), self._sizes(layer)
        plain, add = packing.CONVOLUTION, packing.CONVOLUTION_SUM
        if layer.target is aten.conv1d.default:
            plain, add = conv1d, conv1d_add
            sizes = [(b, c, 1, length) for b, c, length in sizes]

        def pack(weight: torch.Tensor) -> torch.Tensor:
            image = weight.unsqueeze(2) if weight.dim() == 3 else weight
            if self._measures:
                return packing.pack_convolution(image, window, sizes)
            return packing.convolution_layouts(image, window, sizes)[0]

        weight = self._packed_once(model, layer, str(window), pack)
        rest = (weight, _bias(layer), *window)
        if residual is None:
            return FusedCall(found, plain, (x, *rest, *_activation_arguments(found.activation)))
        return FusedCall(found, add, (x, residual, *rest, "add", 1.0, None, [], None))

    def _has_one_pixel(self, model: FxModel, layer: fx.Node) -> bool:
        """Whether a 1x1 convolution is a small matrix product: one pixel per image, as in a squeeze-and-excite gate."""
        weight = model.weight_of(layer.args[1])
        assert weight is not None
        pixels = all(
            size[2:] == (1, 1) and size[0] * weight.numel() < LEAST_MULTIPLICATIONS for size in self._sizes(layer)
        )
        return pixels and _is_1x1(model, layer)

    def _sizes(self, layer: fx.Node) -> list[tuple[int, ...]]:
        return sizes_of(layer, self._symbols)

    def _layouts(self, model: FxModel, conv: fx.Node) -> int:
        """Return the number of layouts that oneDNN wants for a convolution's weight in the planned shapes."""
        weight = model.weight_of(conv.args[1])
        assert weight is not None
        return len(packing.convolution_layouts(weight, _onednn_window(conv), self._sizes(conv)))

    def _packed_once(
        self, model: FxModel, layer: fx.Node, use: str, pack: Callable[[torch.Tensor], torch.Tensor]
    ) -> fx.Node:
        """Return a placeholder of the packed weight. Tied weights are packed once per use."""
        node = layer.args[1]
        assert isinstance(node, fx.Node)
        key = (*self._identities[node.name], use)
        if key not in self._packed:
            self._packed[key] = model.in_file(pack(model.weights[node.name]))
        return model.add_weight(f"{node.name}_packed", self._packed[key])


def _activation_arguments(activation: Activation | None) -> tuple[str, list[float], str]:
    """Return the arguments for an activation function in oneDNN's operators."""
    return (
        ("none", [], "")
        if activation is None
        else (activation.name, list(activation.scalars), activation.algorithm)
    )


def _is_1x1(model: FxModel, conv: fx.Node) -> bool:
    """Whether a convolution is pointwise, which is a linear layer in channels-last layout."""
    weight = model.weight_of(conv.args[1])
    return weight is not None and weight.shape[2:] == (1, 1) and _window(conv) == [[1, 1], [0, 0], [1, 1], 1]


def sizes_of(layer: fx.Node, shapes: Sequence[Mapping[str, int]]) -> list[tuple[int, ...]]:
    """Return the size of a layer's input in each shape, given by its symbols; empty if the export did not record it."""
    value = layer.args[0].meta.get("val") if isinstance(layer.args[0], fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return []
    return [tuple(_size_of(d, symbols) for d in value.shape) for symbols in shapes]


def _size_of(dim: Any, symbols: Mapping[str, int]) -> int:
    """Return a dimension, given the values of its symbols."""
    if isinstance(dim, int):
        return dim
    expression = dim.node.expr
    return int(expression.subs({s: symbols[str(s)] for s in expression.free_symbols}))
