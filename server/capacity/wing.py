"""Capacity planning, by the name of its command."""

from cohabit.planner.parts import Part, Parts

PARTS: Parts = {
    "cohabit.commands": {
        "fit": Part(
            "cohabit.server.commands.fit",
            "say which models fit into how much memory, and how long clients would wait",
        )
    }
}
