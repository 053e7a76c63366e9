"""Moves optimizers' state: it is out between steps as far as memory needs, and a step runs in parts.

State leaves only while nobody but the optimizer holds it. What is out has a placeholder in `optimizer.state`, which is
a mapping that brings a parameter's state back before anybody gets it, so no read meets a tensor that is out. A
parameter's own dict is always the same plain dict.
"""

import inspect
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, ItemsView, Iterator, Sequence, ValuesView
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import optim

from cohabit.runtime.training.interrupts import Interrupts
from cohabit.runtime.training.residency import Residency
from cohabit.runtime.training.tracked import LEAST_BYTES, REFERENCES, Tracked, storage_uses, used_by

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


class _Away:
    """Stands in `optimizer.state` for the state of a parameter that is on its way out, out, or on its way back."""

    __slots__ = ("is_returning", "nbytes", "own", "trackeds")

    def __init__(self, own: dict[Any, Any], trackeds: Sequence[Tracked]) -> None:
        self.own, self.trackeds = own, trackeds
        self.nbytes = used_by(trackeds)
        self.is_returning = False

    @property
    def is_out(self) -> bool:
        return all(tracked.is_out for tracked in self.trackeds)


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
    """Moves the state of one optimizer. The residency tracks it while it is out, or on its way."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        residency: Residency,
        lock: AbstractContextManager[Any],
        interrupts: Interrupts,
    ) -> None:
        self._optimizer = weakref.proxy(optimizer)
        self._residency, self.lock, self._interrupts = residency, lock, interrupts
        self.is_moving = False
        self.out_goal = 0
        """Bytes to be out between two steps."""
        self.room: Callable[[], int] = int
        """Returns the bytes that staying state, loads and the update's temporaries may take during a step."""
        self.total_bytes = self.out_bytes = 0
        """Of all state, and of what is out, or on its way out or back."""
        self.held_bytes = 0
        """Bytes that had to leave and were held by others."""
        self._counted = -1
        self._away: dict[Any, _Away] = {}
        """By parameter."""
        self._before: defaultdict[Any, Any] | None = None
        step = inspect.unwrap(type(optimizer).step)
        self._step_code = step.__code__ if runs_in_parts(optimizer) else None
        self._handles = [
            optimizer.register_step_pre_hook(self._begins),
            optimizer.register_step_post_hook(self._ends),
        ]

    @property
    def staying_bytes(self) -> int:
        return self.total_bytes - self.out_bytes

    def trackeds(self) -> set[Tracked]:
        """Return the storages that are out, or on their way."""
        return {tracked for away in self._away.values() for tracked in away.trackeds}

    def start(self, goal_bytes: int) -> None:
        """Begin to move, between two steps, until `goal_bytes` are out. Under a mode, some may be out already."""
        with self.lock:
            self.is_moving = True
            self._wrap()
            self._count()
            self.out_goal = min(goal_bytes, self.total_bytes)
            self.leave_for(self.out_goal)
            self._settle()

    def stop(self) -> None:
        """Move nothing until the next `start`. What is out is left to the residency."""
        with self.lock:
            self.is_moving, self.out_goal = False, 0
            self._residency.finish_saves()
            self._restore_groups()
            state = self._optimizer.state
            for key, away in self._away.items():
                if dict.get(state, key) is away:
                    dict.__setitem__(state, key, away.own)
            self._away.clear()
            self._counted = -1
            self._change(-self.total_bytes, -self.out_bytes)

    def close(self) -> None:
        """Leave the optimizer as it was, but for what is out."""
        for handle in self._handles:
            handle.remove()
        self.stop()
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
                self._return(key, away)

    def back(self, key: Any, away: _Away) -> Any:
        """Return a parameter's dict, whose tensors are in memory again."""
        with self.lock:
            self._return(key, away)
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
                    self._return(key, away)
        self._interrupts.deliver()

    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.is_moving:
            return
        with self.lock:
            self._restore_groups()
            self._count()
            self.leave_for(self.out_goal)
        self._interrupts.deliver()

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
        self._away.clear()
        self._change(0, -self.out_bytes)
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
                self._forget_replaced()
                following = parts[number + 1][1] if number + 1 < len(parts) else []
                taken = _TEMPORARIES * sum(parameter.nbytes for parameter in chunk)
                self._make_room(chunk, taken, done, parts[number + 1 :])
                for _, away in self._away_of(chunk):
                    self._load(away)
                coming = [away for _, away in self._away_of(following) if not away.is_returning]
                if self.staying_bytes + taken + sum(away.nbytes for away in coming if away.is_out) <= self.room():
                    for away in coming:
                        self._load(away)
                for parameter, away in self._away_of(chunk):
                    self._return(parameter, away)
            yield {**group, "params": chunk}
            done.extend(last)  # the step's own variables hold the tensors of its last part
            last = chunk
            with self.lock:
                self._count()

    def _away_of(self, parameters: Sequence[Any]) -> list[tuple[Any, _Away]]:
        return [(p, away) for p in parameters if (away := self._away.get(p)) is not None]

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
        returning = sum(away.nbytes for away in self._away.values() if away.is_returning)
        most, chunk, nbytes = (self.room() + returning) // _PARTS, list[torch.Tensor](), 0
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
        coming = sum(away.nbytes for _, away in self._away_of(chunk) if away.is_out and not away.is_returning)
        last_first = (p for _, parameters in reversed(ahead) for p in reversed(parameters))
        while self.staying_bytes + coming + taken > self.room():
            victim = done.popleft() if done else next(last_first, None)
            if victim is None:
                break
            self.leave(victim)
        self._settle()

    def leave_for(self, goal_bytes: int) -> None:
        """Make state leave until `goal_bytes` are out, that of the parameters that are updated last first."""
        for parameter in [p for group in self._optimizer.param_groups for p in group["params"]][::-1]:
            if self.out_bytes >= goal_bytes:
                return
            self.leave(parameter)
        self.held_bytes = max(self.held_bytes, goal_bytes - self.out_bytes)

    def free(self) -> bool:
        """Make the state of one parameter leave now. Returns whether there was any."""
        with self.lock:
            for key in reversed(list(dict.keys(self._optimizer.state))):
                if self.leave(key):
                    self._settle()
                    return True
            return False

    def prefetch(self, free_bytes: int) -> int:
        """Load what the next step needs first, as far as it fits. Returns the bytes that are being loaded."""
        loaded = 0
        for group in self._optimizer.param_groups if self._away else ():
            for _, away in self._away_of(group["params"]):
                if away.is_returning or not away.is_out:
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
        if type(state) is not _StateMapping:
            return False
        own = dict.get(state, key)
        if type(own) is not dict or sys.getrefcount(own) > 3:
            return False
        trackeds = []
        for value in own.values():
            # Held by the dict, this loop and the call's argument; its storage by itself and its Python object.
            if type(value) is not torch.Tensor or value.layout is not torch.strided or value.requires_grad:
                continue
            if sys.getrefcount(value) > 3 or weakref.getweakrefcount(value):
                continue
            storage = value.untyped_storage()
            if storage_uses(storage._cdata) > 2 or sys.getrefcount(storage) > REFERENCES or storage.is_shared():
                continue
            tracked = self._residency.track(storage)
            if tracked is not None and not tracked.is_pinned:
                trackeds.append(tracked)
            del storage
        if not trackeds:
            return False
        away = self._away[key] = _Away(own, trackeds)
        dict.__setitem__(state, key, away)
        self._change(0, away.nbytes)
        for tracked in trackeds:
            if not tracked.is_out:
                self._residency.save(tracked)
        return True

    def _settle(self) -> None:
        """Wait until everything that is leaving has left. Raises the error of a copy."""
        self._residency.finish_saves()
        self._residency.collect()

    def _forget_replaced(self) -> None:
        state = self._optimizer.state
        for key, away in list(self._away.items()):
            if dict.get(state, key) is not away:
                self._change(0, -away.nbytes)
                del self._away[key]

    def _load(self, away: _Away) -> None:
        """Begin to load what is out; what is leaving stays."""
        if not away.is_returning:
            away.is_returning = True
            for tracked in away.trackeds:
                self._residency.changed(tracked)
                self._residency.load(tracked)

    def _return(self, key: Any, away: _Away) -> None:
        """Put a parameter's dict in its place; wait for what is still being loaded."""
        self._load(away)
        for tracked in away.trackeds:
            if tracked.is_out:
                self._residency.bring_in(tracked)
            self._residency.forget(tracked)
        self._change(0, -away.nbytes)
        if dict.get(self._optimizer.state, key) is away:
            dict.__setitem__(self._optimizer.state, key, away.own)
        self._away.pop(key, None)

    def _count(self) -> None:
        """Count the bytes of all state, whenever there is state of more or fewer parameters."""
        state = self._optimizer.state
        if len(state) != self._counted:
            self._counted = len(state)
            self._change(sum(self._bytes_of(value) for value in dict.values(state)) - self.total_bytes, 0)

    def _change(self, total_bytes: int, out_bytes: int) -> None:
        """Add to the counts."""
        self.total_bytes += total_bytes
        self.out_bytes += out_bytes
        self._residency.state_bytes += total_bytes - out_bytes
        self._residency.state_out_bytes += out_bytes

    def _bytes_of(self, value: Any) -> int:
        if type(value) is _Away:
            return value.nbytes
        if not isinstance(value, dict):
            return 0
        tensors = [v for v in value.values() if type(v) is torch.Tensor and v.layout is torch.strided]
        return sum(t.nbytes for t in tensors if t.nbytes >= LEAST_BYTES)
