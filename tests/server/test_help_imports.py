"""Commands load only what their work needs."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("commands", "unwanted"),
    [
        (["", "serve", "check", "export-bundle"], {"torch", "numba", "scipy", "cohabit.planner.profile"}),
        (["plan", "tile", "profile", "show"], {"torch", "numba", "scipy", "numpy"}),
    ],
)
def test_help_needs_neither_torch_nor_the_planner(commands: list[str], unwanted: set[str]) -> None:
    script = f"""
import sys
from cohabit.server.cli import main
for command in {commands}:
    try:
        main([*command.split(), "--help"])
    except SystemExit as stop:
        assert stop.code == 0
assert not {unwanted} & set(sys.modules), {unwanted} & set(sys.modules)
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout.count("usage: cohabit") == len(commands)


def test_placing_models_needs_nothing_that_only_lowering_does() -> None:
    """A server of a bundle lowers nothing, and has no memory for it: sympy alone takes 32 MiB."""
    unwanted = {"sympy", "numba", "scipy", "torch._dynamo"}
    script = f"""
import sys
import cohabit.server.deploy.place, cohabit.runtime.cpu.backend
sys.exit(bool({unwanted} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
