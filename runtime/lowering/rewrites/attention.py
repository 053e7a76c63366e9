"""Attention of short or growing sequences."""

from typing import Any

import torch
from torch import fx

from cohabit.runtime.lowering.fused_ops import joined_attention, short_attention
from cohabit.runtime.lowering.model import FxModel, same_shape_and_dtype

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_FLASH_TYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
_MOST_LENGTH, _LANES = 128, 16
"""torch's kernel computes the remainder of a row of scores, after whole groups of 16, one by one. If at least half of
16 remain, plain products take 15 to 30 % less time, up to about this length."""


def attend_plainly(model: FxModel) -> None:
    """Compute attention as plain products if its fixed length is short and leaves at least half a vector over."""
    nodes: list[Any] = list(model.graph.nodes)
    for node in nodes:
        plain = node.target is aten.scaled_dot_product_attention.default and len(node.args) == 3
        if not plain or not node.kwargs.keys() <= {"scale"}:
            continue
        shape = node.args[0].meta["val"].shape
        alike = all(same_shape_and_dtype(node.args[0], other) for other in node.args[1:])
        if not alike or len(shape) != 4 or not all(isinstance(n, int) for n in shape[1:]):
            continue
        if shape[2] <= _MOST_LENGTH and shape[2] % _LANES >= _LANES // 2:
            scale = node.kwargs.get("scale")
            node.args = (*node.args, shape[3] ** -0.5 if scale is None else scale)
            node.target, node.kwargs = short_attention, {}


def attend_in_parts(model: FxModel) -> None:
    """Compute attention without joining past keys and values with new ones, which copies all of them in every step."""
    nodes: list[Any] = list(model.graph.nodes)
    for node in nodes:
        if node.target is not aten.scaled_dot_product_attention.default or len(node.args) > 4:
            continue
        query, keys, values, mask = (*node.args, node.kwargs.get("attn_mask"))[:4]
        key_parts, value_parts = _joined_parts(keys), _joined_parts(values)
        if key_parts is None or value_parts is None or mask is None:
            continue
        operands = [part.meta["val"] for part in (query, mask, *key_parts, *value_parts)]
        if not node.kwargs.keys() <= {"attn_mask", "scale", "enable_gqa"} or any(t.dim() != 4 for t in operands):
            continue
        alike = (
            len({str(t.shape[3]) for t in (operands[0], *operands[2:])}) == len({t.dtype for t in operands}) == 1
        )
        whole = str(operands[1].shape[3]) == str(keys.meta["val"].shape[2])
        shared = str(operands[0].shape[1]) != str(operands[2].shape[1])
        if alike and whole and operands[0].dtype in _FLASH_TYPES and not (shared and operands[1].shape[1] != 1):
            (past_key, key), (past_value, value) = key_parts, value_parts
            node.args = (query, past_key, past_value, key, value, mask, node.kwargs.get("scale"))
            node.target, node.kwargs = joined_attention, {}
    model.graph.eliminate_dead_code()


def _joined_parts(operand: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return the two tensors that an operand joins along the third dimension, and may repeat for several heads each.

    None for any other operand, or if something else reads the joined tensor.
    """
    source = operand
    if source.target in _RESHAPES and (repeated := _repeated_heads(source)) is not None:
        source = repeated
    joined: Any = source.args[0] if source.target is aten.cat.default else ()
    if (
        len(joined) != 2
        or source.args[1:] not in ((2,), (-2,))
        or len(source.users) != 1
        or len(operand.users) != 1
    ):
        return None
    return joined[0], joined[1]


def _repeated_heads(whole: Any) -> Any:
    """Return what repeats as [batch, heads x times, length, size], each of its heads several times; None if nothing."""
    expanded: Any = whole.args[0]
    if expanded.target is aten.clone.default:
        expanded = expanded.args[0]
    if expanded.target is not aten.expand.default or expanded.args[0].target is not aten.unsqueeze.default:
        return None
    source, dim = expanded.args[0].args
    own, times, result = ([str(size) for size in node.meta["val"].shape] for node in (source, expanded, whole))
    same = len(own) == 4 and [*times[:2], *times[3:]] == own and [result[0], *result[2:]] == [own[0], *own[2:]]
    return source if dim == 2 and same else None
