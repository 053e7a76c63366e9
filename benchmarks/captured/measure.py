"""Times a step's ops and their scratch, each by itself on stand-ins for its arguments.

That takes the memory of one op at a time, and changes nothing of the training.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, Protocol

import msgspec
import torch
from torch.utils import _pytree as pytree

from benchmarks.captured.capture import OpCall
from cohabit.runtime.lowering.trace import Storage, Trace

RUNS: Final = 3
"""Of each call, after one that does not count."""
ENOUGH_S: Final = 0.2
"""A call that takes so long is not run again."""
UNMEASURED_BYTES_PER_S: Final = 4e9
"""For a call that stand-ins do not do for, until steps have measured it."""
_NUMBER: Final = 1e-3
"""For numbers that a step reads out of tensors, such as a learning rate."""
_CONTENDED_SHARE: Final = 0.5
"""Of a step's time: the ops that take so much are timed with copies at the same time, too."""


class Meter(Protocol):
    """Runs calls on a device, one at a time, and measures them."""

    @property
    def device(self) -> torch.device: ...

    def measuring(self) -> AbstractContextManager[None]:
        """Make calls that leave no trace in autograd or in the random numbers of the training, and their arguments."""
        ...

    def peaks(self) -> AbstractContextManager[dict[str, int]]:
        """A dictionary that, when the block has ended, has the most bytes that each call of `allocating` took."""
        ...

    def allocating(self, name: str, call: Callable[[], Any]) -> Any:
        """Make a call inside of a block of `peaks`, and return its result."""
        ...

    def seconds(self, call: Callable[[], Any]) -> float:
        """Make a call and return the seconds that the device took."""
        ...


def measured(
    trace: Trace,
    calls: Sequence[OpCall],
    meter: Meter,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Trace, list[float]]:
    """Return the trace with the bytes that its ops take, and each op's seconds. Calls alike are measured once."""
    keys = [_key(call) for call in calls]
    different = list(dict(zip(keys, calls, strict=True)).items())
    total = 2 * len(different)
    results: dict[Any, tuple[int, ...]] = {}
    seconds: dict[Any, float] = {}
    with meter.measuring():
        with meter.peaks() as peaks:
            for done, (key, call) in enumerate(different):
                results[key] = _result_bytes(call, str(done), meter)
                on_progress(done + 1, total)
        for done, (key, call) in enumerate(different, len(different)):
            seconds[key] = _timed(call, meter)
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


def longest(calls: Sequence[OpCall], seconds: Sequence[float]) -> Iterator[tuple[OpCall, int, float]]:
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


def _result_bytes(call: OpCall, name: str, meter: Meter) -> tuple[int, ...]:
    """Run a call under a name that the meter knows; return the bytes of its results' storages.

    Nothing where stand-ins do not do, since a fake kernel said another dtype than the real one has.
    """
    args, kwargs = stand_ins(call, meter.device)
    try:
        result = meter.allocating(name, lambda: call.target(*args, **kwargs))
    except RuntimeError:
        return ()
    return tuple(t.untyped_storage().nbytes() for t in _tensors(result))


def _timed(call: OpCall, meter: Meter) -> float:
    """Return the seconds of the median run."""
    args, kwargs = stand_ins(call, meter.device)
    try:
        first_s = meter.seconds(lambda: call.target(*args, **kwargs))
    except RuntimeError:
        return sum(t.nbytes for t in _tensors((args, kwargs))) / UNMEASURED_BYTES_PER_S
    if first_s > ENOUGH_S:
        return first_s
    return statistics.median(meter.seconds(lambda: call.target(*args, **kwargs)) for _ in range(RUNS))


def stand_ins(call: OpCall, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with bytes: noise, and zeros for integers (an index that every table has)."""
    generator = torch.Generator(device).manual_seed(0)
    made: dict[int, torch.UntypedStorage] = {}

    def stand_in(value: Any) -> Any:
        if isinstance(value, torch.SymFloat | torch.SymInt):
            return _NUMBER
        if not isinstance(value, torch.Tensor):
            return value
        key = value.untyped_storage()._cdata
        if key not in made:
            size = value.untyped_storage().nbytes() // value.element_size()
            flat = torch.empty(size, dtype=value.dtype, device=device)
            made[key] = (
                flat.uniform_(generator=generator) if value.is_floating_point() else flat.zero_()
            ).untyped_storage()
        tensor = torch.empty(0, dtype=value.dtype, device=device)
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
