"""Times a step's ops and their scratch, each by itself on stand-ins for its arguments.

That takes the memory of one op at a time, and changes nothing of the training.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from cohabit.planner.profile import Link
from cohabit.runtime.allocations import measuring_allocations
from cohabit.runtime.training.capture import OpCall
from cohabit.runtime.training.state import StateTensor
from cohabit.runtime.training.store import StateStore

RUNS: Final = 3
"""Of each call, after one that does not count."""
ENOUGH_S: Final = 0.2
"""A call that takes so long is not run again."""
_NUMBER: Final = 1e-3
"""For numbers that a step reads out of tensors, such as a learning rate."""
_LINK_BYTES: Final = (4096, 4 << 20)
_LINK_TENSORS: Final = 8


def measure_calls(
    calls: Sequence[OpCall], on_progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[float], list[int]]:
    """Return seconds and scratch bytes of each call; calls alike are measured once."""
    keys = [_key(call) for call in calls]
    different = list(dict(zip(keys, calls, strict=True)).items())
    seconds: dict[Any, float] = {}
    results: dict[Any, int] = {}
    total = 2 * len(different)
    with torch.inference_mode():
        with measuring_allocations() as peaks:
            for done, (key, call) in enumerate(different):
                results[key] = _run_named(call, str(done))
                on_progress(done + 1, total)
        for done, (key, call) in enumerate(different, len(different)):
            seconds[key] = _timed(call)
            on_progress(done + 1, total)
    scratch = {key: max(0, peaks.get(str(n), 0) - results[key]) for n, (key, _) in enumerate(different)}
    return [seconds[key] for key in keys], [scratch[key] for key in keys]


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


def _run_named(call: OpCall, name: str) -> int:
    """Run a call under a name that the profiler sees; return the bytes of its new results."""
    args, kwargs = _stand_ins(call)
    own = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
    with torch.profiler.record_function(name):
        result = call.target(*args, **kwargs)
    new = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(result)}
    return sum(nbytes for key, nbytes in new.items() if key not in own)


def _timed(call: OpCall) -> float:
    """Return the seconds of the fastest run."""
    args, kwargs = _stand_ins(call)
    first_s = _seconds(lambda: call.target(*args, **kwargs))
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
