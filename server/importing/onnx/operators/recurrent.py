"""LSTM, GRU and RNN, as torch's own layers: the order of the gates differs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cohabit.server.importing.onnx.known import sizes
from cohabit.server.importing.onnx.registry import NodeCall, Value, operator_of

_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""By operator: the numbers of ONNX's gates, in torch's order."""
_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


@operator_of("LSTM", "GRU", "RNN")
def _recurrent(call: NodeCall) -> Value | tuple[Value | None, ...]:
    op, x = call.node.op, call.tensor(0)
    direction, batch_first = call.attr("direction", "forward"), bool(call.attr("layout", 0))
    count = 2 if direction == "bidirectional" else 1
    activations = tuple(call.attr("activations") or _ACTIVATIONS[op] * count)
    usual = activations == _ACTIVATIONS[op] * count or (op == "RNN" and activations == ("Relu",) * count)
    call.require(usual, f"activations {', '.join(activations)}")
    call.require(call.attr("clip") is None, "clip")
    call.require(not call.attr("input_forget", 0) and not call.has(7), "a coupled or peephole gate")
    x = x.transpose(0, 1) if batch_first else x
    if call.has(4):
        lengths = sizes(call.value(4), "sequence_lens")
        call.require(all(length == x.shape[0] for length in lengths), "sequence_lens below the input's length")
    # Weights of each direction, gates in torch's order.
    size, order = call.attr("hidden_size") or call.tensor(2).shape[-1], _GATES[op]
    weight, recurrent, bias = call.tensor(1), call.tensor(2), call.optional(3)
    parameters = []
    for number in range(count):
        own = [weight[number], recurrent[number]]
        if bias is not None:
            own += bias[number].chunk(2)
        parameters += [_ordered(part, order) for part in own]
    states = [_state(call, index, x, count, size, batch_first) for index in (5, 6)[: 2 if op == "LSTM" else 1]]
    x = x.flip(0) if direction == "reverse" else x
    settings = (bias is not None, 1, 0.0, False, count == 2, False)
    if op == "LSTM":
        y, *last = torch.lstm(x, states, parameters, *settings)
    elif op == "RNN":
        function = torch.rnn_relu if activations[0] == "Relu" else torch.rnn_tanh
        y, *last = function(x, states[0], parameters, *settings)
    elif call.attr("linear_before_reset", 0):
        y, *last = torch.gru(x, states[0], parameters, *settings)
    else:
        call.require(count == 1, "two directions with linear_before_reset=0")
        y, *last = _gru_reset_before(x, states[0], parameters)
    # Rows, directions and sizes as ONNX orders them.
    y = y.flip(0) if direction == "reverse" else y
    y = y.reshape(*y.shape[:-1], count, size)
    y = y.transpose(0, 1) if batch_first else y.transpose(1, 2)
    return y, *(state.transpose(0, 1) if batch_first else state for state in last)


def _ordered(weight: Tensor, order: Sequence[int]) -> Tensor:
    gates = weight.chunk(len(order))
    return torch.cat([gates[number] for number in order]) if len(order) > 1 else weight


def _state(call: NodeCall, index: int, x: Tensor, count: int, size: int, batch_first: bool) -> Tensor:
    state = call.optional(index)
    if state is None:
        return x.new_zeros((count, x.shape[1], size))
    return state.transpose(0, 1) if batch_first else state


def _gru_reset_before(x: Tensor, state: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Run a GRU whose reset gate applies to the state before its product, step by step."""
    weight, recurrent, *biases = parameters
    whole = torch.nn.functional.linear(x, weight, biases[0] + biases[1] if biases else None)
    gates, candidate = recurrent[: -state.shape[-1]], recurrent[-state.shape[-1] :]
    hidden, found = state[0], []
    for step in whole.unbind(0):
        own = step[:, : gates.shape[0]] + hidden @ gates.t()
        reset, update = torch.sigmoid(own).chunk(2, -1)
        new = torch.tanh(step[:, gates.shape[0] :] + (reset * hidden) @ candidate.t())
        hidden = new + update * (hidden - new)
        found.append(hidden)
    return torch.stack(found), hidden[None]
