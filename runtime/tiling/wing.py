"""Tilings of NumPy programs, by the name of their command."""

from cohabit.planner.parts import Part, Parts

PARTS: Parts = {
    "cohabit.commands": {
        "tile": Part(
            "cohabit.server.commands.tile",
            "choose how the arrays of a NumPy program are tiled over workers, and run it",
        )
    }
}
