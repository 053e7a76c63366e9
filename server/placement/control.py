"""What the endpoints of the model repository ask for: loading and unloading models while the others are served."""

from typing import Literal, Protocol

from server.errors import ControlOff

ControlMode = Literal["none", "explicit", "poll"]
"""All models at start and never again, on a client's order, or whenever the repository changes."""


class Control(Protocol):
    """Loads and unloads models. All methods belong to the event loop's thread."""

    @property
    def mode(self) -> ControlMode: ...

    async def load(self, model: str, config: str | None = None) -> None:
        """Load a model, or its newest version again; returns once it serves. The version so far serves until then.

        `config` is a ModelConfig in JSON, in place of the model's config.pbtxt. Raises ControlOff unless the mode is
        explicit, NotInRepository, or LoadFailed with the reason; what was served before is served still.
        """
        ...

    async def unload(self, model: str, dependents: bool = False) -> None:
        """Refuse new requests for a model, answer those it has, and give its memory back; returns once that is done.

        A model that is not there is unloaded already. Models depend on no others here, so `dependents` changes
        nothing. Raises ControlOff unless the mode is explicit.
        """
        ...


class NoControl:
    """The mode "none": what was there at start is served, and nothing else."""

    mode: ControlMode = "none"

    async def load(self, model: str, config: str | None = None) -> None:
        raise ControlOff(self.mode)

    async def unload(self, model: str, dependents: bool = False) -> None:
        raise ControlOff(self.mode)
