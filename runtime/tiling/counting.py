"""Counts the bytes that collectives move."""

from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cohabit.planner.tiling.costs import Moved


class CountedCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of one worker; the sum over all workers is the prediction of `planner.tiling`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = Moved()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor calls its collectives, which arrive here next
        name = func.overloadpacket.__name__
        if func.namespace in ("_c10d_functional", "_dtensor") and name != "wait_tensor":
            self.moved += _moved(name, args)
        return func(*args, **(kwargs or {}))


def _moved(name: str, args: Any) -> Moved:
    if not isinstance(args[-1], str):
        return Moved()  # autograd bookkeeping
    tensor: Tensor = args[0]
    group_name: Any = args[-1]
    group = _resolve_process_group(group_name)
    count, nbytes = group.size(), tensor.nbytes
    if name == "all_to_all_single":
        own = args[1][group.rank()] * tensor.element_size()
        received = sum(args[1]) * tensor.element_size()
        return Moved(received, received - own)
    # An all-reduce is a reduce-scatter and an all-gather. An all-gather's result has the size of all inputs.
    times = {"all_reduce": 2, "all_gather_into_tensor": count, "reduce_scatter_tensor": 1, "shard_dim_alltoall": 1}
    if group.rank() > 0:
        return Moved()  # all workers of a group move the same bytes; the first counts for all
    return Moved(nbytes * times[name] * count, nbytes * times[name] * (count - 1))
