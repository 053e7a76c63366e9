"""States of sequences between their requests.

A model's program is a pure function: it takes states as inputs and returns the next ones as outputs. An execution makes
a sequence's next state, which replaces the present one when the request's answer has been written. Therefore, a failed
request leaves its sequence unchanged, wherever it fails.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np

from cohabit.planner.errors import format_bytes
from cohabit.server.errors import InvalidRequest, Overloaded, SequenceLost
from cohabit.server.ipc.model import Array, Inputs, ModelInfo
from cohabit.server.ipc.request import Request, SequenceId, SequenceStep
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.sequences import Control, SequenceRules

_OVERHEAD_BYTES = 1 << 10
"""Bytes counted for each sequence in addition to its states."""
_INITIAL_CAPACITY = 16
"""Initial capacity of a growing state, in entries."""
_CAPACITY_STEP = 64
"""Growing states are padded to a multiple of this, so that consecutive executions can share one buffer."""
_EVICTABLE_S = 1.0
"""Seconds without a request after which a sequence may be forgotten for the sake of others."""


class StateMemory:
    """The memory for the states of all loaded models: limited, and shared by their sequences. Thread-safe.

    A sequence is forgotten when it has been idle for as long as its model allows, whether its model is used or not, and
    earlier if others need the memory: the least recently used one of all models first.
    """

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes = limit_bytes
        self.clock = clock
        self.lock = threading.RLock()
        """Guards the sequences of all loads."""
        self._loads: WeakSet[Sequences] = WeakSet()

    def add(self, load: "Sequences") -> None:
        """Count the sequences of one load of a model, for as long as that load exists."""
        with self.lock:
            self._loads.add(load)

    @property
    def used_bytes(self) -> int:
        with self.lock:
            return sum(load.nbytes for load in self._loads)

    def has_room(self, nbytes: int) -> bool:
        """Free what is gathered of idle models, then evict idle sequences, until `nbytes` are free.

        Returns False if they do not suffice.
        """
        with self.lock:
            while self.used_bytes + nbytes > self.limit_bytes:
                if nbytes > self.limit_bytes:
                    return False
                if not any(load.free_gathered() for load in self._loads) and not self._evict_one():
                    return False
            return True

    def forget_idle(self) -> None:
        """Forget every sequence that has been idle for as long as its model allows. Any thread, at intervals."""
        with self.lock:
            now_s = self.clock()
            for load in list(self._loads):
                load.forget_idle(now_s)

    def _evict_one(self) -> bool:
        """Forget the least recently used sequence, spare ones first.

        Returns False if all others have been used within `_EVICTABLE_S`.
        """
        idle = [(load, id_, known) for load in self._loads for id_, known in load.longest_idle()]
        if not idle:
            return False
        load, id_, known = min(idle, key=lambda one: (not one[2].is_spare, one[2].used_s))
        if not known.is_spare and self.clock() - known.used_s < _EVICTABLE_S:
            return False
        load.forget(id_)
        return True


@dataclass(slots=True)
class _Gathered:
    """A growing state of all rows, as gathered for the last execution.

    In the next execution, most rows belong to the same sequences: only their new entries are copied.
    """

    memory: Array
    """[rows, ...]: each row's entries, then zeros; unused rows keep their old contents."""
    rows: list[tuple[object, int]]
    """By row: the name of the sequence whose entries are in it, and their number."""


@dataclass(slots=True)
class _Sequence:
    name: object
    """Unique for each sequence, even if ids are reused. Under one name, growing states are only appended to."""
    states: list[Array]
    """Growing states have spare capacity."""
    length: int
    """Number of entries of growing states."""
    used_s: float = 0.0
    """When its last answer was written, by `time.monotonic`."""
    is_spare: bool = False
    """Whether it is only kept for sequences that may begin as it does."""

    @property
    def nbytes(self) -> int:
        return _OVERHEAD_BYTES + sum(array.nbytes for array in self.states)


@dataclass(frozen=True, slots=True)
class _Next:
    """A sequence's state after an execution, until its answer has been written."""

    sequence: _Sequence | None
    """None if the sequence ends."""
    nbytes: int
    """Bytes counted in addition to those of the present state."""


