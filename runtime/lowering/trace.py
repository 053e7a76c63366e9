"""Traces a model in one bucket: runs it once and records each call, its storages and its scratch.

Schemas do not tell which results share a storage, the bytes of each storage, or the sizes that shape arithmetic yields;
a real run does. The planner's graph has only ops that create new bytes. A view of existing bytes is an instruction
without cost.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import WeakValueDictionary

import msgspec
import torch
from msgspec import UNSET
from torch import fx
from torch.utils import _pytree as pytree

from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.shapes import Bucket
from cohabit.runtime.allocations import measuring_allocations
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.allowed_ops import allows_lowered
from cohabit.runtime.lowering.model import FxModel, table_of
from cohabit.runtime.lowering.packing import storage_key, stored_bytes
from cohabit.runtime.lowering.slots import Slot, slots_of
from cohabit.runtime.lowering.weights import Manifest

DYNAMIC = "dynamic"
"""Key in the `meta` of nodes that read the size of an input's dynamic dimension other than the batch."""
_FUNCTION_MODULES = (
    "_operator",
    "math",
    "torch",
    "cohabit.runtime.lowering.fused_ops",
    "torch.fx.experimental.sym_node",
)
"""Modules whose functions a program may call in addition to operators."""
_OP = "cohabit op "
"""Prefix of a trace's op names in the profiler."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One call. `args` and `kwargs` are trees with `Slot` leaves; `op` indexes the graph's ops, None for a view."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    op: int | None
    reads: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", tuple(slots_of((self.args, self.kwargs))))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Trace:
    """A model in one bucket, before its weights have addresses.

    Storages are identified by a weight's name, or by kind and `Storage.index` for inputs and activations.
    """

    batch: int
    instructions: tuple[Instruction, ...]
    ops: tuple["TracedOp", ...]
    weight_slots: dict[int, str]
    input_slots: tuple[int, ...]
    output_slots: tuple[int, ...]
    output_storages: tuple["Storage", ...]
    input_bytes: tuple[int, ...]
    slots: int
    """Size of the frame, which holds every value."""
    sizes: tuple[int, ...] = ()
    """Largest size of each dynamic dimension other than the batch."""
    numbers: tuple[int, ...] = ()
    """Slots of the sizes that depend on these dimensions; computed before the first op."""
    op_seconds: tuple[float, ...] = field(default=(), compare=False)
    """Seconds of each op in this one run; empty for a cached trace."""
    digest: str = field(default="", init=False, compare=False)
    """Digest of a cached trace as written; empty for any other, such as a changed copy."""

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.batch, self.sizes)

    def readers(self) -> dict[str, tuple[int, ...]]:
        """Return the indices of the ops that read each weight."""
        readers: dict[str, list[int]] = {name: [] for name in self.weight_slots.values()}
        for index, op in enumerate(self.ops):
            for storage in op.reads:
                if storage.weight is not None:
                    readers[storage.weight].append(index)
        return {name: tuple(ops) for name, ops in readers.items()}


class Storage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The origin of bytes: a weight's name, or the index of an input or an activation."""

    kind: str
    index: int
    nbytes: int
    weight: str | None = None


class TracedOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An op with the storages that it reads, creates, and changes in place."""

    name: str
    target: str
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    mutates: tuple[Storage, ...]
    results: tuple[int, ...]
    """For each storage in `writes`, the index of the returned tensor that has it."""
    scratch_bytes: int = 0
    """Peak bytes that torch's allocator gave the op beyond its results: repacked weights, im2col buffers."""


def trace_model(
    model: FxModel, weights: dict[str, torch.Tensor], bucket: Bucket, examples: Sequence[torch.Tensor]
) -> tuple[Trace, list[torch.Tensor]]:
    """Run the model in one bucket; return the trace and the outputs.

    Each of `weights` has its own storage, shared only by tied weights. Raises UnsupportedModel for sizes that depend on
    values, and for operators that are not allowed.
    """
    tracer = OpTracer(model, weights, bucket, examples)
    with torch.inference_mode(), measuring_allocations() as peaks:
        trace = tracer.run()
    ops = tuple(
        msgspec.structs.replace(
            op, scratch_bytes=max(0, peaks.get(f"{_OP}{n}", 0) - sum(s.nbytes for s in op.writes))
        )
        for n, op in enumerate(trace.ops)
    )
    return replace(trace, ops=ops), tracer.results


