"""The scheduler alone, with a clock of the test's own."""

import pytest

from server.errors import QueueFull
from server.request import InferRequest
from server.scheduler import Expired, Scheduler, Work


def request(model: str = "m", timeout_s: float | None = None) -> InferRequest:
    return InferRequest(model, 1, {}, 1, (), timeout_s=timeout_s)


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