class Sequences:
    """The sequences of one load of a model. `StateMemory.lock` guards their table.

    `enter` and `settle` are called by the event loop, at the beginning and the end of a sequence's turn; `in_rows`,
    `inputs_of` and `keep` by the compute lane's thread, for an execution.
    """

    def __init__(
        self, info: ModelInfo, rules: SequenceRules, memory: StateMemory, batches: Sequence[int] = ()
    ) -> None:
        """`batches`: planned batch sizes, ascending. Growing states are gathered in one of these numbers of rows."""
        self._model = info.name
        self._batched = info.max_batch_size > 0
        self._rules = rules
        self._memory = memory
        self._batches = batches
        self._gathered: dict[str, _Gathered] = {}
        """By input."""
        self._known: dict[SequenceId, _Sequence] = {}
        """Least recently used first."""
        self._under_way: dict[SequenceId, Request] = {}
        """The request whose turn it is: its sequence is not idle."""
        self._next: dict[SequenceId, _Next] = {}
        """Of executed requests whose answers are not written yet."""
        self._begun: dict[SequenceId, _Sequence] = {}
        """What sequences with a prefix begin with, until the answer to their first request."""
        self.nbytes = 0
        """Bytes counted for all these sequences, and for what is gathered of them."""
        memory.add(self)

    @property
    def count(self) -> int:
        """Number of sequences that may have further requests."""
        with self._memory.lock:
            return sum(not known.is_spare for known in self._known.values())

    def enter(self, request: Request) -> None:
        """Begin a request's turn. Its sequence has no other request under way, and stays known until `settle`."""
        with self._memory.lock:
            self._under_way[_step(request).id] = request

    def settle(self, request: Request, *, kept: bool) -> None:
        """End a request's turn. Its sequence continues from the state after it if its answer was `kept`."""
        step = _step(request)
        with self._memory.lock:
            if self._under_way.get(step.id) is request:
                del self._under_way[step.id]
            self._begun.pop(step.id, None)
            after = self._next.pop(step.id, None)
            if after is not None and not kept:
                self.nbytes -= after.nbytes
            elif after is not None:
                self._known.pop(step.id, None)
                if after.sequence is not None:
                    after.sequence.used_s = self._memory.clock()
                    self._known[step.id] = after.sequence
            if not self._known:
                self.free_gathered()

    def in_rows(self, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        """Return the requests in another order: where possible, each in its sequence's row of the last execution."""
        gathered = next(iter(self._gathered.values()), None)
        if gathered is None or len(tickets) == 1:
            return tickets
        row_of = {name: row for row, (name, _) in enumerate(gathered.rows[: len(tickets)])}
        placed: dict[int, Ticket] = {}
        others: list[Ticket] = []
        with self._memory.lock:
            found = [self._known.get(_step(ticket.request).id) for ticket in tickets]
        for ticket, known in zip(tickets, found, strict=True):
            row = None if known is None else row_of.get(known.name)
            if row is None:
                others.append(ticket)
            else:
                placed[row] = ticket
        return [placed[row] if row in placed else others.pop(0) for row in range(len(tickets))]

    def inputs_of(self, tickets: Sequence[Ticket]) -> Inputs:
        """Return the inputs of requests, with their sequences' states and the control inputs.

        They are valid until the next call. Raises InvalidRequest for an unknown sequence, and Overloaded if there is no
        memory for a new one.
        """
        with self._memory.lock:
            found = [self._sequence_before(ticket) for ticket in tickets]
        parts: dict[str, list[Array]] = {}
        for ticket, known in zip(tickets, found, strict=True):
            for name, array in ticket.request.inputs.items():
                parts.setdefault(name, []).append(array)
            for control in self._rules.controls:
                own = self._control(control, _step(ticket.request), known.length)
                parts.setdefault(control.input, []).append(own)
            for state, array in zip(self._rules.states, known.states, strict=True):
                parts.setdefault(state.input, []).append(array)
        axes = {state.input: state.axis for state in self._rules.states if state.axis is not None}
        return {
            name: self._gather(name, axes[name], arrays, found)
            if name in axes
            else arrays[0]
            if len(arrays) == 1
            else np.concatenate(arrays)
            for name, arrays in parts.items()
        }

    def _sequence_before(self, ticket: Ticket) -> _Sequence:
        """Return a request's sequence before the request."""
        step = _step(ticket.request)
        if not step.start:
            return self._known_sequence(step.id, ticket.arrived_s)
        if step.prefix is not None:
            known = self._begun[step.id] = self._with_prefix(*step.prefix)
            return known
        known = _Sequence(object(), [state.initial for state in self._rules.states], 0)
        if step.id not in self._known and not self._memory.has_room(known.nbytes):
            raise self._memory_full(known.nbytes)
        return known

    def _with_prefix(self, other: SequenceId, length: int) -> _Sequence:
        """Return a sequence that begins with a copy of another one's first entries.

        Raises SequenceLost if these are not known, and Overloaded if there is no memory for the copy.
        """
        known = self._known.get(other)
        growing = [(n, state.axis) for n, state in enumerate(self._rules.states) if state.axis is not None]
        if known is None or known.length < length or len(growing) < len(self._rules.states):
            raise SequenceLost(
                f"model '{self._model}' does not know the first {length} entries of sequence {other}"
            )
        parts = [(_entries(known.states[n], axis, 0, length), axis) for n, axis in growing]
        states = [self._with_capacity(part, axis, length, length + 1) for part, axis in parts]
        begun = _Sequence(object(), states, length)
        if not self._memory.has_room(begun.nbytes):
            raise self._memory_full(begun.nbytes)
        return begun

    def _gather(self, name: str, axis: int, arrays: Sequence[Array], found: Sequence[_Sequence]) -> Array:
        """Gather a growing state of all rows, padded, in the last execution's memory. Copies only new entries."""
        whole = arrays if self._batched else [array[None] for array in arrays]
        axis += not self._batched
        rows = next((batch for batch in self._batches if batch >= len(whole)), len(whole))
        longest = max(known.length for known in found)
        rounded = -(-longest // _CAPACITY_STEP) * _CAPACITY_STEP
        capacity = min(max(rounded, _CAPACITY_STEP, self._rules.least_length), self._rules.most_length)
        shape = (rows, *whole[0].shape[1:axis], capacity, *whole[0].shape[axis + 1 :])
        gathered = self._gathered.get(name)
        if gathered is None or gathered.memory.shape != shape:
            gathered = self._new_gathered(name, shape, whole[0].dtype)
        for row, (array, known) in enumerate(zip(whole, found, strict=True)):
            before, length = gathered.rows[row]
            start, place = length if before is known.name else 0, gathered.memory[row : row + 1]
            _entries(place, axis, start, known.length)[...] = _entries(array, axis, start, known.length)
            _entries(place, axis, known.length, length)[...] = 0  # clear the row's previous sequence
            gathered.rows[row] = known.name, known.length
        return gathered.memory if self._batched else gathered.memory[0]

    def _new_gathered(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _Gathered:
        """Replace the memory in which a growing state is gathered. Raises Overloaded if it does not fit."""
        nbytes = math.prod(shape) * dtype.itemsize
        with self._memory.lock:
            if (before := self._gathered.pop(name, None)) is not None:
                self.nbytes -= before.memory.nbytes
            if not self._memory.has_room(nbytes):
                raise self._memory_full(nbytes)
            self.nbytes += nbytes
            gathered = self._gathered[name] = _Gathered(np.zeros(shape, dtype), [(None, 0)] * shape[0])
            return gathered

    def keep(self, tickets: Sequence[Ticket], outputs: Mapping[str, Array]) -> None:
        """Count the states that an execution of these requests returned, one row each, until `settle`: all or none.

        Raises InvalidRequest for a state that would grow too far, and Overloaded if memory is full.
        """
        made: dict[SequenceId, _Sequence | None] = {}
        for row, ticket in enumerate(tickets):
            step = _step(ticket.request)
            own = {name: array[row : row + 1] if self._batched else array for name, array in outputs.items()}
            before = self._begun.get(step.id) if step.start else self._known[step.id]
            made[step.id] = None if step.end else self._sequence_after(step, before, own)
        with self._memory.lock:
            after = {id_: _Next(sequence, self._added_bytes(id_, sequence)) for id_, sequence in made.items()}
            added = sum(each.nbytes for each in after.values())
            if added > 0 and not self._memory.has_room(added):
                raise self._memory_full(added)
            for ticket in tickets:
                step = _step(ticket.request)
                if self._under_way.get(step.id) is ticket.request:
                    self._next[step.id] = after[step.id]
                    self.nbytes += after[step.id].nbytes

    def _added_bytes(self, id_: SequenceId, after: _Sequence | None) -> int:
        before = self._known.get(id_)
        return (0 if after is None else after.nbytes) - (0 if before is None else before.nbytes)

    def forget(self, sequence: SequenceId) -> None:
        """Forget a sequence that has no request under way, if it is known."""
        with self._memory.lock:
            if (known := self._known.pop(sequence, None)) is not None:
                self.nbytes -= known.nbytes
                if not self._known:
                    self.free_gathered()

    def spare(self, sequence: SequenceId) -> None:
        """Keep a sequence only as long as nobody needs its memory."""
        with self._memory.lock:
            if (known := self._known.get(sequence)) is not None:
                known.is_spare = True

    def forget_idle(self, now_s: float) -> None:
        """Forget the sequences without a request for `SequenceRules.idle_s`."""
        for sequence, known in list(self._idle()):
            if now_s - known.used_s <= self._rules.idle_s:
                return
            self.forget(sequence)

    def longest_idle(self) -> list[tuple[SequenceId, _Sequence]]:
        """Return the least recently used sequence without a request under way, a spare one first, if there is one."""
        idle = list(self._idle())
        return [min(idle, key=lambda one: not one[1].is_spare)] if idle else []

    def _idle(self) -> Iterator[tuple[SequenceId, _Sequence]]:
        """Iterate over the sequences without a request under way, the least recently used first."""
        return (one for one in self._known.items() if one[0] not in self._under_way)

    def free_gathered(self) -> bool:
        """Free what is gathered, unless a request is under way. Returns whether there was anything. Under the lock."""
        if self._under_way or not self._gathered:
            return False
        self.nbytes -= sum(gathered.memory.nbytes for gathered in self._gathered.values())
        self._gathered = {}
        return True

    def _sequence_after(
        self, step: SequenceStep, before: _Sequence | None, outputs: Mapping[str, Array]
    ) -> _Sequence:
        """Return a sequence after an execution. `before` stays valid; states with spare capacity are shared."""
        length = 0 if before is None else before.length
        states, longer = list[Array](), length
        for index, state in enumerate(self._rules.states):
            output = outputs[state.output]
            if state.axis is None:
                states.append(output.copy())  # a view would keep all rows of the execution in memory
                continue
            longer = length + output.shape[state.axis]
            if longer > self._rules.most_length:
                raise InvalidRequest(
                    f"sequence {step.id} of model '{self._model}' has {length} entries, and {longer - length} more"
                    f" would exceed the limit of {self._rules.most_length}; end the sequence"
                )
            array = state.initial if before is None else before.states[index]
            array = self._with_capacity(array, state.axis, length, longer)
            _entries(array, state.axis, length, longer)[...] = output
            states.append(array)
        return _Sequence(object() if before is None else before.name, states, longer)

    def _with_capacity(self, array: Array, axis: int, length: int, longer: int) -> Array:
        """Return a growing state with capacity for `longer` entries: `array` itself, or a larger copy."""
        if array.shape[axis] >= longer:
            return array
        capacity = min(max(2 * length, longer, _INITIAL_CAPACITY), self._rules.most_length)
        larger = np.empty((*array.shape[:axis], capacity, *array.shape[axis + 1 :]), array.dtype)
        _entries(larger, axis, 0, length)[...] = _entries(array, axis, 0, length)
        return larger

    def _known_sequence(self, sequence: SequenceId, arrived_s: float) -> _Sequence:
        known = self._known.get(sequence)
        if known is None or arrived_s - known.used_s > self._rules.idle_s:
            raise SequenceLost(
                f"inference request for sequence {sequence} to model '{self._model}' must specify the START flag on the"
                " first request of the sequence. No such sequence is known: a sequence is forgotten when it ends, after"
                f" {self._rules.idle_s:g} s without a request (max_sequence_idle_microseconds), earlier if other"
                " sequences need its memory (--queue-memory), and when the model is reloaded or the engine restarts;"
                " begin it again with sequence_start"
            )
        return known

    def _memory_full(self, nbytes: int) -> Overloaded:
        memory = self._memory
        return Overloaded(
            f"the states of sequences take {format_bytes(memory.used_bytes)} of {format_bytes(memory.limit_bytes)},"
            f" which leaves less than the {format_bytes(nbytes)} that a new or growing sequence of model"
            f" '{self._model}' needs; end sequences, let them be forgotten sooner (max_sequence_idle_microseconds), or"
            " start the server with a larger --queue-memory"
        )

    def _control(self, control: Control, step: SequenceStep, length: int) -> Array:
        match control.kind:
            case "start":
                return control.on if step.start else control.off
            case "end":
                return control.on if step.end else control.off
            case "ready":
                return control.on
            case "id":
                return self._id(control, step.id)
            case "length":
                return np.full_like(control.off, length)

    def _id(self, control: Control, sequence: SequenceId) -> Array:
        limits = np.iinfo(control.off.dtype)
        if isinstance(sequence, str) or not limits.min <= sequence <= limits.max:
            raise InvalidRequest(
                f"sequence_id {str(sequence)[:40]!r} must be a number from {limits.min} to {limits.max}: model"
                f" '{self._model}' takes it as input '{control.input}'"
            )
        return np.full_like(control.off, sequence)


def first_inputs(rules: SequenceRules, inputs: Inputs) -> Inputs:
    """Return the inputs of a sequence of one request."""
    made = dict(inputs)
    for state in rules.states:
        sizes = [rules.least_length if n == state.axis else size for n, size in enumerate(state.initial.shape)]
        made[state.input] = state.initial if state.axis is None else np.zeros(sizes, state.initial.dtype)
    return made | {
        control.input: control.off if control.kind == "length" else control.on for control in rules.controls
    }


def _entries(array: Array, axis: int, start: int, end: int) -> Array:
    """Return a view of some entries along an axis."""
    return array[(slice(None),) * axis + (slice(start, end),)]


def _step(request: Request) -> SequenceStep:
    """Return a request's position in its sequence. `server.protocol.matching.fit` guarantees that it has one."""
    assert request.sequence is not None
    return request.sequence
