"""Turns of a sequence's requests: each one starts from the state that the answer before it left."""

import asyncio
from dataclasses import dataclass
from weakref import WeakValueDictionary

from cohabit.server.engine.sequences import Sequences
from cohabit.server.ipc.model import ModelKey
from cohabit.server.ipc.request import Request, SequenceId


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock
    sequences: Sequences | None = None
    """The sequences of the load that executes the request, once it is queued."""
    is_answered: bool = False


class Turns:
    """The turns of one compute lane's sequences. Event loop's thread only.

    A sequence has one request at a time in the scheduler. Its turn begins in the order of arrival, and ends when its
    answer has been written, or dropped. Only then is it known which state the next one starts from.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[tuple[ModelKey, SequenceId], asyncio.Lock] = WeakValueDictionary()
        """By sequence, as long as a request of it is under way."""
        self._under_way: dict[Request, _Turn] = {}

    async def begin(self, request: Request) -> None:
        """Wait for a request's turn. Requests without a sequence take none."""
        if request.sequence is not None:
            lock = self._lock(request.model, request.sequence.id)
            await lock.acquire()
            self._under_way[request] = _Turn(lock)

    def queued(self, request: Request, sequences: Sequences | None) -> None:
        """Keep the sequence of a queued request, on the load that executes it."""
        if sequences is not None and (turn := self._under_way.get(request)) is not None:
            turn.sequences = sequences
            sequences.enter(request)

    def answered(self, request: Request) -> None:
        """From now on, `settle` ends the request's turn."""
        if (turn := self._under_way.get(request)) is not None:
            turn.is_answered = True

    def settle(self, request: Request, *, kept: bool) -> None:
        """End the turn of an answered request: its answer was `kept`, or could not be written."""
        turn = self._under_way.get(request)
        if turn is not None and turn.is_answered:
            self._end(request, kept=kept)

    def drop(self, request: Request) -> None:
        """End the turn of a request that has no answer. Does nothing if it has ended."""
        if request in self._under_way:
            self._end(request, kept=False)

    async def end_sequence(
        self, model: ModelKey, sequence: SequenceId, sequences: Sequences, *, spare: bool
    ) -> None:
        """Forget a sequence after its requests under way, or give up its memory."""
        async with self._lock(model, sequence):
            if spare:
                sequences.spare(sequence)
            else:
                sequences.forget(sequence)

    def _end(self, request: Request, *, kept: bool) -> None:
        turn = self._under_way.pop(request)
        if turn.sequences is not None:
            turn.sequences.settle(request, kept=kept)
        turn.lock.release()

    def _lock(self, model: ModelKey, sequence: SequenceId) -> asyncio.Lock:
        return self._locks.setdefault((model, sequence), asyncio.Lock())
