"""Applies a model's options: the dtype of parameters and activations, and the layout of convolutions."""

from functools import partial
from operator import is_not
from typing import Any

import torch
from torch import fx

from cohabit.runtime.lowering.model import FxModel
from cohabit.runtime.options import Options

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default)
_NEED_CONTIGUOUS = (aten.view.dtype, aten.view_as_complex.default, aten.as_strided.default)
"""Operators that fail on strides other than the export's, or read other elements."""


def apply_options(model: FxModel, options: Options) -> None:
    """Convert parameters and ops to the options, and cast inputs and outputs. Runs after batch norms are folded."""
    if options.dtype != "float32":
        _cast(model, getattr(torch, options.dtype))
    if options.channels_last:
        _channels_last(model)
    if options.channels_last or options.packed:
        _take_any_strides(model)


def _take_any_strides(model: FxModel) -> None:
    """Allow values computed from a convolution to have other strides than the export's.

    Requires that no op changes a view of its operand in place.
    """
    found: set[fx.Node] = set()
    for node in list(model.graph.nodes):
        is_convolution = getattr(node.target, "_opname", "").startswith("conv")
        if node.op != "call_function" or not (is_convolution or not found.isdisjoint(node.all_input_nodes)):
            continue
        found.add(node)
        if node.target in _VIEWS:
            node.target = aten.reshape.default
        elif node.target in _NEED_CONTIGUOUS:
            with model.graph.inserting_before(node):
                contiguous = model.graph.call_function(aten.contiguous.default, (node.args[0],))
            contiguous.meta = dict(node.args[0].meta)
            node.args = (contiguous, *node.args[1:])


def _cast(model: FxModel, dtype: torch.dtype) -> None:
    for tensors in (model.weights, model.tables):
        tensors |= {n: model.in_file(t.to(dtype)) for n, t in tensors.items() if t.dtype is torch.float32}
    for node in model.graph.nodes:
        if node.op == "call_function":
            compute_in(node, dtype)
    to_copy = aten._to_copy.default
    first_op = next(n for n in model.graph.nodes if n.op != "placeholder")
    for node, port in zip(model.input_nodes, model.inputs, strict=True):
        if port.dtype is torch.float32:
            with model.graph.inserting_before(first_op):
                cast = model.graph.call_function(to_copy, (node,), {"dtype": dtype})
            cast.meta = dict(node.meta)
            node.replace_all_uses_with(cast, delete_user_cb=partial(is_not, cast))
    (output,) = (n for n in model.graph.nodes if n.op == "output")
    results: list[fx.Node] = []
    for node, port in zip(output.args[0], model.outputs, strict=True):
        with model.graph.inserting_before(output):
            back = model.graph.call_function(to_copy, (node,), {"dtype": port.dtype})
        results.append(back if port.dtype is torch.float32 else node)
    output.args = (tuple(results),)
    model.graph.eliminate_dead_code()


def compute_in(node: fx.Node, dtype: torch.dtype) -> None:
    """Make an op use `dtype` if it names float32, or creates a float32 tensor without tensor operands."""

    def replaced(argument: Any) -> Any:
        return dtype if argument is torch.float32 else argument

    node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), replaced)
    schema, value = getattr(node.target, "_schema", None), node.meta.get("val")
    arguments = {} if schema is None else {a.name: a for a in schema.arguments}
    makes_float32 = isinstance(value, torch.Tensor) and value.dtype is torch.float32
    takes_tensors = any("Tensor" in str(a.type) for a in arguments.values())
    if makes_float32 and not takes_tensors and "dtype" in arguments and node.kwargs.get("dtype") is None:
        node.kwargs = {**node.kwargs, "dtype": dtype}


def _channels_last(model: FxModel) -> None:
    for node in model.graph.nodes:
        if node.op == "call_function" and node.target is aten.conv2d.default:
            weight = model.weight_of(node.args[1])
            if weight is not None:
                turned = weight.contiguous(memory_format=torch.channels_last)
                model.weights[node.args[1].name] = model.in_file(turned)
