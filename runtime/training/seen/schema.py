"""Facts about an op that swapping needs: views, new results and their bytes, written arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

_LIST_OPS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
"""Ops that compute list elements independently: a call on the lists equals calls on parts of them."""
_RESIZING = ("aten::resize", "aten::set_")
_RECURRENT = "aten::mkldnn_rnn_layer"
_WORKSPACE = 16
"""oneDNN's LSTM returns a workspace of about 16 times the bytes of its output, which has none on meta tensors."""
_COMMUNICATION = "c10d::"
"""Operations of torch.distributed, which other threads carry out."""
_UNDECLARED_WRITES = ("running_mean", "running_var")
"""Batch norm's statistics, written although its schema does not say so."""


@dataclass(frozen=True, slots=True)
class OpSchema:
    """Properties of an op. Arguments are identified by position, keyword-only ones by name."""

    name: str
    is_view: bool
    """All results alias arguments, and nothing is written: the op reads no bytes."""
    makes_results: bool
    """At least one result is newly allocated."""
    written: frozenset[int | str]
    is_trusted: bool
    """The schema is torch's. Other libraries' ops may write any argument."""
    takes_lists: bool
    scalars: frozenset[int | str]
    """Tensors with a number for each element of the lists."""
    may_grow: bool
    """It may resize its written arguments."""
    is_composite: bool
    """It arrives whole in inference mode only, where autograd does not decompose it: its results may be new or not."""
    outlives_call: bool
    """It goes on using its arguments' memory after it has returned."""


@cache
def schema_of(op: OpOverload) -> OpSchema:
    schema = op._schema

    def is_written(argument: torch.Argument) -> bool:
        declared = argument.alias_info is not None and argument.alias_info.is_write
        return declared or argument.name in _UNDECLARED_WRITES

    aliases = [result.alias_info for result in schema.returns]
    written = frozenset(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if is_written(argument)
    )
    return OpSchema(
        name=schema.name,
        is_view=bool(aliases) and not written and all(a is not None and not a.is_write for a in aliases),
        makes_results=any(alias is None for alias in aliases),
        written=written,
        is_trusted=schema.name.startswith("aten::"),
        takes_lists=schema.name.startswith(_LIST_OPS),
        scalars=frozenset(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if argument.name == "scalars" and isinstance(argument.type, torch.TensorType)
        ),
        may_grow=schema.overload_name.endswith("out") or schema.name.startswith(_RESIZING),
        is_composite=_is_composite(
            schema.name if not schema.overload_name else f"{schema.name}.{schema.overload_name}"
        ),
        outlives_call=schema.name.startswith(_COMMUNICATION),
    )


def _is_composite(name: str) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(name, "CompositeImplicitAutograd") and not any(
        has_kernel(name, key) for key in ("CPU", "CUDA")
    )


def result_bytes(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the bytes of an op's new results, by running it on meta tensors; None if it does not run on these."""
    given: set[int] = set()

    def without_data(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            given.add(empty.untyped_storage()._cdata)
            return empty
        if isinstance(value, list | tuple):
            return type(value)(map(without_data, value))
        return torch.device("meta") if isinstance(value, torch.device) else value

    try:
        result = op(*map(without_data, args), **{key: without_data(value) for key, value in kwargs.items()})
        results = result if isinstance(result, list | tuple) else [result]
        made = [tensor.untyped_storage() for tensor in results if isinstance(tensor, torch.Tensor)]
    except Exception:
        return None
    sizes = {storage._cdata: storage.nbytes() for storage in made}
    made_bytes = sum(nbytes for storage, nbytes in sizes.items() if storage not in given)
    if op._schema.name == _RECURRENT:
        made_bytes += _WORKSPACE * max(sizes.values())
    return made_bytes
