"""Moves what autograd saves: hooks on saved tensors, and no price per op.

A storage that autograd saves leaves memory only while its use counts say that autograd alone holds it. Then nobody can
read or write it until autograd unpacks it, so no read meets a storage that is out. While anybody else holds it, it is
the very memory that eager PyTorch's graph would hold.

What is saved first is used last, so it leaves first, and returns in the order in which the recorded step unpacked. If
a searcher has planned the step, its advice says instead what leaves, and when copies begin.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import torch

from cohabit.runtime.training.interrupts import Interrupts
from cohabit.runtime.training.record import Advice, Record
from cohabit.runtime.training.residency import Residency
from cohabit.runtime.training.tracked import LEAST_BYTES, REFERENCES, Tracked, storage_nbytes, storage_uses

_AHEAD: Final = 6
"""Entries that are on their way back at a time."""
_LOOKED_AT: Final = 8
"""Entries that are looked at per event, to find one that autograd alone holds."""
_TRIES: Final = (4, 64)
"""An entry that is found to be held by others so often waits behind the others; then it stays."""
_MOST_DEAD: Final = 256
"""Dead entries that are forgotten late, while nothing has to leave."""

_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class _Saved:
    """What packed tensors of one storage refer to; it lives as long as one of them."""

    __slots__ = ("__weakref__", "storage")

    def __init__(self, storage: Any) -> None:
        self.storage = storage


class _SavedRef(weakref.ref[_Saved]):
    """A weak reference with a C callback: an interrupt in a Python callback would be swallowed."""

    __slots__ = ("entry",)
    entry: "_Entry | None"


class _Entry:
    """The manager's record of a saved storage. The residency counts it while it is out, or on its way."""

    __slots__ = ("cdata", "first_pack", "is_away", "nbytes", "packed", "ref", "tracked", "tries")

    def __init__(self, ref: _SavedRef, cdata: int, nbytes: int, first_pack: int) -> None:
        self.ref, self.cdata, self.nbytes, self.first_pack = ref, cdata, nbytes, first_pack
        self.packed: list[weakref.ref[torch.Tensor]] = []
        """Tensors that autograd holds in place of the saved ones: each is a use of the storage."""
        self.tracked: Tracked | None = None
        """None while it stays in memory."""
        self.is_away = False
        """It is out, or leaves when its copy has ended, unless it is unpacked before."""
        self.tries = 0


