"""Storages that cannot be resized, from files, shared memory or numpy, get a storage of torch's own in their place."""

from collections.abc import Iterable

import torch


def rehome(tensors: Iterable[torch.Tensor]) -> None:
    """Move tensors of such storages to new ones; those that share one, tied weights and views, share the new one.

    Tensors elsewhere that share it keep the old one.
    """
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage.resizable():
            continue
        if id(storage) not in moved:
            copied = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            copied.copy_(storage, False)
            moved[id(storage)] = storage, copied  # the first stays referenced, so that its id is not used again
        _, copied = moved[id(storage)]
        with torch.no_grad():
            empty = torch.empty(0, dtype=tensor.dtype)
            tensor.data = empty.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())
