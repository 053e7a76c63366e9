"""Which ops may overwrite an operand."""

from typing import Any

import torch
from torch import fx

from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.fused_ops import FUSED_OPS
from cohabit.runtime.lowering.model import FxModel, same_form
from cohabit.runtime.lowering.rewrites.slicing import CONVOLUTIONS

aten = torch.ops.aten

_FRESH = frozenset(
    {
        *CONVOLUTIONS,
        *(aten.linear.default, aten.addmm.default, aten.mm.default, aten.bmm.default, aten.matmul.default),
        *(aten.batch_norm.default, aten.layer_norm.default, aten.group_norm.default, aten.cat.default),
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.max_pool2d.default),
        *(aten.mean.dim, aten.adaptive_avg_pool2d.default, aten.scaled_dot_product_attention.default),
        *(packing.CONVOLUTION, packing.CONVOLUTION_SUM, packing.LINEAR, packing.LINEAR_SUM),
        *FUSED_OPS,
    }
)
"""Operators whose result is always new bytes."""
_UNARY_IN_PLACE = {
    aten.relu.default: aten.relu_.default,
    aten.gelu.default: aten.gelu_.default,
    aten.silu.default: aten.silu_.default,
    aten.tanh.default: aten.tanh_.default,
    aten.sigmoid.default: aten.sigmoid_.default,
    aten.hardtanh.default: aten.hardtanh_.default,
    aten.hardswish.default: aten.hardswish_.default,
}
_BINARY_IN_PLACE = {aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
_AS_IF_NEW = {changing: new for new, changing in (_UNARY_IN_PLACE | _BINARY_IN_PLACE).items()}


def undo_own_changes(model: FxModel) -> None:
    """Replace the model's own in-place ops by plain ones where no other op can see the difference.

    `work_in_place` then decides again: a ReLU after an in-place sum of the model's would make new bytes otherwise.
    """
    for node in model.graph.nodes:
        new = _AS_IF_NEW.get(node.target) if node.op == "call_function" else None
        if new is not None and _dies_with(node.args[0], node, set()) and _keeps_dtype(node):
            node.target = new


def _keeps_dtype(node: fx.Node) -> bool:
    """Whether an op's tensors all have one dtype, so that its result does not depend on being in place."""
    values: list[Any] = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return all(isinstance(v, torch.Tensor) for v in values) and len({v.dtype for v in values}) == 1


def work_in_place(model: FxModel) -> None:
    """Let elementwise ops overwrite an operand that nothing else reads: half the activations, and the same bits."""
    ours: set[fx.Node] = set()
    for node in model.graph.nodes:
        if node.op != "call_function" or not node.args:
            continue
        if node.target is packing.CONVOLUTION_SUM and _dies_with(node.args[1], node, ours):
            x, residual, *rest = node.args
            node.target, node.args = packing.CONVOLUTION_SUM_IN_PLACE, (residual, x, *rest)
            ours.add(node)
        elif not _dies_with(node.args[0], node, ours):
            continue
        elif node.target in _UNARY_IN_PLACE:
            node.target = _UNARY_IN_PLACE[node.target]
            ours.add(node)
        elif node.target in _BINARY_IN_PLACE and same_form(node.args[0], node):
            node.target = _BINARY_IN_PLACE[node.target]
            ours.add(node)


def _dies_with(operand: Any, reader: fx.Node, ours: set[fx.Node]) -> bool:
    """Whether an operand is new bytes whose last reader is this op, reads them once, and which have no other name.

    What the model itself changed in place does not count: it may be read under its older name.
    """
    return (
        isinstance(operand, fx.Node)
        and (operand.target in _FRESH or operand in ours)
        and all(user is reader or (user.target in _FRESH and user < reader) for user in operand.users)
        and sum(a is operand for a in reader.args) == 1
    )
