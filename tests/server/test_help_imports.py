"""Help is shown without loading what only work needs."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["check", "--help"], ["export-bundle", "--help"]]
)
def test_help_needs_neither_torch_nor_the_planner(arguments: list[str]) -> None:
    unwanted = {"torch", "numba", "scipy", "cohabit.planner.profile"}
    script = f"""
import sys
from cohabit.server.cli import main
try:
    main({arguments})
except SystemExit as stop:
    assert stop.code == 0
sys.exit(bool({unwanted} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, stdout=subprocess.DEVNULL).returncode == 0
