"""The scheduler alone, with a clock of the test's own."""

import pytest

from server.errors import QueueFull
from server.request import InferRequest
from server.scheduler import Expired, Scheduler, Work, worthwhile_batches


def request(model: str = "m", timeout_s: float | None = None, batch: int = 1) -> InferRequest:
    return InferRequest(model, 1, {}, batch, (), timeout_s=timeout_s)


def served(scheduler: Scheduler, now_s: float = 0.0) -> list[str]:
    models = []
    while (pick := scheduler.next(now_s)) is not None:
        assert isinstance(pick, Work)
        models.append(pick.model)
    return models


def test_empty_scheduler_has_nothing_to_do() -> None:
    assert Scheduler(4).next(0.0) is None


def test_oldest_request_of_all_models_runs_first() -> None:
    scheduler = Scheduler(4)
    for now_s, model in enumerate("abacb"):
        scheduler.submit(float(now_s), request(model))
    assert served(scheduler) == list("abacb")


def test_requests_of_one_instant_run_in_order_of_arrival() -> None:
    scheduler = Scheduler(4)
    tickets = [scheduler.submit(0.0, request()) for _ in range(3)]
    assert [scheduler.next(0.0) for _ in tickets] == [Work("m", (ticket,)) for ticket in tickets]


def test_full_queue_refuses_its_model_only() -> None:
    scheduler = Scheduler(2)
    scheduler.submit(0.0, request("a"))
    scheduler.submit(0.0, request("a"))
    with pytest.raises(QueueFull, match=r"Exceeds maximum queue size: 2 requests wait for model 'a'"):
        scheduler.submit(0.0, request("a"))
    scheduler.submit(0.0, request("b"))
    assert (scheduler.pending("a"), scheduler.pending("b"), len(scheduler)) == (2, 1, 3)
    scheduler.next(0.0)
    scheduler.submit(0.0, request("a"))


def test_request_that_waited_too_long_is_expired_when_picked() -> None:
    scheduler = Scheduler(4)
    late = scheduler.submit(0.0, request(timeout_s=1.0))
    patient = scheduler.submit(0.5, request(timeout_s=2.0))
    assert scheduler.next(1.5) == Expired(late)
    assert scheduler.next(1.5) == Work("m", (patient,))


def test_request_picked_at_its_deadline_runs() -> None:
    scheduler = Scheduler(4)
    ticket = scheduler.submit(0.0, request(timeout_s=1.0))
    assert scheduler.next(1.0) == Work("m", (ticket,))


def test_cancelled_request_never_runs() -> None:
    scheduler = Scheduler(4)
    kept, dropped = scheduler.submit(0.0, request("a")), scheduler.submit(0.0, request("a"))
    assert scheduler.cancel(dropped)
    assert not scheduler.cancel(dropped)
    assert scheduler.next(0.0) == Work("a", (kept,))
    assert not scheduler.cancel(kept)
    assert scheduler.next(0.0) is None


def test_cancelling_makes_room() -> None:
    scheduler = Scheduler(1)
    scheduler.cancel(scheduler.submit(0.0, request()))
    scheduler.submit(0.0, request())


def test_clear_forgets_what_waited() -> None:
    scheduler = Scheduler(4)
    ticket = scheduler.submit(0.0, request())
    scheduler.clear()
    assert len(scheduler) == 0
    assert scheduler.next(0.0) is None
    assert not scheduler.cancel(ticket)


def batches_taken(scheduler: Scheduler) -> list[list[int]]:
    taken = []
    while (pick := scheduler.next(0.0)) is not None:
        assert isinstance(pick, Work)
        taken.append([t.request.batch for t in pick.tickets])
    return taken


@pytest.mark.parametrize(
    ("waiting", "together"),
    [
        ([1, 1, 1, 1, 1, 1, 1], [[1, 1, 1, 1], [1, 1], [1]]),
        ([1, 2, 1, 1], [[1, 2, 1], [1]]),
        ([3, 1, 2], [[3, 1], [2]]),
        ([8, 1, 1], [[8], [1, 1]]),
        ([1, 4, 1], [[1], [4], [1]]),
    ],
)
def test_waiting_requests_join_in_worthwhile_batches(waiting: list[int], together: list[list[int]]) -> None:
    scheduler = Scheduler(16)
    scheduler.join("m", frozenset({2, 4}))
    for batch in waiting:
        scheduler.submit(0.0, request(batch=batch))
    assert scheduler.ahead(0.0) == ("m", sum(together[0]))
    assert batches_taken(scheduler) == together


def test_requests_of_other_models_and_late_ones_do_not_join() -> None:
    scheduler = Scheduler(16)
    scheduler.join("m", frozenset({2, 4}))
    first = scheduler.submit(0.0, request())
    scheduler.submit(0.0, request("other"))
    late = scheduler.submit(0.0, request(timeout_s=1.0))
    scheduler.submit(0.0, request())
    assert scheduler.next(2.0) == Work("m", (first,))
    assert served(scheduler, 0.0)[:1] == ["other"]
    assert late.deadline_s == 1.0


@pytest.mark.parametrize(
    ("seconds", "worthwhile"),
    [
        ({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7}, {1, 2, 4, 8}),
        ({1: 1.0, 2: 2.0, 4: 4.0}, {1}),
        ({1: 1.0, 2: 1.9, 4: 2.0}, {1, 4}),
        ({}, set()),
    ],
)
def test_batches_are_worthwhile_where_a_sample_takes_less_time(
    seconds: dict[int, float], worthwhile: set[int]
) -> None:
    assert worthwhile_batches(seconds) == worthwhile
