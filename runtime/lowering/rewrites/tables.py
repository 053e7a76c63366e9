"""Reads the rows of many embedding tables at once."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

import torch
from torch import fx

from cohabit.runtime.lowering.fused_ops import rows_of_tables
from cohabit.runtime.lowering.model import FxModel

aten = torch.ops.aten

LEAST_TABLES = 4
"""Minimum number of tables for which checking the ids pays."""


def join_tables(model: FxModel) -> None:
    """Join tables whose rows a `stack` or `cat` combines, and read one row of each by one op.

    Calling a gather takes longer than copying its row. Ids are checked against their own table's size.
    """
    for node in list(model.graph.nodes):
        if node.target not in (aten.stack.default, aten.cat.default) or node.kwargs:
            continue
        parts, dim = node.args[0], (*node.args, 0)[1]
        if dim not in (1, -1) or (node.target is aten.stack.default and dim != 1):
            continue
        joined: list[Any] = []
        for key, run in groupby(parts, key=lambda part: _source(model, part)):
            own = list(run)
            if key is None or len(own) < LEAST_TABLES or not _in_order(own):
                joined += [(part, False) for part in own]
            else:
                joined.append((_gather(model, node, key[0], own), True))
        if not any(together for _, together in joined):
            continue
        call = model.graph.call_function
        with model.graph.inserting_before(node):
            if node.target is aten.stack.default:
                given = [p if together else call(aten.unsqueeze.default, (p, 1)) for p, together in joined]
            else:
                given = [call(aten.flatten.using_ints, (p, 1)) if together else p for p, together in joined]
            whole = given[0] if len(given) == 1 else call(aten.cat.default, (given, 1))
        whole.meta = dict(node.meta)
        node.replace_all_uses_with(whole)
        model.graph.erase_node(node)
    model.graph.eliminate_dead_code()


def _source(model: FxModel, part: Any) -> tuple[Any, ...] | None:
    """Return the ids, width and dtype, if a part reads a table by one column of the ids; else None."""
    if not isinstance(part, fx.Node) or part.target is not aten.embedding.default or part.kwargs:
        return None
    table, ids = model.weight_of(part.args[0]), part.args[1]
    if table is None or len(part.users) > 1 or len(part.args[0].users) > 1 or len(part.args) > 2:  # type: ignore[union-attr]
        return None
    if not isinstance(ids, fx.Node) or ids.target is not aten.select.int or ids.args[1] != 1:
        return None
    value = ids.args[0].meta["val"]  # type: ignore[union-attr]
    columns = value.dim() == 2 and value.dtype is torch.int64 and isinstance(value.shape[1], int)
    return (ids.args[0], table.shape[1], table.dtype) if columns and isinstance(ids.args[2], int) else None


def _column(part: fx.Node) -> int:
    ids, _, column = cast(Any, part.args[1]).args
    return int(column) if column >= 0 else int(ids.meta["val"].shape[1]) + int(column)


def _in_order(parts: Sequence[fx.Node]) -> bool:
    return [_column(p) for p in parts] == list(range(_column(parts[0]), _column(parts[0]) + len(parts)))


def _gather(model: FxModel, before: fx.Node, ids: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
    """Add nodes that read one row of each table: [batch, tables, width]."""
    names = [str(p.all_input_nodes[0]) for p in parts]
    tables = [model.weights[name] for name in names]
    sizes = torch.tensor([len(t) for t in tables])
    name = names[0]
    table = model.add_weight(f"{name}_joined", model.in_file(torch.cat(tables)))
    offsets = model.add_weight(f"{name}_offsets", sizes.cumsum(0) - sizes)
    limits = model.add_weight(f"{name}_sizes", sizes)
    first, call = _column(parts[0]), model.graph.call_function
    with model.graph.inserting_before(before):
        own = call(aten.slice.Tensor, (ids, 1, first, first + len(parts)))
        rows = call(rows_of_tables, (own, offsets, limits))
        return call(aten.embedding.default, (table, rows))
