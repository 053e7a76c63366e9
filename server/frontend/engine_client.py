"""The front end's interface to the engine, in this process or in its own."""

from typing import Protocol

from msgspec.structs import replace

from cohabit.server.errors import ModelNotFound
from cohabit.server.frontend.memory import Lease
from cohabit.server.ipc.catalog import Catalog
from cohabit.server.ipc.model import ModelInfo, ModelKey
from cohabit.server.ipc.request import Answer, Request, SequenceId
from cohabit.server.ipc.spans import OnSpans
from cohabit.server.ipc.statistics import EngineReport
from cohabit.server.observe.settings import LogSettings


class EngineClient(Protocol):
    """All methods belong to the event loop's thread."""

    @property
    def catalog(self) -> Catalog:
        """The models and their current states."""
        ...

    @property
    def unavailable(self) -> str | None:
        """Why no request can be executed at present, or None. Meanwhile, new requests wait."""
        ...

    @property
    def restarts(self) -> int:
        """Number of restarts of the engine's process."""
        ...

    @property
    def waiting(self) -> int:
        """Number of unanswered requests."""
        ...

    async def infer(
        self, request: Request, info: ModelInfo, lease: Lease, on_spans: OnSpans | None = None
    ) -> Answer:
        """Execute a request whose inputs are in leased memory. The answer's arrays are valid as long as the lease.

        `on_spans` receives the spans of its execution. Cancelling removes the request from the queue, if it has not
        started. Raises RequestError.
        """
        ...

    async def load(self, model: str, config: str | None) -> None:
        """Load a model's versions; `config`, a ModelConfig in JSON, replaces its config.pbtxt. See `Lifecycle.load`."""
        ...

    async def unload(self, model: str) -> None:
        """Unload all versions of a model. See `Lifecycle.unload`."""
        ...

    async def report(self, model: ModelKey | None = None) -> EngineReport:
        """Return the engine's counters, or those of one model; while it is unavailable, the last ones."""
        ...

    def count_rejection(self, model: ModelKey, reason: str) -> None:
        """Count a request that the front end refused."""
        ...

    def end_sequence(self, model: ModelKey, sequence: SequenceId, *, spare: bool = False) -> None:
        """Forget a sequence that has no further requests; a `spare` one only once its memory is needed."""
        ...

    def change_log(self, settings: LogSettings) -> None:
        """Apply log settings in the engine's process."""
        ...

    async def close(self) -> bool:
        """End the engine; False if it was abandoned or killed."""
        ...


async def infer_or_succeed(
    client: EngineClient,
    request: Request,
    info: ModelInfo,
    lease: Lease,
    version: str | None,
    on_spans: OnSpans | None = None,
) -> Answer:
    """Execute a request on its model, or on the model that has replaced it.

    If the model was replaced after the request arrived, its successor executes the request, provided that it takes the
    same tensors. The successor is the current load of `version`, or of the highest READY version if None.
    """
    try:
        return await client.infer(request, info, lease, on_spans)
    except ModelNotFound:
        if (present := successor_of(client.catalog, info, version)) is None:
            raise
    return await client.infer(replace(request, model=present.key), present, lease, on_spans)


def successor_of(catalog: Catalog, info: ModelInfo, version: str | None) -> ModelInfo | None:
    """Return the current load of `version`, or of the highest READY version if None, in place of another version.

    None if it takes other tensors. Raises as `Catalog.require` does.
    """
    present = catalog.require(info.name, version)
    return present if replace(present, version=info.version) == info else None
