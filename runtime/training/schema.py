"""Facts from an op's schema that swapping needs: views, new results, written arguments."""

from dataclasses import dataclass
from functools import cache

import torch
from torch._ops import OpOverload

_LIST_OPS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
"""Ops that compute list elements independently: a call on the lists equals calls on parts of them."""
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
    )
