"""States of sequences between their requests.

A model's program is a pure function: it takes states as inputs and returns the next ones as outputs. An execution makes
a sequence's next state, which replaces the present one when the request's answer has been written. Therefore, a failed
request leaves its sequence unchanged, wherever it fails.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
from msgspec.structs import replace

from cohabit.planner.errors import format_bytes
from cohabit.server.engine.slots import StateSlot, StateSlots
from cohabit.server.errors import InvalidRequest, Overloaded, SequenceLost
from cohabit.server.ipc.model import Array, Inputs, ModelInfo
from cohabit.server.ipc.request import Answer, Request, SequenceId, SequenceStep
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.sequences import Control, SequenceRules

_OVERHEAD_BYTES = 1 << 10
"""Bytes counted for each sequence in addition to its states."""
_LENGTH_STEP = 64
"""Growing states are padded to a multiple of this: a GPU has a graph for each length."""
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
        """Evict idle sequences until `nbytes` are free. Returns False if that does not suffice."""
        with self.lock:
            while self.used_bytes + nbytes > self.limit_bytes:
                if nbytes > self.limit_bytes or not self._evict_one():
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
class _Sequence:
    states: dict[str, Array]
    """States that do not grow, by input."""
    length: int
    """Number of entries of growing states."""
    slot: StateSlot | None
    """The growing states; None without any."""
    used_s: float = 0.0
    """When its last answer was written, by `time.monotonic`."""
    is_spare: bool = False
    """Whether it is only kept for sequences that may begin as it does."""

    @property
    def nbytes(self) -> int:
        """Bytes counted in addition to those of the slot."""
        return _OVERHEAD_BYTES + sum(array.nbytes for array in self.states.values())


@dataclass(frozen=True, slots=True)
class _Next:
    """A sequence's state after an execution, until its answer has been written."""

    sequence: _Sequence | None
    """None if the sequence ends."""
    nbytes: int
    """Bytes counted in addition to those of the present state."""


