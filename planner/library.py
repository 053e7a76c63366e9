"""Plans, graphs and profiles on disk: one JSON file each, found by fingerprint.

Files are written to the side and moved into place, so that a reader sees a whole file or none. A file that cannot
be used (truncated, edited, of another version) is reported and made again.
"""

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import planner.graph
import planner.plan
import planner.profile
from planner.check import check
from planner.errors import FingerprintMismatch, FormatError, InvalidPlan
from planner.graph import Graph, fingerprint
from planner.plan import Plan
from planner.problem import Problem
from planner.profile import Profile
from planner.search.driver import search

logger = logging.getLogger(__name__)

Damage = Callable[[Path, str], None]
"""Told which file is not usable, and why."""


class Library:
    """A folder of plans, graphs and profiles. Several processes may use it at once."""

    def __init__(self, root: Path, on_damage: Damage | None = None) -> None:
        self.root = root
        self.on_damage = on_damage if on_damage is not None else _log

    def plan(self, problem: Problem, *, seed: int = 0) -> Plan:
        """Read the plan for a problem, or search and store it. Raises InfeasibleBudget."""
        known = self.known(problem, seed=seed)
        if known is not None:
            return known
        plan = search(problem, seed=seed)
        _write(self.plan_path(problem, seed), planner.plan.encode(plan))
        return plan

    def known(self, problem: Problem, *, seed: int = 0) -> Plan | None:
        """Read the plan for a problem, if there is one that can be used."""
        path = self.plan_path(problem, seed)
        try:
            return _read_plan(path, problem)
        except FileNotFoundError:
            return None
        except (FormatError, InvalidPlan) as error:
            self.on_damage(path, str(error))
            return None

    def plan_path(self, problem: Problem, seed: int = 0) -> Path:
        key = (
            planner.plan.FORMAT_VERSION,
            problem.graph.fingerprint,
            problem.profile.fingerprint,
            problem.partition_bytes,
            problem.workspace_bytes,
            problem.residents,
            seed,
        )
        return self.root / "plans" / f"{fingerprint(key)}.json"

    def put_graph(self, graph: Graph) -> Path:
        return _write(self.root / "graphs" / f"{graph.fingerprint}.json", planner.graph.encode(graph))

    def graph(self, fingerprint: str) -> Graph:
        """Read a graph. Raises FileNotFoundError, FormatError or InvalidGraph."""
        graph = planner.graph.decode((self.root / "graphs" / f"{fingerprint}.json").read_bytes())
        if graph.fingerprint != fingerprint:
            raise FingerprintMismatch("graph file", fingerprint, graph.fingerprint)
        return graph

    def put_profile(self, profile: Profile) -> Path:
        return _write(self.root / "profiles" / f"{profile.fingerprint}.json", planner.profile.encode(profile))

    def profile(self, fingerprint: str) -> Profile:
        """Read a profile. Raises FileNotFoundError or FormatError."""
        profile = planner.profile.decode((self.root / "profiles" / f"{fingerprint}.json").read_bytes())
        if profile.fingerprint != fingerprint:
            raise FingerprintMismatch("profile file", fingerprint, profile.fingerprint)
        return profile


def _read_plan(path: Path, problem: Problem) -> Plan:
    plan = planner.plan.decode(path.read_bytes())
    check(problem.graph, problem.profile, plan)
    if (plan.partition_bytes, plan.workspace_bytes) != (problem.partition_bytes, problem.workspace_bytes):
        raise FormatError(
            f"plan is for {plan.partition_bytes} + {plan.workspace_bytes} bytes,"
            f" not {problem.partition_bytes} + {problem.workspace_bytes}"
        )
    if problem.residents is not None and plan.residents != problem.residents:
        raise FormatError("plan has other residents than the model's other batch sizes")
    return plan


def _write(path: Path, raw: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def _log(path: Path, reason: str) -> None:
    logger.warning("library file not usable, making it again", extra={"path": str(path), "reason": reason})
