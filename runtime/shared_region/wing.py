"""Layouts in which models share one region, by the names that `--layout` takes."""

from cohabit.planner.parts import Part, Parts

_LAYOUTS = ("time_shared", "pipelined", "lru", "on_demand")
PARTS: Parts = {
    "cohabit.layouts": {name: Part(f"cohabit.runtime.shared_region.sharing:{name}") for name in _LAYOUTS}
}