class Sequences:
    """The sequences of a model's loads that have the same weights and rules. `StateMemory.lock` guards their table.

    `enter` and `settle` are called by the event loop, at the beginning and the end of a sequence's turn; `in_rows` and
    `execute` by the compute lane's thread.
    """

    def __init__(
        self,
        info: ModelInfo,
        rules: SequenceRules,
        memory: StateMemory,
        batches: Sequence[int] = (),
        weights: str | None = None,
    ) -> None:
        """`batches`: planned batch sizes, ascending. `weights`: identity of the weights, None if it is not known."""
        self._model = info.name
        self._batched = info.max_batch_size > 0
        self._rules = rules
        self._memory = memory
        self._growing = [state for state in rules.states if state.axis is not None]
        self._slots = StateSlots(self._growing, rules.most_length, batches, memory.lock, batched=self._batched)
        self._known: dict[SequenceId, _Sequence] = {}
        """Least recently used first."""
        self._under_way: dict[SequenceId, Request] = {}
        """The request whose turn it is: its sequence is not idle."""
        self._next: dict[SequenceId, _Next] = {}
        """Of executed requests whose answers are not written yet."""
        self._begun: dict[SequenceId, _Sequence] = {}
        """What sequences begin with, until the answer to their first request."""
        self.nbytes = 0
        """Bytes counted for all these sequences."""
        self._weights = weights
        self._layout = _layout(info, rules, batches)
        memory.add(self)

    def continued(self, info: ModelInfo, rules: SequenceRules, batches: Sequence[int], weights: str | None) -> bool:
        """Serve the model's next load, too. Returns False if its weights, states or batch sizes are others."""
        if weights is None or weights != self._weights or _layout(info, rules, batches) != self._layout:
            return False
        with self._memory.lock:
            self._rules = rules
        return True

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
            before = self._known.get(step.id), self._begun.pop(step.id, None)
            after = self._next.pop(step.id, None)
            if after is not None and not kept:
                self.nbytes -= after.nbytes
            elif after is not None:
                self._known.pop(step.id, None)
                if after.sequence is not None:
                    after.sequence.used_s = self._memory.clock()
                    self._known[step.id] = after.sequence
            now = self._known.get(step.id)
            for one in before:
                if one is not None and (now is None or one.slot is not now.slot):
                    self._release(one.slot)

    def in_rows(self, tickets: Sequence[Ticket]) -> Sequence[Ticket]:
        """Return the requests in the order of their sequences' slots, new ones last."""
        with self._memory.lock:
            known = {ticket: self._known.get(_step(ticket.request).id) for ticket in tickets}
        rows = {ticket: one.slot.row for ticket, one in known.items() if one is not None and one.slot is not None}
        last = max(rows.values(), default=0) + 1
        return sorted(tickets, key=lambda ticket: rows.get(ticket, last))

    def execute(self, tickets: Sequence[Ticket], run: Callable[[Inputs, int], Answer]) -> Answer:
        """Execute requests together, and keep the resulting states until they are settled.

        `run` gets inputs with states and control inputs, and their number of rows. Raises InvalidRequest for an unknown
        sequence and for a state that would grow too far, and Overloaded if there is no memory.
        """
        found = [self._sequence_before(ticket) for ticket in tickets]
        parts: dict[str, list[Array]] = {}
        for ticket, known in zip(tickets, found, strict=True):
            for name, array in ticket.request.inputs.items():
                parts.setdefault(name, []).append(array)
            for control in self._rules.controls:
                own = self._control(control, _step(ticket.request), known.length)
                parts.setdefault(control.input, []).append(own)
            for name, array in known.states.items():
                parts.setdefault(name, []).append(array)
        in_order = list(range(len(found)))
        window, rows, size = self._window(found) if self._growing else ({}, in_order, 0)
        order = in_order
        if rows != in_order:  # rows of other sequences lie between: they are computed, and left out
            order = [rows.index(row) if row in rows else 0 for row in range(size)]
        inputs = {
            name: arrays[0] if len(order) == 1 else np.concatenate([arrays[n] for n in order])
            for name, arrays in parts.items()
        }
        answer = run(inputs | window, len(order))
        if rows != in_order:
            answer = replace(answer, outputs={name: array[rows] for name, array in answer.outputs.items()})
        self._keep(tickets, found, answer.outputs)
        return answer

    def _window(self, found: Sequence[_Sequence]) -> tuple[dict[str, Array], list[int], int]:
        """Return growing states by input, each sequence's row in them, and their number of rows."""
        slots = [_slot(known) for known in found]
        window = self._slots.window(slots, self._is_spare)
        longest = max(known.length for known in found)
        rounded = -(-longest // _LENGTH_STEP) * _LENGTH_STEP
        length = min(max(rounded, self._rules.least_length), self._rules.most_length)
        arrays = self._slots.entries_in(window, length)
        states = {
            state.input: array if self._batched else array[0]
            for state, array in zip(self._growing, arrays, strict=True)
        }
        return states, [slot.row - window.start for slot in slots], window.size

    def _is_spare(self, slot: StateSlot) -> bool:
        return any(known.slot is slot and known.is_spare for known in self._known.values())

    def _sequence_before(self, ticket: Ticket) -> _Sequence:
        """Return a request's sequence before the request."""
        step = _step(ticket.request)
        with self._memory.lock:
            if not step.start:
                known = self._known_sequence(step.id, ticket.arrived_s)
                self._clear(known)
                return known
            if (failed := self._begun.pop(step.id, None)) is not None:
                self._release(failed.slot)
            states = {state.input: state.initial for state in self._rules.states if state.axis is None}
            begun = _Sequence(states, 0, self._slots.take() if self._growing else None)
            self._begun[step.id] = begun
            nbytes = begun.nbytes + (self._slots.nbytes(1) if self._growing else 0)
            if step.id not in self._known and not self._memory.has_room(nbytes):
                raise self._memory_full(nbytes)
        if step.prefix is not None:
            self._copy_prefix(begun, *step.prefix)
        return begun

    def _copy_prefix(self, begun: _Sequence, other: SequenceId, length: int) -> None:
        """Let a sequence begin with a copy of another one's first entries.

        Raises SequenceLost if these are not known, and Overloaded if there is no memory for the copy.
        """
        lost = SequenceLost(f"model '{self._model}' does not know the first {length} entries of sequence {other}")
        with self._memory.lock:
            known = self._known.get(other)
        if known is None or known.length < length or len(self._growing) < len(self._rules.states):
            raise lost
        source, target = _slot(known), _slot(begun)
        self._write(target, self._slots.entries(source, 0, length), 0, length)
        with self._memory.lock:
            if not self._slots.is_held(source):
                raise lost
            added = self._slots.nbytes(length)
            if not self._memory.has_room(added):
                raise self._memory_full(added)
            self._count(target, added)
            begun.length = length

    def _keep(self, tickets: Sequence[Ticket], found: Sequence[_Sequence], outputs: Mapping[str, Array]) -> None:
        """Count the states that an execution of these requests returned, one row each, until `settle`: all or none."""
        made: list[_Sequence | None] = []
        for row, (ticket, before) in enumerate(zip(tickets, found, strict=True)):
            step = _step(ticket.request)
            own = {name: array[row : row + 1] if self._batched else array for name, array in outputs.items()}
            made.append(None if step.end else self._sequence_after(step, before, own))
        kept = list[tuple[_Sequence, _Sequence, int]]()
        with self._memory.lock:
            ids = [_step(ticket.request).id for ticket in tickets]
            fixed = [self._added_bytes(id_, after) for id_, after in zip(ids, made, strict=True)]
            grown = [
                0 if after is None or after.slot is None else self._slots.nbytes(after.length) - after.slot.nbytes
                for after in made
            ]
            added = sum(fixed) + sum(grown)
            if added > 0 and not self._memory.has_room(added):
                raise self._memory_full(added)
            for row, (ticket, before, after) in enumerate(zip(tickets, found, made, strict=True)):
                if self._under_way.get(ids[row]) is ticket.request:
                    self._next[ids[row]] = _Next(after, fixed[row])
                    self.nbytes += fixed[row]
                    if after is not None and after.slot is not None:
                        self._count(after.slot, grown[row])
                        kept.append((before, after, row))
        for before, after, row in kept:
            rows = [outputs[state.output][row : row + 1] for state in self._growing]
            if not self._batched:
                rows = [outputs[state.output][None] for state in self._growing]
            self._write(_slot(after), rows, before.length, after.length)

    def _clear(self, known: _Sequence) -> None:
        """Clear the entries of a request whose answer was not written."""
        if known.slot is not None and known.slot.length > known.length:
            for array in self._slots.entries(known.slot, known.length, known.slot.length):
                array[...] = 0
            known.slot.length = known.length

    def _write(self, slot: StateSlot, arrays: Sequence[Array], start: int, end: int) -> None:
        """Write entries of a slot."""
        for target, array in zip(self._slots.entries(slot, start, end), arrays, strict=True):
            target[...] = array
        slot.length = end

    def _count(self, slot: StateSlot, nbytes: int) -> None:
        slot.nbytes += nbytes
        self.nbytes += nbytes

    def _release(self, slot: StateSlot | None) -> None:
        if slot is not None:
            self._slots.release(slot)
            self._count(slot, -slot.nbytes)

    def _added_bytes(self, id_: SequenceId, after: _Sequence | None) -> int:
        before = self._known.get(id_)
        return (0 if after is None else after.nbytes) - (0 if before is None else before.nbytes)

    def forget(self, sequence: SequenceId) -> None:
        """Forget a sequence that has no request under way, if it is known."""
        with self._memory.lock:
            if (known := self._known.pop(sequence, None)) is not None:
                self.nbytes -= known.nbytes
                self._release(known.slot)

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

    def _sequence_after(self, step: SequenceStep, before: _Sequence, outputs: Mapping[str, Array]) -> _Sequence:
        """Return a sequence after an execution. `before` stays valid; both have the same slot."""
        lengths = {outputs[state.output].shape[state.axis] for state in self._growing if state.axis is not None}
        longer = before.length + max(lengths, default=0)
        if self._growing and longer > self._rules.most_length:
            raise InvalidRequest(
                f"sequence {step.id} of model '{self._model}' has {before.length} entries, and"
                f" {longer - before.length} more would exceed the limit of {self._rules.most_length}; end the sequence"
            )
        # Copies: a view would keep all rows of the execution in memory.
        states = {state.input: outputs[state.output].copy() for state in self._rules.states if state.axis is None}
        return _Sequence(states, longer, before.slot)

    def _known_sequence(self, sequence: SequenceId, arrived_s: float) -> _Sequence:
        known = self._known.get(sequence)
        if known is None or arrived_s - known.used_s > self._rules.idle_s:
            raise SequenceLost(
                f"inference request for sequence {sequence} to model '{self._model}' must specify the START flag on the"
                " first request of the sequence. No such sequence is known: a sequence is forgotten when it ends, after"
                f" {self._rules.idle_s:g} s without a request (max_sequence_idle_microseconds), earlier if other"
                " sequences need its memory (--queue-memory), and when the model is reloaded with other weights or the"
                " engine restarts; begin it again with sequence_start"
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


def _layout(info: ModelInfo, rules: SequenceRules, batches: Sequence[int]) -> tuple[object, ...]:
    """Return what determines a model's states and their memory: all rules except for the time limit."""
    states = [(s.input, s.output, s.axis, *_value(s.initial)) for s in rules.states]
    controls = [(c.input, c.kind, *_value(c.off), *_value(c.on)) for c in rules.controls]
    return info.max_batch_size > 0, list(batches), states, controls, rules.least_length, rules.most_length


def _value(array: Array) -> tuple[object, ...]:
    return array.dtype, array.shape, array.tobytes()


def _slot(known: _Sequence) -> StateSlot:
    """Return the slot of a sequence with growing states."""
    assert known.slot is not None
    return known.slot


def first_inputs(rules: SequenceRules, inputs: Inputs) -> Inputs:
    """Return the inputs of a sequence of one request."""
    made = dict(inputs)
    for state in rules.states:
        sizes = [rules.least_length if n == state.axis else size for n, size in enumerate(state.initial.shape)]
        made[state.input] = state.initial if state.axis is None else np.zeros(sizes, state.initial.dtype)
    return made | {
        control.input: control.off if control.kind == "length" else control.on for control in rules.controls
    }


def _step(request: Request) -> SequenceStep:
    """Return a request's position in its sequence. `server.protocol.matching.fit` guarantees that it has one."""
    assert request.sequence is not None
    return request.sequence
