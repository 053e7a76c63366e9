"""Makes a program functional: each value is written once, by the op that creates it, so that ops can be moved freely.

Archives keep the in-place ops of their models. Most change a value that no view shares, and are replaced by their
out-of-place form. A program with any other change is functionalized by torch, which traces it again.
"""

from collections.abc import Iterator
from functools import partial
from operator import lt
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram

from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.allowed_ops import is_random
from cohabit.runtime.lowering.fused_ops import FUSED_OPS

aten = torch.ops.aten

_PACKED_OPS = (packing.CONVOLUTION, packing.CONVOLUTION_SUM, packing.LINEAR, packing.LINEAR_SUM)
_NEW_COMPOSITES = frozenset(
    {
        *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
        *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding),
        *(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input),
        *(aten.linear.default, aten.matmul.default, aten.batch_norm.default, aten.layer_norm.default),
        *(aten.group_norm.default, aten.instance_norm.default, aten.scaled_dot_product_attention.default),
        *(aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default),
        *(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default),
        *(aten.softmax.int, aten.log_softmax.int, aten.relu6.default, aten.embedding_bag.padding_idx),
    }
)
"""Composite operators that make new bytes, which their schemas do not tell."""
_UNNAMED_VIEWS = (aten._unsafe_view.default, aten.lift.default)
"""Operators whose result shares their operand's bytes, although their schema does not say so."""
_DROPOUTS = (
    *(aten.dropout.default, aten.dropout_.default),
    *(aten.feature_dropout.default, aten.feature_dropout_.default),
)
_ELEMENTWISE = frozenset(
    {aten.hardswish.default, aten.fill.Scalar, aten.fill.Tensor, aten.masked_fill.Tensor, aten.zero.default}
)
"""Elementwise operators that torch does not tag as such."""
_WRITING = frozenset(
    {
        *(aten.copy.default, aten.index_put.default, aten.masked_scatter.default, aten.index_add.default),
        *(aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor),
        *(aten.scatter.src, aten.scatter.value, aten.scatter_add.default),
    }
)
"""Operators that write some elements of their first operand; its other elements and its type are the result's."""


def functional(name: str, program: ExportedProgram) -> tuple[fx.Graph, ExportedProgram]:
    """Return a graph without in-place changes, and the program whose signature it has.

    Raises UnsupportedModel.
    """
    top = _copy(program)
    within = (node for graph in _graphs(program.graph_module) if graph is not program.graph for node in graph.nodes)
    if not any(map(is_change, within)) and write_once(top):
        return top, program
    changes = [node for graph in _graphs(program.graph_module) for node in graph.nodes if is_change(node)]
    try:
        program = program.run_decompositions({})
    except Exception as error:  # the tracer raises any type
        reason = str(error).split("\n", 1)[0][:300]
        raise UnsupportedModel(
            f"{name}: op {changes[0].name} changes a tensor in place, and torch cannot write the program without that:"
            f" {reason}. Use the op's out-of-place form"
        ) from error
    top = _copy(program)
    _name_batch_norms(top)
    return top, program


def _copy(program: ExportedProgram) -> fx.Graph:
    """Return a copy of a program's graph without dropouts, which do nothing in inference.

    Views become reshapes, which accept every layout: a rewritten layer's kernel may return another than was exported.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    for node in list(graph.nodes):
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        if node.op == "call_function" and node.target in _DROPOUTS and node.args[2] is False:
            node.replace_all_uses_with(cast(fx.Node, node.args[0]))
            graph.erase_node(node)
    return graph


def _graphs(root: torch.nn.Module) -> Iterator[fx.Graph]:
    """Yield the graphs of a program and of its branches, loops and regions."""
    return (module.graph for module in root.modules() if isinstance(module, fx.GraphModule))


def is_change(node: fx.Node) -> bool:
    """Whether a node changes an operand in place."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def makes_new_bytes(node: fx.Node) -> bool:
    """Whether an op's result is one tensor that shares no bytes with another value."""
    op = node.target
    if op in _UNNAMED_VIEWS:
        return False
    if op in FUSED_OPS or op in _PACKED_OPS:
        return True
    if not isinstance(op, OpOverload) or op._schema.is_mutable or len(op._schema.returns) != 1:
        return False
    (result,) = op._schema.returns
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(
        str(cast(Any, op).name()), "CompositeImplicitAutograd"
    )
    return str(result.type) == "Tensor" and result.alias_info is None and (not composite or op in _NEW_COMPOSITES)


