"""Moves optimizers' state: it is out between steps as far as memory needs, and a step runs in parts.

State leaves only while nobody but the optimizer holds it. What is out has a placeholder in `optimizer.state`, which is
a mapping that brings a parameter's state back before anybody gets it, so no read meets a tensor that is out. A
parameter's own dict is always the same plain dict.
"""

import inspect
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, ItemsView, Iterator, Sequence, ValuesView
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import optim

from cohabit.runtime.stores.pages import give_pages_back
from cohabit.runtime.training.copies.copying import Copier
from cohabit.runtime.training.copies.spill import SpillSlot, SpillStore
from cohabit.runtime.training.owners import state_tensors
from cohabit.runtime.training.tracked import (
    LEAST_BYTES,
    REFERENCES,
    CopyWaits,
    StorageCopy,
    storage_address,
    storage_nbytes,
    storage_uses,
)

_BY_PARAMETER: Final = (
    optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.Muon,
    optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam,
)  # fmt: skip
"""Optimizers whose steps update each parameter on its own: a step on parts of the parameters has the same bits."""
_TEMPORARIES: Final = 3
"""Bytes that an update takes beside the state, over those of its parameters."""
_UPDATES: Final = 16
"""Parts in which a plan sees an optimizer's step."""
_PARTS: Final = 4
"""Parts in memory at a time: one is saved, one still held by the optimizer's step, one updated, one loaded."""


def runs_in_parts(optimizer: optim.Optimizer) -> bool:
    """Whether a step on parts of the parameters has the bits of a step on all."""
    step = inspect.unwrap(type(optimizer).step)
    return any(step is inspect.unwrap(kind.step) for kind in _BY_PARAMETER)


class _Moved:
    """A tensor of a parameter's state, and where its bytes are kept while it is out."""

    __slots__ = ("copy", "nbytes", "offset", "shape", "slot", "stride", "tensor")

    def __init__(self, tensor: torch.Tensor, nbytes: int, slot: SpillSlot) -> None:
        self.tensor, self.nbytes, self.slot = tensor, nbytes, slot
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        self.copy: StorageCopy | None = None


class _Away:
    """Stands in `optimizer.state` for the state of a parameter that is on its way out, out, or on its way back."""

    __slots__ = ("is_leaving", "is_loading", "is_out", "key", "moved", "own")

    def __init__(self, key: Any, own: dict[Any, Any], moved: Sequence[_Moved]) -> None:
        self.key, self.own, self.moved = key, own, moved
        self.is_leaving, self.is_out, self.is_loading = True, False, False

    @property
    def nbytes(self) -> int:
        return sum(moved.nbytes for moved in self.moved)


class _StateMapping(defaultdict[Any, Any]):
    """An optimizer's state. Whatever is read from it is in memory."""

    def __init__(self, mover: "OptimizerState", content: "defaultdict[Any, Any]") -> None:
        super().__init__(content.default_factory, content)
        self._mover = mover

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        return self._mover.back(key, value) if type(value) is _Away else value

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is `get`

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            value = self[key]
            del self[key]
            return value
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        key = next(reversed(self), None)
        return super().popitem() if key is None else (key, self.pop(key))

    # `dict` reads mappings that do not iterate as it does through their methods.
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def values(self) -> Any:
        return ValuesView(self)

    def items(self) -> Any:
        return ItemsView(self)

    def copy(self) -> Any:
        return defaultdict(self.default_factory, self)

    __copy__ = copy

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __eq__(self, other: object) -> bool:
        return bool(self.copy() == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.copy().__reduce_ex__(protocol)


class _Groups(list[dict[str, Any]]):
    """Parameter groups. The optimizer's own step, and nothing else, iterates over parts of them."""

    def __init__(self, groups: list[dict[str, Any]], step_code: Any, parts: Callable[[], Iterator[Any]]) -> None:
        super().__init__(groups)
        self.groups, self._step_code, self._parts = groups, step_code, parts

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._parts() if sys._getframe(1).f_code is self._step_code else super().__iter__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(super().__iter__()),)


