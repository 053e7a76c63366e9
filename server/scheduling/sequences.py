"""Sequences: requests that share state. Plain data."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from cohabit.server.ipc.model import Array
from cohabit.server.ipc.request import SequenceId
from cohabit.server.scheduling.queues import Ticket

ControlKind = Literal["start", "end", "ready", "id", "length"]


@dataclass(frozen=True, slots=True)
class State:
    """What a model hands from one request of a sequence to the next: an output that is then an input.

    Of a growing state, such as the keys and values of attention, the output is what a request adds to it.
    """

    input: str
    output: str
    initial: Array
    """The input of a sequence's first request, with a batch dimension of 1 if the model has one."""
    axis: int | None = None
    """Of a growing state, the axis along which it grows, the batch counted. It is empty at first."""


@dataclass(frozen=True, slots=True)
class Control:
    """An input that tells the model where in its sequence a request stands."""

    input: str
    kind: ControlKind
    off: Array
    """The input where that is not so, with a batch dimension of 1 if the model has one. Of a number, zeros."""
    on: Array


@dataclass(frozen=True, slots=True)
class SequenceRules:
    """How a model's requests make sequences: Triton's `sequence_batching`."""

    states: tuple[State, ...]
    controls: tuple[Control, ...]
    idle_s: float
    """After this time without a request a sequence is forgotten."""
    least_length: int = 0
    most_length: int = 0
    """The sizes that a growing state can have, padded; 0 where there is none."""

    @property
    def hidden_inputs(self) -> frozenset[str]:
        """The inputs that clients do not send."""
        return frozenset([*(state.input for state in self.states), *(control.input for control in self.controls)])

    @property
    def hidden_outputs(self) -> frozenset[str]:
        return frozenset(state.output for state in self.states)


def executable(waiting: Iterable[Ticket]) -> Iterator[Ticket]:
    """Yield the requests that may be executed next: of a sequence the first, since it makes the state of the second."""
    seen: set[SequenceId] = set()
    for ticket in waiting:
        step = ticket.request.sequence
        if step is None:
            yield ticket
        elif step.id not in seen:
            seen.add(step.id)
            yield ticket
