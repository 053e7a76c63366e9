"""Files of the cache are whole, whoever writes them at the same time, and whoever was killed while writing."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cohabit.planner import cache_file

WRITERS, TURNS = 8, 25


@pytest.fixture(params=["without a name", "named"])
def nameless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system has files without a name."""
    if request.param == "without a name":
        return True
    opened = os.open

    def named(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", named)
    return False


def content(writer: int, turn: int) -> bytes:
    return b"[%d,%d]" % (writer, turn) * 500


def write_often(path: Path, writer: int) -> None:
    for turn in range(TURNS):
        cache_file.write(path, content(writer, turn))
        assert cache_file.read(path)[:1] == b"["


@pytest.mark.usefixtures("nameless")
def test_threads_that_write_one_file_do_not_disturb_one_another(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    with ThreadPoolExecutor(WRITERS) as writers:
        for writing in [writers.submit(write_often, path, writer) for writer in range(WRITERS)]:
            writing.result()
    assert cache_file.read(path) in {content(writer, TURNS - 1) for writer in range(WRITERS)}
    assert list(tmp_path.iterdir()) == [path]


def test_processes_of_one_id_do_not_disturb_one_another(tmp_path: Path) -> None:
    """As in containers that share a cache."""
    path = tmp_path / "file.json"
    code = (
        "import os, sys; from pathlib import Path; os.getpid = lambda: 7\n"
        "from tests.planner.test_cache_file import write_often\n"
        "write_often(Path(sys.argv[1]), int(sys.argv[2]))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(path), str(writer)]) for writer in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert list(tmp_path.iterdir()) == [path]


def killed_links(path: Path) -> list[Path]:
    return [path.with_name(f".{path.name}.{end}") for end in (str(os.getpid()), "1", "abcdef")]


@pytest.mark.usefixtures("nameless")
def test_what_killed_writers_left_blocks_no_write_and_is_removed_when_it_is_old(tmp_path: Path) -> None:
    path, other = tmp_path / "file.json", tmp_path / ".file.json2.1"
    for left in (*killed_links(path), other):
        left.write_bytes(b"half")
    cache_file.write(path, b"1")
    assert cache_file.read(path) == b"1"
    assert all(left.exists() for left in killed_links(path)), "another writer may write it now"
    for left in (*killed_links(path), other):
        os.utime(left, (1.0, 1.0))
    cache_file.write(path, b"2")
    assert {child.name for child in tmp_path.iterdir()} == {path.name, other.name}


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize("failing", ["fsync", "replace", "link"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    cache_file.write(path, b"1")

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    called: Callable[..., object] = getattr(os, failing)
    monkeypatch.setattr(os, failing, fail)
    try:
        cache_file.write(path, b"2")
    except OSError:
        assert cache_file.read(path) == b"1"
    else:
        assert failing == "link", "a file that has a name needs no link"
    monkeypatch.setattr(os, failing, called)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("nameless")
def test_of_two_first_writes_the_earlier_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.json"
    assert cache_file.write_first(path, b"1") == b"1"
    assert cache_file.write_first(path, b"2") == cache_file.read(path) == b"1"
    path.write_bytes(b"cut")
    assert cache_file.write_first(path, b"3") == cache_file.read(path) == b"3"
    assert list(path.parent.iterdir()) == [path]
