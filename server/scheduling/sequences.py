"""Sequences: requests that share state. Plain data."""

from dataclasses import dataclass
from typing import Literal

from cohabit.server.ipc.model import Array

ControlKind = Literal["start", "end", "ready", "id", "length"]


@dataclass(frozen=True, slots=True)
class State:
    """State passed between a sequence's requests: an output that becomes the next request's input.

    A growing state, such as attention's keys and values, grows by the output of each request.
    """

    input: str
    output: str
    initial: Array
    """The input of a sequence's first request, with a batch dimension of 1 if the model has one."""
    axis: int | None = None
    """Axis along which a growing state grows, counting the batch dimension. The state is empty at first."""


@dataclass(frozen=True, slots=True)
class Control:
    """An input that tells the model a request's position in its sequence."""

    input: str
    kind: ControlKind
    off: Array
    """The input if the condition is false, with a batch dimension of 1 if the model has one. Zeros for numbers."""
    on: Array


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """Rules for a model's sequences: Triton's `sequence_batching`."""

    states: tuple[State, ...]
    controls: tuple[Control, ...]
    idle_s: float
    """Seconds without a request after which a sequence is forgotten."""
    least_length: int = 0
    most_length: int = 0
    """Size limits of a growing state, padded; 0 without one."""

    @property
    def hidden_inputs(self) -> frozenset[str]:
        """The inputs that clients do not send."""
        return frozenset([*(state.input for state in self.states), *(control.input for control in self.controls)])

    @property
    def hidden_outputs(self) -> frozenset[str]:
        return frozenset(state.output for state in self.states)
