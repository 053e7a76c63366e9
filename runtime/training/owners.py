"""The tensors of modules and optimizers, the storages of tensors, and who else holds these.

Storages that cannot be resized (from files or numpy) are replaced by torch's own, if the owners alone hold them.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.training.tracked import REFERENCES, storage_uses

Owner = nn.Module | torch.optim.Optimizer | torch.Tensor


def held_by_others(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of storages that others than these tensors may read: views, arrays, other processes."""
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    storages = {id(s): s for tensor in distinct for s in storages_of(tensor)}
    own = Counter(id(s) for tensor in distinct if tensor.layout is torch.strided for s in storages_of(tensor))
    held = set()
    for key in list(storages):
        storage = storages.pop(key)
        # Beside the owners' tensors, its Python object is a use. That is held by this variable and the call's argument.
        if (
            storage_uses(storage._cdata) > own[key] + 1
            or sys.getrefcount(storage) > REFERENCES
            or (storage.device.type == "cpu" and storage.is_shared())  # torch says so of all on a GPU
        ):
            held.add(key)
    return held


def unseen_module(owners: Iterable[Owner]) -> str | None:
    """Return a module among the owners whose ops no mode may see: it would run otherwise, or not at all."""
    for owner in owners:
        for name, module in owner.named_modules() if isinstance(owner, nn.Module) else ():
            if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
                return f"a compiled module ({name or type(module).__name__})"
            if type(module).__name__ == "FullyShardedDataParallel":
                return f"an FSDP module ({name or type(module).__name__})"
    return None


def has_compiled() -> bool:
    """Whether the process has compiled anything with torch.compile. Under a mode it would run uncompiled."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(backend is not None for backend in frames.cached_backends.values())


def rehome(tensors: Iterable[torch.Tensor], held: set[int]) -> None:
    """Move tensors with unresizable storages to new ones. Tied weights and views among `tensors` still share one.

    Storages that others hold too (their ids in `held`) stay.
    """
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.resizable() or id(storage) in held:
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
    """Yield the owners' tensors: first those that `lasting` yields, then gradients and optimizers' state."""
    owners = list(owners)
    yield from lasting(owners)
    yield from gradients(owners)
    for owner in owners:
        if isinstance(owner, torch.optim.Optimizer):
            for state in owner.state.values():
                yield from state_tensors(state)


def gradients(owners: Iterable[Owner]) -> Iterator[torch.Tensor]:
    for tensor in lasting(owners):
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def lasting(owners: Iterable[Owner]) -> Iterator[torch.Tensor]:
    """Yield the owners' parameters, buffers and tensors."""
    for owner in owners:
        if isinstance(owner, torch.optim.Optimizer):
            for group in owner.param_groups:
                yield from group["params"]
        elif isinstance(owner, nn.Module):
            yield from owner.parameters()
            yield from owner.buffers()
        else:
            yield owner


def state_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a parameter's state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from state_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for element in value:
            yield from state_tensors(element)
