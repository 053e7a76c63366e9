"""The states of sequences between their requests.

A model's program is a function: it takes states as inputs and returns the next ones as outputs. So a request that fails
leaves its sequence as it was, and states are kept wherever there is room for arrays.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np

from cohabit.planner.errors import format_bytes
from cohabit.server.errors import InvalidRequest, Overloaded
from cohabit.server.ipc.model import Array, Inputs, ModelInfo
from cohabit.server.ipc.request import Request, SequenceId, SequenceStep
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.sequences import Control, SequenceRules

_OVERHEAD_BYTES = 1 << 10
"""What a sequence counts for besides its states."""


class StateMemory:
    """A bound for the states of all models that are loaded. Any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lock = threading.Lock()
        """Held from a look at `used_bytes` until what was found free is reserved."""
        self._loads: WeakSet[Sequences] = WeakSet()

    def add(self, load: "Sequences") -> None:
        """Count the sequences of one load of a model, for as long as that is used."""
        self._loads.add(load)

    @property
    def used_bytes(self) -> int:
        return sum(load.nbytes for load in self._loads)


@dataclass(slots=True)
class _Sequence:
    states: list[Array]
    used_s: float
    """When its last request was executed, by `time.monotonic`."""


class Sequences:
    """The sequences of one load of a model. Belongs to its compute lane's thread, but for `enter` and `leave`."""

    def __init__(self, info: ModelInfo, rules: SequenceRules, memory: StateMemory) -> None:
        self._model = info.name
        self._batched = info.max_batch_size > 0
        self._rules = rules
        self._memory = memory
        self._each_bytes = rules.state_bytes + _OVERHEAD_BYTES
        self._known: dict[SequenceId, _Sequence] = {}
        """The one that was used last is last."""
        self._waiting: Counter[SequenceId] = Counter()
        """Requests that are not answered yet. The event loop changes it."""
        self._reserved = 0
        """Sequences that the present execution may add."""
        memory.add(self)

    @property
    def count(self) -> int:
        return len(self._known)

    @property
    def nbytes(self) -> int:
        """What they count for in memory."""
        return (len(self._known) + self._reserved) * self._each_bytes

    def enter(self, request: Request) -> None:
        """Note that a request waits: its sequence is not idle. Event loop's thread."""
        self._waiting[_step(request).id] += 1

    def leave(self, request: Request) -> None:
        """Note that a request is over. Event loop's thread."""
        sequence = _step(request).id
        self._waiting[sequence] -= 1
        if not self._waiting[sequence]:
            del self._waiting[sequence]

    @contextmanager
    def room(self, tickets: Sequence[Ticket], now_s: float) -> Iterator[None]:
        """Reserve memory for the sequences that these requests start. Raises Overloaded if there is none.

        Idle sequences are forgotten first.
        """
        for sequence, known in list(self._known.items()):
            if now_s - known.used_s <= self._rules.idle_s:
                break
            if sequence not in self._waiting:
                del self._known[sequence]
        steps = [_step(ticket.request) for ticket in tickets]
        new = len({step.id for step in steps if step.start} - self._known.keys())
        with self._memory.lock:
            if self._memory.used_bytes + new * self._each_bytes > self._memory.limit_bytes:
                raise self._no_room()
            self._reserved = new
        try:
            yield
        finally:
            self._reserved = 0

    def inputs_of(self, ticket: Ticket) -> Inputs:
        """Return a request's inputs with its sequence's states, and with what tells the model where it stands.

        Raises InvalidRequest for a sequence that is not known.
        """
        step = _step(ticket.request)
        if step.start:
            states = [state.initial for state in self._rules.states]
        else:
            states = self._states_of(step.id, ticket.arrived_s)
        inputs = dict(ticket.request.inputs)
        inputs |= {state.input: array for state, array in zip(self._rules.states, states, strict=True)}
        inputs |= {control.input: self._control(control, step) for control in self._rules.controls}
        return inputs

    def keep(self, tickets: Sequence[Ticket], outputs: Mapping[str, Array], now_s: float) -> None:
        """Keep the states that an execution of these requests, one row each, has returned. They must have room."""
        for row, ticket in enumerate(tickets):
            step = _step(ticket.request)
            self._known.pop(step.id, None)
            if step.end:
                continue
            states = [self._row(outputs[state.output], row, len(tickets)) for state in self._rules.states]
            self._known[step.id] = _Sequence(states, now_s)

    def _row(self, output: Array, row: int, rows: int) -> Array:
        """Return a request's part of a state, which outlives the arrays of its execution."""
        return output if rows == 1 or not self._batched else output[row : row + 1].copy()

    def _states_of(self, sequence: SequenceId, arrived_s: float) -> list[Array]:
        known = self._known.get(sequence)
        if known is None or arrived_s - known.used_s > self._rules.idle_s:
            raise InvalidRequest(
                f"inference request for sequence {sequence} to model '{self._model}' must specify the START flag on the"
                " first request of the sequence, which is not known. A sequence is forgotten when it ends, after"
                f" {self._rules.idle_s:g} s without a request (max_sequence_idle_microseconds), and when the model is"
                " loaded again or the engine starts again; begin it with sequence_start"
            )
        return known.states

    def _no_room(self) -> Overloaded:
        memory = self._memory
        return Overloaded(
            f"the states of sequences take {format_bytes(memory.used_bytes)} of {format_bytes(memory.limit_bytes)},"
            f" which leaves no {format_bytes(self._each_bytes)} for another one of model '{self._model}'; end"
            " sequences, let them be forgotten sooner (max_sequence_idle_microseconds), or start the server with a"
            " larger --queue-memory"
        )

    def _control(self, control: Control, step: SequenceStep) -> Array:
        match control.kind:
            case "start":
                return control.on if step.start else control.off
            case "end":
                return control.on if step.end else control.off
            case "ready":
                return control.on
            case "id":
                return self._id(control, step.id)

    def _id(self, control: Control, sequence: SequenceId) -> Array:
        limits = np.iinfo(control.off.dtype)
        if isinstance(sequence, str) or not limits.min <= sequence <= limits.max:
            raise InvalidRequest(
                f"sequence_id {str(sequence)[:40]!r} must be a number from {limits.min} to {limits.max}: model"
                f" '{self._model}' takes it as input '{control.input}'"
            )
        return np.full_like(control.off, sequence)


def _step(request: Request) -> SequenceStep:
    """Return a request's place in its sequence; `fit` lets none without one through."""
    assert request.sequence is not None
    return request.sequence