def covering(model: str, traces: Sequence[Trace]) -> Trace:
    """Merge traces of several shapes of a bucket, the largest first, into one that covers them all.

    Storages and scratch get their largest size. Raises UnsupportedModel if anything else differs.
    """
    first, *others = traces
    nbytes = {_identity(s): s.nbytes for op in first.ops for s in (*op.reads, *op.writes)}
    scratch = [op.scratch_bytes for op in first.ops]
    for other in others:
        _require_same(model, first, other)
        for n, op in enumerate(other.ops):
            scratch[n] = max(scratch[n], op.scratch_bytes)
            for storage in (*op.reads, *op.writes):
                nbytes[_identity(storage)] = max(nbytes[_identity(storage)], storage.nbytes)

    def largest(storages: Sequence[Storage]) -> tuple[Storage, ...]:
        return tuple(msgspec.structs.replace(s, nbytes=nbytes.get(_identity(s), s.nbytes)) for s in storages)

    ops = tuple(
        msgspec.structs.replace(
            op,
            reads=largest(op.reads),
            writes=largest(op.writes),
            mutates=largest(op.mutates),
            scratch_bytes=scratch[n],
        )
        for n, op in enumerate(first.ops)
    )
    return replace(first, ops=ops, output_storages=largest(first.output_storages))


def _identity(storage: Storage) -> tuple[str, int, str | None]:
    return storage.kind, storage.index, storage.weight


def _require_same(model: str, first: Trace, other: Trace) -> None:
    """Raise UnsupportedModel if a model calls other ops, or makes other views, at other sizes of a bucket."""

    def form(trace: Trace) -> list[tuple[str, Any]]:
        storages = [[[_identity(s) for s in part] for part in (o.reads, o.writes, o.mutates)] for o in trace.ops]
        ops = [(o.name, (o.target, s, o.results)) for o, s in zip(trace.ops, storages, strict=True)]
        outputs = ("the output", ([_identity(s) for s in trace.output_storages], trace.output_slots))
        return [*((i.name, i) for i in trace.instructions), *ops, outputs]

    for (name, own), (_, theirs) in zip(form(first), form(other), strict=False):
        if own != theirs:
            raise UnsupportedModel(
                f"{model}: {name} is not the same at all sizes of the bucket {first.bucket}: it makes a view at some"
                " and new bytes at others, or has an argument that export has fixed. Give sizes to plan for that do"
                " not span the change, with --shape-buckets, or export the dimension at a fixed size"
            )


