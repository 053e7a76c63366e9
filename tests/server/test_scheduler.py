"""The scheduler alone, on a clock that the tests set."""

import math
import random

import pytest

from cohabit.planner.shapes import Bucket
from cohabit.server.errors import LevelFull, ModelNotFound, QueueFull, RateLimited, RequestTimedOut
from cohabit.server.ipc.model import ModelKey
from cohabit.server.ipc.request import Request
from cohabit.server.scheduling.batching import Batch
from cohabit.server.scheduling.order import BYPASSES
from cohabit.server.scheduling.policy import LevelPolicy, Policy
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.scheduler import PATIENCE_S, Scheduler

SWAP_BOUND = {Bucket(1): 1.0, Bucket(2): 1.1, Bucket(4): 1.2, Bucket(8): 1.3}
COMPUTE_BOUND = {Bucket(1): 1.0, Bucket(2): 2.0, Bucket(4): 4.0, Bucket(8): 8.0}


def key(name: str) -> ModelKey:
    return ModelKey(name, 1)


def request(
    model: str = "m", timeout_s: float | None = None, batch: int = 1, priority: int | None = None, length: int = 0
) -> Request:
    sizes = (length,) if length else ()
    return Request(key(model), {}, batch, (), timeout_s=timeout_s, priority=priority, sizes=sizes)


def scheduler_of(*models: str, queue_limit: int = 16, policy: Policy | None = None) -> Scheduler:
    scheduler = Scheduler(queue_limit)
    for model in models or ("m",):
        scheduler.add(key(model), policy=policy)
    return scheduler


def served(scheduler: Scheduler, now_s: float = 0.0) -> list[str]:
    models = []
    while (work := scheduler.next(now_s)) is not None:
        models.append(work.model.name)
        scheduler.finished(work, now_s, None)
    return models


def batches_taken(scheduler: Scheduler, now_s: float = 0.0) -> list[list[int]]:
    taken = []
    while (work := scheduler.next(now_s)) is not None:
        taken.append([t.request.batch for t in work.tickets])
        scheduler.finished(work, now_s, None)
    return taken


def test_oldest_request_of_all_models_runs_first() -> None:
    scheduler = scheduler_of(*"abc")
    assert scheduler.next(0.0) is None
    with pytest.raises(ModelNotFound):
        scheduler.submit(0.0, request("unknown"))
    for now_s, model in enumerate("abacb"):
        scheduler.submit(float(now_s), request(model))
    assert served(scheduler) == list("abacb")


@pytest.mark.parametrize("keeps_order", [False, True])
def test_under_overload_a_request_is_passed_over_unless_the_model_preserves_the_order(keeps_order: bool) -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), SWAP_BOUND, policy=Policy(keeps_order=keeps_order), max_rows=8)
    first = scheduler.submit(0.0, request(timeout_s=1.5))
    later = [scheduler.submit(0.0, request()) for _ in range(7)]
    with pytest.raises(RequestTimedOut):
        scheduler.submit(0.0, request(timeout_s=0.1))
    work = scheduler.next(0.0)
    assert work is not None
    assert (work.tickets[0] is first) == keeps_order
    assert (work.tickets == tuple(later)) != keeps_order


def test_full_queue_refuses_its_model_only_and_says_when_to_come_back() -> None:
    scheduler = Scheduler(2)
    scheduler.add(key("a"), {Bucket(1): 3.0})
    scheduler.add(key("b"), {Bucket(1): 1.0})
    for _ in range(2):
        scheduler.submit(0.0, request("a"))
    with pytest.raises(QueueFull, match=r"Exceeds maximum queue size: 2 requests wait for model 'a'") as refusal:
        scheduler.submit(0.0, request("a"))
    assert refusal.value.retry_after_s == pytest.approx(6.0)
    scheduler.submit(0.0, request("b"))
    assert (scheduler.pending(key("a")), scheduler.pending(key("b")), len(scheduler._tickets)) == (2, 1, 3)
    scheduler.next(0.0)
    scheduler.submit(0.0, request("a"))


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        (Policy(default=LevelPolicy(limit=1)), QueueFull),
        (Policy(levels=2, default=LevelPolicy(limit=1)), LevelFull),
    ],
)
def test_a_models_own_limit_fills_its_queue_or_one_of_its_levels(policy: Policy, kind: type[QueueFull]) -> None:
    scheduler = scheduler_of(policy=policy)
    scheduler.submit(0.0, request())
    with pytest.raises(QueueFull, match="1 requests wait") as refusal:
        scheduler.submit(0.0, request())
    assert type(refusal.value) is kind


