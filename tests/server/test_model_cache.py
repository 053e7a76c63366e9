"""What is kept in memory of models that have gone: the newest, within bounds, as long as their files are the same."""

import os
from pathlib import Path

from cohabit.server.file_state import FileState
from cohabit.server.models.known_models import LeastRecentlyUsed


def test_the_least_recently_used_makes_room() -> None:
    cache = LeastRecentlyUsed[str, int](most=2)
    cache["a"], cache["b"] = 1, 2
    assert cache.get("a") == 1
    cache["c"] = 3
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)


def test_bytes_are_bounded_too_and_what_is_larger_than_all_is_not_kept() -> None:
    cache = LeastRecentlyUsed[str, int](most=10, most_bytes=100, nbytes=lambda value: value)
    cache["a"], cache["b"], cache["c"] = 50, 40, 20
    assert ("a" in cache, "b" in cache, "c" in cache) == (False, True, True)
    cache["d"] = 101
    assert not cache._values


def test_a_replaced_value_counts_once() -> None:
    cache = LeastRecentlyUsed[str, int](most=10, most_bytes=100, nbytes=lambda value: value)
    cache["a"] = 60
    cache["a"] = 70
    assert cache["a"] == 70


def test_nothing_that_is_known_to_be_absent_is_asked_for_again() -> None:
    rooms = LeastRecentlyUsed[str, int | None](most=2)
    rooms["full"] = None
    assert "full" in rooms
    assert rooms["full"] is None


def test_a_file_that_was_written_or_replaced_is_another(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    assert FileState.of(path) is None
    path.write_bytes(b"abc")
    before = FileState.of(path)
    assert before == FileState.of(path)
    os.utime(path, ns=(1, 1))
    assert FileState.of(path) != before
    replacement = tmp_path / "new"
    replacement.write_bytes(b"xyz")
    os.replace(replacement, path)
    assert FileState.of(path) != before