def run_model(
    model: FxModel, weights: dict[str, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Run a model op by op, and return its outputs."""
    tracer = OpTracer(model, weights, Bucket(0), inputs)
    with torch.inference_mode():
        tracer.run()
    return tracer.results


class OpTracer:
    """Runs a model's graph node by node and records calls and storages."""

    def __init__(
        self, model: FxModel, weights: dict[str, torch.Tensor], bucket: Bucket, examples: Sequence[torch.Tensor]
    ) -> None:
        self.model = model
        self.bucket = bucket
        self.nodes = list(model.graph.nodes)
        self.slots = {node: i for i, node in enumerate(self.nodes)}
        self.frame: dict[fx.Node, Any] = {}
        self.literals: set[fx.Node] = set()
        self.numbers: dict[fx.Node, int] = {}
        """Slots of sizes that are not literals."""
        self.storages: dict[int, Storage] = {}
        self.holders: dict[int, set[fx.Node]] = {}
        self.instructions: list[Instruction] = []
        self.ops: list[TracedOp] = []
        self.op_seconds: list[float] = []
        self.activations = 0
        self.weights = weights
        self.examples = dict(zip((n.name for n in model.input_nodes), examples, strict=True))
        self.results: list[torch.Tensor] = []
        self.last_use = {n: user for user in self.nodes for n in user.all_input_nodes}

    def run(self) -> Trace:
        for node in self.nodes:
            match node.op:
                case "placeholder":
                    self._enter(node)
                case "get_attr":
                    self.frame[node] = getattr(self.model.root, str(node.target))
                    self.literals.add(node)
                case "call_function":
                    self._call(node)
        (outputs,) = (cast(Any, node.args[0]) for node in self.nodes if node.op == "output")
        self.results = [self.frame[n] for n in outputs]
        return Trace(
            batch=self.bucket.batch,
            instructions=tuple(self.instructions),
            ops=tuple(self.ops),
            weight_slots={self.slots[n]: s for n in self.nodes if (s := self._weight_name(n)) is not None},
            input_slots=tuple(self.slots[n] for n in self.model.input_nodes),
            output_slots=tuple(self.slots[n] for n in outputs),
            output_storages=tuple(self.storages[storage_key(t)] for t in self.results),
            input_bytes=tuple(t.untyped_storage().nbytes() for t in self.examples.values()),
            slots=len(self.nodes),
            op_seconds=tuple(self.op_seconds),
            sizes=self.bucket.sizes,
            numbers=tuple(self.numbers.values()),
        )

    def _weight_name(self, node: fx.Node) -> str | None:
        """The name under which a weight is stored: the first name among tied weights."""
        if node.op != "placeholder" or node.name not in self.weights:
            return None
        return self.storages[storage_key(self.weights[node.name])].weight

    def _enter(self, node: fx.Node) -> None:
        if node.name in self.weights:
            tensor = self.weights[node.name]
            storage = Storage("weight", 0, stored_bytes(tensor), node.name)
        else:
            tensor = self.examples[node.name]
            index = list(self.examples).index(node.name)
            storage = Storage("input", index, tensor.untyped_storage().nbytes())
        self.storages.setdefault(storage_key(tensor), storage)
        self.holders.setdefault(storage_key(tensor), set()).add(node)
        self.frame[node] = tensor

    def _call(self, node: fx.Node) -> None:
        self._require_allowed(node.target)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.frame[n])
        assert callable(node.target)
        table = table_of(node.target, args)
        given = args if table is None else (self.model.tables[table], *args[1:])
        ops = len(self.ops)
        with torch.profiler.record_function(f"{_OP}{ops}"):
            start_s = time.perf_counter()
            result = node.target(*given, **kwargs)
            seconds = time.perf_counter() - start_s
        self.frame[node] = result
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self._scalar(node, (args, kwargs))
        else:
            self._tensors(node, (args, kwargs), result)
        self.op_seconds += [seconds] * (len(self.ops) - ops)
        self._release(node)

    def _scalar(self, node: fx.Node, inputs: Any) -> None:
        """Turn shape arithmetic into literals, unless it depends on a dynamic dimension other than the batch.

        A number read from a tensor stays an instruction.
        """
        if _depends_on_values(node):
            self._issue(node, self._op(node, inputs, (), ()))
        elif DYNAMIC in node.meta or not self.numbers.keys().isdisjoint(node.all_input_nodes):
            self.numbers[node] = self.slots[node]
            self._issue(node, None)
        else:
            self.literals.add(node)

    def _tensors(self, node: fx.Node, inputs: Any, result: Any) -> None:
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._refuse_value_sizes(node)
        mutated = self._mutated(node, inputs)
        new = any(storage_key(t) not in self.storages for t in outputs)
        index = self._op(node, inputs, outputs, mutated) if new or mutated else None
        for tensor in outputs:
            self.holders.setdefault(storage_key(tensor), set()).add(node)
        self._issue(node, index)

    def _op(self, node: fx.Node, inputs: Any, outputs: Sequence[torch.Tensor], mutated: Sequence[Storage]) -> int:
        read = dict.fromkeys(storage_key(t) for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor))
        reads = tuple(self.storages[key] for key in read)
        writes, results = [], []
        for n, tensor in enumerate(outputs):
            if storage_key(tensor) not in self.storages:
                storage = Storage("activation", self.activations, tensor.untyped_storage().nbytes())
                self.storages[storage_key(tensor)] = storage
                self.activations += 1
                writes.append(storage)
                results.append(n)
        target = _target_name(node.target)
        self.ops.append(TracedOp(node.name, target, reads, tuple(writes), tuple(mutated), tuple(results)))
        return len(self.ops) - 1

    def _mutated(self, node: fx.Node, inputs: Any) -> list[Storage]:
        """Return the storages that an in-place operator changes."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return []
        args, kwargs = inputs
        changed: dict[int, Storage] = {}
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    changed[storage_key(tensor)] = self.storages[storage_key(tensor)]
        return list(changed.values())

    def _require_allowed(self, target: Any) -> None:
        """Raise UnsupportedModel for a target that served models must not call."""
        if not allows_lowered(target) and getattr(target, "__module__", "") not in _FUNCTION_MODULES:
            raise UnsupportedModel(
                f"{self.model.name}: the program calls {target}, which is not an operator that a model may use"
            )

    def _refuse_value_sizes(self, node: fx.Node) -> None:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and any(is_unbacked(d) for d in value.shape):
                raise UnsupportedModel(
                    f"{self.model.name}: op {node.name} makes a tensor of shape {[str(d) for d in value.shape]},"
                    " which depends on values: its memory cannot be promised beforehand."
                    " Pad to a fixed size, or mask instead of selecting"
                )

    def _issue(self, node: fx.Node, op: int | None) -> None:
        def slot(n: fx.Node) -> Any:
            return self.frame[n] if n in self.literals else Slot(self.slots[n])

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), slot)
        self.instructions.append(
            Instruction(node.name, node.target, args, kwargs, self.slots[node], op)  # type: ignore[arg-type]
        )

    def _release(self, node: fx.Node) -> None:
        """Drop values after their last use: a storage's key is reused once the storage is freed."""
        dead = [n for n in node.all_input_nodes if self.last_use[n] is node and n.op == "call_function"]
        if node not in self.last_use:
            dead.append(node)
        for n in dead:
            value = self.frame[n]
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    key = storage_key(tensor)
                    holders = self.holders[key]
                    holders.discard(n)
                    if not holders:
                        del self.holders[key]
                        del self.storages[key]
            if n not in self.literals:
                del self.frame[n]


