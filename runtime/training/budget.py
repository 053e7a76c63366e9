"""`cohabit.budget`: keeps the tensors of a training loop within a byte budget.

The loop runs eagerly. What autograd saves and what the optimizers keep leaves memory (`saved.py`, `state.py`). Ops are
seen, and whatever they read may leave (`seen/ops.py`), in the first steps of most loops, and where that is not enough.
"""

import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch

from cohabit.planner.errors import UnknownSearcher, format_bytes
from cohabit.planner.memory import parse_share, parse_size
from cohabit.planner.search.registry import BASELINES, SEARCHERS
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.heap import allocated_bytes, release_free_memory, resident_bytes
from cohabit.runtime.stores.pinned import HostPinning, PinnedMemory, default_limit_bytes
from cohabit.runtime.training.copies.copying import CopyThread
from cohabit.runtime.training.copies.spill import FileSpill, PinnedSpill, RamSpill
from cohabit.runtime.training.copies.streams import CopyStreams, DeviceCopyThread
from cohabit.runtime.training.first_step import FirstStep
from cohabit.runtime.training.interrupts import Interrupts
from cohabit.runtime.training.owners import (
    Owner,
    device_of,
    distinct_storages,
    flat,
    has_compiled,
    lasting,
    state_tensors,
    tensors_of,
    unseen_module,
)
from cohabit.runtime.training.planning.planned import StepPlanner
from cohabit.runtime.training.record import Record
from cohabit.runtime.training.residency import Residency
from cohabit.runtime.training.saved import SavedTensors, after_backward, functions_without_hooks, in_backward
from cohabit.runtime.training.seen.ops import SeenOps
from cohabit.runtime.training.seen.outside import threads_in
from cohabit.runtime.training.state import OptimizerState, runs_in_parts
from cohabit.runtime.training.tracked import LEAST_BYTES, NEVER

_log = logging.getLogger("cohabit.training")

_TOTAL = " total"
_UPDATED = 5
"""Bytes that an optimizer's step on the largest parameter takes, over those of the parameter: state and temporaries."""


def budget(
    memory: int | str,
    *owners: Owner | Iterable[Owner],
    store: Literal["ram", "file"] = "ram",
    folder: Path | str | None = None,
    search: str | None = None,
) -> "Budget":
    """Return a context in which a training loop runs within a byte budget, with eager PyTorch's bits.

        with cohabit.budget("2GiB", model, optimizer, store="file"):
            for x, y in loader:
                loss = criterion(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    `memory` is in bytes, a size such as "2GiB", or a share such as "60%" of the peak of the loop's first step, which
    runs without a limit. "3GiB total" limits the whole process: tensors may take what the rest of it leaves, measured
    every few ops; the store must be "file". With owners on a GPU, the budget limits that GPU's memory, and tensors in
    the CPU's memory are not counted. Several loops share a budget in threads started inside the context; a process has
    one budget at a time. `owners` are the modules, optimizers and tensors whose memory counts, in addition to all
    tensors made by ops inside the context. Evicted bytes go to RAM (pinned, for a GPU), or to an unnamed file in
    `folder` (default: the system's temporary folder). Leaving the context swaps everything back in, also after an
    error. `search` names a searcher of training steps, such as "interval" or "best": in a process of its own, it plans
    which saved tensors leave, and when copies begin. By default, what was saved first leaves first.

    Raises ValueError for an invalid size, store or searcher, or without owners; UnsupportedModel for owners on several
    GPUs, or on a device that is neither CUDA's nor the CPU; MemoryExceeded for a total that the process exceeds
    without tensors. Inside the context, an op that needs more than a given size raises MemoryExceeded. An op that needs
    more than a share runs, with a warning.
    """
    return Budget(memory, owners, store, folder, search)


_TOLERATED = 0.05
"""Fraction of the budget by which a step may exceed it before ops are seen again."""
_GROWN = 8
"""The budget divided by this is what the process may grow between steps before freed memory is released."""
_AS_MUCH = 0.95
"""Fraction of what a departed step saved: a step that saves as much is recorded instead."""


