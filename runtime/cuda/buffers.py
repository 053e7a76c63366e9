"""Fixed host buffers of a program's inputs and outputs, at the addresses in its captured graphs."""

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch

from cohabit.planner.graph import aligned
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.indices import IndexedValues
from cohabit.runtime.lowering.model import Port
from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.stores.pages import Bytes
from cohabit.runtime.stores.pinned import PinnedMemory

_ALIGNMENT_BYTES = 64
Shapes = tuple[torch.Size, ...]


class Buffers:
    """Pinned host memory for the inputs and outputs of one program."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        shapes: Sequence[tuple[int, ...]],
        pinned: PinnedMemory,
        *,
        is_dynamic: bool,
        indexed: Sequence[IndexedValues] = (),
    ) -> None:
        """`shapes` are the largest of inputs and outputs. With `is_dynamic`, inferences may have smaller shapes."""
        self._name = name
        self._indexed = indexed
        self._ports = tuple(inputs)
        self._pinned = pinned
        self._is_dynamic = is_dynamic
        ports = (*inputs, *outputs)
        sizes = [_nbytes(port, shape) for port, shape in zip(ports, shapes, strict=True)]
        self._host = pinned.take(sum(sizes), f"{name}: inputs and outputs")
        places = zip(accumulate(sizes, initial=0), ports, shapes, strict=False)
        views = [_view(self._host[at:], port, shape) for at, port, shape in places]
        self._largest = tuple(views[: len(inputs)]), tuple(views[len(inputs) :])
        self.inputs, self.outputs = self._largest

    @property
    def smaller(self) -> Shapes | None:
        """Input shapes of the current inference; None if they are the largest."""
        return None if self.inputs is self._largest[0] else tuple(own.shape for own in self.inputs)

    def check(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise DeviceError from IndexError, as a CPU does, if an index is out of range. Nothing runs on the device."""
        for values in self._indexed:
            if (value := values.out_of_range(tensors[values.input])) is not None:
                text = (
                    f"{self._name}: input {self._ports[values.input].name} has the value {value}, an index that is out"
                    f" of range: it must be from {values.least} to {values.most}"
                )
                raise DeviceError(text) from IndexError(text)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy an inference's inputs in. No work may be in progress. Raises DeviceError for a wrong shape or dtype."""
        self.inputs, self.outputs = self._largest
        for port, own, given in zip(self._ports, self.inputs, tensors, strict=True):
            fits = own.shape == given.shape or (self._is_dynamic and _holds(own, given))
            if not fits or own.dtype != given.dtype:
                raise DeviceError(
                    f"{self._name}: input {port.name} is {given.dtype} of shape {tuple(given.shape)}, the program"
                    f" takes {own.dtype} of shape {tuple(own.shape)}"
                )
        if any(own.shape != given.shape for own, given in zip(self.inputs, tensors, strict=True)):
            self.inputs = tuple(_part(own, given.shape) for own, given in zip(self.inputs, tensors, strict=True))
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given)

    def upload(self, frame: Frame, slots: Sequence[int], device: torch.device) -> None:
        """Copy the inputs to new device tensors, on the current stream."""
        for slot, own in zip(slots, self.inputs, strict=True):
            frame[slot] = own.to(device, non_blocking=True, copy=True)

    def download(self, values: Sequence[torch.Tensor]) -> None:
        """Copy the outputs to their buffers, on the current stream."""
        if self.smaller is not None:
            pairs = zip(self.outputs, values, strict=True)
            self.outputs = tuple(_part(own, value.shape) for own, value in pairs)
        for own, value in zip(self.outputs, values, strict=True):
            own.copy_(value, non_blocking=True)

    def taken(self) -> list[torch.Tensor]:
        """Return the outputs of the last inference, which must have ended, as new tensors."""
        return [own.clone() for own in self.outputs]

    def close(self) -> None:
        self._pinned.release(self._host)


def _holds(own: torch.Tensor, given: torch.Tensor) -> bool:
    return own.dim() == given.dim() and all(map(operator.ge, own.shape, given.shape))


def _part(own: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a view of a smaller shape over the first bytes."""
    return own.view(-1)[: shape.numel()].view(shape)


def _nbytes(port: Port, shape: tuple[int, ...]) -> int:
    return aligned(torch.Size(shape).numel() * port.dtype.itemsize, _ALIGNMENT_BYTES)


def _view(host: Bytes, port: Port, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.from_numpy(host[: torch.Size(shape).numel() * port.dtype.itemsize])
    return raw.view(port.dtype).reshape(shape) if len(raw) else torch.empty(shape, dtype=port.dtype)
