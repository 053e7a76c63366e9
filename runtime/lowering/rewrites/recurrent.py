"""Rewrites of recurrent layers: one call per layer and direction."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.model import FxModel

aten = torch.ops.aten

_RECURRENT = {aten.lstm.input: 2, aten.gru.input: 1, aten.rnn_tanh.input: 1, aten.rnn_relu.input: 1}
"""Number of states by operator."""
_LSTM_MODE = 2
"""oneDNN's number of the LSTM mode in `mkldnn_rnn_layer`."""


def split_recurrent_layers(model: FxModel) -> None:
    """Split a recurrent network of L layers into L calls, so that only one layer's weights must be in memory."""
    for node in list(model.graph.nodes):
        states = _RECURRENT.get(node.target) if node.op == "call_function" else None
        if states is None:
            continue
        x, hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first = node.args
        if layers == 1 or (train and dropout):
            continue
        directions = 2 if bidirectional else 1
        per_layer = len(weights) // layers
        finals: list[list[fx.Node]] = [[] for _ in range(states)]
        call = model.graph.call_function
        with model.graph.inserting_before(node):
            for layer in range(layers):
                rows = (0, layer * directions, (layer + 1) * directions)
                start = [call(aten.slice.Tensor, (h, *rows)) for h in (hidden if states == 2 else [hidden])]
                own = weights[layer * per_layer : (layer + 1) * per_layer]
                arguments = (x, start if states == 2 else start[0], own)
                result = call(node.target, (*arguments, has_biases, 1, 0.0, False, bidirectional, batch_first))
                x = call(operator.getitem, (result, 0))
                for i, final in enumerate(finals):
                    final.append(call(operator.getitem, (result, i + 1)))
            outputs = [x, *(call(aten.cat.default, (final, 0)) for final in finals)]
        replace_items(model, node, outputs)


def split_directions(model: FxModel) -> None:
    """Split each unpacked bidirectional layer into a call per direction, the second one on reversed input."""
    for node in list(model.graph.nodes):
        states = _RECURRENT.get(node.target) if node.op == "call_function" else None
        if states is None or not node.args[7] or node.args[4] != 1:
            continue
        x, hidden, weights, has_biases, _, dropout, train, _, batch_first = cast(Any, node.args)
        time, half = [1 if batch_first else 0], len(weights) // 2
        call: Callable[..., Any] = model.graph.call_function
        with model.graph.inserting_before(node):
            outputs: list[list[fx.Node]] = [[] for _ in range(states + 1)]
            for d in range(2):
                start = [call(aten.slice.Tensor, (h, 0, d, d + 1)) for h in (hidden if states == 2 else [hidden])]
                arguments = (call(aten.flip.default, (x, time)) if d else x, start if states == 2 else start[0])
                own = weights[d * half : (d + 1) * half]
                result = call(node.target, (*arguments, own, has_biases, 1, dropout, train, False, batch_first))
                for i, output in enumerate(outputs):
                    output.append(call(operator.getitem, (result, i)))
            outputs[0][1] = call(aten.flip.default, (outputs[0][1], time))
            joined = [call(aten.cat.default, (output, 2 if i == 0 else 0)) for i, output in enumerate(outputs)]
        replace_items(model, node, joined)


def replace_items(model: FxModel, node: fx.Node, outputs: Sequence[fx.Node]) -> None:
    for user in list(node.users):
        outputs[user.args[1]].meta = dict(user.meta)  # type: ignore[index]
        user.replace_all_uses_with(outputs[user.args[1]])  # type: ignore[index]
        model.graph.erase_node(user)
    model.graph.erase_node(node)


def pack_lstms(model: FxModel) -> None:
    """Replace each direction of a float32 LSTM layer by one oneDNN kernel with packed weights."""
    for node in list(model.graph.nodes):
        if node.op == "call_function" and node.target is aten.lstm.input and _can_be_packed(model, node):
            weights = cast(Any, node.args)[2]
            _pack_lstm(model, node)
            for weight in weights:
                model.drop_unused_weight(weight)


def _can_be_packed(model: FxModel, node: fx.Node) -> bool:
    _, _, nodes, has_biases, layers, _, _, bidirectional, _ = cast(Any, node.args)
    weights = [model.weight_of(w) for w in nodes]
    return bool(
        has_biases is True
        and layers == 1
        and len(weights) == (8 if bidirectional else 4)
        and all(w is not None and w.dtype is torch.float32 for w in weights)
        and all(len(w.users) == 1 for w in nodes)
    )


def _pack_lstm(model: FxModel, node: fx.Node) -> None:
    x, states, weights, _, _, _, _, bidirectional, batch_first = cast(Any, node.args)
    call: Callable[..., Any] = model.graph.call_function
    packed = [_packed_direction(model, weights[4 * d : 4 * d + 4], d == 1) for d in range(1 + bool(bidirectional))]
    with model.graph.inserting_before(node):
        by_time = call(aten.transpose.int, (x, 0, 1)) if batch_first else x
        by_time = call(aten.contiguous.default, (by_time,))
        results = []
        for direction, (own, hidden) in enumerate(packed):
            start = [call(aten.select.int, (state, 0, direction)) for state in states]
            start = [call(aten.contiguous.default, (state,)) for state in start]
            how: tuple[Any, ...] = (direction == 1, [], _LSTM_MODE, hidden, 1, True, False, False, False)
            results.append(call(aten.mkldnn_rnn_layer.default, (by_time, *own, *start, *how)))
        outputs = [[call(operator.getitem, (result, i)) for result in results] for i in range(3)]
        whole = outputs[0][0] if len(packed) == 1 else call(aten.cat.default, (outputs[0], 2))
        finals = [call(aten.stack.default, (final, 0)) for final in outputs[1:]]
        whole = call(aten.transpose.int, (whole, 0, 1)) if batch_first else whole
    replace_items(model, node, [whole, *finals])


def _packed_direction(model: FxModel, weights: Sequence[fx.Node], reverse: bool) -> tuple[list[fx.Node], int]:
    """Return the placeholders of one direction's weights and biases, and the size of its state."""
    by_input, by_state, *biases = weights
    plain = model.weights[by_input.name], model.weights[by_state.name]
    packed = packing.pack_lstm(*plain, reverse=reverse)
    names = by_input.name, by_state.name
    placeholders = [model.add_weight(f"{n}_packed", model.in_file(w)) for n, w in zip(names, packed, strict=True)]
    return [*placeholders, *biases], int(plain[1].shape[1])