def test_cancelled_request_never_runs_and_makes_room() -> None:
    scheduler = scheduler_of(queue_limit=2)
    kept, dropped = scheduler.submit(0.0, request()), scheduler.submit(0.0, request())
    assert scheduler.cancel(dropped)
    assert not scheduler.cancel(dropped)
    assert scheduler.cancel(scheduler.submit(0.0, request()))
    assert scheduler.next(0.0) == Batch((kept,), 1)
    assert not scheduler.cancel(kept)
    assert scheduler.next(0.0) is None


def test_clear_forgets_what_waited() -> None:
    scheduler = scheduler_of()
    ticket = scheduler.submit(0.0, request())
    scheduler.clear()
    assert (len(scheduler._tickets), scheduler.next(0.0)) == (0, None)
    assert not scheduler.cancel(ticket)


# Deadlines.


def test_request_that_could_never_be_in_time_is_refused_on_arrival() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 2.0})
    with pytest.raises(RequestTimedOut, match="cannot answer within 1000 ms"):
        scheduler.submit(0.0, request(timeout_s=1.0))
    assert len(scheduler._tickets) == 0


def test_request_that_what_is_ahead_makes_late_is_refused_on_arrival() -> None:
    scheduler = Scheduler(16)
    for model in "ab":
        scheduler.add(key(model), {Bucket(1): 1.0})
    scheduler.submit(0.0, request("a"))
    assert scheduler.next(0.0) is not None
    scheduler.submit(0.0, request("b"))
    with pytest.raises(RequestTimedOut, match="would have taken"):
        scheduler.submit(0.0, request("a", timeout_s=3.1))
    scheduler.submit(0.0, request("a", timeout_s=3.3))


def test_what_its_level_overtakes_is_not_ahead_of_a_request() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0}, policy=Policy(levels=2), max_rows=1)
    for _ in range(3):
        scheduler.submit(0.0, request(priority=2))
    scheduler.submit(0.0, request(priority=1, timeout_s=1.5))
    with pytest.raises(RequestTimedOut, match="would have taken"):
        scheduler.submit(0.0, request(priority=2, timeout_s=4.5))
    scheduler.submit(0.0, request(priority=2, timeout_s=5.5))


def test_the_delay_of_answers_is_kept_free_before_a_deadline() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0})
    assert scheduler.cancel(scheduler.submit(0.0, request(timeout_s=1.3)))
    for _ in range(20):
        scheduler.answered(0.2)
    with pytest.raises(RequestTimedOut):
        scheduler.submit(0.0, request(timeout_s=1.3))


def test_request_is_refused_when_it_becomes_hopeless_and_not_before() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0})
    ticket = scheduler.submit(0.0, request(timeout_s=5.0))
    latest_s = scheduler.expiry_s()
    assert 3.5 < latest_s <= 4.0, "the predicted second must fit, with a margin"
    assert scheduler.shed(latest_s) == []
    assert scheduler.shed(latest_s + 0.01) == [ticket]
    assert scheduler.next(latest_s + 0.01) is None


def test_work_that_begins_dooms_what_can_no_longer_follow_it() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("long"), {Bucket(1): 10.0})
    scheduler.add(key("short"), {Bucket(1): 1.0})
    scheduler.submit(0.0, request("short", timeout_s=12.0))
    assert scheduler.next(0.0) is not None
    hasty = scheduler.submit(0.0, request("short", timeout_s=5.0))
    scheduler.submit(0.0, request("long"))
    scheduler.pause(key("short"))
    assert scheduler.shed(0.0) == []
    assert scheduler.next(1.0) is not None, "long begins"
    assert scheduler.shed(1.0) == [hasty]


