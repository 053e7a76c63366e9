"""Times a step's ops and their scratch, each by itself on stand-ins for its arguments.

That takes the memory of one op at a time, and changes nothing of the training.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import torch
from torch.utils import _pytree as pytree

from cohabit.planner.profile import Link
from cohabit.runtime.allocations import measuring_allocations
from cohabit.runtime.lowering.trace import Storage, Trace
from cohabit.runtime.profiling.stopwatch import repeating
from cohabit.runtime.training.capture import OpCall
from cohabit.runtime.training.state import StateTensor
from cohabit.runtime.training.store import StateStore

RUNS: Final = 3
"""Of each call, after one that does not count."""
ENOUGH_S: Final = 0.2
"""A call that takes so long is not run again."""
UNMEASURED_BYTES_PER_S: Final = 4e9
"""For a call that stand-ins do not do for, until steps have measured it."""
_NUMBER: Final = 1e-3
"""For numbers that a step reads out of tensors, such as a learning rate."""
_LINK_BYTES: Final = (4096, 4 << 20)
_LINK_TENSORS: Final = 8
_CONTENDED_SHARE: Final = 0.5
"""Of a step's time: the ops that take so much are timed with copies at the same time, too, ..."""
_CONTENDED_S: Final = 0.02
"""... for so many seconds each."""


def measured(
    trace: Trace, calls: Sequence[OpCall], on_progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Trace, list[float]]:
    """Return the trace with the bytes that its ops take, and each op's seconds. Calls alike are measured once."""
    keys = [_key(call) for call in calls]
    different = list(dict(zip(keys, calls, strict=True)).items())
    total = 2 * len(different)
    results: dict[Any, tuple[int, ...]] = {}
    seconds: dict[Any, float] = {}
    with torch.inference_mode(), torch.random.fork_rng([]):
        with measuring_allocations() as peaks:
            for done, (key, call) in enumerate(different):
                results[key] = _result_bytes(call, str(done))
                on_progress(done + 1, total)
        for done, (key, call) in enumerate(different, len(different)):
            seconds[key] = _timed(call)
            on_progress(done + 1, total)
    peak = {key: peaks.get(str(n), 0) for n, (key, _) in enumerate(different)}
    nbytes: dict[Storage, int] = {}
    scratch = []
    for op, key in zip(trace.ops, keys, strict=True):
        real = results[key]
        new = {s: real[n] if real else s.nbytes for s, n in zip(op.writes, op.results, strict=True)}
        nbytes |= new
        scratch.append(max(0, peak[key] - sum(new.values())))
    return _with_bytes(trace, nbytes, scratch), [seconds[key] for key in keys]


def _with_bytes(trace: Trace, nbytes: Mapping[Storage, int], scratch: Sequence[int]) -> Trace:
    """Return a trace with other sizes of storages: some fake kernels say another dtype than real ones have."""

    def real(storages: Iterable[Storage]) -> tuple[Storage, ...]:
        return tuple(msgspec.structs.replace(s, nbytes=nbytes.get(s, s.nbytes)) for s in storages)

    ops = tuple(
        msgspec.structs.replace(
            op, reads=real(op.reads), writes=real(op.writes), mutates=real(op.mutates), scratch_bytes=n
        )
        for op, n in zip(trace.ops, scratch, strict=True)
    )
    return replace(trace, ops=ops, output_storages=real(trace.output_storages))


def measure_link(store: StateStore) -> tuple[Link, Link]:
    """Time tensors that come back into memory, and that leave it: the link in, and the link out.

    Memory is allocated, and released, as it is in a step.
    """
    came_s, left_s = [], []
    for size in _LINK_BYTES:
        tensors = [StateTensor(torch.zeros(size, dtype=torch.uint8)) for _ in range(_LINK_TENSORS)]
        buffers = store.spill_buffers([size] * _LINK_TENSORS)
        left_s.append(
            statistics.median(_seconds(partial(t.save, b)) for t, b in zip(tensors, buffers, strict=True))
        )
        came_s.append(
            statistics.median(_seconds(partial(t.load, b)) for t, b in zip(tensors, buffers, strict=True))
        )
    return _link(came_s), _link(left_s)


