"""Tilings of distributed arrays: NumPy programs as graphs, the bytes each tiling moves, and the best tiling.

After Spartan: Chien-Chin Huang's thesis, chapters 2 and 3 and appendix A.

    from cohabit.planner.tiling import TilingGraph, newarray, plan_tiling
    x, w = newarray((100_000, 64), name="x"), newarray((64,), name="w")
    plan = plan_tiling(TilingGraph.of(x.T @ (x @ w), workers=4))
"""

from cohabit.planner.tiling.arrays import LazyArray, join_update, map_tiles, newarray
from cohabit.planner.tiling.graph import TilingGraph
from cohabit.planner.tiling.search import SEARCHES, TilingPlan, plan_tiling

__all__ = [
    "SEARCHES",
    "LazyArray",
    "TilingGraph",
    "TilingPlan",
    "join_update",
    "map_tiles",
    "newarray",
    "plan_tiling",
]
