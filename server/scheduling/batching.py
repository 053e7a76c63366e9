"""Batch formation: which waiting requests of a model are executed together, and whether to wait for more."""

import math
from collections.abc import Iterable, Iterator

import msgspec

from cohabit.server.ipc.model import ModelKey
from cohabit.server.scheduling.estimates import Estimate
from cohabit.server.scheduling.policy import Policy
from cohabit.server.scheduling.queues import Ticket

_GAIN = 0.9
"""A larger batch is preferred if its time per row is at most this fraction of a smaller batch's."""


class Batch(msgspec.Struct, frozen=True):
    """Requests of one model, to be executed together."""

    tickets: tuple[Ticket, ...]
    rows: int
    keep_until_s: float = -math.inf
    """Further requests may join until this time."""
    predicted_s: float = 0.0
    """Expected duration of its execution, set on dispatch."""

    @property
    def model(self) -> ModelKey:
        return self.tickets[0].request.model


def choose_batch(
    waiting: Iterable[Ticket],
    policy: Policy,
    estimate: Estimate,
    max_rows: int,
    now_s: float,
    since_s: float | None = None,
) -> Batch:
    """Choose the waiting requests to execute with the first one; their sizes must equal the first one's.

    The batch delay counts from `since_s`, by default from the arrival of the oldest of them.

    A batch may be padded: five requests of a swap-bound model run as a batch of eight, with one copy of the parameters.
    A compute-bound model gains nothing from batching, so its requests are executed one by one.
    """
    taken: list[Ticket] = []
    rows, best_s, paying, preferred, deadline_s = 0, math.inf, 1, 0, math.inf
    full = False
    # `paying` is the last batch length at which another request still paid off.
    for ticket in waiting:
        if taken and ticket.request.sizes != taken[0].request.sizes:
            if not policy.keeps_order:
                continue
            full = True
            break
        more = rows + ticket.request.batch
        # The earliest deadline in the batch limits its duration.
        if ticket.deadline_s is not None:
            deadline_s = min(deadline_s, ticket.deadline_s)
        too_late = deadline_s < math.inf and now_s + estimate.upper_estimate_s(more, now_s) > deadline_s
        if taken and (more > max_rows or ticket.load_number != taken[0].load_number or too_late):
            full = True
            break
        taken.append(ticket)
        rows = more
        per_row_s = estimate.predicted_s(rows) / rows
        if per_row_s <= _GAIN * best_s:
            best_s, paying = per_row_s, len(taken)
        if rows in policy.preferred_batches:
            preferred = len(taken)
    keep_until_s = -math.inf
    if policy.batch_delay_s > 0.0 and not full and not preferred and rows < max_rows:
        # Wait until the batch delay of the oldest request ends, or a deadline forces the start.
        latest_start_s = deadline_s - estimate.upper_estimate_s(rows, now_s)
        since_s = min(ticket.arrived_s for ticket in taken) if since_s is None else since_s
        keep_until_s = min(since_s + policy.batch_delay_s, latest_start_s)
    del taken[preferred or paying :]
    return Batch(tuple(taken), sum([t.request.batch for t in taken]), keep_until_s)


def best_rate_batch(
    waiting: Iterable[Ticket], usual: Batch, estimate: Estimate, max_rows: int, now_s: float
) -> Batch:
    """Return the batch with the highest rate of answers, for use under overload.

    Leaves out requests whose deadline is too near for that batch; including them would force small batches.
    """
    if estimate.seconds(usual.rows) == 0.0:  # neither predicted nor measured yet
        return usual
    first = usual.tickets[0]
    compatible = [
        t for t in waiting if t.load_number == first.load_number and t.request.sizes == first.request.sizes
    ]
    best, best_per_s = usual, usual.rows / estimate.seconds(usual.rows) / _GAIN
    for rows in estimate.planned(max_rows):
        chosen = tuple(_fitting(compatible, rows, now_s + estimate.upper_estimate_s(rows, now_s)))
        filled = sum(ticket.request.batch for ticket in chosen)
        if chosen and filled / estimate.seconds(filled) > best_per_s:
            best, best_per_s = Batch(chosen, filled), filled / estimate.seconds(filled)
    return best


def _fitting(tickets: Iterable[Ticket], max_rows: int, end_s: float) -> Iterator[Ticket]:
    """Yield, in order, requests that fit into a batch and whose deadline is not before its end."""
    rows = 0
    for ticket in tickets:
        if ticket.deadline_s is None or ticket.deadline_s >= end_s:
            rows += ticket.request.batch
            if rows > max_rows:
                return
            yield ticket


def grows(rows: int, estimate: Estimate, max_rows: int) -> bool:
    """Whether a batch of more rows would take clearly less time per row."""
    per_row_s = estimate.predicted_s(rows) / rows
    larger = [most for most in estimate.planned(max_rows) if most > rows]
    return any(estimate.predicted_s(most) / most <= _GAIN * per_row_s for most in larger)