def test_the_nearer_deadline_runs_first() -> None:
    scheduler = Scheduler(16)
    for model in "abc":
        scheduler.add(key(model), {Bucket(1): 0.01})
    scheduler.submit(0.0, request("a"))
    scheduler.submit(0.0, request("b", timeout_s=0.5))
    scheduler.submit(0.0, request("c", timeout_s=0.2))
    assert served(scheduler) == ["c", "b", "a"]


def test_of_equal_deadlines_that_of_the_longer_execution_is_nearer() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("short"), {Bucket(1): 0.1})
    scheduler.add(key("long"), {Bucket(1): 0.4})
    for model in ("short", "long"):
        scheduler.submit(0.0, request(model, timeout_s=0.9))
    assert served(scheduler) == ["long", "short"]


def test_age_outweighs_deadlines_in_the_end() -> None:
    scheduler = Scheduler(16)
    for model in "ab":
        scheduler.add(key(model), {Bucket(1): 0.01})
    scheduler.submit(0.0, request("a"))
    scheduler.submit(PATIENCE_S, request("b", timeout_s=0.5))
    assert served(scheduler, PATIENCE_S) == ["a", "b"]


def test_saying_a_long_timeout_does_not_make_a_request_less_urgent() -> None:
    scheduler = scheduler_of("a", "b")
    scheduler.submit(0.0, request("a", timeout_s=60.0))
    scheduler.submit(0.1, request("b"))
    assert served(scheduler, 0.1) == ["a", "b"]


def test_measured_times_correct_the_predictions_both_ways() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0, Bucket(8): 4.0})

    def run(seconds: float, times: int) -> None:
        for _ in range(times):
            scheduler.submit(0.0, request())
            work = scheduler.next(0.0)
            assert work is not None
            scheduler.finished(work, 0.0, seconds)

    run(2.0, 40)
    assert scheduler.correction(key("m")) == pytest.approx(2.0, rel=0.05)
    with pytest.raises(RequestTimedOut):
        scheduler.submit(0.0, request(timeout_s=1.9))
    with pytest.raises(RequestTimedOut):
        scheduler.submit(0.0, request(batch=8, timeout_s=7.9))
    run(0.5, 60)
    scheduler.submit(0.0, request(timeout_s=0.6))


def test_refusals_do_not_keep_a_model_of_unknown_times_from_running() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"))
    with pytest.raises(RequestTimedOut):
        scheduler.submit(0.0, request(timeout_s=-1.0))
    waiting = scheduler.submit(0.0, request())
    assert scheduler.next(0.0) == Batch((waiting,), 1)


def test_request_that_slow_executions_have_made_hopeless_is_not_executed() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0})
    first, tight, patient = (scheduler.submit(0.0, request(timeout_s=timeout_s)) for timeout_s in (2.0, 4.0, 60.0))
    work = scheduler.next(0.0)
    assert work is not None
    assert work.tickets == (first,)
    scheduler.finished(work, 2.5, 2.5)
    work = scheduler.next(2.5)
    assert work is not None
    assert work.tickets == (patient,), "1.5 seconds are left to the other, which were enough when it came"
    assert scheduler.shed(2.5) == [tight]
    assert len(scheduler._tickets) == 0


def test_model_that_was_slow_once_is_tried_again() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0})
    scheduler.submit(0.0, request())
    work = scheduler.next(0.0)
    assert work is not None
    scheduler.finished(work, 100.0, 100.0)
    scheduler.submit(100.0, request())
    with pytest.raises(RequestTimedOut):
        scheduler.submit(100.0, request(timeout_s=2.9))
    scheduler.submit(110.0, request(timeout_s=2.9))  # nothing has been heard of it for ten seconds


