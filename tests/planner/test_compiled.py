"""Loops that are cached as machine code are compiled again when code that they hold changes."""

import shutil
import subprocess
import sys
from pathlib import Path

import planner.compiled

LOOPS = {
    "callee.py": """
from planner.compiled import compiled

@compiled
def factor():
    return {factor}
""",
    "caller.py": """
from planner.callee import factor
from planner.compiled import compiled

@compiled
def scaled(n):
    return n * factor()
""",
}


def scaled(folder: Path, factor: int) -> str:
    """What a fresh process computes with a callee that returns `factor`."""
    for name, source in LOOPS.items():
        path = folder / "planner" / name
        if not path.exists() or name == "callee.py":
            path.write_text(source.replace("{factor}", str(factor)))
    command = [sys.executable, "-c", "from planner.caller import scaled; print(scaled(5))"]
    environment = {
        "PYTHONPATH": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",  # bytecode counts as current while the source's second and size are the same
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_change_of_what_a_loop_calls_is_seen(tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "__init__.py").touch()
    shutil.copy(planner.compiled.__file__, tmp_path / "planner")
    assert scaled(tmp_path, 2) == "10"
    assert list((tmp_path / "cache").rglob("caller.scaled*.nbi"))
    assert scaled(tmp_path, 3) == "15"
