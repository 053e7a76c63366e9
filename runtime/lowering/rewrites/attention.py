"""Attention of short or growing sequences, and the ops before it: projections of one input, and rotary embeddings."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from cohabit.runtime.lowering.fused_ops import joined_attention, rotate, short_attention
from cohabit.runtime.lowering.model import FxModel, is_linear_layer, same_shape_and_dtype

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_KEEP_LAST = (
    *_RESHAPES,
    aten.slice.Tensor,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.clone.default,
    aten.contiguous.default,
)
"""Operators that keep each vector of the last dimension, if its size stays the same."""
_FLASH_TYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
_MOST_LENGTH, _LANES = 128, 16
"""torch's kernel computes the remainder of a row of scores, after whole groups of 16, one by one. If at least half of
16 remain, plain products take 15 to 30 % less time, up to about this length."""


def join_projections(model: FxModel, most_bytes: int) -> None:
    """Join linear layers of one input, whose results are only reshaped, into one layer of limited size.

    Queries, keys and values become views of its result. Entering a kernel takes as long as a small product.
    """
    by_input: dict[Any, list[Any]] = defaultdict(list)
    nodes: list[Any] = list(model.graph.nodes)
    for node in nodes:
        if is_linear_layer(model, node) and _only_reshaped(node):
            weight, bias = model.weight_of(node.args[1]), node.args[2] if len(node.args) > 2 else None
            if (
                weight is None
                or len(node.args[1].users) > 1
                or (bias is not None and model.weight_of(bias) is None)
            ):
                continue
            # Layers with and without a bias cannot be joined.
            by_input[node.args[0], bias is None, weight.dtype].append(node)
    # Join the weights of each group, and let the old results be slices of the new one.
    for (x, plain, _), layers in by_input.items():
        given = [[model.weights[n.name] for n in layer.args[1:]] for layer in layers]
        if len(layers) < 2 or sum(weight.nbytes for weight, *_ in given) > most_bytes:
            continue
        joined = [
            model.add_weight(f"{layers[0].args[1].name}_joined", model.in_file(torch.cat([g[0] for g in given]))),
            *([] if plain else [model.add_weight(f"{layers[0].name}_bias", torch.cat([g[1] for g in given]))]),
        ]
        call = model.graph.call_function
        with model.graph.inserting_before(layers[0]):
            whole = call(aten.linear.default, (x, *joined))
            start = 0
            for layer, (weight, *_) in zip(layers, given, strict=True):
                part = call(aten.slice.Tensor, (whole, -1, start, start + len(weight)))
                part.meta, start = dict(layer.meta), start + len(weight)
                layer.replace_all_uses_with(part)
                for user in part.users:
                    user.target = aten.reshape.default
        value = layers[0].meta["val"]
        whole.meta["val"] = value.new_empty((*value.shape[:-1], start))
        for layer in layers:
            read = layer.args[1:]
            model.graph.erase_node(layer)
            for old in read:
                model.drop_unused_weight(old)


def _only_reshaped(node: fx.Node) -> bool:
    return bool(node.users) and all(user.target in _RESHAPES for user in node.users)


def rotate_pairs(model: FxModel) -> None:
    """Compute rotary embeddings as one multiplication of complex numbers.

    A model's rotation pairs the first half of each head with the second. Rows of the query and key projections are
    reordered so that pairs are adjacent, which changes no product of a query and a key.
    """
    tables: dict[Any, fx.Node] = {}
    nodes: list[Any] = list(model.graph.nodes)
    for node in nodes:
        if node.target is not aten.scaled_dot_product_attention.default:
            continue
        query, key = (_rotation(model, _origin(operand)) for operand in node.args[:2])
        if query is None or key is None:
            continue
        for rotation in (query, key):
            layer, angles = rotation.heads.args[0], (rotation.cosines, rotation.sines)
            layer.args = (layer.args[0], *(_paired(model, old, rotation.size) for old in layer.args[1:]))
            if angles not in tables:
                cos, sin = (model.weights[n.name].view(-1, rotation.size) for n in angles)
                table = torch.stack([cos, sin], -1)[:, None, : rotation.size // 2]
                tables[angles] = model.add_weight("rotation", table.contiguous())
            with model.graph.inserting_before(rotation.total):
                pairs = model.graph.call_function(rotate, (rotation.heads, tables[angles]))
                turned = model.graph.call_function(aten.transpose.int, (pairs, 1, 2))
            turned.meta = dict(rotation.total.meta)
            rotation.total.replace_all_uses_with(turned)
    model.graph.eliminate_dead_code()


def _paired(model: FxModel, old: fx.Node | None, size: int) -> fx.Node | None:
    """Return a weight or bias with the rows of each head reordered: both of a pair, then both of the next."""
    if old is None:
        return None
    weight = model.weights[old.name]
    rows = weight.reshape(-1, 2, size // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    new = model.add_weight(f"{old.name}_pairs", model.in_file(rows))
    old.replace_all_uses_with(new)
    model.drop_unused_weight(old)
    return new


def _origin(operand: Any) -> Any:
    """Return the node that an operand's vectors come from, through views that nothing else reads."""
    while operand.target in _KEEP_LAST and len(operand.users) == 1:
        source = operand.args[0]
        if not isinstance(source, fx.Node) or str(_last(source)) != str(_last(operand)):
            break
        operand = source
    return operand


