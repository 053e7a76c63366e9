"""Runs a loop's ops with what they read in memory, and sees each op: whatever ops read may leave.

A dispatch mode intercepts the ops of a thread, forward, backward and optimizer: before an op, the storages that it
reads are swapped in, and others are evicted to make room. So ops always read valid bytes, whatever the loop does.
Evictions and prefetches follow the recorded ops (`history.py`). Where the loop does something new, the least recently
used storages are evicted, and swapped in on demand, as in the passive mode of Capuchin (ASPLOS 2020, section 4.2).
"""

import logging
import threading
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from operator import or_
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from cohabit.planner.errors import format_bytes
from cohabit.runtime.errors import MemoryExceeded, UnsupportedModel
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.training.interrupts import Interrupts
from cohabit.runtime.training.owners import distinct_storages, held_by_others, rehome, storages_of
from cohabit.runtime.training.record import Record
from cohabit.runtime.training.residency import Residency
from cohabit.runtime.training.seen.history import History
from cohabit.runtime.training.seen.outside import Pins, watching
from cohabit.runtime.training.seen.process_limit import ProcessLimit
from cohabit.runtime.training.seen.schema import OpSchema, result_bytes, schema_of
from cohabit.runtime.training.tracked import LEAST_BYTES, NEVER, Tracked, used_by

_log = logging.getLogger("cohabit.training")

_WINDOW = 48
"""Ops to look ahead."""
_LOOK_EVERY = 8
"""Ops between two lookaheads."""
_MEASURE_EVERY = 32
"""Ops between two measurements of the process, where the budget is its total."""
_DIVIDE_EVERY = 1024
"""Ops between two divisions of the total between tensors and the rest of the process."""
_LEAST_SCRATCHED = 1 << 20
"""Under a total, the scratch of ops on more bytes than these is measured."""
_UNKNOWN_SCRATCH = 2
"""Scratch of an op that has not been measured, over its arguments and results: oneDNN's convolutions take up to 1.9."""
_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
_BELOW_MODES = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.Python)
_PART = 4
"""Calls on lists of tensors are split into parts of at most 1/4 of the budget. Lookaheads stop once they need more."""


@dataclass(slots=True, eq=False)
class _Running:
    """An op that is running, outside the lock. Its storages stay in memory, and room for its results is reserved."""

    history: History
    number: int
    """Of its signature."""
    schema: OpSchema
    used: Sequence[Tracked]
    reserved_bytes: int
    """Expected bytes of its results and scratch."""
    thread: int
    before_bytes: int | None = None
    """Resident memory of the process when it began; None if its scratch is not measured."""
    growing: Sequence[torch.Tensor] = ()
    """Uncounted small tensors that it may resize."""
    made: list[Tracked] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        return used_by(self.used) + self.reserved_bytes