def test_an_idle_device_tries_what_it_expects_to_be_in_time() -> None:
    """After a slow execution, the time that few exceed is twice the usual one; it counts where requests would wait."""
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0}, max_rows=1)

    def executed(*tickets: Ticket, seconds: float) -> None:
        for ticket in tickets:
            work = scheduler.next(0.0)
            assert work is not None
            assert work.tickets == (ticket,)
            scheduler.finished(work, 0.0, seconds)

    executed(scheduler.submit(0.0, request()), seconds=3.0)
    executed(scheduler.submit(0.0, request(timeout_s=1.3)), seconds=1.2)
    alone = scheduler.submit(0.0, request(timeout_s=1.3))
    with pytest.raises(RequestTimedOut):
        scheduler.submit(0.0, request(timeout_s=2.4))
    later = scheduler.submit(0.0, request())
    assert scheduler.shed(0.0) == []
    executed(alone, later, seconds=1.2)
    with pytest.raises(RequestTimedOut):
        scheduler.submit(0.0, request(timeout_s=0.9))


def test_requests_with_deadlines_leave_nothing_behind() -> None:
    """A heap that kept them until their deadlines would keep their inputs too."""
    scheduler = scheduler_of()
    for _ in range(10_000):
        scheduler.cancel(scheduler.submit(0.0, request(timeout_s=3600.0)))
    assert len(scheduler._deadlines._heap) < 200


# Batching.


@pytest.mark.parametrize(
    ("waiting", "together"),
    [
        ([1] * 7, [[1] * 7]),
        ([1] * 9, [[1] * 8, [1]]),
        ([3, 1, 2], [[3, 1, 2]]),
        ([8, 1, 1], [[8], [1, 1]]),
        ([5, 4, 1], [[5], [4, 1]]),
    ],
)
def test_model_bound_by_its_swaps_is_padded_rather_than_swapped_twice(
    waiting: list[int], together: list[list[int]]
) -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), SWAP_BOUND, max_rows=8)
    for batch in waiting:
        scheduler.submit(0.0, request(batch=batch))
    assert batches_taken(scheduler) == together


def test_model_bound_by_arithmetic_does_not_keep_its_requests_waiting_for_each_other() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), COMPUTE_BOUND, max_rows=8)
    for _ in range(3):
        scheduler.submit(0.0, request())
    assert batches_taken(scheduler) == [[1], [1], [1]]


def test_model_without_a_batch_is_never_put_together() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0}, max_rows=0)
    for _ in range(2):
        scheduler.submit(0.0, request())
    assert batches_taken(scheduler) == [[1], [1]]


@pytest.mark.parametrize(("batch", "timeout_s"), [(1, 9.0), (8, 17.0)])
def test_requests_that_are_never_put_together_are_expected_to_take_their_time_one_by_one(
    batch: int, timeout_s: float
) -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0, Bucket(8): 2.0}, max_rows=0)
    for _ in range(8):
        scheduler.submit(0.0, request(batch=batch))
    with pytest.raises(RequestTimedOut):
        scheduler.submit(0.0, request(batch=batch, timeout_s=timeout_s - 0.01))
    scheduler.submit(0.0, request(batch=batch, timeout_s=timeout_s * 1.3))


def test_requests_of_other_models_and_of_a_replaced_version_do_not_join() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), SWAP_BOUND, max_rows=8)
    scheduler.add(key("other"), SWAP_BOUND, max_rows=8)
    for model in ("m", "other", "m"):
        scheduler.submit(0.0, request(model))
    scheduler.add(key("m"), SWAP_BOUND, max_rows=8)
    scheduler.submit(0.0, request("m"))
    assert batches_taken(scheduler) == [[1, 1], [1], [1]]


def test_batch_grows_only_while_all_in_it_stay_in_time() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0, Bucket(2): 1.2, Bucket(4): 2.0, Bucket(8): 3.0}, max_rows=8)
    scheduler.submit(0.0, request(timeout_s=2.2))
    for _ in range(5):
        scheduler.submit(0.0, request())
    assert batches_taken(scheduler)[0] == [1, 1]


def delayed(delay_s: float, *preferred: int) -> Scheduler:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), SWAP_BOUND, Policy(preferred_batches=preferred, batch_delay_s=delay_s), max_rows=8)
    return scheduler


