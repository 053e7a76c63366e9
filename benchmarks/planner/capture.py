"""From an FX graph to the planner's: it is run on fake tensors, which have shapes and storages but no bytes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from cohabit.planner.graph import Graph, Op, Tensor, TensorKind
from cohabit.runtime.lowering import weights
from cohabit.runtime.lowering.model import table_of

aten = torch.ops.aten


class Work(NamedTuple):
    """What an op has to do: multiplications and additions, and bytes that it reads and writes."""

    flops: int
    nbytes: int


class Captured(NamedTuple):
    """A graph and the work of each of its ops."""

    graph: Graph
    work: tuple[Work, ...]


@dataclass(eq=False, slots=True)
class Storage:
    """Bytes of their own; compared by identity. `tensor` is a value that fills them."""

    name: str
    kind: TensorKind
    tensor: torch.Tensor
    alignment: int = 64

    @property
    def nbytes(self) -> int:
        return int(self.tensor.untyped_storage().nbytes())


@dataclass(eq=False, slots=True)
class Call:
    """An op that makes or changes bytes."""

    name: str
    target: str
    reads: list[Storage]
    writes: list[Storage]
    mutates: list[Storage]
    work: Work


@dataclass(slots=True)
class Trace:
    """What happened when a graph ran.

    `entered` has the storages of its placeholders, `results` those of its outputs, flattened, None for no tensor.
    """

    calls: list[Call]
    entered: list[Storage]
    results: list[Storage | None]


def trace(
    graph: fx.Graph, values: Mapping[str, tuple[TensorKind, torch.Tensor]], tables: Mapping[str, torch.Tensor]
) -> Trace:
    """Run a graph whose placeholders have the given kinds and fake values; rows of `tables` arrive as inputs.

    Views and tied weights share their storage. Ops that make no bytes (views, getitem, shape arithmetic) vanish.
    """
    return _Tracer(graph, values, tables).run()


class _Tracer:
    def __init__(
        self,
        graph: fx.Graph,
        values: Mapping[str, tuple[TensorKind, torch.Tensor]],
        tables: Mapping[str, torch.Tensor],
    ) -> None:
        self.graph = graph
        self.values = values
        self.tables = tables
        self.frame: dict[fx.Node, Any] = {}  # never forgotten, so that no two storages have the same key
        self.storages: dict[int, Storage] = {}
        self.calls: list[Call] = []
        self.entered: list[Storage] = []
        self.counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)

    def run(self) -> Trace:
        results: list[Storage | None] = []
        modes = {t.fake_mode for _, t in self.values.values()}  # type: ignore[attr-defined]
        (mode,) = modes
        with torch.no_grad(), mode, self.counter:
            for node in self.graph.nodes:
                if node.op == "placeholder":
                    self._enter(node)
                elif node.op == "call_function":
                    self._call(node)
                elif node.op == "get_attr":
                    self.frame[node] = self._constant(node, mode)
                else:
                    assert node.op == "output", node.op
                    leaves = pytree.tree_leaves(node.args[0])
                    results = [self._known(self.frame[n]) if isinstance(n, fx.Node) else None for n in leaves]
        return Trace(self.calls, self.entered, results)

    def _enter(self, node: fx.Node) -> None:
        if node.name not in self.values:
            self.frame[node] = None  # a placeholder for a value other than a tensor
            return
        kind, tensor = self.values[node.name]
        self.frame[node] = tensor
        self.entered.append(self.storages.setdefault(_key(tensor), Storage(node.name, kind, tensor)))

    def _constant(self, node: fx.Node, mode: FakeTensorMode) -> Any:
        owner: Any = self.graph.owning_module
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        tensor = mode.from_tensor(owner) if type(owner) is torch.Tensor else owner
        self.storages.setdefault(_key(tensor), Storage(node.name, "parameter", tensor))
        return tensor

    def _known(self, value: Any) -> Storage | None:
        return self.storages[_key(value)] if isinstance(value, torch.Tensor) else None

    def _call(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.frame[n])
        if (table := table_of(node.target, args)) is not None:
            self.frame[node] = self._rows(node, table, args[1])  # type: ignore[arg-type]
            return
        flops = self.counter.get_total_flops()
        result = node.target(*args, **kwargs)  # type: ignore[operator]
        flops = self.counter.get_total_flops() - flops
        self.frame[node] = result
        read, made = _tensors((args, kwargs)), _tensors(result)
        writes = []
        for i, tensor in enumerate(made):
            if _key(tensor) not in self.storages:
                name = node.name if len(made) == 1 else f"{node.name}.{i}"
                self.storages[_key(tensor)] = Storage(name, "activation", tensor)
                writes.append(self.storages[_key(tensor)])
        changed = _changed(node, args, kwargs)
        if writes or changed:
            nbytes = sum(map(_touched_bytes, [*read, *changed])) + sum(w.nbytes for w in writes)
            elements = sum(math.prod(t.shape) for t in made)
            reads, mutates = (_unique(self.storages[_key(t)] for t in ts) for ts in (read, changed))
            work = Work(int(flops) or elements, nbytes)
            self.calls.append(Call(node.name, _name(node.target), reads, writes, mutates, work))

    def _rows(self, node: fx.Node, table: str, indices: torch.Tensor) -> torch.Tensor:
        rows = torch.empty((*indices.shape, *self.tables[table].shape[1:]), dtype=self.tables[table].dtype)
        self.storages[_key(rows)] = Storage(node.name, "input", rows)
        return rows


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two batched matrix products; softmax is left out, as torch's counter does on other devices."""
    *batch, queries, width = query.shape
    return int(2 * math.prod(batch) * queries * key.shape[-2] * (width + value.shape[-1]))


