"""Several engines under Ray Serve, by the name of its command."""

from cohabit.planner.parts import Part, Parts

PARTS: Parts = {
    "cohabit.commands": {
        "scale": Part(
            "cohabit.server.commands.scale",
            "serve a repository with several engines, on one or more machines, which Ray Serve places",
        )
    }
}
