"""`--profile BOARD`: a profile of this machine scaled to a board's store and cores."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cohabit.planner.profile import Link
from cohabit.server.cli import main
from cohabit.server.commands.planning.board_profiles import BOARD_PROFILES
from tests.planner.graphs import PAGE, chain, profile_of
from tests.runtime import models

GRAPH = chain([PAGE, 2 * PAGE])
PROFILE = profile_of(GRAPH, op_s=1e-3, bandwidth=1e9)


@pytest.mark.parametrize("name", BOARD_PROFILES)
def test_a_board_has_the_times_of_its_cores_and_its_store(name: str) -> None:
    board = BOARD_PROFILES[name]
    scaled = board.scaled(PROFILE)
    assert scaled.compute_s == pytest.approx(PROFILE.compute_s * board.compute_factor.value)
    assert scaled.swap_in == scaled.swap_out == Link(board.latency_s.value, board.bandwidth_bytes_per_s.value)
    assert scaled.graph == GRAPH.fingerprint
    assert scaled.fingerprint != PROFILE.fingerprint
    assert scaled.device == f"{name}, scaled from a profile of {PROFILE.device}"


@pytest.mark.parametrize("name", BOARD_PROFILES)
def test_every_figure_of_a_board_has_a_source_and_is_known_as_an_estimate(name: str) -> None:
    board = BOARD_PROFILES[name]
    figures = (board.latency_s, board.bandwidth_bytes_per_s, board.compute_factor, board.memory_bytes)
    assert all(figure.source for figure in figures)
    assert board.compute_factor.is_estimate, "no data sheet compares a core with this machine's"
    assert "compute_factor" in board.estimates


def test_plans_are_predicted_for_a_board(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.export(models.Wide(), {"x": torch.zeros(3, 384)}, tmp_path / "wide" / "1" / "model.pt2")
    measured = ("--cache", str(tmp_path / "cache"), "--store", "file")
    assert main(["profile", str(tmp_path / "wide"), *measured, "--profile", "ufs-phone"]) == 0
    shown = capsys.readouterr().out
    assert "ufs-phone, scaled from a profile of" in shown
    assert "2.10 GB/s after 100.0 us" in shown


def test_a_board_needs_a_model_that_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--graph", "some.json", "--profile", "pi5-sd", "--memory", "1MiB"]) == 2
    assert "--profile pi5-sd scales what is measured here; give a MODEL" in capsys.readouterr().err
    assert main(["plan", "models/m", "--profile", "pi6.json", "--memory", "1MiB"]) == 2
    assert "--graph and --profile FILE are there to plan without a model" in capsys.readouterr().err


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
