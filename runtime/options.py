"""How a model's kernels may compute: what it gains in time it pays in accuracy, so nothing of it is the default.

Tolerances are relative to the largest output, against eager float32 on the CPU; a test per option holds them.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from runtime.lowering.fused import PLAIN
from runtime.lowering.model import Model

Dtype = Literal["float32", "float16", "bfloat16"]

TOLERANCES: dict[Dtype, float] = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
TF32_TOLERANCE = 1e-2

_CONVOLUTIONS = (torch.ops.aten.conv2d.default, *PLAIN)


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of one model. Inputs and outputs keep their types whatever is chosen."""

    dtype: Dtype = "float32"
    """Type of parameters and activations that are float32 in the archive."""
    channels_last: bool = False
    """Store the weights of 2-d convolutions channels last, which their kernels then take for activations, too."""
    tf32: bool = False
    """Let CUDA round float32 operands of matrix products and convolutions to 10 bits of mantissa."""
    fused: bool = False
    """Let one kernel of cuDNN's do a convolution, its bias, a residual sum and a ReLU, where there is one."""

    @property
    def label(self) -> str:
        """Part of file names: empty for the defaults. `tf32` changes no file."""
        dtype = f"-{self.dtype}" if self.dtype != "float32" else ""
        return dtype + "-channels-last" * self.channels_last + "-fused" * self.fused

    @property
    def tolerance(self) -> float:
        return max(TOLERANCES[self.dtype], TF32_TOLERANCE if self.tf32 else 0.0)


DEFAULTS = Options()


def apply(model: Model, options: Options) -> None:
    """Change a model's parameters, and cast at its inputs and outputs. Goes behind all other rewrites."""
    if options.dtype != "float32":
        _cast(model, getattr(torch, options.dtype))
    if options.channels_last:
        _channels_last(model)


def _cast(model: Model, dtype: torch.dtype) -> None:
    for tensors in (model.weights, model.tables):
        tensors |= {name: t.to(dtype) for name, t in tensors.items() if t.dtype is torch.float32}
    to_copy = torch.ops.aten._to_copy.default
    inputs = [n for n in model.graph.nodes if n.op == "placeholder" and n.name not in model.weights]
    first_op = next(n for n in model.graph.nodes if n.op != "placeholder")
    for node, port in zip(inputs, model.inputs, strict=True):
        if port.dtype is torch.float32:
            with model.graph.inserting_before(first_op):
                cast = model.graph.call_function(to_copy, (node,), {"dtype": dtype})
            node.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
    (output,) = (n for n in model.graph.nodes if n.op == "output")
    results: list[fx.Node] = []
    for node, port in zip(output.args[0], model.outputs, strict=True):
        with model.graph.inserting_before(output):
            back = model.graph.call_function(to_copy, (node,), {"dtype": port.dtype})
        results.append(back if port.dtype is torch.float32 else node)
    output.args = (tuple(results),)
    model.graph.eliminate_dead_code()


def _channels_last(model: Model) -> None:
    for node in model.graph.nodes:
        if node.op == "call_function" and node.target in _CONVOLUTIONS:
            weight = model.weight_of(node.args[1])
            if weight is not None:
                model.weights[node.args[1].name] = weight.contiguous(memory_format=torch.channels_last)
