"""Moves what autograd saves: hooks on saved tensors, and no price per op.

A storage that autograd saves leaves memory only while its use counts say that autograd alone holds it. Then nobody can
read or write it until autograd unpacks it, so no read meets a storage that is out. An entry is the storage itself, not
a copy of some version of it: while anybody else holds it, it is the very memory that eager PyTorch's graph would hold.

What is saved first is used last, so it leaves first, and returns in the order in which the recorded step unpacked. If
a searcher has planned the step, its advice says instead what leaves, and when copies begin.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from typing import Any, Final

import torch

from cohabit.runtime.stores.pages import give_pages_back
from cohabit.runtime.training.copies.copying import Copier
from cohabit.runtime.training.copies.spill import SpillSlot, SpillStore
from cohabit.runtime.training.record import Advice, Record
from cohabit.runtime.training.tracked import (
    LEAST_BYTES,
    CopyWaits,
    StorageCopy,
    storage_address,
    storage_nbytes,
    storage_uses,
)

_AHEAD: Final = 6
"""Entries that are on their way back at a time."""
_LOOKED_AT: Final = 8
"""Entries that are looked at per event, to find one that autograd alone holds."""
_TRIES: Final = (4, 64)
"""An entry that is found to be held by others so often waits behind the others; then it stays."""

_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class _State(Enum):
    IN = auto()
    SAVING = auto()
    """It is in memory, and leaves when its copy has ended, unless it is unpacked before."""
    OUT = auto()
    LOADING = auto()


class _Saved:
    """What packed tensors of one storage refer to; it lives as long as one of them."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        """None while it is out."""


class _SavedRef(weakref.ref[_Saved]):
    """A weak reference with a C callback: an interrupt in a Python callback would be swallowed."""

    __slots__ = ("entry",)
    entry: "_Entry"


class _Entry:
    """The manager's record of a saved storage."""

    __slots__ = ("cdata", "copy", "first_pack", "nbytes", "ref", "slot", "state", "stream", "tries")

    def __init__(self, saved: _Saved, deaths: deque[_SavedRef], nbytes: int, first_pack: int, stream: int) -> None:
        self.ref = _SavedRef(saved, deaths.append)
        self.ref.entry = self
        self.nbytes, self.first_pack, self.stream = nbytes, first_pack, stream
        self.cdata: int = saved.storage._cdata
        self.state = _State.IN
        self.slot: SpillSlot | None = None
        self.copy: StorageCopy | None = None
        self.tries = 0


