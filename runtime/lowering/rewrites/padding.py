"""Moves zero padding before convolutions into the convolutions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.nn.functional import pad

from cohabit.runtime.lowering.model import FxModel

aten = torch.ops.aten

_DIMENSIONS: dict[Any, int] = {aten.conv1d.default: 1, aten.conv2d.default: 2}
_DEFAULTS: tuple[Any, ...] = (None, [1], [0], [1], 1)
"""Defaults of the arguments after the weight: bias, stride, padding, dilation, groups."""
_MOST_GROWTH = 2.0
"""Maximum growth of a depthwise kernel. Its zeros cost less time than a copy of the image."""


def absorb_padding(model: FxModel) -> None:
    """Let convolutions add the zeros that an op before them adds: same results, one image less.

    Convolutions pad both sides of a dimension equally. For unequal padding, a depthwise convolution pads by the larger
    number, and its kernel gets zeros on the other side.
    """
    for node in list(model.graph.nodes):
        amounts = _zeros(node)
        if amounts is None:
            continue
        for conv in list(node.users):
            _absorb(model, conv, node, amounts)
    model.graph.eliminate_dead_code()


def _zeros(node: Any) -> Sequence[int] | None:
    """Return the zeros that an op adds, in torch's order: both sides per dimension, the last one first; else None."""
    if node.target is aten.constant_pad_nd.default:
        mode, value = "constant", (*node.args, 0)[2]
    elif node.target is aten.pad.default:
        given: list[Any] = [*node.args[2:], *("constant", None)[len(node.args) - 2 :]]
        mode, value = given
    else:
        return None
    amounts: Any = node.args[1]
    plain = all(isinstance(n, int) and n >= 0 for n in amounts) and not node.kwargs
    return amounts if plain and mode == "constant" and not value else None


def _absorb(model: FxModel, conv: Any, padded: fx.Node, amounts: Sequence[int]) -> None:
    """Move an op's padding into a convolution that reads it, if the convolution supports it."""
    dims = _DIMENSIONS.get(conv.target)
    weight = model.weight_of(conv.args[1]) if dims is not None else None
    if weight is None or conv.args[0] is not padded or conv.kwargs or len(amounts) > 2 * weight.dim() - 4:
        return
    window: list[Any] = [*conv.args[2:], *_DEFAULTS[len(conv.args) - 2 :]]
    bias, stride, padding, dilation, groups = window
    own, steps = ([*n] * (weight.dim() - 2 if len(n) == 1 else 1) for n in (padding, dilation))
    added = [*amounts, *[0] * (2 * len(own) - len(amounts))]
    sides = [(added[2 * n], added[2 * n + 1]) for n in reversed(range(len(own)))]
    zeros = [(max(side) - side[0], max(side) - side[1]) for side in sides]
    if any(map(any, zeros)):
        if weight.shape[1] != 1 or any(n % step for pair, step in zip(zeros, steps, strict=True) for n in pair):
            return
        kernel = pad(weight, [n // steps[k] for k in reversed(range(len(zeros))) for n in zeros[k]])
        if kernel.nbytes > _MOST_GROWTH * weight.nbytes:
            return
        old = conv.args[1]
        conv.args = (conv.args[0], model.add_weight(f"{old.name}_padded", model.in_file(kernel)), *conv.args[2:])
        model.drop_unused_weight(old)
    total = [n + max(side) for n, side in zip(own, sides, strict=True)]
    conv.args = (padded.args[0], conv.args[1], bias, stride, total, dilation, groups)