def measure_contention(calls: Sequence[OpCall], seconds: Sequence[float], store: StateStore) -> tuple[float, float]:
    """Return the factors by which ops take longer while copies are made, and copies while ops run: at least 1.

    The longest ops run by themselves, and while a thread has a tensor leave memory and come back, again and again.
    """
    tensor = StateTensor(torch.zeros(_LINK_BYTES[1], dtype=torch.uint8))
    (buffer,) = store.spill_buffers(_LINK_BYTES[1:])
    rounds_s: list[float] = []

    def copy() -> None:
        rounds_s.append(_seconds(partial(tensor.save, buffer)) + _seconds(partial(tensor.load, buffer)))

    for _ in range(_LINK_TENSORS):
        copy()
    copy_alone_s = statistics.median(rounds_s)
    rounds_s.clear()
    alone_s, contended_s = 0.0, 0.0
    with torch.inference_mode(), torch.random.fork_rng([]):
        for call, count, op_s in _longest(calls, seconds):
            args, kwargs = _stand_ins(call)
            run = partial(call.target, *args, **kwargs)
            times = math.ceil(_CONTENDED_S / max(op_s, 1e-6))
            try:
                op_alone_s = statistics.median(_seconds(run) for _ in range(times))
            except RuntimeError:
                continue  # stand-ins do not do
            with repeating(copy, "busy-link"):
                contended_s += count * statistics.median(_seconds(run) for _ in range(times))
            alone_s += count * op_alone_s
    if not rounds_s or not alone_s:
        return 1.0, 1.0
    return max(1.0, contended_s / alone_s), max(1.0, statistics.median(rounds_s) / copy_alone_s)


def _longest(calls: Sequence[OpCall], seconds: Sequence[float]) -> Iterator[tuple[OpCall, int, float]]:
    """Yield calls that differ, how often a step has them, and the seconds of one, those that take most first."""
    keys = [_key(call) for call in calls]
    known, counts = dict(zip(keys, zip(calls, seconds, strict=True), strict=True)), Counter(keys)
    left_s = _CONTENDED_SHARE * sum(seconds)
    for key, count in sorted(counts.items(), key=lambda item: -item[1] * known[item[0]][1]):
        if left_s <= 0:
            return
        call, op_s = known[key]
        left_s -= count * op_s
        yield call, count, op_s


def _link(seconds: Sequence[float]) -> Link:
    (small, large), (small_s, large_s) = _LINK_BYTES, seconds
    return Link(small_s, (large - small) / max(large_s - small_s, 0.05 * large_s, 1e-9))


def _result_bytes(call: OpCall, name: str) -> tuple[int, ...]:
    """Run a call under a name that the profiler sees; return the bytes of its results' storages.

    Nothing where stand-ins do not do, since a fake kernel said another dtype than the real one has.
    """
    args, kwargs = _stand_ins(call)
    try:
        with torch.profiler.record_function(name):
            result = call.target(*args, **kwargs)
    except RuntimeError:
        return ()
    return tuple(t.untyped_storage().nbytes() for t in _tensors(result))


def _timed(call: OpCall) -> float:
    """Return the seconds of the median run."""
    args, kwargs = _stand_ins(call)
    try:
        first_s = _seconds(lambda: call.target(*args, **kwargs))
    except RuntimeError:
        return sum(t.nbytes for t in _tensors((args, kwargs))) / UNMEASURED_BYTES_PER_S
    if first_s > ENOUGH_S:
        return first_s
    return statistics.median(_seconds(lambda: call.target(*args, **kwargs)) for _ in range(RUNS))


def _seconds(run: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _stand_ins(call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with bytes: noise, and zeros for integers (an index that every table has)."""
    generator = torch.Generator().manual_seed(0)
    made: dict[int, torch.UntypedStorage] = {}

    def stand_in(value: Any) -> Any:
        if isinstance(value, torch.SymFloat | torch.SymInt):
            return _NUMBER
        if not isinstance(value, torch.Tensor):
            return value
        key = value.untyped_storage()._cdata
        if key not in made:
            flat = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype)
            made[key] = (
                flat.uniform_(generator=generator) if value.is_floating_point() else flat.zero_()
            ).untyped_storage()
        tensor = torch.empty(0, dtype=value.dtype)
        return tensor.set_(made[key], value.storage_offset(), value.shape, value.stride())

    args, kwargs = pytree.tree_map(stand_in, (call.args, call.kwargs))
    return args, kwargs


def _key(call: OpCall) -> Any:
    """What calls of the same time have in common."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    return call.target, structure, tuple(_form(leaf) for leaf in leaves)


def _form(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.untyped_storage().nbytes()
    return "a number" if isinstance(leaf, torch.SymFloat | torch.SymInt) else repr(leaf)


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
