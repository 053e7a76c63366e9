"""Files: what is stored comes back, and what is damaged is reported and made again."""

import ast
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import cohabit.planner.graph
import cohabit.planner.plan
import cohabit.planner.profile
from cohabit.planner import cache_file
from cohabit.planner.errors import InvalidGraph
from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Address, Placement
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Link
from cohabit.planner.search.driver import search
from cohabit.planner.sizing.fitting import known_or_searched
from cohabit.planner.sizing.problem import Division, ModelDemand
from tests.support.planner.graphs import PAGE, chain, hand_written_plan, profile_of

ROOT = Path(__file__).parents[2]
GRAPH = chain([PAGE] * 3)
PROFILE = profile_of(GRAPH)
PROBLEM = Problem(GRAPH, PROFILE, Memory(4 * PAGE, PAGE))


class Shelf:
    """A library in a temporary folder, and what it complains about."""

    def __init__(self, root: Path, log: pytest.LogCaptureFixture) -> None:
        self.library = Library(root)
        self.path = self.library.plan_path(PROBLEM, "best")
        self._log = log

    @property
    def complaints(self) -> list[str]:
        return [vars(record)["fields"]["reason"] for record in self._log.records]


@pytest.fixture
def shelf(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Shelf:
    return Shelf(tmp_path, caplog)


def test_plan_is_stored_and_read_again(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = known_or_searched(PROBLEM, shelf.library)
    assert plan == search(PROBLEM)
    monkeypatch.setattr("cohabit.planner.sizing.fitting.search", None)  # would fail if it were called
    assert known_or_searched(PROBLEM, shelf.library) == plan
    assert shelf.complaints == []
    assert [p.name for p in shelf.path.parent.iterdir()] == [shelf.path.name]  # nothing temporary is left


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: b"\xff\xfe" + raw, "not a plan file"),
        (lambda raw: raw.replace(b'"format_version":2', b'"format_version":3'), "upgrade Cohabit"),
        (lambda raw: raw.replace(b'"format_version":2', b'"format_version":1'), "make the plan again"),
        (lambda raw: raw.replace(b'"steps"', b'"stops"'), "damaged"),
        (lambda raw: raw.replace(b'"after":[]', b'"after":[99]'), "plan refused"),
        (lambda raw: raw.replace(b'"partition_bytes":4096', b'"partition_bytes":8192'), "partition_bytes=8192"),
        (lambda raw: raw.replace(GRAPH.fingerprint.encode(), b"0" * 64), "was made for 000000000000"),
    ],
)
def test_damaged_plan_is_reported_and_made_again(shelf: Shelf, damage: object, says: str) -> None:
    plan = known_or_searched(PROBLEM, shelf.library)
    assert callable(damage)
    cache_file.write(shelf.path, damage(cache_file.read(shelf.path)))
    assert known_or_searched(PROBLEM, shelf.library) == plan
    assert len(shelf.complaints) == 1
    assert says in shelf.complaints[0]
    assert cohabit.planner.plan.decode(cache_file.read(shelf.path)) == plan


