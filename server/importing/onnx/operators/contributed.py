"""Operators of ONNX Runtime's own domain, com.microsoft, which optimised transformers have."""

import torch
import torch.nn.functional as F

from cohabit.server.importing.onnx.registry import NodeCall, Value, operator_of


@operator_of("com.microsoft.Gelu")
def _gelu(call: NodeCall) -> Value:
    return F.gelu(call.tensor())


@operator_of("com.microsoft.BiasGelu")
def _bias_gelu(call: NodeCall) -> Value:
    return F.gelu(call.tensor(0) + call.tensor(1))


@operator_of("com.microsoft.FastGelu")
def _fast_gelu(call: NodeCall) -> Value:
    x = call.tensor(0) + call.tensor(1) if call.has(1) else call.tensor(0)
    return F.gelu(x, approximate="tanh")


@operator_of("com.microsoft.QuickGelu")
def _quick_gelu(call: NodeCall) -> Value:
    x = call.tensor()
    return x * torch.sigmoid(call.attr("alpha", 1.702) * x)


@operator_of("com.microsoft.FusedMatMul")
def _fused_matmul(call: NodeCall) -> Value:
    call.require(not call.attr("transBatchA", 0) and not call.attr("transBatchB", 0), "a transposed batch")
    a, b = call.tensor(0), call.tensor(1)
    a = a.transpose(-1, -2) if call.attr("transA", 0) else a
    b = b.transpose(-1, -2) if call.attr("transB", 0) else b
    found = torch.matmul(a, b)
    return found if call.attr("alpha", 1.0) == 1.0 else found * call.attr("alpha", 1.0)


@operator_of("com.microsoft.SkipLayerNormalization")
def _skip_layer_normalization(call: NodeCall) -> Value | tuple[Value | None, ...]:
    call.require(not any(call.node.outputs[1:3]), "its mean as an output")
    x = call.tensor(0) + call.tensor(1)
    x = x + call.tensor(4) if call.has(4) else x
    scale = call.tensor(2)
    found = F.layer_norm(x, [scale.shape[0]], scale, call.optional(3), call.attr("epsilon", 1e-12))
    return (found, None, None, x) if len(call.node.outputs) > 1 else found
