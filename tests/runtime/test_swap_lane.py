"""The counters by which lanes wait for each other."""

import threading

import pytest
from server_fakes import eventually

from runtime.cpu.swap_lane import Counter


def test_a_thread_is_woken_when_its_value_is_reached_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, woken = Counter(), 0
    notify_all = counter._reached.notify_all

    def counted() -> None:
        nonlocal woken
        woken += 1
        notify_all()

    monkeypatch.setattr(counter._reached, "notify_all", counted)
    ended: list[int] = []

    def wait_for(value: int) -> None:
        counter.wait(value)
        ended.append(value)

    threads = [threading.Thread(target=wait_for, args=(value,)) for value in (7, 3)]
    for thread in threads:
        thread.start()
    eventually(lambda: sorted(counter._awaited) == [3, 7])
    counter.advance(1)
    counter.advance(2)
    assert (woken, ended) == (0, [])
    counter.advance(4)
    threads[1].join(60)
    assert (woken, ended) == (1, [3])
    eventually(lambda: counter._awaited == [7])
    for value in (5, 6):
        counter.advance(value)
    assert (woken, ended) == (1, [3])
    counter.advance(7)
    threads[0].join(60)
    assert (woken, ended) == (2, [3, 7])
    counter.wait(7)
