"""Training in little memory, by the name of its command."""

from cohabit.planner.parts import Part, Parts

PARTS: Parts = {
    "cohabit.commands": {
        "train": Part(
            "cohabit.server.commands.train", "train the model of a script in less memory than its step needs"
        )
    }
}