class OptimizerState:
    """Moves the state of one optimizer. All methods that begin or end copies take the lock."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        device: torch.device,
        copier: Copier,
        spill: SpillStore,
        lock: AbstractContextManager[Any],
        waits: CopyWaits,
        deliver: Callable[[], None],
    ) -> None:
        self._optimizer = weakref.proxy(optimizer)
        self._waits, self._deliver = waits, deliver
        """Called at the end of each hook: handles a signal that came meanwhile."""
        self.is_moving = False
        self._device, self._copier, self._spill, self.lock = device, copier, spill, lock
        self.out_goal = 0
        """Bytes to be out between two steps."""
        self.room: Callable[[], int] = int
        """Returns the bytes that state and the update's temporaries may take during a step."""
        self.total_bytes = self.out_bytes = self.moved_bytes = 0
        self._leaving: deque[_Away] = deque()
        """What is on its way out. `out_bytes` count it, and so do `in_bytes`."""
        self._leaving_bytes = 0
        self.held_bytes = 0
        """Bytes that had to leave and were held by others."""
        self._counted = -1
        self._away: dict[Any, _Away] = {}
        """By parameter."""
        self._before: defaultdict[Any, Any] | None = None
        self._is_forked = False
        step = inspect.unwrap(type(optimizer).step)
        self._step_code = step.__code__ if runs_in_parts(optimizer) else None
        self._handles = [
            optimizer.register_step_pre_hook(self._begins),
            optimizer.register_step_post_hook(self._ends),
        ]

    @property
    def staying_bytes(self) -> int:
        return self.total_bytes - self.out_bytes

    @property
    def in_bytes(self) -> int:
        return self.staying_bytes + self._leaving_bytes

    def close(self) -> None:
        """Bring everything in, and leave the optimizer as it was."""
        for handle in self._handles:
            handle.remove()
        self.bring_all_in()
        self._restore_groups()
        optimizer = self._optimizer
        if type(optimizer.state) is _StateMapping:
            plain = self._before if self._before is not None else defaultdict(dict)
            plain.clear()
            plain.update(optimizer.state)
            optimizer.state = plain
        self._before = None

    def bring_all_in(self) -> None:
        with self.lock:
            self.out_goal = 0
            for key, away in list(self._away.items()):
                self._load(away)
                self._take_back(key, away)

    def back(self, key: Any, away: _Away) -> Any:
        """Return a parameter's dict, whose tensors are in memory again."""
        with self.lock:
            self._load(away)
            self._take_back(key, away)
            return away.own

    # A step

    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.is_moving:
            return
        with self.lock:
            self._wrap()
            self._restore_groups()
            if self._step_code is not None:
                groups = optimizer.param_groups
                optimizer.param_groups = _Groups(groups, self._step_code, lambda: self._parts(groups))
            else:
                for key, away in list(self._away.items()):
                    self._load(away)
                    self._take_back(key, away)
        self._deliver()

    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.is_moving:
            return
        with self.lock:
            self._restore_groups()
            self._count()
            self.leave_for(self.out_goal)
        self._deliver()

    def start(self, goal_bytes: int, bring_in: Callable[[Any], None]) -> None:
        """Begin to move, between two steps, until `goal_bytes` are out.

        Storages may be out, under a mode: `bring_in` brings one in for good. They leave one after the other, so that
        there is no need to have all in memory at a time.
        """
        with self.lock:
            self.is_moving = True
            self._wrap()
            self.out_goal = min(goal_bytes, self.total_bytes)
            for parameter in self._last_first():
                if self.out_bytes >= self.out_goal:
                    break
                self._for_each_storage(parameter, bring_in)
                self.leave(parameter)
                self._settle()

    def _for_each_storage(self, parameter: Any, call: Callable[[Any], None]) -> None:
        for tensor in state_tensors(dict.get(self._optimizer.state, parameter)):
            if tensor.layout is torch.strided:
                call(tensor.untyped_storage())

    def stop(self) -> None:
        """Move nothing until the next `start`. Everything is in."""
        self.is_moving = False
        self._restore_groups()

    def returning(self) -> Iterator[torch.Tensor]:
        """Bring everything in, one parameter's state after the other, and yield its tensors."""
        with self.lock:
            self.out_goal = 0
            state = self._optimizer.state
            for key in list(dict.keys(state)):
                yield from state_tensors(state[key])

    def after_fork(self, lock: AbstractContextManager[Any]) -> None:
        """Continue in a forked process, which has no copy thread: what is read is loaded at once."""
        self.lock, self.out_goal, self._is_forked = lock, 0, True
        self._leaving.clear()
        for away in self._away.values():
            for moved in away.moved:
                if moved.copy is not None and not moved.copy.end.is_set():
                    moved.copy = None
                    if away.is_loading:
                        self._make(moved, is_load=True)

    def _restore_groups(self) -> None:
        groups = self._optimizer.param_groups
        if type(groups) is _Groups:
            groups.groups[:] = list.__iter__(groups)
            self._optimizer.param_groups = groups.groups

    def _wrap(self) -> None:
        """Make `optimizer.state` a mapping that brings back what is read. Loading a state replaces it."""
        optimizer = self._optimizer
        state = optimizer.state
        if type(state) is _StateMapping and state._mover is self:
            return
        if type(state) is not defaultdict or sys.getrefcount(state) > 3:
            return  # others hold the mapping itself: its content stays
        for away in self._away.values():
            self._discard(away)
        self._away.clear()
        self._before = state
        optimizer.state = _StateMapping(self, state)
        state.clear()
        self._count()

    def _parts(self, groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield groups of parameters, with their state in memory and room to update it."""
        parts = [(group, chunk) for group in groups for chunk in self._chunks(group["params"])]
        done: deque[Any] = deque()
        last: list[torch.Tensor] = []
        for number, (group, chunk) in enumerate(parts):
            with self.lock:
                self._collect()
                following = parts[number + 1][1] if number + 1 < len(parts) else []
                taken = _TEMPORARIES * sum(parameter.nbytes for parameter in chunk)
                self._make_room(chunk, taken, done, parts[number + 1 :])
                for parameter in chunk:
                    if (away := self._away.get(parameter)) is not None:
                        self._load(away)
                coming = [
                    away for p in following if (away := self._away.get(p)) is not None and not away.is_loading
                ]
                if self.staying_bytes + taken + sum(away.nbytes for away in coming if away.is_out) <= self.room():
                    for away in coming:
                        self._load(away)
                for parameter in chunk:
                    if (away := self._away.get(parameter)) is not None:
                        self._take_back(parameter, away)
            yield {**group, "params": chunk}
            done.extend(last)  # the step's own variables hold the tensors of its last part
            last = chunk
            with self.lock:
                self._count()

    def updates(self) -> Iterator[tuple[int, int]]:
        """Yield the bytes of state of some parameters and those that their update takes beside it, in order.

        A step that does not run in parts is one update.
        """
        state = self._optimizer.state
        if self._step_code is None:
            yield self.total_bytes, 0
            return
        state_bytes = taken = 0
        for parameter in [p for group in self._optimizer.param_groups for p in group["params"]]:
            state_bytes += self._bytes_of(dict.get(state, parameter))
            taken += _TEMPORARIES * parameter.nbytes
            if state_bytes > self.total_bytes // _UPDATES:
                yield state_bytes, taken
                state_bytes = taken = 0
        if state_bytes:
            yield state_bytes, taken

    def _chunks(self, parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        most, chunk, nbytes = self.room() // _PARTS, list[torch.Tensor](), 0
        for parameter in parameters:
            own = _TEMPORARIES * parameter.nbytes + self._bytes_of(dict.get(self._optimizer.state, parameter))
            if chunk and nbytes + own > most:
                yield chunk
                chunk, nbytes = [], 0
            chunk.append(parameter)
            nbytes += own
        yield chunk

    def _make_room(
        self,
        chunk: list[torch.Tensor],
        taken: int,
        done: deque[Any],
        ahead: Sequence[tuple[Any, list[torch.Tensor]]],
    ) -> None:
        """Make state of updated parameters leave, then state that is needed last, until a part fits."""
        coming = sum(away.nbytes for p in chunk if (away := self._away.get(p)) is not None and away.is_out)
        last_first = (p for _, parameters in reversed(ahead) for p in reversed(parameters))
        while self.staying_bytes + coming + taken > self.room():
            victim = done.popleft() if done else next(last_first, None)
            if victim is None:
                break
            self.leave(victim)
        self._settle()

    def leave_for(self, goal_bytes: int) -> None:
        """Make state leave until `goal_bytes` are out, that of the parameters that are updated last first."""
        for parameter in self._last_first():
            if self.out_bytes >= goal_bytes:
                return
            self.leave(parameter)
        self.held_bytes = max(self.held_bytes, goal_bytes - self.out_bytes)

    def _last_first(self) -> list[Any]:
        return [p for group in self._optimizer.param_groups for p in group["params"]][::-1]

    def free(self) -> bool:
        """Wait for what is leaving, or make the state of one parameter leave now. Returns whether there was any."""
        with self.lock:
            if self._leaving:
                self._settle()
                return True
            for key in reversed(list(dict.keys(self._optimizer.state))):
                if self.leave(key):
                    self._settle()
                    return True
            return False

    def prefetch(self, free_bytes: int) -> int:
        """Load what the next step needs first, as far as it fits. Returns the bytes that are being loaded."""
        loaded = 0
        for group in self._optimizer.param_groups if self._away else ():
            for parameter in group["params"]:
                away = self._away.get(parameter)
                if away is None or away.is_loading or not away.is_out:
                    continue
                if loaded + away.nbytes > free_bytes:
                    return loaded
                loaded += away.nbytes
                self._load(away)
        return loaded

    # Copies

    def leave(self, key: Any) -> bool:
        """Begin to save a parameter's state, if the optimizer alone holds it. Returns whether any is leaving."""
        state = self._optimizer.state
        if type(state) is not _StateMapping or self._is_forked:
            return False
        own = dict.get(state, key)
        if type(own) is not dict or sys.getrefcount(own) > 3:
            return False
        moved = []
        for value in own.values():
            if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device != self._device:
                continue
            storage = value.untyped_storage()
            nbytes = storage_nbytes(storage)
            # Held by the dict, this loop and the call's argument; its storage by itself and its Python object.
            if nbytes < LEAST_BYTES or sys.getrefcount(value) > 3 or weakref.getweakrefcount(value):
                continue
            if not storage.resizable() or storage.is_shared() or value.requires_grad:
                continue
            if storage_uses(storage._cdata) > 2 or sys.getrefcount(storage) > REFERENCES:
                continue
            moved.append(_Moved(value, nbytes, self._spill.take(nbytes)))
            del storage
        if not moved:
            return False
        away = _Away(key, own, moved)
        self._away[key] = away
        self._leaving.append(away)
        self._leaving_bytes += away.nbytes
        dict.__setitem__(state, key, away)
        self.out_bytes += away.nbytes
        for part in moved:
            self._make(part, is_load=False)
        return True

    def _make(self, moved: _Moved, is_load: bool) -> None:
        storage = moved.tensor.untyped_storage()
        if is_load:
            storage = torch.UntypedStorage(moved.nbytes, device=self._device)  # type: ignore[no-untyped-call]
        copy = moved.copy = StorageCopy(moved.slot, storage, moved.nbytes, is_load)
        self.moved_bytes += moved.nbytes
        if self._is_forked:
            copy.end = threading.Event()
            self._copier.make(copy)
            copy.end.set()
        else:
            self._copier.begin(copy)

    def _settle(self) -> None:
        """Wait until everything that is leaving has left."""
        for away in self._leaving:
            for moved in away.moved:
                if moved.copy is not None:
                    self._waits.wait(moved.copy)
        self.collect()

    def collect(self) -> None:
        """Release the memory of what has been saved."""
        while self._leaving and all(m.copy is None or m.copy.end.is_set() for m in self._leaving[0].moved):
            away = self._leaving.popleft()
            if not away.is_leaving:
                continue
            for moved in away.moved:
                copy, moved.copy = moved.copy, None
                assert copy is not None
                if copy.error is not None:
                    self._take_back(away.key, away)
                    raise copy.error
                moved.tensor.data = torch.empty(0, dtype=moved.tensor.dtype, device=self._device)
                if self._device.type == "cpu":
                    give_pages_back(storage_address(copy.storage), moved.nbytes)
            self._stop_leaving(away)
            away.is_out = True

    def _stop_leaving(self, away: _Away) -> None:
        if away.is_leaving:
            away.is_leaving = False
            self._leaving_bytes -= away.nbytes

    def _collect(self) -> None:
        """Release the memory of what has been saved, and forget what was replaced."""
        state = self._optimizer.state
        for key, away in list(self._away.items()):
            if dict.get(state, key) is not away:
                self._discard(away)
                del self._away[key]
        self.collect()

    def _load(self, away: _Away) -> None:
        """Begin to load what is out."""
        if away.is_loading or not away.is_out:
            return
        away.is_loading = True
        self.out_bytes -= away.nbytes
        for moved in away.moved:
            self._make(moved, is_load=True)

    def _take_back(self, key: Any, away: _Away) -> None:
        """Put a parameter's dict in its place; wait for what is still being loaded."""
        for moved in away.moved:
            copy = moved.copy
            if away.is_loading and copy is not None:
                self._waits.wait(copy)
                if copy.error is not None:
                    raise copy.error
        for moved in away.moved:
            if away.is_loading and moved.copy is not None:
                data = torch.empty(0, dtype=moved.tensor.dtype, device=self._device)
                moved.tensor.data = data.set_(moved.copy.storage, moved.offset, moved.shape, moved.stride)
                moved.copy = None
        if not away.is_loading:
            self.out_bytes -= away.nbytes  # it had not left yet
        self._stop_leaving(away)
        self._release(away)
        if dict.get(self._optimizer.state, key) is away:
            dict.__setitem__(self._optimizer.state, key, away.own)
        self._away.pop(key, None)

    def _discard(self, away: _Away) -> None:
        """Forget state that was replaced while it was out."""
        if not away.is_loading:
            self.out_bytes -= away.nbytes
        self._stop_leaving(away)
        self._release(away)

    def _release(self, away: _Away) -> None:
        for moved in away.moved:
            if moved.copy is not None:
                moved.copy.end.wait()  # the slot may be used again
            self._spill.give_back(moved.slot)

    def _count(self) -> None:
        """Count the bytes of all state, whenever there is state of more or fewer parameters."""
        state = self._optimizer.state
        if len(state) != self._counted:
            self._counted = len(state)
            self.total_bytes = sum(self._bytes_of(value) for value in dict.values(state))

    def _bytes_of(self, value: Any) -> int:
        if type(value) is _Away:
            return value.nbytes
        if not isinstance(value, dict):
            return 0
        tensors = [v for v in value.values() if type(v) is torch.Tensor and v.layout is torch.strided]
        return sum(t.nbytes for t in tensors if t.device == self._device and t.nbytes >= LEAST_BYTES)
