"""Loops that are cached as machine code are compiled again when code that they hold changes."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cohabit.planner.compiled

LOOPS = {
    "callee.py": """
from cohabit.planner.compiled import compiled

@compiled
def factor():
    return {factor}
""",
    "caller.py": """
from cohabit.planner.callee import factor
from cohabit.planner.compiled import compiled

@compiled
def scaled(n):
    return n * factor()
""",
}


CALL = """
import os, sys, tempfile
from pathlib import Path
tempfile.tempdir = os.environ["TMPDIR"]  # and no other, if that is read-only
for name in sys.argv[1:]:
    try:
        (Path(name) / "probe").touch()
    except OSError:
        continue
    sys.exit(f"{name} should be read-only")
from cohabit.planner.caller import scaled
result = scaled(5)
print(result, sum(scaled.stats.cache_hits.values()), sum(scaled.stats.cache_misses.values()))
"""


def source_with(folder: Path, factor: int) -> Path:
    """The package with two loops, of which the callee returns `factor`."""
    package = folder / "cohabit" / "planner"
    package.mkdir(parents=True, exist_ok=True)
    for name in (package.parent / "__init__.py", package / "__init__.py"):
        name.touch()
    for name in ("compiled.py", "cache_file.py", "errors.py"):
        shutil.copy(Path(cohabit.planner.compiled.__file__).with_name(name), package)
    for name, source in LOOPS.items():
        if name == "callee.py" or not (package / name).exists():
            (package / name).write_text(source.replace("{factor}", str(factor)))
    return folder


def called(source: Path, *read_only: Path, **environment: str) -> str:
    """What a fresh process computes, and how often it found compiled code and did not."""
    done = subprocess.run(
        [sys.executable, "-c", CALL, *map(str, read_only)],
        # Bytecode counts as current while the source's second and size are the same.
        env={"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        cwd=source,
        preexec_fn=obey_permissions,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def obey_permissions() -> None:
    """Take from root, in a new process, what lets it write where it has no permission."""
    if os.geteuid() == 0:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


@pytest.mark.long
def test_a_change_of_what_a_loop_calls_is_seen(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    assert called(source_with(tmp_path, 2), **environment) == "10 0 1"
    assert list((tmp_path / "cache").rglob("caller.scaled*.nbi"))
    assert called(source_with(tmp_path, 3), **environment) == "15 0 1"


@pytest.mark.long
def test_loops_compiled_in_a_folder_that_is_read_only_now_are_used(tmp_path: Path) -> None:
    """They are copied to where they can be, for good; where nothing can be written, loops are compiled every time."""
    source = source_with(tmp_path / "source", 2)
    given, user, temporary = folders = [tmp_path / name for name in ("given", "user", "temporary")]
    for folder in folders:
        folder.mkdir()
    places = {"XDG_CACHE_HOME": str(user), "HOME": str(user), "TMPDIR": str(temporary)}
    environment = {"NUMBA_CACHE_DIR": str(given), **places}
    assert called(source, **environment) == "10 0 1"

    def where_copies_are() -> set[Path]:
        return {f for f in (user, temporary) if any(f.rglob("caller.scaled*.nbi"))}

    for writable, expected in ((None, ["10 0 1"]), (temporary, ["10 1 0"]), (user, ["10 1 0"] * 2)):
        tops = [folder for folder in (*folders, source / "cohabit" / "planner") if folder != writable]
        locked = [f for top in tops for f in (top, *top.rglob("*")) if f.is_dir()]
        for folder in locked:
            folder.chmod(0o555)
        try:
            assert [called(source, *tops, **environment) for _ in expected] == expected
        finally:
            for folder in locked:
                folder.chmod(0o755)
        assert where_copies_are() == ({writable} if writable else set())
        for folder in (user, temporary):
            shutil.rmtree(folder)
            folder.mkdir()


def test_temporary_compiled_code_of_another_user_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"cohabit-{os.geteuid()}"
    assert cohabit.planner.compiled._temporary_folder("state") == folder / "state"
    folder.chmod(0o755)
    assert cohabit.planner.compiled._temporary_folder("state") is None, "others may have written there"
    folder.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "theirs")
    assert cohabit.planner.compiled._temporary_folder("state") is None


@pytest.mark.long
def test_without_compiled_loops_the_same_plan_is_made_by_interpreting_them(tmp_path: Path) -> None:
    """Of a chain whose parameters take twice the memory, by each searcher with a few evaluations."""
    own = {
        "compiled": {},
        "interpreted": {cohabit.planner.compiled.INTERPRET: "1", "NUMBA_CACHE_DIR": str(tmp_path)},
    }
    plans = {
        how: subprocess.run(
            [sys.executable, "-c", QUICK_PLAN],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for how, environment in own.items()
    }
    assert plans["compiled"] == ["compiled", *plans["interpreted"][1:]]
    assert plans["interpreted"][0] == "interpreted"
    assert not list(tmp_path.rglob("*.nbi"))


QUICK_PLAN = """
import sys
import cohabit.planner.plan
from cohabit.planner.memory import single_budget
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.search.driver import search
from cohabit.planner.search.registry import SEARCHERS, can_plan
from cohabit.planner.streaming import stream
from cohabit.planner.sizing.fitting import split_budget
from tests.support.planner.graphs import chain, profile_of

graph = chain([1 << 20] * 4)
profile = profile_of(graph)
memory = split_budget({1: graph}, {1: profile}, 2 << 20)
plan = search(Problem(graph, profile, memory), limit=Limit(evaluations=3))
is_compiled = "Dispatcher" in type(stream.play).__name__
assert is_compiled == ("numba" in sys.modules), "numba is imported only where it compiles"
print("compiled" if is_compiled else "interpreted")
print(cohabit.planner.plan.encode(plan).decode())
problem = Problem(graph, profile, single_budget(2 << 20))
for searcher in SEARCHERS:
    if can_plan(searcher, problem):
        print(cohabit.planner.plan.encode(search(problem, searcher, limit=Limit(evaluations=3))).decode())
"""


def test_the_first_plan_compiles_unless_it_is_interpreted_or_compiled_loops_are_there(tmp_path: Path) -> None:
    program = "from cohabit.planner.compiled import compiles_first; print(compiles_first())"

    interpret = cohabit.planner.compiled.INTERPRET
    others = {name: value for name, value in os.environ.items() if name != interpret}

    def answer(**environment: str) -> str:
        environment = {"NUMBA_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), **environment}
        return subprocess.check_output([sys.executable, "-c", program], text=True, env=others | environment).strip()

    assert answer() == "True"
    assert answer(**{interpret: "1"}) == "False"
    (folder,) = tmp_path.iterdir()
    (folder / "loop.nbi").touch()
    assert answer() == "False"
