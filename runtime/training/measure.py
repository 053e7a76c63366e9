"""Times a step's ops and their scratch, each by itself on stand-ins for its arguments.

That takes the memory of one op at a time, and changes nothing of the training.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import torch
from torch.utils import _pytree as pytree

from cohabit.planner.profile import Link
from cohabit.runtime.allocations import measuring_allocations
from cohabit.runtime.lowering.trace import Storage, Trace
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
    """Return the seconds of the fastest run."""
    args, kwargs = _stand_ins(call)
    try:
        first_s = _seconds(lambda: call.target(*args, **kwargs))
    except RuntimeError:
        return sum(t.nbytes for t in _tensors((args, kwargs))) / UNMEASURED_BYTES_PER_S
    if first_s > ENOUGH_S:
        return first_s
    return min(first_s, *(_seconds(lambda: call.target(*args, **kwargs)) for _ in range(RUNS)))


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
