"""The tensors of modules and optimizers, and the storages of tensors.

Storages that cannot be resized (from files, shared memory or numpy) are replaced by torch's own.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from cohabit.runtime.errors import UnsupportedModel

Owner = nn.Module | torch.optim.Optimizer | torch.Tensor


def rehome(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors with unresizable storages to new ones. Tied weights and views among `tensors` still share one.

    Tensors elsewhere keep the old storage.
    """
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.resizable():
            continue
        if id(storage) not in moved:
            copied = torch.UntypedStorage(storage.nbytes(), device=storage.device)  # type: ignore[no-untyped-call]
            copied.copy_(storage, False)
            moved[id(storage)] = storage, copied  # the reference to the old storage keeps its id from being reused
        _, copied = moved[id(storage)]
        with torch.no_grad():
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = empty.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Return the device whose memory the budget limits. Beside a GPU's tensors, those in the CPU's memory are free.

    Raises UnsupportedModel for several GPUs, and for devices that are neither a GPU of CUDA's nor the CPU.
    """
    cpu = torch.device("cpu")
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor.device != cpu))
    if len(devices) > 1:
        raise UnsupportedModel(
            f"budget: the owners are on {devices[0]} and {devices[1]}, and a budget is of one device's memory; name"
            " the owners on one of them"
        )
    device = devices[0] if devices else cpu
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModel(f"budget: the owners are on {device}; supported are 'cpu' and 'cuda'")
    return device


def storages_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the storages of a tensor's elements: several for a sparse tensor, none for one without storage."""
    try:
        if tensor.layout is torch.strided:
            return (tensor.untyped_storage(),)
        if tensor.layout is torch.sparse_coo:
            return (tensor._indices().untyped_storage(), tensor._values().untyped_storage())
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
        else:
            return ()
        return tuple(part.untyped_storage() for part in parts)
    except (NotImplementedError, RuntimeError):
        return ()


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[Any]:
    return list({id(s): s for tensor in tensors for s in storages_of(tensor)}.values())


def flat(owners: Iterable[Any]) -> Iterator[Owner]:
    for owner in owners:
        if isinstance(owner, nn.Module | torch.optim.Optimizer | torch.Tensor):
            yield owner
        elif isinstance(owner, Mapping):
            yield from flat(owner.values())
        elif isinstance(owner, Iterable):
            yield from flat(owner)
        else:
            raise ValueError(f"budget: {type(owner).__name__} is not a module, an optimizer or a tensor")


def tensors_of(owners: Iterable[Owner]) -> Iterator[torch.Tensor]:
    """Yield the owners' tensors, each followed by its gradient."""
    for owner in owners:
        if isinstance(owner, torch.optim.Optimizer):
            found = [p for group in owner.param_groups for p in group["params"]]
            found += [value for state in owner.state.values() for value in _tensors_in(state)]
        elif isinstance(owner, nn.Module):
            found = [*owner.parameters(), *owner.buffers()]
        else:
            found = [owner]
        for tensor in found:
            yield tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield tensor.grad


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _tensors_in(element)