@pytest.mark.parametrize("damage", [lambda r: r[: len(r) // 2], lambda r: b"", lambda r: r.replace(b"1", b"2", 1)])
def test_every_changed_byte_is_noticed(shelf: Shelf, damage: Callable[[bytes], bytes]) -> None:
    plan = known_or_searched(PROBLEM, shelf.library)
    shelf.path.write_bytes(damage(shelf.path.read_bytes()))
    assert known_or_searched(PROBLEM, shelf.library) == plan
    assert "checksum does not fit" in shelf.complaints[0]
    assert cohabit.planner.plan.decode(cache_file.read(shelf.path)) == plan


def test_a_full_disk_keeps_no_plan_from_being_made(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert known_or_searched(PROBLEM, shelf.library) == search(PROBLEM)
    assert list(shelf.path.parent.iterdir()) == []


def test_different_problems_have_different_files(shelf: Shelf) -> None:
    residents = (Placement(0, Address("partition", 0)),)
    others = [
        msgspec.structs.replace(PROFILE, device="another"),
        msgspec.structs.replace(PROFILE, compute_slowdown=1.5),
    ]
    problems = [
        PROBLEM,
        Problem(GRAPH, PROFILE, Memory(4 * PAGE, 2 * PAGE)),
        Problem(GRAPH, PROFILE, Memory(5 * PAGE, PAGE)),
        Problem(GRAPH, PROFILE, Memory(4 * PAGE, PAGE), residents),
        *(Problem(GRAPH, other, Memory(4 * PAGE, PAGE)) for other in others),
    ]
    paths = {shelf.library.plan_path(p, s) for p in problems for s in ("best", "genetic")}
    assert len(paths) == 2 * len(problems)


def test_plans_of_different_searchers_are_not_mixed_up(shelf: Shelf) -> None:
    plans = {s: known_or_searched(PROBLEM, shelf.library, s) for s in ("best", "genetic")}
    for searcher, plan in plans.items():
        assert shelf.library.plan(PROBLEM, searcher) == plan == search(PROBLEM, searcher)
        assert plan.provenance is not None
        assert plan.provenance.searcher.startswith(searcher)


def test_stored_residents_must_be_those_asked_for(shelf: Shelf) -> None:
    fixed = Problem(GRAPH, PROFILE, Memory(4 * PAGE, PAGE), (Placement(1, Address("partition", 0)),))
    other = known_or_searched(PROBLEM, shelf.library)
    cache_file.write(shelf.library.plan_path(fixed, "best"), cohabit.planner.plan.encode(other))
    assert known_or_searched(fixed, shelf.library).residents == fixed.residents
    assert "other residents" in shelf.complaints[0]


def test_a_division_of_another_problem_is_made_again(shelf: Shelf) -> None:
    """One file stands at the place of the other."""
    models = ModelDemand("a", {1: GRAPH}, {1: PROFILE}), ModelDemand("b", {1: GRAPH}, {1: PROFILE})
    for count in (1, 2):
        division = Division(9 * PAGE, PAGE, (PAGE,) * count)
        shelf.library.store_division(models[:count], 9 * PAGE, "partitioned", 1, division)
        assert shelf.library.division(models[:count], 9 * PAGE, "partitioned", 1) == division
    first, second = shelf.path.parent.glob("*.division.json")
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    found = [shelf.library.division(models[:count], 9 * PAGE, "partitioned", 1) for count in (1, 2)]
    assert found == [None, None]
    assert all("division is of" in complaint for complaint in shelf.complaints)


DECODE_AT_ONCE = """
import sys, threading
from pathlib import Path
from cohabit.planner import graph, plan, profile

sys.setswitchinterval(1e-6)
files = [Path(name).read_bytes() for name in sys.argv[1:]]
barrier, done = threading.Barrier(8), []

def decode():
    barrier.wait()
    done.append([module.decode(raw) for module, raw in zip((graph, profile, plan), files)])

threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(done) == 8
assert all(each == done[0] for each in done)
"""


def test_first_files_may_be_decoded_in_several_threads_at_once(tmp_path: Path) -> None:
    """Msgspec looks at a type when it is first decoded; two threads that did so at once crashed in half of the runs."""
    plan = hand_written_plan(GRAPH, PROFILE)
    contents = {"graph": cohabit.planner.graph.encode(GRAPH), "profile": cohabit.planner.profile.encode(PROFILE)}
    contents["plan"] = cohabit.planner.plan.encode(plan)
    for name, raw in contents.items():
        (tmp_path / name).write_bytes(raw)
    command = [sys.executable, "-c", DECODE_AT_ONCE, *(str(tmp_path / name) for name in contents)]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


AT_DECODE_TIME = {
    "server/config/config.py": "the settings, before there are threads",
    "server/config/bundle.py": "a bundle's manifest, before there are threads",
    "runtime/training/planning/background.py": "a search's request, in a process of one thread",
    "server/protocol/json_body.py": "types whose decoders http/codec.py makes, and those of the event loop alone",
    "server/http/completions.py": "plain types, for which msgspec caches nothing",
    "server/http/generate.py": "plain types, for which msgspec caches nothing",
}


@pytest.mark.long
def test_decoders_are_made_when_modules_are_imported() -> None:
    """A `decode(..., type=...)`, or a Decoder made in a function, may have msgspec look at a type in two threads."""
    found = set()
    for path in (ROOT / folder for folder in ("planner", "runtime", "server")):
        for module in path.rglob("*.py"):
            tree = ast.parse(module.read_text())
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            if any(
                ast.unparse(call.func) in ("msgspec.json.decode", "msgspec.msgpack.decode")
                and any(keyword.arg == "type" for keyword in call.keywords)
                for call in calls
            ):
                found.add(str(module.relative_to(ROOT)))
    assert found == AT_DECODE_TIME.keys()


def test_edited_graph_that_reads_what_nothing_wrote_is_refused() -> None:
    broken = msgspec.structs.replace(GRAPH, ops=GRAPH.ops[1:])
    with pytest.raises(InvalidGraph, match="reads A1 before it is written"):
        cohabit.planner.graph.decode(cohabit.planner.graph.encode(broken))


def test_whole_numbers_in_a_profile_do_not_change_its_fingerprint() -> None:
    whole = msgspec.structs.replace(PROFILE, swap_in=Link(0, 4096))
    assert whole.fingerprint == cohabit.planner.profile.decode(cohabit.planner.profile.encode(whole)).fingerprint