class SeenOps:
    """The ops of a loop while they are seen, in all of its threads. The budget is the residency's limit."""

    def __init__(
        self, residency: Residency, lock: threading.RLock, interrupts: Interrupts, share: float | None
    ) -> None:
        """With `share`, of the first step's peak, ops that need more than the budget run, with a warning."""
        self._residency = residency
        self._lock = lock
        self._interrupts = interrupts
        self._share = share
        self._changed = threading.Condition(lock)
        """Notified when an op has ended, and when ops are no longer seen."""
        self._running: list[_Running] = []
        self._pins = Pins(residency)
        self._process: ProcessLimit | None = None
        self._record = Record()
        self._warned_bytes = 0
        self._mode: _Mode | None = None
        """That of the thread that entered it, while ops are seen."""
        self._watching = ExitStack()
        """What sees the reads of all threads."""

    @property
    def is_on(self) -> bool:
        return self._mode is not None

    def limit_total(self, total_bytes: int) -> None:
        """Limit the whole process. Raises MemoryExceeded if it takes all of that without tensors."""
        self._process = ProcessLimit(total_bytes)
        self._process.divide(self._residency)
        if not self._residency.limit_bytes:
            raise self._process.exceeded()
        self._residency.measure = partial(self._process.measure, self._residency)

    def lift_total(self) -> None:
        """End the limit of the process."""
        process, self._process = self._process, None
        self._residency.measure = None
        if process is not None:
            process.close()

    def enter(self, tensors: Sequence[torch.Tensor], record: Record, modes_before: int) -> None:
        """See the ops of this thread and the reads of all threads from now on; `tensors` are counted.

        Modes that the loop has entered since there were `modes_before` stay above.
        """
        kept = self._residency
        held = held_by_others(tensors)
        rehome((tensor for tensor in tensors if tensor.device == kept.device), held)
        for storage in distinct_storages(tensors):
            kept.adopt(storage, stays=id(storage) in held)
        self._pins = self._watching.enter_context(watching(kept, self._lock))
        kept.peak_bytes = max(kept.peak_bytes, kept.used_bytes)
        self._record = record
        above = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack() - modes_before)]
        self._mode = _Mode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        for mode in reversed(above):
            _push_mode(mode)

    def leave(self, kept: Collection[Tracked] = ()) -> None:
        """Bring everything in but `kept`, and leave the mode, whichever modes the loop has entered since."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        above = []
        while (top := _pop_mode()) is not mode:
            above.append(top)
        _push_mode(mode)
        mode.__exit__(None, None, None)
        for other in reversed(above):
            _push_mode(other)
        with self._lock:
            self._residency.bring_in_all_but(kept)
            self._changed.notify_all()
        self._watching.close()

    def of_thread(self) -> AbstractContextManager[Any]:
        """Return the context in which another thread's ops are seen, if they are."""
        return nullcontext() if self._mode is None else _Mode(self)

    def after_fork(self, lock: threading.RLock) -> None:
        """Continue in a forked process, which has no copy thread: swapped-in storages then stay in memory."""
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._running.clear()
        self._process = self._residency.measure = None
        self._residency.after_fork()

    def run(
        self, history: History, op: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an op after swapping in the storages it reads; `history` is its thread's.

        Raises MemoryExceeded, and the op's own errors.
        """
        if not all(map(_is_plain, types)):
            return NotImplemented  # the subclass unwraps itself, and its inner tensors are dispatched here
        try:
            if self._mode is None:  # in a thread that outlived the context
                return op(*args, **kwargs)
            if not isinstance(op, OpOverload):
                raise UnsupportedModel(
                    f"budget: {op} calls other functions from within torch, where no op can be seen"
                )
            schema = schema_of(op)
            if schema.is_composite:
                with _Mode(self, history):
                    return op.decompose(*args, **kwargs)
            run = self._run_view if schema.is_view else self._run_in_parts if schema.takes_lists else self._run
            return run(history, op, schema, args, kwargs)
        finally:
            if self._interrupts.pending:
                self._interrupts.deliver()

    def _run_view(
        self, history: History, op: OpOverload, schema: OpSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an op that reads no bytes. Evicted storages stay out."""
        with self._lock:
            used, sizes = self._used(history, schema, args, kwargs)
            number = history.begin((op, *sizes))
            self._residency.enter_stream()
            with self._sized(used):
                result = op(*args, **kwargs)
            self._record_op(history, number, list(used), [])
        return result

    def _run(
        self, history: History, op: OpOverload, schema: OpSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        # Under the lock: swap in what it reads, and reserve room for its results. The op itself runs outside it.
        with self._lock:
            running = self._begin(history, op, schema, args, kwargs)
        if running is None:
            return op(*args, **kwargs)
        try:
            result = op(*args, **kwargs) if schema.is_trusted else self._run_seeing(history, op, args, kwargs)
        except BaseException:
            with self._lock:
                self._end(running)
            raise
        with self._lock:
            try:
                if self._mode is not None:
                    self._complete(running, result)
            finally:
                self._end(running)
        return result

    def _run_seeing(
        self, history: History, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run another library's op: the ops that it calls are seen, since it may read tensors of its closure."""
        given = (value for argument in (*args, *kwargs.values()) for value in _flat(argument))
        keys = reduce(or_, (torch._C._dispatch_keys(v) for v in given if isinstance(v, torch.Tensor)), _NO_KEYS)
        if keys == _NO_KEYS:
            return op(*args, **kwargs)
        with _Mode(self, history):
            return op.redispatch(keys & _BELOW_MODES, *args, **kwargs)

    def _begin(
        self, history: History, op: OpOverload, schema: OpSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> _Running | None:
        """Prepare an op. Returns None if ops are no longer seen. Raises MemoryExceeded for an op too large."""
        residency = self._residency
        used, sizes = self._used(history, schema, args, kwargs)
        number = history.begin((op, *sizes))
        expected = history.made_bytes(number)
        self._require(schema, used_by(used) + (expected or 0))
        if expected is None and schema.makes_results and residency.limit_bytes != NEVER:
            expected = result_bytes(op, args, kwargs)
            if expected is None:  # data-dependent, or without a meta kernel: assume its largest argument's size
                expected = max((tracked.nbytes for tracked in used), default=0)
        expected = expected or 0
        scratch, is_measured = 0, False
        if self._process is not None and (op_bytes := used_by(used) + expected) > _LEAST_SCRATCHED:
            known = history.scratch_bytes(number)
            is_measured = known is None
            scratch = _UNKNOWN_SCRATCH * op_bytes if known is None else known
            self._require(schema, op_bytes + scratch, "up to " if is_measured else "")
        running = _Running(history, number, schema, list(used), expected + scratch, threading.get_ident())
        if schema.may_grow:
            written = [value for key, value in (*enumerate(args), *kwargs.items()) if key in schema.written]
            tensors = [tensor for value in written for tensor in (value if isinstance(value, list) else [value])]
            running.growing = [t for t in tensors if t.layout is torch.strided and t.nbytes < LEAST_BYTES]

        # It waits while ops of other threads leave too little room, holding nothing that they may need.
        while self._needed_by_others() and self._needed_bytes() + running.needed_bytes > residency.limit_bytes:
            self._changed.wait()
        if self._mode is None:
            return None

        residency.enter_stream()
        self._running.append(running)
        for tracked, is_written in used.items():
            tracked.uses += 1
            if is_written:
                residency.changed(tracked)
        try:
            allocated = residency.incoming_bytes(used) + running.reserved_bytes
            residency.take_room(allocated)
            for tracked in used:
                residency.use(tracked)
                if schema.outlives_call:
                    residency.pin(tracked)
        except BaseException:
            running.reserved_bytes = 0
            self._end(running)
            raise
        residency.reserved_bytes += running.reserved_bytes
        if self._process is not None and is_measured:
            release_free_memory()  # scratch in memory that was there already would not be seen
            running.before_bytes = self._process.start_peak()
        return running

    def _needed_bytes(self) -> int:
        return sum(running.needed_bytes for running in self._running)

    def _needed_by_others(self) -> bool:
        thread = threading.get_ident()
        return any(running.thread != thread for running in self._running)

    def _complete(self, running: _Running, result: Any) -> None:
        """Track an op's results, and plan ahead."""
        residency, schema = self._residency, running.schema
        residency.enter_stream()
        residency.reserved_bytes -= running.reserved_bytes
        running.reserved_bytes = 0
        if schema.makes_results:
            running.made = self._made(result, running.used)
        elif running.growing:
            running.made = self._made(running.growing, running.used)
        if self._process is not None and running.before_bytes is not None:
            scratch = self._process.peak_bytes() - running.before_bytes - used_by(running.made)
            running.history.set_scratch(running.number, max(scratch, 0))
        if schema.written:
            for tracked in running.used:
                residency.resized(tracked)
        self._record.note_op(schema.name)
        residency.note_peak()
        if not residency.make_room(0):
            self._require(schema, used_by(running.used) + used_by(running.made))
        self._record_op(running.history, running.number, running.used, running.made)

    def _end(self, running: _Running) -> None:
        self._residency.reserved_bytes -= running.reserved_bytes
        self._running.remove(running)
        for tracked in running.used:
            tracked.uses -= 1
        for tracked in running.made:
            tracked.uses -= 1
        self._changed.notify_all()

    def _record_op(self, history: History, number: int, used: Sequence[Tracked], made: Sequence[Tracked]) -> None:
        history.record(number, used, made)
        if self._process is not None and history.position % _DIVIDE_EVERY == 0:
            self._process.divide(self._residency)
        elif self._process is not None and history.position % _MEASURE_EVERY == 0:
            self._process.measure(self._residency, 0)
        if history.position % _LOOK_EVERY == 0:
            self._look_ahead(history)

    def _run_in_parts(
        self, history: History, op: OpOverload, schema: OpSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run an op that computes elements of tensor lists independently, on parts of the lists that fit."""
        length = next((len(a) for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)), 0)
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple) and len(a) == length]
        tensors = [[x for x in elements if isinstance(x, torch.Tensor)] for elements in zip(*lists, strict=True)]
        sizes = [sum(x.nbytes for x in elements if x.layout is torch.strided) for elements in tensors]
        most_bytes = self._residency.limit_bytes // _PART
        if sum(sizes) <= most_bytes:
            return self._run(history, op, schema, args, kwargs)
        results: list[Any] = []
        start = 0
        while start < length:
            end, nbytes = start + 1, sizes[start]
            while end < length and nbytes + sizes[end] <= most_bytes:
                nbytes += sizes[end]
                end += 1

            def part(key: int | str, value: Any, start: int = start, end: int = end) -> Any:
                is_list = isinstance(value, list | tuple) and len(value) == length
                return value[start:end] if is_list or key in schema.scalars else value

            some_args = tuple(part(position, value) for position, value in enumerate(args))
            some_kwargs = {name: part(name, value) for name, value in kwargs.items()}
            result = self._run(history, op, schema, some_args, some_kwargs)
            if isinstance(result, list | tuple):
                results.extend(result)
            start = end
        return results if schema.makes_results else None

    def _used(
        self, history: History, schema: OpSchema, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[Tracked, bool], list[Hashable]]:
        """Return the distinct tracked storages of an op's arguments, with whether it may write them, and all sizes."""
        self._pins.collect()
        history.died(self._residency.collect_dead())
        used: dict[Tracked, bool] = {}
        sizes: list[Hashable] = []
        for key, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, torch.Tensor):
                tensors: Sequence[Any] = (value,)
            elif isinstance(value, list | tuple):
                tensors = value
            elif isinstance(value, torch.UntypedStorage):
                if (tracked := self._residency.find(value)) is not None:
                    used[tracked] = True
                continue
            else:
                if isinstance(value, int | torch.dtype):
                    sizes.append(value)
                continue
            is_written = key in schema.written or not schema.is_trusted
            for tensor in tensors:
                if not isinstance(tensor, torch.Tensor):
                    if isinstance(tensor, int):
                        sizes.append(tensor)
                    continue
                sizes.append(None if tensor.is_nested else tensor.shape)
                sizes.append(tensor.dtype)
                for storage in storages_of(tensor):
                    if (tracked := self._residency.find(storage)) is not None:
                        used[tracked] = is_written or used.get(tracked, False)
        return used, sizes

    def _made(self, result: Any, used: Sequence[Tracked]) -> list[Tracked]:
        """Track an op's new storages, and mark them as in use."""
        made: dict[Tracked, None] = {}
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                for storage in storages_of(tensor):
                    tracked = self._residency.track(storage)
                    if tracked is not None and tracked not in made and tracked not in used:
                        made[tracked] = None
                        tracked.uses += 1
        return list(made)

    @contextmanager
    def _sized(self, used: Iterable[Tracked]) -> Iterator[None]:
        """Give evicted storages their size inside the block: views check the size, and read no bytes."""
        sized = [tracked for tracked in used if tracked.is_out and tracked.copy is None]
        try:
            for tracked in sized:
                self._residency.give_size(tracked)
            yield
        finally:
            for tracked in sized:
                self._residency.take_size(tracked)

    def _require(self, schema: OpSchema, nbytes: int, about: str = "") -> None:
        """Raise MemoryExceeded for an op that exceeds a given size. If the budget is a share, warn instead.

        `about` says that the bytes are a guess.
        """
        limit_bytes = self._residency.limit_bytes
        if nbytes <= limit_bytes:
            return
        needs = f"{schema.name}: the op needs {about}{format_bytes(nbytes)} ({nbytes} bytes) at once, the budget is"
        if self._process is not None:
            raise self._process.exceeded(f"{needs} {format_bytes(limit_bytes)}: ")
        if self._share is None:
            raise MemoryExceeded(f"{needs} {format_bytes(limit_bytes)}; raise it, or train with smaller batches")
        if nbytes > self._warned_bytes:
            self._warned_bytes = nbytes
            _log.warning(
                "%s %s, %.0f %% of the first step's peak", needs, format_bytes(limit_bytes), 100 * self._share
            )

    def _look_ahead(self, history: History) -> None:
        """Start copies for a loop's next ops: writes that make room, then prefetches."""
        limit_bytes = self._residency.limit_bytes
        if limit_bytes == NEVER:
            return
        ahead = history.ahead(_WINDOW, limit_bytes // _PART)
        if ahead is not None:
            end_s = history.pace.wait_s(ahead.position, time.perf_counter())
            self._residency.write_ahead(ahead.needed_bytes, end_s)
            for tracked in ahead.wanted:
                if not self._residency.prefetch(tracked):
                    break


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts the ops of one thread."""

    def __init__(self, seen: SeenOps, history: History | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = partial(seen.run, history or History())

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._run(func, types, args, kwargs or {})


def _flat(argument: Any) -> Sequence[Any]:
    return argument if isinstance(argument, list | tuple) else (argument,)


@cache
def _is_plain(kind: type) -> bool:
    """Whether torch dispatches ops on such tensors itself: the subclass does not override dispatch."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
