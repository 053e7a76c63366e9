"""A model during lowering: an fx graph, its weights by name, its inputs and outputs."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx

from cohabit.planner.shapes import STATIC, DynamicShape, evaluate
from cohabit.runtime.heap import release_free_memory
from cohabit.runtime.lowering import packing

LEAST_FILE_BYTES = 64 << 10
"""Minimum bytes of a computed weight that is kept in file-backed memory."""


class Port(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input or output of the model.

    `shape` has None for the batch, always the first dimension, and expressions of symbols for other dynamic sizes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str | None, ...]

    def at(self, batch: int, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape, given the symbols' values."""
        return tuple(batch if d is None else evaluate(d, symbols) if isinstance(d, str) else d for d in self.shape)


TABLE_OPS = frozenset({torch.ops.aten.embedding.default, torch.ops.aten.embedding_bag.padding_idx})
"""Operators that read a few rows of their first argument."""


def table_of(target: Any, args: Sequence[Any]) -> str | None:
    """Return the name of the host store's table that an op reads, which replaces its first argument; else None."""
    return args[0] if target in TABLE_OPS and isinstance(args[0], str) else None


@dataclass(slots=True)
class FxModel:
    """`weights` maps placeholder names to tensors, `tables` the names in place of ops' first arguments (`table_of`)."""

    name: str
    root: torch.nn.Module
    graph: fx.Graph
    weights: dict[str, torch.Tensor]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    max_batch: int | None
    """Largest batch that the program was exported for; None if the batch is fixed."""
    batch_symbol: str | None = None
    dynamic: DynamicShape = STATIC
    changed_inputs: tuple[str, ...] = ()
    """Inputs that the exported program changes in place; the functional one leaves them unchanged."""
    tables: dict[str, torch.Tensor] = field(default_factory=dict)
    saved_bytes: int = 0
    """Bytes that encoding saves in tables, and in weights that compute in int8."""
    mixing: str | None = None
    """The op that mixes the rows of a batch; None if they are shown to be independent, or there is no batch."""
    folder: Path | None = None
    """Folder of the files of computed weights; None for anonymous memory."""
    memory: list[torch.Tensor] = field(default_factory=list)
    """The bytes of packed weights; they live as long as the model."""

    @property
    def input_nodes(self) -> list[fx.Node]:
        """The placeholders of `inputs`, in order. Their names are torch's, and may differ from the inputs' names."""
        return [n for n in self.graph.nodes if n.op == "placeholder" and n.name not in self.weights]

    def add_weight(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """Return a new placeholder with this weight; its name is made unique."""
        first_op = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(first_op):
            node = self.graph.placeholder(name)
        self.weights[node.name] = tensor
        return node

    def in_file(self, computed: torch.Tensor) -> torch.Tensor:
        """Return a copy of a dense or packed weight in file-backed memory; a small weight as it is. Raises OSError."""
        nbytes = packing.stored_bytes(computed)
        if self.folder is None or nbytes < LEAST_FILE_BYTES:
            return computed
        raw = _file_memory(nbytes, self.folder)
        if not packing.is_packed(computed):
            return raw.view(computed.dtype).as_strided(computed.shape, computed.stride()).copy_(computed)
        raw.numpy()[:] = packing.raw_bytes(computed)
        self.memory.append(raw)
        layout = packing.layout_of(computed)
        return packing.packed_tensor(raw.data_ptr(), computed.dtype, tuple(computed.shape), layout)

    def weight_of(self, node: Any) -> torch.Tensor | None:
        """Return the weight of a placeholder; None for any other node."""
        return self.weights.get(node.name) if isinstance(node, fx.Node) and node.op == "placeholder" else None

    def drop_unused_weight(self, node: Any) -> None:
        """Release a weight that is no longer read; any other node stays."""
        if self.weight_of(node) is not None and not node.users:
            del self.weights[node.name]
            self.graph.erase_node(node)


def _file_memory(nbytes: int, folder: Path) -> torch.Tensor:
    """Return the bytes of an unnamed file, which the kernel can write back under memory pressure. Raises OSError."""
    release_free_memory()
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=nbytes, dtype=torch.uint8)


def is_linear_layer(model: FxModel, node: fx.Node) -> bool:
    """Whether a node is a product with a matrix, with or without a bias of one element per matrix row."""
    if node.target is not torch.ops.aten.linear.default or node.kwargs:
        return False
    weight, bias = (_value_of(model, n) for n in (*node.args[1:], None)[:2])
    whole = len(node.args) < 3 or node.args[2] is None or bias is not None
    return weight is not None and weight.dim() == 2 and whole and (bias is None or bias.shape == weight.shape[:1])


def _value_of(model: FxModel, node: Any) -> torch.Tensor | None:
    """Return a weight, or export's metadata of a value."""
    value = model.weight_of(node)
    return value if value is not None or node is None else node.meta.get("val")


def same_shape_and_dtype(first: fx.Node, second: fx.Node) -> bool:
    """Whether two values have the same shape and dtype, by export's metadata."""
    a, b = first.meta.get("val"), second.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.dtype == b.dtype and [str(d) for d in a.shape] == [str(d) for d in b.shape]
