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
        node.name for node in nodes if node.users and all(_is_faster(model, r, symbols) for r in node.users)
    )


def _is_faster(model: FxModel, layer: fx.Node, symbols: Sequence[Mapping[str, int]]) -> bool:
    if layer.target not in _INT8 or layer.kwargs:
        return False
    _, place = _operands(layer)
    weight, bias = (model.weight_of(n) for n in (*layer.args, None)[place : place + 2])
    if (
        weight is None
        or weight.dtype is not torch.float32
        or weight.dim() != 2
        or not int8_kernel.takes(*weight.shape)
    ):
        return False
    if len(layer.args) > place + 1 and layer.args[place + 1] is not None and bias is None:
        return False
    channels = 1 if layer.target in (conv1x1, conv1x1_add) else -1
    rows = {math.prod(size) // size[channels] for size in sizes_of(layer, symbols)}
    if not rows:
        return False
    activation = layer.args[3:] if layer.target in (packing.LINEAR, conv1x1) else ("none",)
    shape = LayerShape(
        inputs=weight.shape[1],
        outputs=weight.shape[0],
        rows=tuple(sorted(rows)),
        has_bias=bias is not None,
        fused=None if activation[0] == "none" else (activation[0], tuple(activation[1]), activation[2]),
        adds=layer.target in _SUMS,
        packs=packing.is_packed(weight),
        threads=torch.get_num_threads(),
    )
    return computes_in_int8(shape)


def _operands(layer: fx.Node) -> tuple[tuple[Any, ...], int]:
    """Return a layer's inputs, and the position of its weight; its bias is next."""
    place = 2 if layer.target in _SUMS else 1
    return layer.args[:place], place


def copied(model: FxModel) -> FxModel:
    """Return a model with a graph of its own and the same weights."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(model.graph, {}))
    return replace(model, graph=graph, weights=dict(model.weights), tables=dict(model.tables))


def compute_in_int8(model: FxModel, names: Collection[str]) -> None:
    """Replace layers with these weights by layers with the weights in int8. Tied weights stay tied."""
    known: dict[tuple[Any, ...], torch.Tensor] = {}
    scales: dict[tuple[Any, ...], torch.Tensor] = {}
    for node in [n for n in model.graph.nodes if n.name in names]:
        weight = model.weights[node.name]
        key = packing.storage_key(weight), tuple(weight.shape), weight.numel() and node.name
        if key not in known:
            multiples, scales[key] = by_row(dense(weight))
            known[key] = model.in_file(multiples)
        own = model.add_weight(f"{node.name}_int8", known[key])
        for layer in list(node.users):
            inputs, place = _operands(layer)
            _, bias_node, *rest = (*layer.args[place:], None)[: max(2, len(layer.args) - place)]
            bias = model.weight_of(bias_node)
            zeros = torch.zeros(weight.shape[0]) if bias is None else bias
            terms = model.add_weight(f"{node.name}_terms", torch.stack([scales[key].flatten(), zeros]))
            with model.graph.inserting_before(layer):
                call = model.graph.call_function(_INT8[layer.target], (*inputs, own, terms, *rest))
            call.meta = dict(layer.meta)
            layer.replace_all_uses_with(call)
            model.graph.erase_node(layer)
            model.drop_unused_weight(bias_node)
        model.saved_bytes += weight.numel() * 3
        model.drop_unused_weight(node)


def dense(weight: torch.Tensor) -> torch.Tensor:
    """Return a packed weight as it was before packing; any other weight as it is."""
    return weight.to_dense() if packing.is_packed(weight) else weight


def by_row(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in int8, and the scale of each row [rows, 1]."""
    scales = matrix.abs().amax(1, keepdim=True) / int8_kernel.MOST
    return (matrix / scales.clamp(min=_LEAST_SCALE)).round().to(torch.int8), scales