def test_request_is_kept_back_for_others_until_its_delay_is_over() -> None:
    scheduler = delayed(0.5)
    scheduler.submit(0.0, request())
    scheduler.submit(0.2, request())
    assert scheduler.next(0.2) is None
    assert scheduler.wake_s(0.2) == 0.5
    work = scheduler.next(0.5)
    assert work is not None
    assert work.rows == 2


def test_full_batch_waits_for_nothing() -> None:
    scheduler = delayed(0.5)
    for _ in range(8):
        assert scheduler.next(0.0) is None
        scheduler.submit(0.0, request())
    assert batches_taken(scheduler) == [[1] * 8]


def test_preferred_batch_goes_at_once() -> None:
    scheduler = delayed(0.5, 3)
    for _ in range(5):
        scheduler.submit(0.0, request())
    assert batches_taken(scheduler) == [[1, 1, 1]]
    assert scheduler.pending(key("m")) == 2
    assert batches_taken(scheduler, 0.5) == [[1, 1]]


def test_delay_never_costs_a_deadline() -> None:
    scheduler = delayed(5.0)
    scheduler.submit(0.0, request(timeout_s=2.0))
    wake_s = scheduler.wake_s(0.0)
    assert 0.0 < wake_s <= 1.0
    assert scheduler.shed(wake_s) == []
    assert scheduler.next(wake_s) is not None


# Shapes.

BY_LENGTH = {Bucket(b, (n,)): n / 16 * seconds for n in (16, 64) for b, seconds in ((1, 1.0), (8, 1.3))}


def lengths_taken(scheduler: Scheduler) -> list[list[int]]:
    taken = []
    while (work := scheduler.next(0.0)) is not None:
        taken.append([t.request.sizes[0] for t in work.tickets])
        scheduler.finished(work, 0.0, None)
    return taken


@pytest.mark.parametrize(
    ("keeps_order", "expected"), [(False, [[5, 5], [9, 9], [50]]), (True, [[5], [9], [5], [9], [50]])]
)
def test_requests_of_the_same_shape_are_batched_even_within_a_bucket(
    keeps_order: bool, expected: list[list[int]]
) -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), BY_LENGTH, Policy(keeps_order=keeps_order), max_rows=8)
    for length in (5, 9, 5, 9, 50):
        scheduler.submit(0.0, request(length=length))
    assert lengths_taken(scheduler) == expected


def test_a_request_is_expected_to_take_the_time_of_its_bucket() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), BY_LENGTH, max_rows=8)
    with pytest.raises(RequestTimedOut):
        scheduler.submit(0.0, request(timeout_s=3.0, length=17))
    scheduler.submit(0.0, request(timeout_s=3.0, length=16))
    with pytest.raises(RequestTimedOut):  # behind the other, which is of another shape
        scheduler.submit(0.0, request(timeout_s=1.9, length=15))
    work = scheduler.next(0.0)
    assert work is not None
    assert work.predicted_s == 1.0
    scheduler.finished(work, 2.0, 2.0)
    corrected = scheduler.correction(key("m"))
    assert corrected > 1.0
    scheduler.submit(2.0, request(length=64))
    work = scheduler.next(2.0)
    assert work is not None
    assert work.predicted_s == 4.0, "what one bucket took says nothing of another"


def test_under_overload_a_batch_still_has_one_shape() -> None:
    scheduler = Scheduler(32)
    scheduler.add(key("m"), BY_LENGTH, max_rows=8)
    for n in range(16):
        scheduler.submit(0.0, request(timeout_s=60.0, length=(5, 9)[n % 2]))
    with pytest.raises(RequestTimedOut):
        scheduler.submit(0.0, request(timeout_s=0.1, length=5))
    assert lengths_taken(scheduler) == [[5] * 8, [9] * 8]


# Priorities and limits.


def levels(count: int, **by_level: LevelPolicy) -> Policy:
    policies = {int(level[1:]): policy for level, policy in by_level.items()}
    return Policy(levels=count, default_level=count, by_level=policies)


def test_more_urgent_level_overtakes_and_unknown_levels_count_as_the_default() -> None:
    scheduler = scheduler_of(policy=levels(2))
    tickets = [scheduler.submit(0.0, request(priority=p)) for p in (2, None, 7, 1)]
    order = [work.tickets[0] for _ in tickets if (work := scheduler.next(0.0)) is not None]
    assert order == [tickets[3], *tickets[:3]]


