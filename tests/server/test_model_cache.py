"""What is kept in memory of models that have gone: the newest, within bounds, as long as their files are the same."""

import os
from pathlib import Path

from server.models.cache import FileState, Newest


def test_the_least_recently_used_makes_room() -> None:
    shelf = Newest[str, int](most=2)
    shelf["a"], shelf["b"] = 1, 2
    assert shelf.get("a") == 1
    shelf["c"] = 3
    assert (shelf.get("a"), shelf.get("b"), shelf.get("c")) == (1, None, 3)


def test_bytes_are_bounded_too_and_what_is_larger_than_all_is_not_kept() -> None:
    shelf = Newest[str, int](most=10, most_bytes=100, nbytes=lambda value: value)
    shelf["a"], shelf["b"], shelf["c"] = 50, 40, 20
    assert ("a" in shelf, "b" in shelf, "c" in shelf) == (False, True, True)
    shelf["d"] = 101
    assert len(shelf) == 0


def test_a_replaced_value_counts_once() -> None:
    shelf = Newest[str, int](most=10, most_bytes=100, nbytes=lambda value: value)
    shelf["a"] = 60
    shelf["a"] = 70
    assert shelf["a"] == 70


def test_nothing_that_is_known_to_be_absent_is_asked_for_again() -> None:
    rooms = Newest[str, int | None](most=2)
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
