"""An activation that leaves memory and comes back while a program runs.

Whatever has been made of it, views and all, looks at one storage of torch's. That storage is emptied and filled again,
so nothing has to be made anew: views see its new bytes. Everything here is of one run at a time.
"""

import threading
from collections.abc import Sequence

import torch
from torch.utils import _pytree as pytree

from runtime.binding.slots import Frame
from runtime.memory import Place
from runtime.offload.journeys import Journey


class Traveller:
    """One journey in the current run. The lanes' order is the caller's business, but for who empties the storage."""

    def __init__(self, journey: Journey, place: Place) -> None:
        self.journey = journey
        self._place = place
        self._users = [0 if s.is_last else 1 + s.swap_outs for s in journey.stays]
        """Who must be done with it before each departure: its last reader, and those who copy it out."""
        self._storage: torch.UntypedStorage | None = None
        self._stay = 0
        self._left = 0
        self._lock = threading.Lock()

    def begin(self, frame: Frame) -> None:
        """Take the storage from what its op returned, unless nobody reads that. The compute lane's, behind that op."""
        leaves = pytree.tree_leaves(frame[self.journey.slot])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._storage = tensors[self.journey.leaf].untyped_storage() if tensors else None
        self._stay, self._left = 0, self._users[0]

    def save(self) -> None:
        """Copy it out. The swap-out lane's."""
        if self._storage is not None:
            self._place.save(self._bytes)
            self._release()

    def release(self, frame: Frame) -> None:
        """The last op of a stay has used it. The compute lane's."""
        self._release()

    def _release(self) -> None:
        """One of its users is done: the last one empties the storage."""
        with self._lock:
            self._left -= 1
            if self._left == 0 and self._storage is not None:
                self._storage.resize_(0)

    def bring(self) -> None:
        """Take memory and fill it. The swap-in lane's, when all users of the stay before are done."""
        if self._storage is not None:
            self.refill()
            self._place.load(self._bytes)

    def way_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a copy out goes and comes from, for a device whose copies are issued and not made."""
        return self._room, self._bytes

    def way_back(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._bytes, self._room

    @property
    def _room(self) -> torch.Tensor:
        assert self._place.room is not None, "a place that copies by itself"
        return self._place.room

    @property
    def _bytes(self) -> torch.Tensor:
        assert self._storage is not None, "an activation that has not been made"
        return _bytes_of(self._storage)

    def empty(self) -> None:
        """Give up the bytes, in the order of the stream that uses them."""
        assert self._storage is not None
        self._storage.resize_(0)

    def refill(self) -> None:
        """Take bytes again, to be filled by whoever waits for this."""
        assert self._storage is not None
        self._storage.resize_(self.journey.nbytes)
        self._stay += 1
        self._left = self._users[self._stay]

    def forget(self, frame: Frame | None = None) -> None:
        """Let go of the storage: the frame alone holds it then. The compute lane's, behind the last op that uses it."""
        self._storage = None

    def close(self) -> None:
        """Give its room in the host back. No copy may be under way."""
        self._place.close()


def travellers(journeys: Sequence[Journey], places: Sequence[Place]) -> tuple[Traveller, ...]:
    return tuple(Traveller(journey, place) for journey, place in zip(journeys, places, strict=True))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's bytes as a flat tensor."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))
