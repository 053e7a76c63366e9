"""Recovers indices that exporters flatten: `x[rows, columns]` is written as one index into all elements of `x`.

From the flattened index it can no longer be told that a row of the result depends only on a row of `x`.
"""

from collections.abc import Mapping, Sequence

import torch

from cohabit.server.importing.onnx.registry import OnnxNode

PAIRS = "GatherPairs"
"""The operator of the recovered index, with `x`, rows and columns as inputs."""


def with_pairs(nodes: Sequence[OnnxNode], constants: Mapping[str, torch.Tensor]) -> list[OnnxNode]:
    """Replace Gather(Flatten(x), rows * columns of x + column) by an index of two dimensions."""
    made = {name: node for node in nodes for name in node.outputs}
    return [_pairs(node, made, constants) or node for node in nodes]


def _pairs(node: OnnxNode, made: Mapping[str, OnnxNode], constants: Mapping[str, torch.Tensor]) -> OnnxNode | None:
    if node.op != "Gather" or node.attributes.get("axis", 0) != 0:
        return None
    data, index = (made.get(name) for name in node.inputs)
    if (
        data is None
        or index is None
        or (data.op, index.op) != ("Flatten", "Add")
        or data.attributes.get("axis") != 2
    ):
        return None
    for column, product in (index.inputs, reversed(index.inputs)):
        factors = made.get(product)
        if factors is None or factors.op != "Mul":
            continue
        for row, size in (factors.inputs, reversed(factors.inputs)):
            if _is_second_size(size, data.inputs[0], made, constants):
                inputs = (data.inputs[0], row, column)
                return OnnxNode(PAIRS, node.name, node.opset, inputs, node.outputs)
    return None


def _is_second_size(name: str, x: str, made: Mapping[str, OnnxNode], constants: Mapping[str, torch.Tensor]) -> bool:
    """Whether a value is the size of the second dimension of `x`."""
    chosen = made.get(name)
    if chosen is None or chosen.op != "Gather" or chosen.inputs[1] not in constants:
        return False
    shape, number = made.get(chosen.inputs[0]), constants[chosen.inputs[1]]
    return shape is not None and shape.op == "Shape" and shape.inputs[0] == x and number.tolist() in (1, [1])
