"""Short measurements of models, also in processes that tests start, which import this module from PYTHONPATH.

Each figure is measured in one run. Profiles have the right form, and rough numbers.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

STOPWATCH = "cohabit.runtime.measure.stopwatch"
SHORT = {"_MEASURING_S": 0.0, "_FEWEST_RUNS": 1, "_MOST_TRIES": 1}


class ShortMeasurements(MetaPathFinder):
    """Shortens measurements when the module that makes them is imported: other processes do without torch."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == STOPWATCH else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def shortened(module: ModuleType) -> None:
                execute(module)
                vars(module).update(SHORT)

            spec.loader.exec_module = shortened  # type: ignore[method-assign]
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, ShortMeasurements())
