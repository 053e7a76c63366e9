"""Fuses convolutions with their residual sum and ReLU: `relu(conv2d(x) [+ residual])`.

The fused op stands where the ReLU stood, so whatever lies between must not change its operands: a pattern with an op
in between that changes anything in place is left alone.
"""

from typing import Any

import torch
from torch import fx

from runtime.lowering.fused_ops import conv_add_relu, conv_relu
from runtime.lowering.model import FxModel, same_form

aten = torch.ops.aten

_DEFAULTS = (None, [1, 1], [0, 0], [1, 1], 1)
"""Of a 2-d convolution's arguments after the weight: bias, stride, padding, dilation, groups."""


def fuse_convolutions(model: FxModel) -> None:
    """Replace each convolution, residual sum and ReLU that nothing else reads by one op.

    Runs after the rewrite that makes in-place ops plain, and before the one that makes plain ops in-place.
    """
    places = {node: n for n, node in enumerate(model.graph.nodes)}
    for relu in list(model.graph.nodes):
        if relu.op == "call_function" and relu.target is aten.relu.default:
            _fuse(model, relu, places)


def _fuse(model: FxModel, relu: fx.Node, places: dict[fx.Node, int]) -> None:
    below = relu.args[0]
    if not isinstance(below, fx.Node) or not _read_once(below, relu):
        return
    conv: fx.Node | None = below
    residual: fx.Node | None = None
    if below.target is aten.add.Tensor:
        conv, residual = _summands(below, places)
    if conv is None or not _fusable(conv) or _something_changes(conv, relu):
        return
    x, weight, bias, *rest = _arguments(conv)
    with model.graph.inserting_before(relu):
        if residual is None:
            fused = model.graph.call_function(conv_relu, (x, weight, bias, *rest))
        else:
            fused = model.graph.call_function(conv_add_relu, (x, weight, residual, bias, *rest))
    fused.meta = dict(relu.meta)
    places[fused] = places[relu]
    relu.replace_all_uses_with(fused)
    for node in dict.fromkeys((relu, below, conv)):
        model.graph.erase_node(node)


def _summands(total: fx.Node, places: dict[fx.Node, int]) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
    """The convolution and the residual of a sum. Of two convolutions the later one: the other is computed by then."""
    first, second = total.args
    if total.kwargs or not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None, None
    if not same_form(first, second):
        return None, None
    pairs = [(c, r) for c, r in ((first, second), (second, first)) if _fusable(c) and _read_once(c, total)]
    return max(pairs, key=lambda pair: places[pair[0]], default=(None, None))


def _fusable(node: fx.Node) -> bool:
    """Whether a node is a convolution of images in a batch."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and node.target is aten.conv2d.default
        and not node.kwargs
        and isinstance(value, torch.Tensor)
        and value.dim() == 4
    )


def _read_once(operand: fx.Node, reader: fx.Node) -> bool:
    """Whether this node is the value's only reader, and reads it once."""
    return len(operand.users) == 1 and sum(a is operand for a in reader.args) == 1


def _something_changes(start: fx.Node, end: fx.Node) -> bool:
    """Whether an op between two nodes changes what it reads."""
    node = start
    while node is not end:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return True
        node = node.next
    return False


def _arguments(conv: fx.Node) -> list[Any]:
    """All seven arguments of a convolution, with a number per dimension."""
    given = [*conv.args, *_DEFAULTS[len(conv.args) - 2 :]]
    for position in (3, 4, 5):
        sizes = given[position]
        if isinstance(sizes, list | tuple) and len(sizes) == 1:
            given[position] = [sizes[0], sizes[0]]
    return given