_attention_flops._get_raw = True  # type: ignore[attr-defined]
_FORMULAS = {aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _changed(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Arguments that an operator changes in place, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    changed = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed += _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    return changed


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes behind a view; an expanded dimension counts once."""
    elements = math.prod(d for d, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return int(elements * tensor.element_size())


def _unique(storages: Iterable[Storage]) -> list[Storage]:
    return list(dict.fromkeys(storages))


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def own_storages(tensors: Mapping[str, torch.Tensor], mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    """Fake weights as dense tensors with a storage each; those that are the same bytes and shape share one."""
    known: dict[tuple[Any, ...], torch.Tensor] = {}
    own = {}
    with mode:
        for name, tensor in tensors.items():
            key = (_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
            if key not in known:
                known[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
            own[name] = known[key]
    return own


def without_dead_calls(found: Trace, outputs: Sequence[Storage]) -> Trace:
    """Leave out ops whose results nothing uses."""
    used = set(outputs)
    kept = []
    for call in reversed(found.calls):
        if used.intersection((*call.writes, *call.mutates)) or any(s.kind == "state" for s in call.mutates):
            used.update(call.reads)
            kept.append(call)
    return replace(found, calls=kept[::-1])


def join_weights(found: Trace) -> Trace:
    """Put parameters together as the weights file does: those that the same ops read, and small neighbours."""
    readers: dict[Storage, list[int]] = {}
    for k, call in enumerate(found.calls):
        for storage in call.reads:
            if storage.kind == "parameter":
                readers.setdefault(storage, []).append(k)
    uses = [weights.WeightUse(s.name, s.tensor, tuple(ops)) for s, ops in readers.items()]
    manifest = weights.lay_out("", uses, {})
    segments: dict[str, Storage] = {}
    for segment in manifest.segments:
        bytes_ = torch.empty(segment.nbytes, dtype=torch.uint8, device="meta")
        joined = Storage(segment.name, "parameter", bytes_, weights.BLOCK_BYTES)
        segments |= {piece.name: joined for piece in segment.pieces}
    calls = []
    for call in found.calls:
        reads = _unique(segments[s.name] if s.kind == "parameter" else s for s in call.reads)
        calls.append(Call(call.name, call.target, reads, call.writes, call.mutates, call.work))
    return replace(found, calls=calls)


_FIRST: tuple[TensorKind, ...] = ("parameter", "state", "input", "activation")


def captured(name: str, batch: int, found: Trace, outputs: Sequence[Storage]) -> Captured:
    """Number a trace's storages, parameters and state first, and make the planner's graph of it. Checked."""
    found = without_dead_calls(found, outputs)
    storages = _unique(s for call in found.calls for s in (*call.reads, *call.writes) if s.nbytes)
    storages.sort(key=lambda s: _FIRST.index(s.kind))
    ids = {storage: i for i, storage in enumerate(storages)}

    def of(some: Iterable[Storage]) -> tuple[int, ...]:
        return tuple(ids[s] for s in some if s in ids)

    ops = tuple(Op(c.name, c.target, of(c.reads), of(c.writes), mutates=of(c.mutates)) for c in found.calls)
    tensors = tuple(Tensor(s.name, s.nbytes, s.kind, s.alignment) for s in storages)
    graph = Graph(name, batch, "none", tensors, ops, of(_unique(outputs)))
    graph.validate()
    return Captured(graph, tuple(call.work for call in found.calls))