_UNMOVED: Final = torch.Size()
"""Shape in the packed form of a tensor that stays as it is: nothing leaves while a step is recorded under a mode."""
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_Packed = tuple[torch.Tensor, int] | tuple[torch.Tensor, int, _Saved, _Entry, torch.Size, tuple[int, ...], int]


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares storage and version, and may be held by the node of the tensor without a cycle."""
    return tensor if tensor.grad_fn is None else tensor.detach()


@contextmanager
def functions_without_hooks() -> Iterator[None]:
    """Inside the block, functions of torch.func run as if there were no hooks. Otherwise they refuse to run."""
    autograd: Any = torch._C._autograd
    disable = autograd._saved_tensors_hooks_disable
    autograd._saved_tensors_hooks_disable = lambda message, fail_if_non_empty=True: disable(message, False)
    try:
        yield
    finally:
        autograd._saved_tensors_hooks_disable = disable


class SavedTensors:
    """Packs and unpacks what autograd saves, within the bytes that the rest of the loop leaves."""

    def __init__(
        self,
        device: torch.device,
        copier: Copier,
        spill: SpillStore,
        lock: AbstractContextManager[Any],
        record: Record,
        waits: CopyWaits,
        deliver: Callable[[], None],
    ) -> None:
        self.device, self._copier, self._spill, self._lock = device, copier, spill, lock
        self.record, self._waits = record, waits
        self._deliver = deliver
        """Called at the end of each hook: handles a signal that came meanwhile."""
        self.limit_bytes: int | None = None
        """None: nothing leaves."""
        self.nbytes_of: Callable[[Any], int] = storage_nbytes
        """Returns the size of a storage, also of one that a mode has evicted."""
        self.others_bytes: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the bytes in memory that move, but are not autograd's, and those that stay: optimizers' state."""
        self.free_others: Callable[[], bool] = bool
        """Makes some of these leave; returns whether there were any."""
        self.has_room: Callable[[int], None] = lambda nbytes: None
        """Called with the limit when no saved tensor is out."""
        self._alive_bytes = 0
        """Of all entries, each once."""
        self.in_bytes = self.out_bytes = 0
        """Of entries in memory, and of those that are out or leaving: what leaves is in both."""
        self.moved_bytes = 0
        self.peak_bytes = self.exceeded_bytes = 0
        self.over_bytes = 0
        """As `exceeded_bytes`, of this step."""
        self.held_bytes = 0
        """Most bytes that had to leave and were held by others."""
        self._empty: dict[torch.dtype, torch.Tensor] = {}
        self._owned: dict[int, Any] = {}
        self._by_storage: dict[int, _SavedRef] = {}
        self._by_pack: dict[int, _SavedRef] = {}
        """By the number of the entry's first pack, in that order."""
        self._staying: deque[_Entry] = deque()
        """Entries in memory, those to leave first at the front."""
        self._deaths: deque[_SavedRef] = deque()
        self._copies: deque[tuple[_Entry, StorageCopy]] = deque()
        self._freed: deque[tuple[_Entry, StorageCopy]] = deque()
        """Dead entries with copies that have not ended: their slots are in use."""
        self.packs = 0
        """Packs so far, of storages that count."""
        self._loops: set[int] = set()
        """Threads with a loop. The record is of the one that packed first."""
        self._needed: _Entry | None = None
        """The entry that was unpacked last, which stays until the next event."""
        self._is_forked = False
        self.advice: Advice | None = None
        """A plan of the recorded step."""
        self._due_out: deque[int] = deque()
        self._due_in: deque[int] = deque()
        """Storages that the advice has leave or return by now, by their numbers in the step."""
        self._held: dict[_Entry, None] = {}
        """In a step that is observed: entries that others than autograd held at the last event."""

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's saved tensors are moved."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    @property
    def loops(self) -> int:
        """Number of threads whose tensors were saved."""
        return len(self._loops)

    def alive_bytes(self) -> int:
        """Return the bytes of all saved storages, in memory or not."""
        self._collect()
        return self._alive_bytes

    def owns(self, storages: list[Any]) -> None:
        """Set the owners' storages, which never leave here: autograd does not hold them alone."""
        self._owned = {storage._cdata: storage for storage in storages}  # held, so that no other gets its number

    # Hooks

    def pack(self, tensor: torch.Tensor) -> Any:
        if not _modes():
            return self._pack(tensor)
        with torch._C._DisableTorchDispatch():  # modes of the loop's own see what they see in eager PyTorch
            return self._pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if not _modes():
            return self._unpack(packed)
        with torch._C._DisableTorchDispatch():
            return self._unpack(packed)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or _is_wrapped(tensor):
            return _detached(tensor)
        version, kept = tensor._version, _detached(tensor)
        if tensor.device != self.device or tensor.is_quantized:
            return kept, version
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return kept, version
        storage = tensor.untyped_storage()
        nbytes = self.nbytes_of(storage)
        if nbytes < LEAST_BYTES or storage._cdata in self._owned:
            return kept, version
        try:
            with self._lock:
                return self._packed(tensor, kept, version, storage, nbytes)
        finally:
            self._deliver()

    def _packed(self, tensor: torch.Tensor, kept: torch.Tensor, version: int, storage: Any, nbytes: int) -> _Packed:
        stream = self._copier.streams.current()
        self._collect()
        ref = self._by_storage.get(storage._cdata)
        saved = None if ref is None else ref()
        if saved is not None:
            entry = ref.entry  # type: ignore[union-attr]
        else:
            if not storage.resizable() or storage.is_shared():
                return kept, version
            saved = _Saved(storage)
            entry = _Entry(saved, self._deaths, nbytes, self.packs, stream)
            self._by_storage[entry.cdata] = self._by_pack[entry.first_pack] = entry.ref
            self._staying.append(entry)
            self.in_bytes += nbytes
            self._alive_bytes += nbytes
        self.packs += 1
        del storage
        self._event(nbytes, entry)
        if self.limit_bytes is None:
            return kept, version, saved, entry, _UNMOVED, (), -1
        self._keep_within(self.limit_bytes)
        if self._due_in and self._is_advised:
            self._prefetch(entry, stream, self.limit_bytes)
        # Has the tensor's version counter, and no storage of its own.
        probe = tensor.detach() if kept is tensor else kept
        probe.data = self._empty_of(tensor.dtype)
        return probe, version, saved, entry, tensor.shape, tensor.stride(), int(tensor.storage_offset())

    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is not tuple:
            return packed  # type: ignore[no-any-return]
        probe, version = packed[:2]
        if probe._version != version:
            shape = list(probe.shape if len(packed) == 2 or packed[6] < 0 else packed[4])
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{probe.type()} {shape}] is at version {probe._version}; expected version {version} instead. Hint:"
                " enable anomaly detection to find the operation that failed to compute its gradient, with"
                " torch.autograd.set_detect_anomaly(True)."
            )
        if len(packed) == 2:
            return probe  # type: ignore[no-any-return]
        _, _, saved, entry, shape, stride, offset = packed
        try:
            with self._lock:
                self._bring(saved, entry)
                if offset < 0:
                    return probe  # type: ignore[no-any-return]
                return self._over(probe, saved.storage, shape, stride, offset)
        finally:
            self._deliver()

    def _bring(self, saved: _Saved, entry: _Entry) -> None:
        """Make sure that an entry's bytes are in memory, and prefetch what follows."""
        stream = self._copier.streams.current()
        self._collect()
        self._event(-entry.nbytes, entry)
        if entry.state is _State.SAVING:
            entry.state = _State.IN
            self.out_bytes -= entry.nbytes
            self._staying.append(entry)
        if entry.state is _State.OUT:
            self._load(entry, saved, stream)
        self._needed = entry
        if self.limit_bytes is not None:
            self._keep_within(self.limit_bytes)
            self._prefetch(entry, stream, self.limit_bytes)
        if entry.state is _State.LOADING:
            copy = entry.copy
            assert copy is not None
            self._waits.wait(copy)
            self._arrived(entry, saved, copy)
        if entry.stream != stream:
            self._copier.streams.share(saved.storage)

    def _event(self, nbytes: int, entry: _Entry) -> None:
        """Tell the record what autograd does, if this is the thread whose steps are recorded."""
        thread = threading.get_ident()
        self._loops.add(thread)
        if len(self._loops) == 1:
            self.record.event(nbytes, entry.first_pack, self._alive_bytes)
            if self.record.observed is not None:
                self._observe(entry)
            if self.advice is not None:
                self._due_out.extend(self.advice.leaving.get(self.record.at, ()))
                self._due_in.extend(self.advice.returning.get(self.record.at, ()))

    def _observe(self, entry: _Entry) -> None:
        """Note the time of an event, and which entries others than autograd hold after it."""
        observed = self.record.observed
        assert observed is not None
        observed.starts_s.append(self._waits.clock_s())
        for held in list(self._held):
            saved = held.ref()
            if saved is None or held.state is not _State.IN or self._is_alone(held, saved):
                del self._held[held]
        self._held[entry] = None
        for held in self._held:
            observed.uses.setdefault(self.record.number_of(held.first_pack), []).append(self.record.at)

    def observe_end(self) -> None:
        """The step that is observed ends here, unless further events come."""
        if self.record.observed is not None:
            del self.record.observed.starts_s[self.record.at + 1 :]
            self.record.observed.starts_s.append(self._waits.clock_s())

    def end_step(self) -> None:
        self.record.end_step(self.packs)
        self._held.clear()
        self._due_out.clear()
        self._due_in.clear()
        self._staying = deque(dict.fromkeys(entry for entry in self._staying if entry.ref() is not None))

    def _over(
        self, probe: torch.Tensor, storage: Any, shape: torch.Size, stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        tensor = probe.detach()
        tensor.data = torch.empty(0, dtype=probe.dtype, device=self.device).set_(storage, offset, shape, stride)
        return tensor

    def _empty_of(self, dtype: torch.dtype) -> torch.Tensor:
        found = self._empty.get(dtype)
        if found is None:
            found = self._empty[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return found

    # Room

    def _keep_within(self, limit_bytes: int) -> None:
        """Begin what has to leave by the step's peak, and wait for it as far as it has to be out by now."""
        beside, coming = self.record.beside()
        others, staying = self.others_bytes()
        # What has to be out by the highest point ahead, if what will be saved until then stays.
        if self._is_advised:
            self._leave_as_advised()
        elif self.out_bytes < coming + staying - limit_bytes:
            self._leave(coming + staying - limit_bytes)
        if self.in_bytes + others + beside > limit_bytes:
            self._fit(beside, limit_bytes)
        else:
            self.peak_bytes = max(self.peak_bytes, self.in_bytes + others + beside)

    def _fit(self, beside: int, limit_bytes: int) -> None:
        """Wait until the next ops fit: `beside` are bytes beside saved tensors and others that move."""
        while (over := self.in_bytes + self.others_bytes()[0] + beside - limit_bytes) > 0:
            if any(not copy.is_load for _, copy in self._copies):
                self._waits.wait(self._copies[0][1])
                self._collect()
            elif not self._leave(self.out_bytes + over, everything=True) and not self.free_others():
                self.over_bytes = max(self.over_bytes, over)
                self.exceeded_bytes = max(self.exceeded_bytes, over)
                self.held_bytes = max(self.held_bytes, sum(entry.nbytes for entry in self._staying))
                break
        self.peak_bytes = max(self.peak_bytes, self.in_bytes + self.others_bytes()[0] + beside)

    @property
    def _is_advised(self) -> bool:
        return self.advice is not None and self.record.is_followed and len(self._loops) == 1

    def _leave_as_advised(self) -> None:
        """Begin to save the entries that are due, once autograd alone holds them."""
        for _ in range(len(self._due_out)):
            number = self._due_out.popleft()
            entry, saved = self._numbered(number)
            if entry is None or saved is None or entry.state is not _State.IN:
                continue
            if entry is self._needed or not self._is_alone(entry, saved):
                self._due_out.append(number)
                continue
            self._save(entry, saved)

    def _numbered(self, number: int) -> tuple[_Entry | None, _Saved | None]:
        """Return a storage of this step by its number there, if it is alive."""
        ref = self._by_pack.get(self.record.first_pack_of(number))
        return (None, None) if ref is None else (ref.entry, ref())

    def _is_alone(self, entry: _Entry, saved: _Saved) -> bool:
        """Whether autograd alone holds an entry's storage."""
        # The storage's one use is the Python object's, which `saved` and the call's argument refer to.
        return storage_uses(entry.cdata) == 1 and sys.getrefcount(saved.storage) <= 2

    def _leave(self, goal_bytes: int, *, everything: bool = False) -> bool:
        """Begin to save entries, first saved first, until `goal_bytes` are out or leaving. Returns whether it did."""
        began, back = False, []
        for _ in range(len(self._staying) if everything else min(_LOOKED_AT, len(self._staying))):
            if self.out_bytes >= goal_bytes:
                break
            entry = self._staying.popleft()
            saved = entry.ref()
            if saved is None or entry.state is not _State.IN:
                continue
            if entry is self._needed:
                back.append(entry)
                continue
            if not self._is_alone(entry, saved):
                entry.tries += not everything
                if entry.tries <= _TRIES[0]:
                    back.append(entry)
                elif entry.tries <= _TRIES[1] or everything:
                    self._staying.append(entry)
                continue
            self._save(entry, saved)
            began = True
        self._staying.extendleft(reversed(back))
        return began

    def _save(self, entry: _Entry, saved: _Saved) -> None:
        if entry.slot is None:
            entry.slot = self._spill.take(entry.nbytes)
        entry.state = _State.SAVING
        self.out_bytes += entry.nbytes
        self._begin(entry, saved.storage, is_load=False)

    def _load(self, entry: _Entry, saved: _Saved, stream: int) -> None:
        storage = torch.UntypedStorage(entry.nbytes, device=self.device)  # type: ignore[no-untyped-call]
        entry.state, entry.stream = _State.LOADING, stream
        self.in_bytes += entry.nbytes
        self.out_bytes -= entry.nbytes
        self._begin(entry, storage, is_load=True)

    def _begin(self, entry: _Entry, storage: Any, is_load: bool) -> None:
        assert entry.slot is not None
        copy = entry.copy = StorageCopy(entry.slot, storage, entry.nbytes, is_load)
        self._copies.append((entry, copy))
        self.moved_bytes += entry.nbytes
        if self._is_forked:  # without a copy thread
            copy.end = threading.Event()
            self._copier.make(copy)
            copy.end.set()
        else:
            self._copier.begin(copy)

    def _prefetch(self, entry: _Entry, stream: int, limit_bytes: int) -> None:
        """Begin to load what is unpacked next, as far as it fits beside the next ops."""
        if self.out_bytes == 0:
            self.has_room(limit_bytes)
            return
        coming = sum(copy.is_load for _, copy in self._copies)
        if coming >= _AHEAD:
            return
        free = limit_bytes - self.in_bytes - self.others_bytes()[0] - self.record.soon_beside()
        numbers = self.record.upcoming(entry.first_pack)
        if self._is_advised:
            numbers = self._advised_returns(numbers)
        for number in numbers:
            ref = self._by_pack.get(number)
            saved = None if ref is None else ref()
            if saved is None:
                continue
            following = ref.entry  # type: ignore[union-attr]
            if following.state is _State.SAVING:
                following.state = _State.IN
                self.out_bytes -= following.nbytes
                self._staying.append(following)
            if following.state is _State.OUT:
                if following.nbytes > free:
                    return
                free -= following.nbytes
                self._load(following, saved, stream)
                coming += 1
                if coming >= _AHEAD:
                    return

    def _advised_returns(self, upcoming: Iterator[int]) -> Iterator[int]:
        """Yield the first packs of storages that are due to return, then those that left against the advice.

        One that does not fit stays at the front, and is yielded again at the next event.
        """
        advice = self.advice
        assert advice is not None
        while self._due_in:
            yield self.record.first_pack_of(self._due_in[0])
            self._due_in.popleft()
        yield from (first for first in upcoming if self.record.number_of(first) not in advice.moved)

    def _arrived(self, entry: _Entry, saved: _Saved, copy: StorageCopy) -> None:
        if entry.copy is not copy or entry.state is not _State.LOADING:
            return
        entry.copy = None
        if copy.error is not None:
            entry.state = _State.OUT
            self.in_bytes -= entry.nbytes
            self.out_bytes += entry.nbytes
            raise copy.error
        saved.storage = copy.storage
        entry.cdata = copy.storage._cdata
        entry.state, entry.tries = _State.IN, 0
        self._by_storage[entry.cdata] = entry.ref
        self._staying.append(entry)

    def _collect(self) -> None:
        """Forget what has died, and complete copies that have ended."""
        while self._deaths:
            self._bury(self._deaths.popleft().entry)
        while self._copies and self._copies[0][1].end.is_set():
            entry, copy = self._copies.popleft()
            if entry.copy is not copy:
                continue
            saved = entry.ref()
            if copy.is_load:
                if saved is not None and copy.error is None:
                    self._arrived(entry, saved, copy)
                continue
            entry.copy = None
            if entry.state is not _State.SAVING or saved is None:
                continue
            if copy.error is not None:
                entry.state = _State.IN
                self.out_bytes -= entry.nbytes
                raise copy.error
            self._depart(entry, saved)
        while self._freed and self._freed[0][1].end.is_set():
            self._spill.give_back(self._freed.popleft()[0].slot)

    def _depart(self, entry: _Entry, saved: _Saved) -> None:
        entry.state = _State.OUT
        storage, saved.storage = saved.storage, None
        self._by_storage.pop(entry.cdata, None)
        self.in_bytes -= entry.nbytes
        if self.device.type == "cpu":
            # The C library may keep freed memory. The pages go back to the system whatever it does.
            give_pages_back(storage_address(storage), entry.nbytes)

    def _bury(self, entry: _Entry) -> None:
        self._alive_bytes -= entry.nbytes
        if entry.state in (_State.SAVING, _State.OUT):
            self.out_bytes -= entry.nbytes
        if entry.state is not _State.OUT:
            self.in_bytes -= entry.nbytes
        if self._by_storage.get(entry.cdata) is entry.ref:
            del self._by_storage[entry.cdata]
        del self._by_pack[entry.first_pack]
        if self.record.observed is not None:
            self.record.observed.last[self.record.number_of(entry.first_pack)] = self.record.at
        if entry.slot is not None:
            if entry.copy is None or entry.copy.end.is_set():
                self._spill.give_back(entry.slot)
            else:
                self._freed.append((entry, entry.copy))

    # The end

    def after_fork(self, lock: AbstractContextManager[Any]) -> None:
        """Continue in a forked process, where nothing leaves."""
        self._lock, self._is_forked, self.limit_bytes = lock, True, None
        while self._copies:
            entry, copy = self._copies.popleft()
            if entry.copy is not copy:
                continue
            entry.copy = None
            if copy.is_load and entry.state is _State.LOADING:
                entry.state = _State.OUT
                self.in_bytes -= entry.nbytes
                self.out_bytes += entry.nbytes
            elif entry.state is _State.SAVING:
                entry.state = _State.IN
                self.out_bytes -= entry.nbytes

    def bring_all_in(self) -> None:
        """Load everything, ignoring the limit; from now on nothing leaves."""
        with self._lock:
            self.limit_bytes = None
            self._collect()
            stream = self._copier.streams.current()
            for entry in [ref.entry for ref in self._by_pack.values()]:
                saved = entry.ref()
                if saved is None:
                    continue
                if entry.state is _State.SAVING:
                    entry.state = _State.IN
                    self.out_bytes -= entry.nbytes
                if entry.state is _State.OUT:
                    self._load(entry, saved, stream)
                if entry.state is _State.LOADING and entry.copy is not None:
                    entry.copy.end.wait()
                    self._arrived(entry, saved, entry.copy)
            self._collect()
