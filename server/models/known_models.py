"""A cache of recently opened models without their parameters, so that a model can be opened again at once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cohabit.planner.memory import Memory
from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering.lower import Lowered
from cohabit.server.file_state import FileState

Plans = Mapping[Bucket, Plan]

_BYTES_PER_INSTRUCTION = 4 << 10
"""Graph, profile, plan, draft and calls together, rounded up from a measured 3.4 KiB."""
MOST_MODELS, MOST_BYTES = 64, 256 << 20
_MOST_ROOMS = 16

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LeastRecentlyUsed(Generic[K, V]):
    """A dictionary that evicts the least recently used entry. Not thread-safe."""

    def __init__(
        self, most: int, most_bytes: int | None = None, nbytes: Callable[[V], int] = lambda value: 0
    ) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()
        self._most = most
        self._most_bytes = most_bytes
        self._nbytes = nbytes

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        return self[key] if key in self._values else None

    def __getitem__(self, key: K) -> V:
        self._values.move_to_end(key)
        return self._values[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._most or self._is_large():
            self._values.popitem(last=False)

    def _is_large(self) -> bool:
        return self._most_bytes is not None and sum(map(self._nbytes, self._values.values())) > self._most_bytes


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model without its parameters, with the plans that were found for it."""

    lowered: Lowered
    profiles: dict[Bucket, Profile]
    weights: FileState | None
    """The weights file as it was when its checksum was verified."""
    plans: LeastRecentlyUsed[Memory, Plans] = field(default_factory=lambda: LeastRecentlyUsed(_MOST_ROOMS))
    """Plans from the library, by workspace and partition size."""
    rooms: LeastRecentlyUsed[Hashable, Memory | None] = field(
        default_factory=lambda: LeastRecentlyUsed(_MOST_ROOMS)
    )
    """The best workspace and partition for the model, by the state of the arena."""

    @property
    def is_unchanged(self) -> bool:
        """Whether the weights file is still the one that was verified."""
        return self.weights is not None and self.weights == FileState.of(self.lowered.weights_path)

    @property
    def is_provisional(self) -> bool:
        """Whether it still has to be measured."""
        return any(profile.provisional for profile in self.profiles.values())

    @property
    def nbytes(self) -> int:
        """An estimate of its own memory."""
        return _BYTES_PER_INSTRUCTION * sum(len(trace.instructions) for trace in self.lowered.traces.values())
