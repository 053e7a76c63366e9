"""Linear layers that compute with weights in int8: which ones, and their ops.

A layer's weight is then int8 in the weights file, on the link and in memory: its copies are not decoded.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.encoding import int8_kernel
from cohabit.runtime.lowering.fused_ops import (
    conv1x1,
    conv1x1_add,
    conv1x1_int8,
    conv1x1_int8_add,
    linear_int8,
    linear_int8_add,
)
from cohabit.runtime.lowering.fusion import sizes_of
from cohabit.runtime.lowering.model import FxModel
from cohabit.runtime.lowering.rewrites.linear_forms import LayerShape, computes_in_int8

aten = torch.ops.aten
_LEAST_SCALE: Final = 1e-38

_INT8: dict[Any, Callable[..., torch.Tensor]] = {
    aten.linear.default: linear_int8,
    packing.LINEAR: linear_int8,
    packing.LINEAR_SUM: linear_int8_add,
    conv1x1: conv1x1_int8,
    conv1x1_add: conv1x1_int8_add,
}
"""The op with a weight in int8, by the op with a weight in float32."""
_SUMS = (packing.LINEAR_SUM, conv1x1_add)


def int8_layers(model: FxModel, symbols: Sequence[Mapping[str, int]]) -> frozenset[str]:
    """Return the names of float32 weights whose layers are fastest with the weight in int8, at these sizes."""
    nodes = [node for node in model.graph.nodes if node.op == "placeholder" and node.name in model.weights]
    return frozenset(
        node.name for node in nodes if node.users and all(_is_faster(model, node, r, symbols) for r in node.users)
    )


def _is_faster(model: FxModel, node: fx.Node, layer: fx.Node, symbols: Sequence[Mapping[str, int]]) -> bool:
    """Whether a reader of this weight is a layer that is faster with the weight in int8."""
    weight = model.weights[node.name]
    if layer.target not in _INT8 or layer.kwargs or weight.dtype is not torch.float32 or weight.dim() != 2:
        return False
    place = _place(layer)
    bias_node = (*layer.args, None)[place + 1]
    bias = model.weight_of(bias_node)
    if (
        layer.args[place] is not node
        or not int8_kernel.takes(*weight.shape)
        or (bias is None) != (bias_node is None)
    ):
        return False
    channels = 1 if layer.target in (conv1x1, conv1x1_add) else -1
    rows = {math.prod(size) // size[channels] for size in sizes_of(layer, symbols)}
    if not rows:
        return False
    fused: Any = layer.args[3:] if layer.target in (packing.LINEAR, conv1x1) else ("none",)
    shape = LayerShape(
        inputs=weight.shape[1],
        outputs=weight.shape[0],
        rows=tuple(sorted(rows)),
        lengths=(1,) * len(rows),  # all are of one batch
        has_bias=bias is not None,
        fused=None if fused[0] == "none" else (fused[0], tuple(fused[1]), fused[2]),
        adds=layer.target in _SUMS,
        packs=packing.is_packed(weight),
        threads=torch.get_num_threads(),
    )
    return computes_in_int8(shape)


def _place(layer: fx.Node) -> int:
    """Return the position of a layer's weight among its arguments: its inputs come before it, and its bias is next."""
    return 2 if layer.target in _SUMS else 1


def copied(model: FxModel) -> FxModel:
    """Return a model with a graph of its own and the same weights."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(model.graph, {}))
    return replace(model, graph=graph, weights=dict(model.weights), tables=dict(model.tables))


def compute_in_int8(model: FxModel, names: Collection[str]) -> None:
    """Replace layers with these weights by layers with the weights in int8. Tied weights stay tied."""
    known: dict[tuple[int, torch.Size], tuple[torch.Tensor, torch.Tensor]] = {}
    for node in [n for n in model.graph.nodes if n.name in names]:
        weight = model.weights[node.name]
        address = packing.storage_key(weight) if packing.is_packed(weight) else weight.data_ptr()
        if (key := (address, weight.shape)) not in known:
            multiples, scales = by_row(dense(weight))
            known[key] = model.in_file(multiples), scales
            model.saved_bytes += weight.numel() * (weight.itemsize - multiples.itemsize)
        multiples, scales = known[key]
        own = model.add_weight(f"{node.name}_int8", multiples)
        for layer in list(node.users):
            place = _place(layer)
            bias_node, rest = (*layer.args, None)[place + 1], layer.args[place + 2 :]
            bias = model.weight_of(bias_node)
            zeros = torch.zeros(weight.shape[0]) if bias is None else bias
            terms = model.add_weight(f"{node.name}_terms", torch.stack([scales.flatten(), zeros]))
            with model.graph.inserting_before(layer):
                call = model.graph.call_function(_INT8[layer.target], (*layer.args[:place], own, terms, *rest))
            call.meta = dict(layer.meta)
            layer.replace_all_uses_with(call)
            model.graph.erase_node(layer)
            model.drop_unused_weight(bias_node)
        model.drop_unused_weight(node)


def dense(weight: torch.Tensor) -> torch.Tensor:
    """Return a packed weight as it was before packing; any other weight as it is."""
    return weight.to_dense() if packing.is_packed(weight) else weight


def by_row(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in int8, and the scale of each row [rows, 1]."""
    scales = matrix.abs().amax(1, keepdim=True) / int8_kernel.MOST
    return (matrix / scales.clamp(min=_LEAST_SCALE)).round().to(torch.int8), scales
