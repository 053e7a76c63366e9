"""Commands load only what their work needs."""

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


def test_placing_models_needs_nothing_that_only_lowering_does() -> None:
    """A server of a bundle lowers nothing, and has no memory for it: sympy alone takes 32 MiB."""
    unwanted = {"sympy", "numba", "scipy", "torch._dynamo"}
    script = f"""
import sys
import cohabit.server.deploy.place, cohabit.runtime.cpu.backend
sys.exit(bool({unwanted} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