def test_level_has_its_own_bound_and_timeout() -> None:
    policy = levels(2, L1=LevelPolicy(limit=1, timeout_s=1.0, timeout_may_shorten=False))
    scheduler = scheduler_of(policy=policy)
    ticket = scheduler.submit(0.0, request(priority=1, timeout_s=0.1))
    assert ticket.deadline_s == 1.0
    with pytest.raises(QueueFull, match="1 requests wait"):
        scheduler.submit(0.0, request(priority=1))
    assert scheduler.submit(0.0, request(priority=2, timeout_s=0.1)).deadline_s == 0.1


@pytest.mark.parametrize(("asked_s", "given_s"), [(None, 1.0), (0.5, 0.5), (2.0, 1.0)])
def test_request_may_shorten_a_timeout_but_not_lengthen_it(asked_s: float | None, given_s: float) -> None:
    assert LevelPolicy(timeout_s=1.0).timeout_of(asked_s) == given_s


def test_late_request_goes_behind_the_others_where_the_policy_says_so() -> None:
    scheduler = scheduler_of(policy=Policy(default=LevelPolicy(timeout_s=1.0, delays_late=True)))
    late = scheduler.submit(0.0, request())
    punctual = scheduler.submit(0.9, request())
    assert scheduler.shed(1.5) == []
    assert [scheduler.next(1.5), scheduler.next(1.5)] == [
        Batch((punctual,), 1),
        Batch((late,), 1),
    ]


def test_concurrency_counts_what_waits_and_what_runs() -> None:
    scheduler = scheduler_of(policy=Policy(concurrency=2))
    scheduler.submit(0.0, request())
    second = scheduler.submit(0.0, request())
    work = scheduler.next(0.0)
    assert work is not None
    with pytest.raises(RateLimited, match="2 requests under way"):
        scheduler.submit(0.0, request())
    scheduler.finished(work, 0.0, 0.1)
    scheduler.submit(0.0, request())
    scheduler.cancel(second)
    scheduler.submit(0.0, request())


def test_rate_allows_bursts_and_then_its_mean() -> None:
    scheduler = scheduler_of(policy=Policy(rate_per_s=10.0, burst=3), queue_limit=1000)
    accepted, waits_s = 0, []
    for tick in range(1000):
        try:
            scheduler.submit(100.0 + tick / 1000, request())
            accepted += 1
        except RateLimited as error:
            waits_s.append(error.retry_after_s)
    assert accepted == 3 + 9
    assert 0.0 < min(waits_s) < max(waits_s) <= 0.1 + 1e-9


# Time that a model loses directly after itself, and what it may not do.


def test_model_whose_residents_are_on_their_way_back_lets_another_go_first() -> None:
    scheduler = Scheduler(16)
    for model in "ab":
        scheduler.add(key(model), {Bucket(1): 1.0}, recovery_s=0.5)
    for now_s, model in ((0.0, "a"), (0.1, "a"), (0.2, "b")):
        scheduler.submit(now_s, request(model))
    assert served(scheduler, 0.2) == ["a", "b", "a"]


def test_held_model_waits_and_keeps_its_requests() -> None:
    scheduler = scheduler_of("a", "b")
    scheduler.submit(0.0, request("a"))
    scheduler.submit(0.0, request("b"))
    scheduler.pause(key("a"))
    assert served(scheduler) == ["b"]
    scheduler.resume(key("a"))
    assert served(scheduler) == ["a"]


def test_removed_model_gives_its_requests_back() -> None:
    scheduler = scheduler_of("a", "b")
    ticket = scheduler.submit(0.0, request("a"))
    scheduler.submit(0.0, request("b"))
    assert scheduler.remove(key("a")) == [ticket]
    assert (scheduler.pending(key("a")), served(scheduler)) == (0, ["b"])


