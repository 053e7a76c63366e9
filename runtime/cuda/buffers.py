"""The fixed buffers through which a program's inputs and outputs pass, so that a captured graph finds them."""

from collections.abc import Sequence

import torch

from runtime.cuda.api import HostBytes
from runtime.cuda.stores import PinnedMemory
from runtime.errors import DeviceError
from runtime.lowering.model import Port
from runtime.lowering.slots import Frame

_ALIGNMENT_BYTES = 64


class Buffers:
    """Pinned host memory for the inputs and outputs of one program at one batch size."""

    def __init__(
        self, name: str, inputs: Sequence[Port], outputs: Sequence[Port], batch: int, pinned: PinnedMemory
    ) -> None:
        self._name = name
        self._ports = tuple(inputs)
        self._pinned = pinned
        sizes = [_nbytes(port, batch) for port in (*inputs, *outputs)]
        self._host = pinned.take(sum(sizes), f"{name}: inputs and outputs")
        views = _views(self._host, (*inputs, *outputs), sizes, batch)
        self.inputs, self.outputs = tuple(views[: len(inputs)]), tuple(views[len(inputs) :])

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take an inference's inputs. No work may be in progress. Raises DeviceError for another shape or dtype."""
        for port, own, given in zip(self._ports, self.inputs, tensors, strict=True):
            if own.shape != given.shape or own.dtype != given.dtype:
                raise DeviceError(
                    f"{self._name}: input {port.name} is {given.dtype} of shape {tuple(given.shape)}, the program"
                    f" takes {own.dtype} of shape {tuple(own.shape)}"
                )
            own.copy_(given)

    def upload(self, frame: Frame, slots: Sequence[int], device: torch.device) -> None:
        """Copy the inputs to new tensors of the device; a kernel of the compute stream."""
        for slot, own in zip(slots, self.inputs, strict=True):
            frame[slot] = own.to(device, non_blocking=True, copy=True)

    def download(self, values: Sequence[torch.Tensor]) -> None:
        """Copy the outputs to their buffers; a kernel of the compute stream."""
        for own, value in zip(self.outputs, values, strict=True):
            own.copy_(value, non_blocking=True)

    def taken(self) -> list[torch.Tensor]:
        """The outputs of the last inference, which has ended, as tensors of the caller's."""
        return [own.clone() for own in self.outputs]

    def close(self) -> None:
        self._pinned.release(self._host)


def _nbytes(port: Port, batch: int) -> int:
    nbytes = torch.Size(port.at(batch)).numel() * port.dtype.itemsize
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _views(host: HostBytes, ports: Sequence[Port], sizes: Sequence[int], batch: int) -> list[torch.Tensor]:
    views = []
    offset = 0
    for port, size in zip(ports, sizes, strict=True):
        shape = torch.Size(port.at(batch))
        raw = torch.from_numpy(host[offset : offset + shape.numel() * port.dtype.itemsize])
        views.append(raw.view(port.dtype).reshape(shape) if shape.numel() else torch.empty(shape, dtype=port.dtype))
        offset += size
    return views