def write_once(graph: fx.Graph) -> bool:
    """Replace in-place changes of values without aliases by out-of-place ops.

    Returns False, and leaves the graph unchanged, if there are other changes.
    """
    own: set[Any] = set()
    changes: dict[fx.Node, OpOverload] = {}
    for node in graph.nodes:
        if is_change(node):
            new = _out_of_place(node)
            if new is None or node.args[0] not in own:
                return False
            changes[node] = new
            own.remove(node.args[0])
            own.add(node)
        elif makes_new_bytes(node):
            own.add(node)
        elif node.op == "call_function":
            own.difference_update(node.all_input_nodes)
    for node, new in changes.items():
        node.target = new
        changed: Any = node.args[0]
        changed.replace_all_uses_with(node, delete_user_cb=partial(lt, node))
    return True


def _out_of_place(node: fx.Node) -> OpOverload | None:
    """Return the out-of-place form of an in-place operator; None without an exact one."""
    op = cast(OpOverload, node.target)
    written = [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    new = _variant(op, op._schema.name.removesuffix("_"))
    if new is None or new is op or written != [op._schema.arguments[0]] or in_place_form(new) is not op:
        return None
    return new if new in _WRITING or _result_type(node, new) == _dtype(node.args[0]) else None


def in_place_form(op: Any) -> OpOverload | None:
    """Return the operator that writes an op's result into its first operand, of equal shape and type, in any layout."""
    known = isinstance(op, OpOverload) and (torch.Tag.pointwise in op.tags or op in _ELEMENTWISE | _WRITING)
    if not known or op._schema.is_mutable or is_random(op) or op._schema.returns[0].alias_info is not None:
        return None
    return _variant(op, f"{op._schema.name}_")


def _variant(op: OpOverload, name: str) -> OpOverload | None:
    """Return the operator of another name with the same overload and argument types."""
    packet = getattr(aten, name.removeprefix("aten::"), None)
    other = getattr(packet, op._overloadname, None)
    if other is None or [str(a.type) for a in other._schema.arguments] != [
        str(a.type) for a in op._schema.arguments
    ]:
        return None
    return cast(OpOverload, other)


def _result_type(node: fx.Node, op: OpOverload) -> torch.dtype | None:
    """Return the dtype of an elementwise op's result for a node's operands."""

    def operand(n: fx.Node) -> Any:
        value = n.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return 1
        return torch.empty([1] * value.dim(), dtype=value.dtype, device="meta")

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
    try:
        return cast(torch.dtype, op(*args, **kwargs).dtype)
    except (RuntimeError, TypeError):
        return None


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _name_batch_norms(graph: fx.Graph) -> None:
    """Restore batch norms to the form of exported programs: torch's tracer decomposes them."""
    for node in list(graph.nodes):
        if node.target is aten._native_batch_norm_legit_no_training.default and not node.kwargs:
            x, weight, bias, mean, variance, momentum, eps = node.args
            (result,) = node.users
            with graph.inserting_before(node):
                norm = graph.call_function(
                    aten.batch_norm.default, (x, weight, bias, mean, variance, False, momentum, eps, False)
                )
            norm.meta = dict(result.meta)
            result.replace_all_uses_with(norm)
            graph.erase_node(result)
            graph.erase_node(node)
