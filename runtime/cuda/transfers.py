"""Copies that restore residents between inferences. They yield to the copies of inferences.

A separate thread issues a restore piece by piece to the swap-in stream. It pauses while an inference copies: ops wait
for those copies, but only the model's next inference waits for a restore. That inference issues the remaining pieces
at once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import torch

from cohabit.runtime.binding.program import Residence
from cohabit.runtime.cuda.issue import Streams
from cohabit.runtime.cuda.program import CudaProgram

Piece = Callable[[], None]
"""Issues some copies to the current stream."""
_PIECE_BYTES = 8 << 20
"""Size of a restore's pieces; it yields to an inference's copies between them."""


@dataclass(slots=True)
class Transfer:
    """A restore of one residence."""

    event: torch.cuda.Event
    """Reached when all issued copies have ended."""
    pieces: deque[Piece] = field(default_factory=deque)
    """Pieces not issued yet."""
    error: BaseException | None = None


class Transfers:
    """Restores in progress, by residence.

    A restore is never replaced or forgotten before it is issued, and pieces issued at once come after those of all
    earlier restores. Bytes that a model has left are therefore written before the next owner's load.
    """

    def __init__(self, streams: Streams, clock: Callable[[], float] = time.monotonic) -> None:
        self._streams = streams
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "restore")
        self._pending: dict[Residence, Transfer] = {}
        self._changed = threading.Condition()
        self._paused_until_s = 0.0

    def submit(self, residence: Residence, pieces: Sequence[Piece]) -> None:
        """Issue pieces in the background, in order."""
        self._thread.submit(self._work, self._new(residence, pieces))

    def issue(self, residence: Residence, pieces: Sequence[Piece]) -> Transfer:
        """Issue pieces at once, after all earlier transfers. The residence's next `take` returns the transfer."""
        self.flush()
        transfer = self._new(residence, pieces)
        self._issue_rest(transfer)
        return transfer

    def take(self, residence: Residence) -> Transfer | None:
        """Return a residence's last transfer, fully issued; None if there was none since the last call."""
        transfer = self._pending.pop(residence, None)
        if transfer is not None:
            self._issue_rest(transfer)
        return transfer

    def flush(self) -> None:
        """Issue the remaining pieces of every transfer."""
        for transfer in self._pending.values():
            self._issue_rest(transfer)

    def _new(self, residence: Residence, pieces: Sequence[Piece]) -> Transfer:
        self.take(residence)
        transfer = self._pending[residence] = Transfer(self._streams.driver.event(), deque(pieces))
        return transfer

    def close(self) -> None:
        self.flush()
        self._thread.shutdown()

    def pause(self, seconds: float) -> None:
        """Issue no pieces in the background for `seconds` from now; 0 resumes them."""
        with self._changed:
            self._paused_until_s = self._clock() + seconds
            self._changed.notify()

    def _work(self, transfer: Transfer) -> None:
        while True:
            with self._changed:
                while transfer.pieces and (left_s := self._paused_until_s - self._clock()) > 0:
                    self._changed.wait(left_s)
                if not transfer.pieces:
                    return
                self._issue_next(transfer)
            try:
                self._streams.driver.synchronize(
                    transfer.event
                )  # at most one piece is ahead of an inference's copies
            except Exception as error:
                self._fail(transfer, error)

    def _issue_rest(self, transfer: Transfer) -> None:
        with self._changed:
            while transfer.pieces:
                self._issue_next(transfer)
            self._changed.notify()

    def _issue_next(self, transfer: Transfer) -> None:
        """Issue a piece. The caller holds the lock. Errors are kept for the model's next run."""
        driver, piece = self._streams.driver, transfer.pieces.popleft()
        try:
            with driver.on(self._streams.swap_in):
                try:
                    piece()
                finally:
                    driver.record(transfer.event)
        except Exception as error:
            self._fail(transfer, error)

    def _fail(self, transfer: Transfer, error: Exception) -> None:
        transfer.error = transfer.error or error
        transfer.pieces.clear()


def pieces_of(program: CudaProgram, copies: Sequence[int]) -> list[Piece]:
    """Return calls that issue these copies of the schedule in order, each up to `_PIECE_BYTES` or one copy."""
    groups: list[list[int]] = []
    group_bytes = 0
    for copy in copies:
        nbytes = program.schedule.copies[copy].nbytes
        if not groups or group_bytes + nbytes > _PIECE_BYTES:
            groups.append([])
            group_bytes = 0
        groups[-1].append(copy)
        group_bytes += nbytes

    def issue(group: Sequence[int]) -> None:
        for copy in group:
            program.copies[copy]()

    return [partial(issue, group) for group in groups]