def is_unbacked(value: Any) -> bool:
    """Whether a size or condition depends on values."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return any(str(s).startswith(("u", "zuf")) for s in value.node.expr.free_symbols)
    return False


def _depends_on_values(node: fx.Node) -> bool:
    if getattr(node.target, "_opname", "") in ("item", "_local_scalar_dense"):
        return True
    return any(is_unbacked(v) for v in pytree.tree_leaves(node.meta.get("val")))


def _target_name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


_graphs: WeakValueDictionary[tuple[str, str], Graph] = WeakValueDictionary()
"""By the digest of a cached trace and the layout of the weights."""


def build_graph(name: str, trace: Trace, manifest: Manifest) -> Graph:
    """Return the planner's graph of a trace: segments first, then inputs, then activations.

    A segment that an op changes is state; all others are parameters. Models whose cached traces and layouts are equal
    share their graphs' parts.
    """
    if not trace.digest:
        return _graph_of(name, trace, manifest)
    key = trace.digest, manifest.layout
    if (known := _graphs.get(key)) is None:
        known = _graphs[key] = _graph_of(name, trace, manifest)
    return known if known.name == name else known.named(name)


def _graph_of(name: str, trace: Trace, manifest: Manifest) -> Graph:
    changed = {s.weight for op in trace.ops for s in op.mutates}
    # Tensor ids are consecutive: segments, inputs, activations.
    segment_of = {p.name: i for i, s in enumerate(manifest.segments) for p in s.pieces}
    inputs = len(manifest.segments)
    activations = inputs + len(trace.input_bytes)

    def tensor_id(storage: Storage) -> int:
        if storage.weight is not None:
            return segment_of[storage.weight]
        return storage.index + (inputs if storage.kind == "input" else activations)

    tensors = [
        Tensor(
            s.name,
            s.nbytes,
            "parameter" if changed.isdisjoint(p.name for p in s.pieces) else "state",
            4096,
            s.codec if s.is_encoded else UNSET,
        )
        for s in manifest.segments
    ]
    # The order must be that of `tensor_id`.
    tensors += [Tensor(f"input_{i}", n, "input") for i, n in enumerate(trace.input_bytes)]
    tensors += [
        Tensor(f"{op.name}.{i}", s.nbytes, "activation") for op in trace.ops for i, s in enumerate(op.writes)
    ]
    ops = tuple(
        Op(
            op.name,
            op.target,
            # Several weights may lie in one segment.
            tuple(sorted({tensor_id(s) for s in op.reads})),
            tuple(tensor_id(s) for s in op.writes),
            scratch_bytes=op.scratch_bytes,
            mutates=tuple(sorted({tensor_id(s) for s in op.mutates})),
        )
        for op in trace.ops
    )
    outputs = tuple(sorted({tensor_id(s) for s in trace.output_storages}))
    graph = Graph(name, trace.batch, manifest.layout, tuple(tensors), ops, outputs, sizes=trace.sizes or UNSET)
    graph.validate()
    return graph
