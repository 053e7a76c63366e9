"""Plans on disk: one JSON file each, found by the fingerprint of its problem.

A file is written under a temporary name and renamed, so that a reader sees a whole file or none. A file that cannot be
used (truncated, edited, of another version) is reported and made again.
"""

import logging
import os
import tempfile
from pathlib import Path
from typing import Final

import planner.plan
from planner.check import check
from planner.errors import FormatError, InvalidPlan
from planner.graph import fingerprint
from planner.plan import Plan
from planner.problem import Problem
from planner.search.driver import search

logger = logging.getLogger(__name__)

SEED: Final = 0
"""Of every search for a plan that is stored."""


class Library:
    """A folder of plans. Several processes may use it at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def plan(self, problem: Problem) -> Plan:
        """Return the stored plan for a problem, or search for one and store it. Raises InfeasibleBudget."""
        known = self.known(problem)
        if known is not None:
            return known
        plan = search(problem, seed=SEED)
        _write(self.plan_path(problem), planner.plan.encode(plan))
        return plan

    def known(self, problem: Problem) -> Plan | None:
        """Return the stored plan for a problem; None if there is none that can be used."""
        path = self.plan_path(problem)
        try:
            return _read_plan(path, problem)
        except FileNotFoundError:
            return None
        except (FormatError, InvalidPlan) as error:
            fields = {"path": str(path), "reason": str(error)}
            logger.warning("library file not usable, making it again", extra={"fields": fields})
            return None

    def plan_path(self, problem: Problem) -> Path:
        key = (planner.plan.FORMAT_VERSION, *problem.key, SEED)
        return self.root / "plans" / f"{fingerprint(key)}.json"


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


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