class Budget:
    """The context returned by `budget`. Reusable after it was left, but not reentrant.

    The first two steps run under a mode that sees their ops. They are recorded, and the second keeps within the budget.
    From then on only what autograd and the optimizers own leaves memory, and no op has a price. The mode stays if that
    is not enough, or if there are no optimizers, which tell when a step ends.
    """

    def __init__(
        self,
        memory: int | str,
        owners: Sequence[Owner | Iterable[Owner]],
        store: Literal["ram", "file"] = "ram",
        folder: Path | str | None = None,
        search: str | None = None,
    ) -> None:
        self._share, limit_bytes, self._is_total = _parsed(memory)
        self._owners = list(flat(owners))
        if not self._owners:
            raise ValueError("budget: name the model and the optimizer, whose memory it counts")
        if store not in ("ram", "file"):
            raise ValueError(f"store '{store}' is unknown: 'ram' or 'file'")
        if store == "ram" and self._is_total:
            raise ValueError(
                f"memory '{memory}' is the whole process's, and store='ram' is in it: set store='file'"
            )
        if store == "ram" and folder is not None:
            raise ValueError("folder is where store='file' keeps its file; leave it out, or set store='file'")
        self._optimizers = [o for o in self._owners if isinstance(o, torch.optim.Optimizer)]
        if self._share is not None and not self._optimizers:
            raise ValueError(
                f"memory '{memory}' is a share of the first step's peak, and a step ends with the optimizer's: name the"
                " optimizer, or give a size such as '2GiB'"
            )
        if search is not None and search not in SEARCHERS and search not in BASELINES:
            raise ValueError(str(UnknownSearcher(search, (*SEARCHERS, *BASELINES))))
        if search is not None and (self._is_total or not self._optimizers):
            raise ValueError(
                f"search='{search}' plans what autograd saves in a step, and with a total or without an optimizer other"
                " tensors leave, too: name the optimizer, and give a size for the tensors, or a share"
            )
        self._searcher = search
        self._given_bytes = limit_bytes
        self._limit_bytes: int | None = None
        """The budget, also after the context was left."""
        self._warned_bytes = 0
        self._device = device_of(tensors_of(self._owners))
        if self._is_total and self._device.type != "cpu":
            raise ValueError(
                f"memory '{memory}' is of the process's resident memory, and the owners are on {self._device}: give a"
                " size, or a share of the first step's peak"
            )
        self._residency = _residency(self._device, store, Path(folder or tempfile.gettempdir()))
        self._lock = threading.RLock()
        self._context = ExitStack()
        self._interrupts = Interrupts()
        self._seen = SeenOps(self._residency, self._lock, self._interrupts, self._share)
        self._reset_steps()

    def _reset_steps(self) -> None:
        self._is_active = False
        self._record = Record()
        self._saved = SavedTensors(self._residency, self._lock, self._record, self._interrupts)
        self._planner: StepPlanner | None = None
        if self._searcher is not None:
            self._planner = StepPlanner(self._searcher, self._saved, self._residency.copier.bytes_per_s)
        self._states: list[OptimizerState] = []
        self._first = FirstStep(self._optimizers, self._residency)
        self._modes_before = 0
        """Number of modes when the context was entered."""
        self._steps = 0
        self._has_ended = False
        """Whether a step has ended within a backward pass, by an optimizer that a hook calls."""
        self._recorded_state_bytes = 0
        self._resident_bytes: int | None = None
        """Of the process, after the step that followed the last release of freed memory."""
        self._awaited_bytes = 0
        """Bytes saved by a step whose record ends the seeing of ops."""
        self._updating_bytes = 0
        """Bytes beside saved tensors and state when an optimizer's step begins."""

    @property
    def limit_bytes(self) -> int | None:
        """The budget; None until the first step has ended, if the budget is a share."""
        if self._is_active and self.sees_ops:
            return None if self._residency.limit_bytes == NEVER else self._residency.limit_bytes
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the tensors in memory now."""
        if self.sees_ops:
            return self._residency.used_bytes
        return self._moving_bytes() + self._record.beside()[0] if self._is_active else 0

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of tensors in memory since the context was entered, or since `reset_peak`.

        Where no ops are seen: saved tensors and state, as counted at each event, and what was recorded beside them.
        """
        return self._residency.peak_bytes

    @property
    def exceeded_bytes(self) -> int:
        """Most bytes by which the budget was exceeded: by ops that need more, or by what the loop holds."""
        return self._residency.exceeded_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes copied out and in so far."""
        return self._residency.moved_bytes

    @property
    def waits(self) -> int:
        """Number of times that the loop has waited for a copy that runs beside its ops."""
        return self._residency.waits.count

    @property
    def held_bytes(self) -> int:
        """Most bytes that had to leave, and stayed because the loop holds them too."""
        return max(self._saved.held_bytes, sum(state.held_bytes for state in self._states))

    @property
    def sees_ops(self) -> bool:
        """Whether ops are seen now, and whatever they read may leave memory."""
        return self._seen.is_on

    @property
    def planned_by(self) -> str | None:
        """Name of the searcher whose plan steps follow; None if what was saved first leaves first."""
        return None if self._saved.advice is None else self._saved.advice.searcher

    def __str__(self) -> str:
        if self.limit_bytes is None:
            return f"peak {format_bytes(self.peak_bytes)} of a first step without a limit"
        moves = "what autograd and the optimizers own" if not self.sees_ops else "whatever ops read"
        if self.planned_by is not None:
            moves += f", planned by {self.planned_by}"
        return (
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.limit_bytes)}, exceeded by"
            f" {format_bytes(self.exceeded_bytes)}; moved {format_bytes(self.moved_bytes)} ({moves}), waited"
            f" {self.waits} times; {format_bytes(self.held_bytes)} stayed because the loop holds them too; the process"
            f" has {format_bytes(resident_bytes())}"
        )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, nothing more leaves memory, and the optimizers' state is in memory."""
        with self._lock:
            before, self._saved.limit_bytes = self._saved.limit_bytes, None
            seen, self._residency.limit_bytes = self._residency.limit_bytes, NEVER
            goals = [state.out_goal for state in self._states]
            for state in self._states:
                state.bring_all_in()
        try:
            yield
        finally:
            with self._lock:
                self._saved.limit_bytes, self._residency.limit_bytes = before, seen
                for state, goal in zip(self._states, goals, strict=True):
                    state.out_goal = goal

    def reset_peak(self) -> None:
        self._residency.peak_bytes = self._residency.used_bytes

    def __enter__(self) -> Self:
        tensors = list(tensors_of(self._owners))
        if (device := device_of(tensors)) != self._device:
            raise UnsupportedModel(
                f"budget: the owners have moved from {self._device} to {device}; make the budget after that"
            )
        with ExitStack() as context:
            with _entering:
                if _active:
                    raise RuntimeError(
                        "budget: a context is entered already, and a process has one at a time; loops of several models"
                        " share one: name all their owners, and start their threads inside it"
                    )
                context.callback(_active.discard, self)
                _active.add(self)
            context.enter_context(self._interrupts.held())
            self._reset_steps()
            self._modes_before = torch._C._len_torch_dispatch_stack()
            is_unseen = unseen_module(self._owners) is not None or has_compiled()
            sees_ops = self._must_see_ops(tensors) or self._residency.copier.takes_memory_at_once or not is_unseen
            self._residency.start()
            context.callback(self._residency.stop)
            context.callback(self._restore)  # before the copy thread ends, which may have copies under way
            self._is_active = True
            context.callback(self._stop_seeing)
            if sees_ops:
                self._see_ops(tensors)
            else:
                self._record.sampled = self._sampled(tensors)
                self._record.begin_recording()
                self._saved.start(None)
            if self._has_hooks:
                self._own()
                context.enter_context(functions_without_hooks())
                context.enter_context(self._saved.hooks())
                self._states = [
                    OptimizerState(o, self._residency, self._lock, self._interrupts) for o in self._optimizers
                ]
            context.enter_context(after_backward(self._end_step))
            for optimizer in self._optimizers:
                context.callback(optimizer.register_step_pre_hook(self._update_begins).remove)
                context.callback(optimizer.register_step_post_hook(self._update_ends).remove)
            context.enter_context(threads_in(self._thread_context))
            self._set_limit()
            self._context = context.pop_all()
        return self

    def _set_limit(self) -> None:
        """Limit what is in memory to the size that was given."""
        if self._given_bytes is None:
            return
        if self._is_total:
            self._seen.limit_total(self._given_bytes)
        elif self.sees_ops:
            self._residency.limit_bytes = self._limit_bytes = self._given_bytes
        else:
            self._saved.limit_bytes = self._limit_bytes = self._given_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.close()
        self._saved.owns([])  # a storage that is held here could not leave in another context

    # Whether ops are seen

    @property
    def _has_hooks(self) -> bool:
        """Whether ops may no longer be seen. On a GPU they are: the order of streams is not checked without that."""
        return bool(self._optimizers) and not self._is_total and not self._residency.copier.takes_memory_at_once

    def _see_ops(self, tensors: list[torch.Tensor]) -> None:
        """From now on, whatever ops read may leave memory."""
        self._saved.stop()
        self._saved.owns([])  # which holds them
        self._seen.enter(tensors, self._record, self._modes_before)
        self._residency.noted = self._note
        self._own()

    def _stop_seeing(self) -> None:
        """Bring everything in but what optimizers have had leave, and leave the mode."""
        self._seen.leave({tracked for state in self._states for tracked in state.trackeds()})
        with self._lock:
            self._residency.noted = lambda: None

    def _thread_context(self) -> AbstractContextManager[Any]:
        """Return what a thread that starts inside the context runs in."""
        stack = ExitStack()
        if self._is_active:
            stack.enter_context(self._seen.of_thread())
        if self._is_active and self._has_hooks:
            stack.enter_context(self._saved.hooks())
        return stack

    def _must_see_ops(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether more has to leave memory than autograd's and the optimizers' tensors.

        Raises UnsupportedModel if that cannot be right.
        """
        needed = self._floor_bytes(tensors)
        limit_bytes = self._limit_bytes or self._given_bytes
        if self._optimizers and not self._is_total and (limit_bytes is None or needed <= limit_bytes):
            return False
        unseen = unseen_module(self._owners)
        if unseen is None:
            return True
        if self._is_total or not self._optimizers:
            raise UnsupportedModel(
                f"budget: there is {unseen}, whose ops are not seen; name the optimizer, and give a size for the"
                " tensors, such as '2GiB', or a share"
            )
        raise UnsupportedModel(
            f"budget: parameters, gradients and one parameter's optimizer state take {format_bytes(needed)}, the budget"
            f" is {format_bytes(limit_bytes or 0)}, and parameters cannot leave memory, because there is {unseen};"
            " raise the budget"
        )

    def _floor_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return the bytes that never leave if only autograd's and the optimizers' tensors move."""
        parameters = {id(p): p for o in self._optimizers for group in o.param_groups for p in group["params"]}
        state = {id(t) for o in self._optimizers for v in o.state.values() for t in state_tensors(v)}
        kept = distinct_storages(t for t in tensors if id(t) not in state and t.device == self._device)
        gradients = sum(p.nbytes for p in parameters.values() if p.requires_grad and p.grad is None)
        largest = max((p.nbytes for p in parameters.values()), default=0)
        return int(sum(storage.nbytes() for storage in kept) + gradients + 2 * largest)

    def _sampled(self, tensors: Iterable[torch.Tensor]) -> Callable[[], int]:
        """Return a function that tells the bytes of tensors in memory that neither autograd nor optimizers hold."""
        owned = int(sum(s.nbytes() for s in distinct_storages(tensors) if s.device == self._device))
        before = allocated_bytes() - owned

        def sampled() -> int:
            return max(allocated_bytes() - before - self._moving_bytes(), 0)

        return sampled

    # Steps

    def _moving_bytes(self) -> int:
        """Return the bytes in memory of what moves while ops are not seen: saved tensors and state."""
        return self._residency.used_bytes + self._residency.state_bytes + self._saved.in_bytes

    def _all_state_bytes(self) -> int:
        """Bytes of all optimizers' state, in memory or not."""
        if not self.sees_ops and self._steps > 1:
            return sum(state.total_bytes for state in self._states)
        found = [t for o in self._optimizers for values in o.state.values() for t in state_tensors(values)]
        return sum(t.nbytes for t in found if t.device == self._device and t.nbytes >= LEAST_BYTES)

    def _note(self) -> None:
        """An op has run: note what its tensors take beside saved ones and state."""
        if self._record.is_recording:
            beside = self._residency.alive_bytes - self._saved.alive_bytes() - self._recorded_state_bytes
            self._record.note(beside)

    def _update_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer's step begins."""
        with self._lock:
            self._record.updating(True)
            self._saved.observe_end()
            if self.sees_ops:
                beside = self._residency.alive_bytes - self._saved.alive_bytes() - self._all_state_bytes()
                self._updating_bytes = max(self._updating_bytes, beside)
            self._first.update_begins(optimizer)

    def _update_ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with self._lock:
            self._record.updating(False)
            if (observed := self._record.observed) is not None and observed.starts_s:
                observed.update_s += self._residency.waits.clock_s() - observed.starts_s[-1]
            if self._first.update_ends(optimizer):
                self._has_ended = True
        if not in_backward():
            self._end_step()

    def _end_step(self) -> None:
        """Note that a step has ended, if one has."""
        with self._lock:
            if self._has_ended:
                self._has_ended = False
                self._step_ends()

    def _step_ends(self) -> None:
        """All optimizers have made a step."""
        self._steps += 1
        departed_bytes = self._record.departed_bytes
        if self._planner is not None and not self.sees_ops and self._limit_bytes is not None:
            self._planner.step_ends(self._limit_bytes, self._updating_bytes)
        self._saved.end_step()
        over_bytes, self._saved.over_bytes = self._saved.over_bytes, 0
        if self._steps == 1:
            self._recorded_state_bytes = self._all_state_bytes()
            if self._share is not None:
                self._limit_bytes = int(self._share * self._whole_bytes())
                self._residency.peak_bytes = 0
                if self.sees_ops:
                    self._residency.limit_bytes = self._limit_bytes
            if self.sees_ops:
                self._record.begin_recording()
                return
            if self._record.is_recording:
                self._record.finish_recording()
            tensors = list(tensors_of(self._owners))
            if self._must_see_ops(tensors) or not (self._can_move_only_saved() or unseen_module(self._owners)):
                self._see_ops(tensors)
                self._residency.limit_bytes = self._limit_bytes or NEVER
            else:
                self._move_only_saved()
        elif self.sees_ops and self._record.is_recording:
            if self._record.finish_recording().most_saved < self._awaited_bytes:
                self._record.begin_recording()
            elif self._can_move_only_saved():
                self._move_only_saved()
            elif self._searcher is not None:
                _log.warning(
                    "search='%s' is not used: more has to leave memory than what autograd and the optimizers own",
                    self._searcher,
                )
        elif not self.sees_ops:
            self._own()
            self._saved.fits = self._saved.fits and self._fits()
            self._release_heap()
            if over_bytes > _TOLERATED * (self._limit_bytes or 0):
                self._warn_exceeded(over_bytes)
                if unseen_module(self._owners) is None and not has_compiled():
                    self._see_ops_again(departed_bytes)

    def _whole_bytes(self) -> int:
        """Return the peak of the first step: as seen, or as recorded and sampled."""
        if self.sees_ops:
            return self._first.whole_bytes
        step = self._record.finish_recording()
        return step.height + self._all_state_bytes()

    def _can_move_only_saved(self) -> bool:
        """Whether the step fits if only autograd's and the optimizers' tensors leave."""
        step, limit_bytes = self._record.step, self._limit_bytes
        if step is None or limit_bytes is None or not step.events or self._saved.loops > 1:
            return False
        largest = max((p.nbytes for o in self._optimizers for g in o.param_groups for p in g["params"]), default=0)
        part = _UPDATED * largest if all(map(runs_in_parts, self._optimizers)) else self._all_state_bytes()
        return max(step.floor, self._updating_bytes + part) <= limit_bytes

    def _move_only_saved(self) -> None:
        """From now on, only what autograd and the optimizers own leaves memory."""
        limit_bytes, step = self._limit_bytes, self._record.step
        assert limit_bytes is not None
        assert step is not None
        saved = self._saved
        self._own()
        over = step.height + self._recorded_state_bytes - limit_bytes
        for state in self._states:
            state.room = partial(self._room_of, state)
            with torch._C._DisableTorchDispatch():
                state.start(max(over, 0))
            over -= state.total_bytes
        self._stop_seeing()
        fits = self._fits()
        if self._planner is not None and not fits:
            self._planner.begin(self._states)
        saved.free_state = lambda: any(state.free() for state in self._states)
        saved.prefetch_state = self._prefetch_state
        saved.start(limit_bytes, fits=fits)
        release_free_memory()  # of steps without a limit

    def _see_ops_again(self, departed_bytes: int) -> None:
        """Hold the budget by seeing ops, until a step is recorded that saves as much as the one that departed.

        If none departed, what the loop holds has exceeded the budget, and ops are seen to the end.
        """
        self._awaited_bytes = int(_AS_MUCH * departed_bytes) or NEVER
        self._record.begin_recording()
        if self._planner is not None:
            self._planner.close()
        for state in self._states:
            state.stop()
        self._see_ops(list(tensors_of(self._owners)))
        self._residency.limit_bytes = self._limit_bytes or NEVER
        self._residency.make_room(0)

    def _fits(self) -> bool:
        """Whether nothing has to leave in a step that follows the record."""
        step = self._record.step
        state_bytes = sum(state.total_bytes for state in self._states)
        return step is not None and step.height + state_bytes <= (self._limit_bytes or 0)

    def _own(self) -> None:
        self._saved.owns(distinct_storages(lasting(self._owners)))

    def _room_of(self, state: OptimizerState) -> int:
        """Return the bytes that an optimizer's staying state, loads and update may take."""
        if self._saved.limit_bytes is None:
            return NEVER
        others = self._moving_bytes() - self._residency.leaving_bytes - state.staying_bytes
        return self._saved.limit_bytes - self._updating_bytes - others

    def _prefetch_state(self, limit_bytes: int) -> None:
        """Load state, as far as it fits beside all saved tensors, which are in memory."""
        state_bytes = self._moving_bytes() - self._saved.alive_bytes()
        free_bytes = limit_bytes - state_bytes - self._record.beside()[1]
        for state in self._states:
            free_bytes -= state.prefetch(free_bytes)

    def _release_heap(self) -> None:
        """Return freed memory to the system once the C library keeps more of it than after an earlier step."""
        now = resident_bytes()
        if self._resident_bytes is None:
            self._resident_bytes = now
        elif now > self._resident_bytes + (self._limit_bytes or NEVER) // _GROWN:
            release_free_memory()
            self._resident_bytes = None

    def _warn_exceeded(self, over_bytes: int) -> None:
        if over_bytes <= self._warned_bytes:
            return
        self._warned_bytes = over_bytes
        _log.warning(
            "the budget of %s is exceeded by %s: of what autograd saved, %s is held by the loop too, and stays",
            format_bytes(self._limit_bytes or 0),
            format_bytes(over_bytes),
            format_bytes(self._saved.held_bytes),
        )

    def _restore(self) -> None:
        """Bring everything back in. Other threads' ops wait for that, and then run without the budget."""
        with self._lock:
            self._seen.lift_total()
            self._limit_bytes = self.limit_bytes
            try:
                if self._planner is not None:
                    self._planner.close()
                self._saved.stop()
                for state in self._states:
                    state.close()
                self._residency.bring_in_all_but()
            finally:
                self._is_active = False

    def _after_fork(self) -> None:
        """Continue in a forked process, which has no copy thread: swapped-in storages then stay in memory."""
        self._lock = threading.RLock()
        self._limit_bytes = None
        self._seen.after_fork(self._lock)
        self._saved.after_fork(self._lock)
        if self._planner is not None:
            self._planner.after_fork()
        for state in self._states:
            state.lock, state.out_goal = self._lock, 0


_active: "weakref.WeakSet[Budget]" = weakref.WeakSet()
"""The entered context, if any."""
_entering = threading.Lock()


def _after_fork() -> None:
    for active in list(_active):
        active._after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _residency(device: torch.device, store: Literal["ram", "file"], folder: Path) -> Residency:
    if device.type == "cpu":
        return Residency(device, RamSpill() if store == "ram" else FileSpill(folder), CopyThread())
    if store == "ram":
        index = torch.cuda.current_device() if device.index is None else device.index
        pinned = PinnedMemory(HostPinning(index), default_limit_bytes())
        return Residency(device, PinnedSpill(pinned, partial(torch.cuda.synchronize, index)), CopyStreams(device))
    return Residency(device, FileSpill(folder), DeviceCopyThread(device))


def _parsed(memory: int | str) -> tuple[float | None, int | None, bool]:
    """Return a share, or a size in bytes, and whether that is the whole process's. Raises ValueError."""
    if isinstance(memory, str):
        size = memory.removesuffix(_TOTAL)
        share = parse_share(size)
        if share is None:
            return None, parse_size(size), size != memory
        if size != memory:
            raise ValueError(f"memory '{memory}': a share is of a step's peak, not of the process; give a size")
        if not 0 < share <= 1:
            raise ValueError(f"memory '{memory}' is out of range; a share lies above 0% and up to 100%")
        return share, None, False
    if isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0:
        raise ValueError(f"memory {memory!r} is not a number of bytes above 0, nor a size such as '2GiB' or '60%'")
    return None, memory, False
