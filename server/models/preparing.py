"""Prepares and plans models beside the serving path: in another process what takes long, in a thread the rest."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from planner.library import Library
from planner.sizing import deployment as sizing
from planner.sizing import fitting
from planner.sizing.fitting import Room
from runtime.backend import Backend
from server.config.config import ServeConfig
from server.models.cache import Plans, new_shelf
from server.models.prepared import Prepared, cache_of, is_prepared, key_of, prepare, prepare_apart, prepare_known
from server.models.repository import ModelSource
from server.models.worker_process import Apart

_PAUSE, _LONGEST_PAUSE_S = 2.0, 0.5
"""After a model was opened from memory, the processor is left to those who serve for so many times as long as that
took: whoever loads small models in a loop, as fast as they come, takes no more than a third of a core."""


class Workshop:
    """All methods block, and may be called by any thread but the event loop's and the engine's."""

    def __init__(self, config: ServeConfig, backend: Backend) -> None:
        self._config = config
        self._backend = backend
        self._library = Library(cache_of(config))
        self._apart, self._background = Apart(), Apart()
        self._shelf = new_shelf()
        self._lock = threading.Lock()
        """For the shelf and what stands on it."""

    def prepare(self, source: ModelSource) -> Prepared:
        """Open a model that was opened before; lower and measure one that is new apart. Raises CohabitError."""
        key = key_of(source, self._config)
        with self._lock:
            known = self._shelf.get(key)
        if known is not None and known.is_whole:
            start_s = time.perf_counter()
            prepared = prepare_known(source, known, self._config, self._backend)
            time.sleep(min(_PAUSE * (time.perf_counter() - start_s), _LONGEST_PAUSE_S))
            return prepared
        if not is_prepared(source, self._config):
            model_config = source.config.SerializeToString() if source.config is not None else None
            self._apart.call(prepare_apart, replace(source, config=None), model_config, self._config)
        prepared = prepare(source, self._config, self._backend, lambda *_: None)
        with self._lock:
            self._shelf[key] = prepared.known
        return prepared

    def known_plans(self, prepared: Prepared, room: Room) -> Plans | None:
        """The best plans for a room, if they were made before."""
        notes = prepared.known.plans
        with self._lock:
            known = notes.get(room)
        if known is not None:
            return known
        plans = fitting.known_plans(prepared.demand, room, self._library)
        if plans is not None:
            with self._lock:
                notes[room] = plans
        return plans

    def quick_plans(self, prepared: Prepared, room: Room) -> Plans:
        """Plans to begin with: what the library has, or else the first that work."""
        return self.known_plans(prepared, room) or self._apart.call(
            fitting.plan_model, prepared.demand, room, None, quick=True
        )

    def best_plans(self, prepared: Prepared, room: Room) -> Plans:
        """The plans that the library keeps; whoever waits for `quick_plans` does not wait for these."""
        plans = self.known_plans(prepared, room)
        if plans is None:
            plans = self._background.call(fitting.plan_model, prepared.demand, room, self._library)
            with self._lock:
                prepared.known.plans[room] = plans  # the very ones that programs are made of
        return plans

    def shares(
        self, models: Sequence[Prepared], memory_bytes: int, least_workspace_bytes: int, lanes: int
    ) -> tuple[int, list[int]]:
        """A lane's workspace, and the partitions that models should have. Raises ApartFailed for too little memory."""
        demands = [model.demand for model in models]
        return self._apart.call(sizing.shares, demands, memory_bytes, least_workspace_bytes, lanes)

    def close(self) -> None:
        """End the other processes."""
        self._apart.close()
        self._background.close()


def is_better(plans: Plans, than: Plans) -> bool:
    """Whether some plans promise less time than others at any batch."""
    pairs = [(plans[batch].provenance, than[batch].provenance) for batch in plans]
    return any(new is not None and old is not None and new.latency_s < old.latency_s for new, old in pairs)
