"""Plans on disk: one JSON file each, found by the fingerprint of its problem.

A file that cannot be used (truncated, damaged, of another version) is reported and made again. A full disk keeps plans
from being stored, not from being made.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import planner.plan
from planner import cache_file
from planner.check import check
from planner.errors import FormatError, InvalidPlan
from planner.graph import fingerprint
from planner.plan import Plan
from planner.problem import Problem
from planner.search.driver import search

logger = logging.getLogger(__name__)

Damage = Callable[[Path, str], None]
"""Called with the file that cannot be used, and the reason."""


class Library:
    """A folder of plans. Several processes may use it at once."""

    def __init__(self, root: Path, on_damage: Damage | None = None) -> None:
        self.root = root
        self.on_damage = on_damage if on_damage is not None else _log

    def plan(self, problem: Problem, *, seed: int = 0) -> Plan:
        """Return the stored plan for a problem, or search for one and store it. Raises InfeasibleBudget."""
        known = self.known(problem, seed=seed)
        if known is not None:
            return known
        plan = search(problem, seed=seed)
        path = self.plan_path(problem, seed)
        try:
            cache_file.write(path, planner.plan.encode(plan))
        except OSError as error:
            logger.warning("plan not kept", extra={"path": str(path), "reason": str(error)})
        return plan

    def known(self, problem: Problem, *, seed: int = 0) -> Plan | None:
        """Return the stored plan for a problem; None if there is none that can be used."""
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


def _read_plan(path: Path, problem: Problem) -> Plan:
    plan = planner.plan.decode(cache_file.read(path))
    check(problem.graph, problem.profile, plan)
    if (plan.partition_bytes, plan.workspace_bytes) != (problem.partition_bytes, problem.workspace_bytes):
        raise FormatError(
            f"plan is for {plan.partition_bytes} + {plan.workspace_bytes} bytes,"
            f" not {problem.partition_bytes} + {problem.workspace_bytes}"
        )
    if problem.residents is not None and plan.residents != problem.residents:
        raise FormatError("plan has other residents than the model's other batch sizes")
    return plan


def _log(path: Path, reason: str) -> None:
    logger.warning("library file not usable, making it again", extra={"path": str(path), "reason": reason})
