"""Times a step's ops and their scratch, each by itself on stand-ins for its arguments.

That takes the memory of one op at a time, and changes nothing of the training.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from cohabit.planner.profile import Link
from cohabit.runtime.allocations import measuring_allocations
from cohabit.runtime.memory import SpillBuffer
from cohabit.runtime.training.capture import OpCall

RUNS: Final = 3
"""Of each call, after one that does not count."""
ENOUGH_S: Final = 0.2
"""A call that takes so long is not run again."""
_NUMBER: Final = 1e-3
"""For numbers that a step reads out of tensors, such as a learning rate."""
_LINK_BYTES: Final = (4096, 8 << 20)


def measure_calls(
    calls: Sequence[OpCall], on_progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[list[float], list[int]]:
    """Return seconds and scratch bytes of each call; calls alike are measured once."""
    keys = [_key(call) for call in calls]
    different = dict(zip(keys, calls, strict=True))
    seconds: dict[Any, float] = {}
    scratch: dict[Any, int] = {}
    for done, (key, call) in enumerate(different.items()):
        seconds[key], scratch[key] = _measured(call)
        on_progress(done + 1, len(different))
    return [seconds[key] for key in keys], [scratch[key] for key in keys]


def measure_link(buffer: SpillBuffer, nbytes: int) -> tuple[Link, Link]:
    """Time copies from and to a buffer of so many bytes: the link in, and the link out."""
    sizes = [min(n, nbytes) for n in _LINK_BYTES]
    times = []
    for copy in (buffer.load, buffer.save):
        found = []
        for size in sizes:
            flat = torch.zeros(size, dtype=torch.uint8)
            buffer.save(flat)
            found.append(statistics.median(_seconds(lambda: copy(flat)) for _ in range(2 * RUNS)))  # noqa: B023
        times.append(_link(sizes, found))
    return times[0], times[1]


def _link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    small, large = sizes
    copied_s = max(seconds[1] - seconds[0], 0.05 * seconds[1], 1e-9)
    return Link(seconds[0], max(large - small, 1) / copied_s)


def _measured(call: OpCall) -> tuple[float, int]:
    """Return the fastest run's seconds, and the most bytes that the allocator gave beyond the results."""
    with torch.inference_mode():
        args, kwargs = _stand_ins(call)
        with measuring_allocations() as peaks, torch.profiler.record_function("call"):
            start_s = time.perf_counter()
            result = call.target(*args, **kwargs)
            first_s = time.perf_counter() - start_s
        own = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        new = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(result)}
        scratch = max(0, peaks.get("call", 0) - sum(n for key, n in new.items() if key not in own))
        del result
        if first_s > ENOUGH_S:
            return first_s, scratch
        return min(_seconds(lambda: call.target(*args, **kwargs)) for _ in range(RUNS)), scratch


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