def _last(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.shape[-1] if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True, slots=True)
class _Rotation:
    """A rotation of a linear layer's result."""

    total: fx.Node
    """The rotation's last op."""
    heads: Any
    """The layer's result as [batch, length, heads, size]."""
    size: int
    cosines: fx.Node
    sines: fx.Node


def _rotation(model: FxModel, total: Any) -> _Rotation | None:
    """Return the rotation that ends with this op; None for any other op, or if a layer's rows cannot be reordered."""
    if total.target is not aten.add.Tensor or total.kwargs or len(total.users) != 1:
        return None
    if not all(isinstance(n, fx.Node) and n.target is aten.mul.Tensor and len(n.users) == 1 for n in total.args):
        return None
    (x, cosines), (turned, sines) = (n.args for n in total.args)
    if not isinstance(x, fx.Node) or x.target is not aten.transpose.int or x.args[1:] != (1, 2):
        return None
    heads, size = cast(Any, x.args[0]), _last(x)
    layer = heads.args[0] if heads.target in _RESHAPES else None
    if layer is None or not is_linear_layer(model, layer) or not isinstance(size, int):
        return None
    read = [n for n in layer.args[1:] if n is not None]
    alone = all(len(n.users) == 1 for n in (layer, heads, *read))
    if not alone or any(model.weight_of(n) is None for n in read) or not _is_turned(turned, x, size):
        return None
    for angles in (model.weight_of(cosines), model.weight_of(sines)):
        if angles is None or angles.dim() != 4 or angles.shape[:2] != (1, 1) or angles.shape[3] != size:
            return None
        if angles.dtype is not torch.float32 or not torch.equal(*angles.chunk(2, -1)):
            return None
    return _Rotation(total, heads, size, cosines, sines)


def _is_turned(turned: Any, x: fx.Node, size: int) -> bool:
    """Whether a value is each vector's negated second half, then its first half, and `x` has no other readers."""
    parts = turned.args[0] if isinstance(turned, fx.Node) and turned.target is aten.cat.default else ()
    joined: Any = parts
    if len(joined) != 2 or turned.args[1:] not in ((-1,), (3,)) or len(turned.users) != 1 or size % 2:
        return False
    negated, first = joined
    second = negated.args[0] if negated.target is aten.neg.default else None
    if second is None or not all(n.target is aten.slice.Tensor and n.args[1] in (-1, 3) for n in (first, second)):
        return False
    bounds = [(part.args[0], part.args[2] or 0, min(part.args[3], size)) for part in (first, second)]
    return bounds == [(x, 0, size // 2), (x, size // 2, size)] and len(x.users) == 3


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