_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED: Final = torch.strided


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares storage and version, and may be held by the node of the tensor without a cycle."""
    return tensor if tensor.grad_fn is None else tensor.detach()


@contextmanager
def after_backward(call: Callable[[], None]) -> Iterator[None]:
    """Inside the block, `call` is called after each backward pass that is not part of another one.

    Within one, a mode cannot be entered or left: torch restores the thread's modes after each node.
    """
    autograd: Any = torch.autograd
    run = autograd._engine_run_backward

    def running(*args: Any, **kwargs: Any) -> Any:
        found = run(*args, **kwargs)
        if not in_backward():
            call()
        return found

    autograd._engine_run_backward = running
    try:
        yield
    finally:
        autograd._engine_run_backward = run


def in_backward() -> bool:
    """Whether this thread is within a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


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
        self, residency: Residency, lock: AbstractContextManager[Any], record: Record, interrupts: Interrupts
    ) -> None:
        self._residency, self._lock, self.record, self._interrupts = residency, lock, record, interrupts
        self._is_moving = False
        self.limit_bytes: int | None = None
        """None: nothing leaves."""
        self.fits = False
        """Whether nothing has to leave in a step that follows the record."""
        self.free_state: Callable[[], bool] = bool
        """Makes some of the optimizers' state leave; returns whether there was any."""
        self.prefetch_state: Callable[[int], None] = lambda nbytes: None
        """Called with the limit when state is out, but no saved tensor."""
        self._alive_bytes = self.in_bytes = 0
        """Of all entries, each once, and of those that stay in memory."""
        self.out_bytes = 0
        """Of entries that are out or leaving."""
        self.over_bytes = 0
        """Most bytes by which this step has exceeded the limit."""
        self.held_bytes = 0
        """Most bytes that had to leave and were held by others."""
        self._owned: dict[int, Any] = {}
        self._by_storage: dict[int, _Entry] = {}
        self._by_pack: dict[int, _Entry] = {}
        """By the number of the entry's first pack, in that order."""
        self._staying: deque[_Entry] = deque()
        """Entries in memory, those to leave first at the front."""
        self._returning: deque[_Entry] = deque()
        """Entries that are being loaded, or have just been."""
        self._deaths: deque[_SavedRef] = deque()
        self.packs = 0
        """Packs so far, of storages that count."""
        self._loops: set[int] = set()
        """Threads with a loop."""
        self._loop: int | None = None
        """The thread with a loop, if it is the only one: the record is of its steps."""
        self._needed: _Entry | None = None
        """The entry that was unpacked last, which stays until the next event."""
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
        self._bury_dead()
        return self._alive_bytes

    def owns(self, storages: list[Any]) -> None:
        """Set the owners' storages, which never leave here: autograd does not hold them alone."""
        self._owned = {storage._cdata: storage for storage in storages}  # held, so that no other gets its number

    def start(self, limit_bytes: int | None, *, fits: bool = False) -> None:
        """Move what is saved from now on, and what is saved already. Ops are not seen, and everything is in memory."""
        self._bury_dead()
        self._is_moving, self.limit_bytes, self.fits = True, limit_bytes, fits
        self.in_bytes = self._alive_bytes

    def stop(self) -> None:
        """Move nothing from now on. What is out is left to the residency."""
        with self._lock:
            self._residency.finish_saves()
            self._bury_dead()
            self._is_moving, self.limit_bytes, self.fits = False, None, False
            self.in_bytes = self.out_bytes = 0
            self._returning.clear()
            for entry in self._by_pack.values():
                if entry.tracked is not None and not entry.tracked.is_out:
                    self._residency.forget(entry.tracked)
                entry.tracked, entry.is_away = None, False

    # Hooks

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return a tensor over the same storage, its version, and the entry if the storage may leave."""
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
        if type(tensor) not in _PLAIN or tensor.layout is not _STRIDED or _is_wrapped(tensor):
            return _detached(tensor)
        version = tensor._version
        if (
            not tensor.is_cpu
            or tensor.is_quantized
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor._is_zerotensor()
        ):
            return _detached(tensor), version
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        nbytes = storage_nbytes(storage) if self._is_moving else self._residency.nbytes_of(storage)
        if nbytes < LEAST_BYTES or cdata in self._owned:
            return _detached(tensor), version
        kept = tensor.detach()  # also of a tensor without a node, which others hold
        try:
            with self._lock:
                entry = self._by_storage.get(cdata)
                saved = None if entry is None else entry.ref()
                if entry is None or saved is None:
                    if not storage.resizable() or storage.is_shared():
                        return kept, version
                    saved = _Saved(storage)
                    ref = _SavedRef(saved, self._deaths.append)
                    entry = ref.entry = _Entry(ref, cdata, nbytes, self.packs)
                    self._by_storage[cdata] = self._by_pack[self.packs] = entry
                    self._staying.append(entry)
                    self._alive_bytes += nbytes
                    if self._is_moving:
                        self.in_bytes += nbytes
                entry.packed.append(weakref.ref(kept))
                self.packs += 1
                if not self._follow(nbytes, entry) and self.limit_bytes is not None:
                    self._keep_within(self.limit_bytes)
                    if self._due_in and self._is_advised:
                        self._prefetch(entry, self.limit_bytes)
                return kept, version, saved, entry
        finally:
            if self._interrupts.pending:
                self._interrupts.deliver()

    def _unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is not tuple:
            return packed  # type: ignore[no-any-return]
        tensor: torch.Tensor = packed[0]
        if tensor._version != packed[1]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version"
                f" {packed[1]} instead. Hint: enable anomaly detection to find the operation that failed to compute its"
                " gradient, with torch.autograd.set_detect_anomaly(True)."
            )
        if len(packed) == 2:
            return tensor
        entry: _Entry = packed[3]
        try:
            with self._lock:
                if not self._follow(-entry.nbytes, entry) or entry.tracked is not None:
                    self._bring(entry)
                return tensor.detach()  # a holder of the storage that counts
        finally:
            if self._interrupts.pending:
                self._interrupts.deliver()

    def _bring(self, entry: _Entry) -> None:
        """Make sure that an entry's bytes are in memory, and prefetch what follows."""
        self._begin_return(entry)
        self._needed = entry
        if self.limit_bytes is not None:
            self._keep_within(self.limit_bytes)
            self._prefetch(entry, self.limit_bytes)
        if (tracked := entry.tracked) is not None:
            if tracked.is_out:
                self._residency.bring_in(tracked)
            self._stay(entry, tracked)

    def _begin_return(self, entry: _Entry) -> None:
        """Have an entry stay that is leaving; begin to load one that is out."""
        tracked = entry.tracked
        if tracked is not None and entry.is_away:
            entry.is_away = False
            self.out_bytes -= entry.nbytes
            self._residency.changed(tracked)
            if tracked.is_out:
                entry.tries = 0
                self._residency.load(tracked)
                self._returning.append(entry)
            else:
                self._stay(entry, tracked)

    def _stay(self, entry: _Entry, tracked: Tracked) -> None:
        self._residency.forget(tracked)
        entry.tracked = None
        self.in_bytes += entry.nbytes
        self._staying.append(entry)

    def _follow(self, nbytes: int, entry: _Entry) -> bool:
        """Tell the record what autograd does. Returns whether the step follows it so far, and fits into memory."""
        record, is_quiet = self.record, self.fits and not self.record.has_departed
        if not is_quiet or len(self._deaths) > _MOST_DEAD:
            self._collect()
        if threading.get_ident() == self._loop or self._is_first_loop():
            record.event(nbytes, entry.first_pack, self._alive_bytes)
            if record.observed is not None:
                self._observe(entry)
            if self.advice is not None:
                self._due_out.extend(self.advice.leaving.get(record.at, ()))
                self._due_in.extend(self.advice.returning.get(record.at, ()))
        return is_quiet and not record.has_departed and self._loop is not None

    def _is_first_loop(self) -> bool:
        """Whether the record is of this thread's steps: it was the first to save anything, and is the only one."""
        self._loops.add(threading.get_ident())
        self._loop = next(iter(self._loops)) if len(self._loops) == 1 else None
        return self._loop is not None

    def _observe(self, entry: _Entry) -> None:
        """Note the time of an event, and which entries others than autograd hold after it."""
        observed = self.record.observed
        assert observed is not None
        observed.starts_s.append(self._residency.waits.clock_s())
        for held in list(self._held):
            saved = held.ref()
            if saved is None or held.is_away or self._is_alone(held, saved):
                del self._held[held]
        self._held[entry] = None
        for held in self._held:
            observed.uses.setdefault(self.record.number_of(held.first_pack), []).append(self.record.at)

    def observe_end(self) -> None:
        """The step that is observed ends here, unless further events come."""
        if self.record.observed is not None:
            del self.record.observed.starts_s[self.record.at + 1 :]
            self.record.observed.starts_s.append(self._residency.waits.clock_s())

    def end_step(self) -> None:
        self._bury_dead()
        self.record.end_step(self.packs)
        self._held.clear()
        self._due_out.clear()
        self._due_in.clear()
        self._staying = deque(dict.fromkeys(entry for entry in self._staying if entry.ref() is not None))

    # Room

    def _keep_within(self, limit_bytes: int) -> None:
        """Begin what has to leave by the step's peak, and wait for it as far as it has to be out by now."""
        residency = self._residency
        beside, coming = self.record.beside()
        # What has to be out by the highest point ahead, if what will be saved until then stays.
        out_bytes = coming + residency.state_bytes - limit_bytes
        if self.advice is not None and self._is_advised:
            self._leave_as_advised()
        elif self.out_bytes < out_bytes:
            self._leave(out_bytes)
        # Wait until the next ops fit: `beside` are bytes beside saved tensors and the optimizers' state.
        while (over := self.in_bytes + residency.used_bytes + residency.state_bytes + beside - limit_bytes) > 0:
            if residency.saving:
                residency.finish_oldest()
                self._collect()
            elif not self._leave(self.out_bytes + over, everything=True) and not self.free_state():
                self.over_bytes = max(self.over_bytes, over)
                residency.exceeded_bytes = max(residency.exceeded_bytes, over)
                self.held_bytes = max(self.held_bytes, sum(entry.nbytes for entry in self._staying))
                break
        if over + limit_bytes > residency.peak_bytes:
            residency.peak_bytes = over + limit_bytes

    @property
    def _is_advised(self) -> bool:
        return self.advice is not None and self.record.is_followed and len(self._loops) == 1

    def _leave_as_advised(self) -> None:
        """Begin to save the entries that are due, once autograd alone holds them."""
        for _ in range(len(self._due_out)):
            number = self._due_out.popleft()
            entry = self._by_pack.get(self.record.first_pack_of(number))
            saved = None if entry is None else entry.ref()
            if entry is None or saved is None or entry.tracked is not None:
                continue
            if entry is self._needed or not self._is_alone(entry, saved):
                self._due_out.append(number)
                continue
            self._save(entry, saved)

    def _is_alone(self, entry: _Entry, saved: _Saved) -> bool:
        """Whether autograd alone holds a storage: by the tensors that were packed."""
        entry.packed = [ref for ref in entry.packed if ref() is not None]
        # The storage's Python object is a use, too. Beside torch, `saved` and the call's argument refer to it.
        uses = len(entry.packed) + 1
        return storage_uses(entry.cdata) == uses and sys.getrefcount(saved.storage) <= REFERENCES

    def _leave(self, goal_bytes: int, *, everything: bool = False) -> bool:
        """Begin to save entries, first saved first, until `goal_bytes` are out or leaving. Returns whether it did."""
        began, back = False, []
        for _ in range(len(self._staying) if everything else min(_LOOKED_AT, len(self._staying))):
            if self.out_bytes >= goal_bytes:
                break
            entry = self._staying.popleft()
            saved = entry.ref()
            if saved is None or entry.tracked is not None:
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
        tracked = entry.tracked = self._residency.track(saved.storage)
        if tracked is None:  # it was made smaller
            return
        self.in_bytes -= entry.nbytes
        entry.is_away = True
        self.out_bytes += entry.nbytes
        self._residency.save(tracked)

    def _prefetch(self, entry: _Entry, limit_bytes: int) -> None:
        """Begin to load what is unpacked next, as far as it fits beside the next ops."""
        residency = self._residency
        if self.out_bytes == 0:
            if residency.state_out_bytes:
                self.prefetch_state(limit_bytes)
            return
        if residency.loading >= _AHEAD:
            return
        free = (
            limit_bytes - self.in_bytes - residency.used_bytes - residency.state_bytes - self.record.soon_beside()
        )
        numbers = self.record.upcoming(entry.first_pack)
        if self.advice is not None and self._is_advised:
            numbers = self._advised_returns(numbers)
        for number in numbers:
            following = self._by_pack.get(number)
            if following is None or following.tracked is None or not following.is_away or following.ref() is None:
                continue
            if following.tracked.is_out:
                if following.nbytes > free:
                    return
                free -= following.nbytes
            self._begin_return(following)
            if residency.loading >= _AHEAD:
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

    def _collect(self) -> None:
        """Forget what has died, and complete copies that have ended. Raises the error of a copy."""
        if self._deaths:
            self._bury_dead()
        if self._is_moving and self._residency.has_news:
            self._residency.collect()
        while self._returning:
            tracked = self._returning[0].tracked
            if tracked is not None and tracked.is_out:
                break
            entry = self._returning.popleft()
            if tracked is not None:
                self._stay(entry, tracked)

    def _bury_dead(self) -> None:
        while self._deaths:
            ref = self._deaths.popleft()
            entry, ref.entry = ref.entry, None  # the two refer to each other
            if entry is not None:
                self._bury(entry)

    def _bury(self, entry: _Entry) -> None:
        self._alive_bytes -= entry.nbytes
        if self._by_storage.get(entry.cdata) is entry:
            del self._by_storage[entry.cdata]
        del self._by_pack[entry.first_pack]
        if self.record.observed is not None:
            self.record.observed.last[self.record.number_of(entry.first_pack)] = self.record.at
        if entry.tracked is not None:
            self._residency.forget(entry.tracked)
            self.out_bytes -= entry.nbytes if entry.is_away else 0
        elif self._is_moving:
            self.in_bytes -= entry.nbytes

    def after_fork(self, lock: AbstractContextManager[Any]) -> None:
        """Continue in a forked process, where nothing leaves."""
        self._lock, self.limit_bytes = lock, None
