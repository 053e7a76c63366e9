"""Recomputation: an op's result is dropped without a copy, and computed again by the same op.

Capuchin (ASPLOS 2020, section 4.4) and HOME recompute where that is cheaper than swapping. A recomputation is valid
as long as the op's inputs exist and have not been written since. Each storage counts its writes, to detect this. While
a result is dropped, its inputs are kept alive, and are neither written nor dropped themselves. So a dropped result can
always be computed again, whatever the loop does.

Only ops whose results do not depend on how work is divided among threads qualify: elementwise ones, and a few more.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
from torch._ops import OpOverload

from cohabit.runtime.training.tracked import LEAST_BYTES, Tracked

_ABOVE_KERNELS: Final = torch._C._dispatch_keyset_full() - torch._C._dispatch_keyset_full_after(
    torch._C.DispatchKey.Python
)
"""Dispatch keys of everything that changes what an op means: transforms, autocast, autograd, modes."""
_NOTED_OPS: Final = 1 << 13
"""A step or several."""
_PAUSED_OPS: Final = 1 << 17
_BY_ROW: Final = ("aten::_softmax", "aten::_log_softmax", "aten::cat", "aten::native_layer_norm")
"""Ops that qualify although they are not elementwise: one thread computes a row."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """A tensor over a storage that may be out."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: torch.Tensor) -> "_Layout":
        return _Layout(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def over(self, storage: Any) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Input:
    tracked: Tracked
    writes: int
    """The storage's count of writes when the op ran."""
    layout: _Layout


@dataclass(slots=True, eq=False)
class Recomputation:
    """An op whose result is dropped and made again."""

    op: OpOverload
    """Overload of the op that writes its results to given tensors."""
    args: tuple[Any, ...]
    """With an `_Input` for each tensor of a tracked storage."""
    kwargs: Mapping[str, Any]
    inputs: list[_Input]
    name: str
    """The overload's parameter for the result."""
    layout: _Layout
    others: Mapping[str, torch.dtype]
    """Dtypes of the op's other results, by parameter. They are computed too, and discarded."""
    writes: int
    """The result's count of writes after the op."""
    threads: int
    """Number of threads that ran the op. It decides where the loop over elements is split. At a split, vector
    instructions end, and last bits may differ."""
    seconds: float
    held: list[Any] = field(default_factory=list)
    """The inputs' storages, while the result is dropped."""

    def is_valid(self, result: Tracked) -> bool:
        """Whether the op would give the bytes that the result's storage has now."""
        return result.writes == self.writes and all(
            given.tracked.writes == given.writes
            and not given.tracked.is_dead
            and not given.tracked.is_pinned
            and not given.tracked.is_dropped
            for given in self.inputs
        )

    def run(self, storage: Any) -> None:
        """Write the result to its storage. The inputs are in memory."""
        with _undisturbed(self.threads):
            results = {
                name: torch.empty(0, dtype=dtype, device=storage.device) for name, dtype in self.others.items()
            }
            results[self.name] = self.layout.over(storage)
            args = [_mapped(value, _tensor_of) for value in self.args]
            kwargs = {name: _mapped(value, _tensor_of) for name, value in self.kwargs.items()}
            self.op(*args, **kwargs, **results)


class Noting:
    """Decides for which ops recomputations are noted. That takes time for each, so it has to be of use.

    It begins when an op has to wait for an eviction, goes on while results are dropped, and pauses if none are.
    """

    def __init__(self) -> None:
        self._left = 0
        """Ops to be noted. Below 0, ops before it may begin again."""
        self._is_used = False

    def op_waits(self) -> None:
        if not self._left:
            self._left = _NOTED_OPS

    def dropped(self) -> None:
        self._is_used = True

    def includes_op(self) -> bool:
        """Return whether to note the op that has just run."""
        if self._left < 0:
            self._left += 1
            return False
        if self._left == 0:
            return False
        self._left -= 1
        if self._left == 0:
            self._left = _NOTED_OPS if self._is_used else -_PAUSED_OPS
            self._is_used = False
        return True


def recomputation_of(
    tracked: Tracked,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    find: Callable[[Any], Tracked | None],
    seconds: float,
) -> Recomputation | None:
    """Return how to compute `tracked` again, a result of the op that has just run; None if that is impossible.

    Arguments below 16 KiB are not tracked; the recomputation keeps copies of them.
    """
    form = _form_with_results(op)
    if form is None:
        return None
    results = result if isinstance(result, tuple) else (result,)
    if not all(map(_is_plain, results)):
        return None
    wanted = [n for n, tensor in enumerate(results) if find(tensor.untyped_storage()) is tracked]
    if len(wanted) != 1 or not _fills(results[wanted[0]], tracked.nbytes):
        return None
    tensors = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor)]
    # Without a floating-point tensor, the op gives Python numbers the default dtype, which the loop may change.
    if not any(tensor.dim() > 0 and tensor.dtype.is_floating_point for tensor in tensors):
        return None
    inputs: list[_Input] = []

    def kept(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        given = find(value.untyped_storage())
        if given is None:
            return value.clone()
        inputs.append(_Input(given, given.writes, _Layout.of(value)))
        return inputs[-1]

    for tensor in tensors:
        if not _is_plain(tensor):
            return None
        if find(tensor.untyped_storage()) is None and not _is_copied_exactly(tensor):
            return None  # its writes are not counted
    overload, names = form
    return Recomputation(
        op=overload,
        args=tuple(_mapped(value, kept) for value in args),
        kwargs={name: _mapped(value, kept) for name, value in kwargs.items()},
        inputs=inputs,
        name=names[wanted[0]],
        layout=_Layout.of(results[wanted[0]]),
        others={names[n]: tensor.dtype for n, tensor in enumerate(results) if n != wanted[0]},
        writes=tracked.writes,
        threads=torch.get_num_threads(),
        seconds=seconds,
    )


@cache
def _form_with_results(op: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """Return the overload of an op that writes to given tensors, and the names of the parameters for these.

    None if the op does not qualify, or has no such form.
    """
    schema = op._schema
    is_qualified = torch.Tag.pointwise in op.tags or schema.name in _BY_ROW
    if not is_qualified or torch.Tag.nondeterministic_seeded in op.tags or schema.is_mutable:
        return None
    if any(returned.alias_info is not None for returned in schema.returns):
        return None
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments]
    for name in op.overloadpacket.overloads():
        form: OpOverload = getattr(op.overloadpacket, name)
        given = [a for a in form._schema.arguments if a.alias_info is None]
        results = [a for a in form._schema.arguments if a.alias_info is not None]
        if [(a.name, str(a.type)) for a in given] == wanted and len(results) == len(schema.returns):
            return form, tuple(a.name for a in results)
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its bytes and its layout: not sparse, not a lazy negation or conjugate, not nested."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_neg()
        and not tensor.is_conj()
        and not tensor._is_zerotensor()
    )


def _is_copied_exactly(tensor: torch.Tensor) -> bool:
    """Whether a copy of a small tensor has its strides, which decide how a loop over elements is divided."""
    return tensor.nbytes < LEAST_BYTES and bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _fills(tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether a tensor covers every byte of its storage exactly once."""
    if tensor.storage_offset() or tensor.nbytes != nbytes:
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    return type(value)(map(change, value)) if isinstance(value, list | tuple) else change(value)


def _tensor_of(value: Any) -> Any:
    return value.layout.over(value.tracked.storage) if isinstance(value, _Input) else value


@contextmanager
def _undisturbed(threads: int) -> Iterator[None]:
    """Run ops as the device's kernels alone: below functorch, autocast, autograd and modes, with so many threads."""
    before = torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(torch._C._DisableTorchDispatch())
        stack.enter_context(torch._C._ExcludeDispatchKeyGuard(_ABOVE_KERNELS))
        if threads != before:
            torch.set_num_threads(threads)
            stack.callback(torch.set_num_threads, before)
        yield
