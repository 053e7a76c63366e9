"""Which of a model's waiting requests are executed together, and whether it pays to wait for more."""

import math
from collections.abc import Iterable, Iterator

import msgspec

from server.scheduling.estimates import Estimate
from server.scheduling.policy import Policy
from server.scheduling.queues import Ticket

_GAIN = 0.9
"""A larger batch is worth it if a row takes at most this part of its time in a smaller one."""


class Batch(msgspec.Struct, frozen=True):
    """Requests of one model, to be executed together."""

    tickets: tuple[Ticket, ...]
    rows: int
    keep_until_s: float = -math.inf
    """Until then others may join."""


def alone(ticket: Ticket) -> Batch:
    """A batch of one request, which nothing else waits beside."""
    return Batch((ticket,), ticket.request.batch)


def batch_of(waiting: Iterable[Ticket], policy: Policy, estimate: Estimate, most_rows: int, now_s: float) -> Batch:
    """Choose how many of those that wait go with the first of them.

    A batch may be padded: five requests of a model bound by its swaps run as eight, whose parameters are copied once.
    One that is bound by arithmetic gains nothing, and then its requests do not wait for each other.
    """
    taken: list[Ticket] = []
    rows, best_s, paying, preferred, deadline_s = 0, math.inf, 1, 0, math.inf
    full = False
    for ticket in waiting:
        more = rows + ticket.request.batch
        if ticket.deadline_s is not None:
            deadline_s = min(deadline_s, ticket.deadline_s)
        too_late = deadline_s < math.inf and now_s + estimate.careful_s(more, now_s) > deadline_s
        if taken and (more > most_rows or ticket.generation != taken[0].generation or too_late):
            full = True
            break
        taken.append(ticket)
        rows = more
        per_row_s = estimate.predicted_s(rows) / rows
        if per_row_s <= _GAIN * best_s:
            best_s, paying = per_row_s, len(taken)
        if rows in policy.preferred_batches:
            preferred = len(taken)
    waits = policy.batch_delay_s > 0.0 and not full and not preferred and rows < most_rows
    keep_until_s = _keep_until(taken, policy, deadline_s - estimate.careful_s(rows, now_s)) if waits else -math.inf
    del taken[preferred or paying :]
    return Batch(tuple(taken), sum([t.request.batch for t in taken]), keep_until_s)


def best_rate_batch(
    waiting: Iterable[Ticket], usual: Batch, estimate: Estimate, most_rows: int, now_s: float
) -> Batch:
    """Where not everything can be answered in time: the batch that answers most per second.

    A request whose deadline is too near for a large batch would make a small one of it, and the next one, too.
    """
    if estimate.seconds(usual.rows) == 0.0:  # nothing was predicted, nor measured yet
        return usual
    generation = usual.tickets[0].generation
    best, best_per_s = usual, usual.rows / estimate.seconds(usual.rows) / _GAIN
    tickets = [ticket for ticket in waiting if ticket.generation == generation]
    for rows in estimate.planned(most_rows):
        chosen = tuple(_fitting(tickets, rows, now_s + estimate.careful_s(rows, now_s)))
        filled = sum(ticket.request.batch for ticket in chosen)
        if chosen and filled / estimate.seconds(filled) > best_per_s:
            best, best_per_s = Batch(chosen, filled), filled / estimate.seconds(filled)
    return best


def _fitting(tickets: Iterable[Ticket], most_rows: int, end_s: float) -> Iterator[Ticket]:
    """In order, so many as fit into a batch that ends then and are still in time."""
    rows = 0
    for ticket in tickets:
        if ticket.deadline_s is None or ticket.deadline_s >= end_s:
            rows += ticket.request.batch
            if rows > most_rows:
                return
            yield ticket


def _keep_until(tickets: Iterable[Ticket], policy: Policy, latest_start_s: float) -> float:
    """When the first of the requests has waited long enough, or must begin for a deadline's sake."""
    return min(min(t.arrived_s for t in tickets) + policy.batch_delay_s, latest_start_s)