def test_work_of_a_removed_model_says_nothing_about_its_successor() -> None:
    scheduler = scheduler_of(policy=Policy(concurrency=1))
    scheduler.submit(0.0, request())
    work = scheduler.next(0.0)
    assert work is not None
    scheduler.remove(key("m"))
    scheduler.add(key("m"), {Bucket(1): 1.0}, Policy(concurrency=1))
    scheduler.submit(0.0, request())
    scheduler.finished(work, 9.0, 9.0)
    assert scheduler.correction(key("m")) == 1.0
    with pytest.raises(RateLimited):
        scheduler.submit(9.0, request())


@pytest.mark.parametrize("seed", range(20))
def test_no_request_is_left_behind_for_ever(seed: int) -> None:
    """Whatever urgent requests pour in, a request starts after a number of executions that is known at its arrival."""
    rng = random.Random(seed)
    names = [f"m{i}" for i in range(rng.randint(1, 6))]
    scheduler = Scheduler(10_000)
    for name in names:
        recovery_s = rng.choice([0.0, 0.1, 10.0])
        scheduler.add(key(name), SWAP_BOUND, levels(3), max_rows=rng.choice([1, 8]), recovery_s=recovery_s)
    bound: dict[Ticket, int] = {}
    executions, now_s = 0, 0.0
    for _ in range(400):
        now_s += rng.random() / 10
        for _ in range(rng.choice([0, 1, 1, 3])):
            urgent = rng.random() < 0.7
            asked = request(rng.choice(names), timeout_s=1e3 if urgent else None, priority=rng.randint(1, 3))
            waiting = len(scheduler._tickets)
            bound[scheduler.submit(now_s, asked)] = executions + (BYPASSES + 1) * (waiting + 1)
        work = scheduler.next(now_s)
        assert (work is None) == (not bound), "nothing holds requests back here"
        if work is not None:
            executions += 1
            for ticket in work.tickets:
                assert executions <= bound.pop(ticket)
            scheduler.finished(work, now_s, rng.random())


def test_what_the_device_gets_ahead_is_what_would_be_next_if_waiting_gains_nothing() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("alone"), {Bucket(1): 1.0})
    scheduler.add(key("swaps"), SWAP_BOUND, max_rows=8)
    scheduler.add(key("computes"), COMPUTE_BOUND, max_rows=8)
    assert scheduler.ready_ahead(0.0) is None
    scheduler.submit(0.0, request("alone"))
    running = scheduler.next(0.0)
    assert running is not None
    for model, expected in (("swaps", None), ("computes", "computes")):
        ticket = scheduler.submit(0.0, request(model))
        found = scheduler.ready_ahead(0.5)
        assert (None if found is None else found.model.name) == expected
        scheduler.cancel(ticket)
    for _ in range(8):
        scheduler.submit(0.0, request("swaps"))
    full = scheduler.ready_ahead(0.5)
    assert full is not None
    assert (full.model.name, full.rows) == ("swaps", 8)


def test_what_may_be_too_late_after_an_execution_is_not_given_to_the_device_ahead() -> None:
    scheduler = Scheduler(16)
    scheduler.add(key("m"), {Bucket(1): 1.0})
    scheduler.submit(0.0, request())
    running = scheduler.next(0.0)
    assert running is not None
    scheduler.submit(0.0, request(timeout_s=4.0))
    assert scheduler.ready_ahead(0.5) is not None
    scheduler.replan(key("m"), {Bucket(1): 3.2}, 0.0)
    assert scheduler.ready_ahead(0.5) is None


def test_two_executions_end_in_any_order_and_the_device_is_busy_until_both_have() -> None:
    for first_ends in (True, False):
        scheduler = Scheduler(16)
        scheduler.add(key("m"), {Bucket(1): 1.0})
        for _ in range(2):
            scheduler.submit(0.0, request())
        one, two = scheduler.next(0.0), scheduler.next(0.25)
        assert one is not None
        assert two is not None
        assert scheduler._busy_until_s == 2.0
        scheduler.finished(one if first_ends else two, 1.5, 1.5)
        assert scheduler._busy_until_s == 2.5, "the other one begins now, and takes its second"
        scheduler.finished(two if first_ends else one, 2.5, 1.0)
        assert scheduler._busy_until_s == -math.inf
