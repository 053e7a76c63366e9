"""LSTMs unrolled over time: per layer and step the three ops that a framework issues.

"The parameter tensors are shared by the LSTM cells in the same layer" (SwapAdvisor, section 6.2). Gates are ordered
as in torch.nn.LSTM: input, forget, cell, output.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

Pair = tuple[torch.Tensor, torch.Tensor]


@torch.library.custom_op("cohabit_planning::lstm_gates", mutates_args=())
def lstm_gates(gates: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The elementwise part of a step: hidden state, cell, and what its gradient needs, the gates after activation."""
    return _gated(gates, cell)


@lstm_gates.register_fake
def _(gates: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(cell), torch.empty_like(cell), torch.empty_like(gates)


@torch.library.custom_op("cohabit_planning::lstm_gates_backward", mutates_args=())
def lstm_gates_backward(
    d_hidden: torch.Tensor,
    d_cell: torch.Tensor,
    cell: torch.Tensor,
    next_cell: torch.Tensor,
    active: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients with respect to the gates before activation and the cell."""
    i, f, g, o = active.chunk(4, 1)
    tanh = next_cell.tanh()
    through = d_cell + d_hidden * o * (1 - tanh * tanh)
    parts = [
        through * g * i * (1 - i),
        through * cell * f * (1 - f),
        through * i * (1 - g * g),
        d_hidden * tanh * o * (1 - o),
    ]
    return torch.cat(parts, 1), through * f


@lstm_gates_backward.register_fake
def _(
    d_hidden: torch.Tensor,
    d_cell: torch.Tensor,
    cell: torch.Tensor,
    next_cell: torch.Tensor,
    active: torch.Tensor,
) -> Pair:
    return torch.empty_like(active), torch.empty_like(cell)


def _gated(gates: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cell = f * cell + i * g
    return o * cell.tanh(), cell, torch.cat([i, f, g, o], 1)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[1], output[1], output[2])


def _gates_gradient(ctx: Any, d_hidden: torch.Tensor, d_cell: torch.Tensor, _: torch.Tensor) -> Any:
    return lstm_gates_backward(d_hidden, d_cell, *ctx.saved_tensors)


lstm_gates.register_autograd(_gates_gradient, setup_context=_remember)


class Layer(nn.Module):
    """One direction of one layer."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.w_ih = nn.Parameter(torch.empty(4 * width, inputs))
        self.w_hh = nn.Parameter(torch.empty(4 * width, width))
        self.bias = nn.Parameter(torch.empty(4 * width))

    def forward(self, x: torch.Tensor, state: Pair) -> Pair:
        hidden, cell = state
        gates = torch.addmm(torch.addmm(self.bias, x, self.w_ih.t()), hidden, self.w_hh.t())
        hidden, cell, _ = lstm_gates(gates, cell)
        return hidden, cell


class Lstm(nn.Module):
    """One tensor [batch, width] per step in, the last layer's hidden state after each step out.

    Steps come one after the other, each through all layers: the order in which a framework unrolls stacked cells and
    in which input arrives. It needs every layer's weights at every step; a searcher may find a better one.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, width) for _ in range(layers))

    def forward(self, *sequence: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = torch.zeros_like(sequence[0])
        states = [(zeros, zeros) for _ in self.layers]
        results = []
        for hidden in sequence:
            for i, layer in enumerate(self.layers):
                states[i] = layer(hidden, states[i])
                hidden = states[i][0]
            results.append(hidden)
        return tuple(results)


class BidirectionalLstm(nn.Module):
    """Each layer reads the sequence in both directions and concatenates what it finds, step by step."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        widths = [width, *(2 * width for _ in range(layers - 1))]
        self.forwards = nn.ModuleList(Layer(w, width) for w in widths)
        self.backwards = nn.ModuleList(Layer(w, width) for w in widths)

    def forward(self, *sequence: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = torch.zeros_like(sequence[0])
        for there, back in zip(self.forwards, self.backwards, strict=True):
            hidden_there = _run(there, sequence, zeros)
            hidden_back = _run(back, sequence[::-1], zeros)[::-1]
            sequence = tuple(torch.cat(pair, 1) for pair in zip(hidden_there, hidden_back, strict=True))
        return sequence


def _run(layer: nn.Module, sequence: Sequence[torch.Tensor], zeros: torch.Tensor) -> list[torch.Tensor]:
    state = (zeros, zeros)
    hidden = []
    for x in sequence:
        state = layer(x, state)
        hidden.append(state[0])
    return hidden
