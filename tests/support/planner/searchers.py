"""Names of searchers by the memory that they plan."""

from cohabit.planner.search.registry import SEARCHERS, can_plan
from tests.support.planner.graphs import counted_problem, served_problem

SINGLE = tuple(name for name in SEARCHERS if can_plan(name, counted_problem(0)))
"""A single budget."""
SERVED = tuple(name for name in SEARCHERS if can_plan(name, served_problem(0)))
"""A partition and a workspace."""
