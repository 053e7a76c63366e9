"""Replaces transposed 1-d convolutions by convolutions."""

from typing import Any

import torch

from cohabit.runtime.lowering.model import FxModel

aten = torch.ops.aten

_DEFAULTS = (None, [1], [0], [0], 1, [1])
"""Defaults of the arguments after the weight: bias, stride, padding, output padding, groups, dilation."""


def convolve_transposed(model: FxModel) -> None:
    """Replace transposed convolutions that lengthen a signal by their stride with convolutions, one channel per phase.

    A result at `n * stride + phase` depends on a few neighbours of `n`. With phases before features, channels last,
    results are in order, and the ops after the convolution are views. The new kernel has zeros where a phase has fewer
    neighbours. A layer is left alone if its weight would grow by more than half, which is rare.
    """
    for node in list(model.graph.nodes):
        if node.target is not aten.conv_transpose1d.default or node.kwargs:
            continue
        given: list[Any] = [*node.args, *_DEFAULTS[len(node.args) - 2 :]]
        x, weight_node, bias_node, *rest = given
        (stride, padding, more), groups, dilation = (int(n[0]) for n in rest[:3]), rest[3], rest[4]
        weight, bias = model.weight_of(weight_node), model.weight_of(bias_node)
        length = x.meta["val"].shape[-1]
        if weight is None or (bias_node is not None and bias is None) or not isinstance(length, int):
            continue
        features, size = weight.shape[1:]
        if x.meta["val"].dim() != 3 or groups != 1 or list(dilation) != [1] or size - 2 * padding + more != stride:
            continue
        kernel = _kernel(weight, stride, padding)
        if kernel.nbytes > 1.5 * weight.nbytes:
            continue
        phases = [model.add_weight(f"{weight_node.name}_phases", model.in_file(kernel))]
        if bias is not None:
            phases.append(model.add_weight(f"{bias_node.name}_phases", bias.repeat(stride)))
        call = model.graph.call_function
        taps = kernel.shape[2]
        with model.graph.inserting_before(node):
            bias_arg = phases[1] if bias is not None else None
            conv = call(aten.conv1d.default, (x, phases[0], bias_arg, [1], [taps // 2], [1], 1))
            conv.meta["val"] = x.meta["val"].new_empty((x.meta["val"].shape[0], stride * features, length))
            ordered = call(aten.transpose.int, (conv, 1, 2))
            joined = call(aten.reshape.default, (ordered, [-1, length * stride, features]))
            result = call(aten.transpose.int, (joined, 1, 2))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        model.graph.erase_node(node)
        for old in (weight_node, bias_node):
            model.drop_unused_weight(old)


def _kernel(weight: torch.Tensor, stride: int, padding: int) -> torch.Tensor:
    """Return the convolution's kernel [stride * features, inner, taps], with an odd number of taps."""
    inner, features, size = weight.shape
    reach = max((size - 1 - padding) // stride, (stride - 1 + padding) // stride)
    kernel = weight.new_zeros(stride, features, inner, 2 * reach + 1)
    for phase in range(stride):
        for tap in range(2 * reach + 1):
            at = phase + padding + (reach - tap) * stride
            if 0 <= at < size:
                kernel[phase, :, :, tap] = weight[:, :, at].T
    return kernel.flatten(0, 1).contiguous()
